"""Exceptions. Their messages say what was expected, what was given and how to fix it."""

LONGEST_MESSAGE = 4000  # characters; what was given may be a file of any size


class RegardError(Exception):
    """Base class of all exceptions of this package.

    >>> try:
    ...     attend(q, k[..., :4], v)
    ... except regard.RegardError as error:
    ...     print(type(error).__name__)
    ShapeError
    """

    def __str__(self) -> str:
        text, half = super().__str__(), LONGEST_MESSAGE // 2
        left_out = len(text) - LONGEST_MESSAGE
        return text if left_out <= 0 else f"{text[:half]} ... ({left_out:,} characters left out) ... {text[-half:]}"


class ShapeError(RegardError, ValueError):
    """Raised if a tensor has a wrong number of axes or a wrong size, or token ids or positions are out of range."""


class DtypeError(RegardError, TypeError):
    """Raised if an argument is not a tensor, has a wrong dtype or layout, or another dtype than the other tensors."""


class DeviceError(RegardError, ValueError):
    """Raised if the tensors of one call are on different devices."""


class ConfigError(RegardError, ValueError):
    """Raised if a setting or argument has an invalid value."""


class MissingExtraError(ConfigError, ImportError):
    """Raised if an optional dependency is not installed. The message names the extra that installs it."""


class KeywordError(ConfigError, TypeError):
    """Raised if a function is called with a keyword argument that it does not have."""


class DataError(RegardError, ValueError):
    """Raised if a data file is missing, damaged or in an unknown format, or its records are inconsistent."""


class UnknownNameError(RegardError, ValueError):
    """Raised if a name, such as that of a model or a kernel, is not registered."""


class KernelRefusedError(RegardError, RuntimeError):
    """Raised if no kernel can compute an attention call exactly, or the kernel chosen with `kernel=` cannot.

    kernel   name of the chosen kernel; None if no kernel can compute the call
    reasons  why the call cannot be computed
    """

    kernel: str | None = None
    reasons: list[str] = []  # noqa: RUF012 (set on every error)


def kernel_refused(kernel: str | None, reasons: list[str], others: list[str]) -> KernelRefusedError:
    """Return the `KernelRefusedError` for an attention call that a kernel cannot compute exactly.

    kernel   name of the kernel; None if no kernel can compute the call
    reasons  why the kernel refuses the call; all are listed in the message
    others   names of kernels that can compute the call
    """
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    who = "no kernel can serve" if kernel is None else f"kernel {kernel!r} refuses"
    instead = f"\nkernel=None would run {others[0]!r}" if others else "\nno other kernel can serve it either"
    # the default constructor: torch.compile cannot trace a custom one
    error = KernelRefusedError(f"{who} this call:{listed}{'' if kernel is None else instead}")
    error.kernel, error.reasons = kernel, reasons
    return error


class CacheError(RegardError, RuntimeError):
    """Raised if a KV cache is full, or new keys do not continue its content."""


class InterventionError(RegardError, RuntimeError):
    """Raised if an edit of a model's attention cannot be made, or changed nothing."""


class CheckpointError(RegardError, RuntimeError):
    """Raised if a checkpoint or saved model is damaged, belongs to another model or has an unknown format."""


class TrainingError(RegardError, RuntimeError):
    """Raised if a training run cannot continue: its loss is not finite, or a checkpoint cannot be written."""
