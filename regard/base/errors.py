"""Errors that say what was expected, what came and what to do next."""


class RegardError(Exception):
    """The parent of every error this package raises on purpose."""


class ShapeError(RegardError, ValueError):
    """A tensor's rank or one of its sizes does not fit the others."""


class DtypeError(RegardError, TypeError):
    """A tensor's dtype is not a floating one, or not that of its partners."""


class DeviceError(RegardError, ValueError):
    """Tensors of one call lie on different devices."""


class ConfigError(RegardError, ValueError):
    """A setting is outside what it may be."""


class DataError(RegardError, ValueError):
    """A file of data is missing, damaged, or not in a form that is read; or records do not fit each other."""


class UnknownNameError(RegardError, ValueError):
    """A name that no registry entry has."""


class KernelRefusedError(RegardError, RuntimeError):
    """A kernel was asked by name for something it cannot compute exactly."""

    kernel: str | None = None
    reasons: list[str] = []  # noqa: RUF012 (set anew on every error)


def kernel_refused(kernel: str | None, reasons: list[str], others: list[str]) -> KernelRefusedError:
    """The refusal of a kernel, or of all of them, with every reason; `others` are those that could serve."""
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    who = "no kernel can serve" if kernel is None else f"kernel {kernel!r} refuses"
    instead = f"\nkernel=None would run {others[0]!r}" if others else "\nno other kernel can serve it either"
    # a plain constructor: torch.compile cannot trace one of our own
    error = KernelRefusedError(f"{who} this call:{listed}{'' if kernel is None else instead}")
    error.kernel, error.reasons = kernel, reasons
    return error


class CacheError(RegardError, RuntimeError):
    """A cache is full, or was handed keys that do not continue what it holds."""


class CheckpointError(RegardError, RuntimeError):
    """A saved model is damaged, is another model's, or is in a format that is not read."""


class TrainingError(RegardError, RuntimeError):
    """A run cannot go on: its loss is no number any more, or its state cannot be kept."""
