"""The mask forms, one file each. A file `name.py` defines the function `name`, which makes the mask.

The file may also define

    examples(n)    expressions for n positions: the first is shown by `regard masks`, tests check all of them
    candidates(n)  masks with which `regard.see.xray` compares a pattern that it measures on n positions, to name it
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from regard.base.registry import Registry
from regard.core.masks.algebra import Mask

FORMS: Registry[ModuleType] = Registry("mask")
for _found in iter_modules(__path__):
    FORMS.add(_found.name)(import_module(f"{__name__}.{_found.name}"))


def constructor(name: str) -> Callable[..., Mask]:
    """Return the public function that makes masks of the form `name`, such as `window`."""
    make: Callable[..., Mask] = getattr(FORMS[name], name)
    return make


def examples(name: str, n: int) -> list[str]:
    """Return example expressions of a mask function for n positions, such as `window(before=3)`."""
    found: list[str] = FORMS[name].examples(n)
    return found


def candidates(n: int) -> Iterator[Mask]:
    """Yield the masks with which `regard.see.xray` compares a pattern of n positions in order to name it."""
    for name in FORMS:
        yield from getattr(FORMS[name], "candidates", lambda n: ())(n)
