"""Record the names of the kernels that run, separately for each thread and asynchronous task."""

from contextvars import ContextVar

_names: ContextVar[tuple[list[str], ...]] = ContextVar("names", default=())


def record_kernel(name: str) -> None:
    """Append a kernel's name to all open records (see `open_record`). Operators of compiled code call this function."""
    for names in _names.get():
        names.append(name)


def open_record() -> list[str]:
    """Start recording kernels. Returns a list to which the name of each kernel that runs is appended.

    `close_record` ends the recording.
    """
    names: list[str] = []
    _names.set((*_names.get(), names))
    return names


def close_record(names: list[str]) -> None:
    """Stop recording kernels into a list that `open_record` returned."""
    _names.set(tuple(other for other in _names.get() if other is not names))
