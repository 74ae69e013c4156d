"""The record of kernels that run, per thread and asynchronous task."""

from contextvars import ContextVar

_names: ContextVar[tuple[list[str], ...]] = ContextVar("names", default=())


def record_kernel(name: str) -> None:
    """Add a kernel to all open records. Operators of compiled code call it when they run."""
    for names in _names.get():
        names.append(name)


def open_record() -> list[str]:
    """Start a record: a new list to which the name of every kernel that runs is appended until `close_record`."""
    names: list[str] = []
    _names.set((*_names.get(), names))
    return names


def close_record(names: list[str]) -> None:
    """End a record that `open_record` started."""
    _names.set(tuple(other for other in _names.get() if other is not names))
