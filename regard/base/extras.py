"""Optional dependencies: import one, or raise an error that names the extra to install."""

from importlib import import_module
from types import ModuleType

from regard.base.errors import MissingExtraError


def import_optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional dependency.

    extra    the extra of this project that installs it, such as "web"
    purpose  what needs it; the error begins with it

    >>> import_optional("sacrebleu", "translate", "BLEU")  # doctest: +SKIP
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{purpose} needs the package {error.name}, which is not installed: pip install 'regard[{extra}]'"
        ) from None
