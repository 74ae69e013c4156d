"""Optional dependencies: import one, or raise an error that names the extra to install."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from regard.base.errors import MissingExtraError


def import_optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional dependency. Raises MissingExtraError if it is not installed.

    extra    the extra of this package that installs the module, such as "web"
    purpose  the feature that needs the module; the error message begins with it

    >>> import_optional("sacrebleu", "translate", "BLEU")  # doctest: +SKIP
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{purpose} needs the package {error.name}, which is not installed: pip install 'regard[{extra}]'"
        ) from None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None
