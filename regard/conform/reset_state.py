"""The same attention before its first call, to see whether what it was asked before changes its answers."""

from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from regard.see.adapters import Probe

FOREIGN = ("torch", "triton", "functools", "builtins")  # whose objects are kernels, and no place for state


@dataclass(frozen=True)
class Anew:
    """How to make its probe, and how to put back what an object or a function keeps."""

    make: Callable[[], Probe]
    put_back: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None  # with what it had, the very same things, when all was asked

    def probe(self) -> Probe:
        """A probe that nobody has asked in the dtype that is fresh."""
        made = self.make()
        self.put_back()
        return made


def anew(fn: object, make: Callable[[], Probe]) -> Anew | None:
    """How to get there, where there is a way; to be called before anything was asked.

    A module is asked in copies, one for each dtype, of which only that in its own dtype is tried in order to find out
    how it is asked: in another dtype a probe that is made anew asks a new copy. What an object keeps in attributes, and
    a function in a dict, list or set that it knows by name, is put back.
    """
    if isinstance(fn, Probe):
        return None
    if isinstance(fn, nn.Module):
        return Anew(make)
    if isinstance(fn, FunctionType):
        kept = [(each, copy(each)) for each in _known(fn)]
        return Anew(make, partial(_refill, kept), partial(_refill, kept))
    if type(fn).__module__.partition(".")[0] in FOREIGN or not hasattr(fn, "__dict__"):
        return None
    try:
        before = deepcopy(vars(fn))
    except Exception:  # a lock, or a file: what cannot be copied cannot be put back
        return None
    own = dict(vars(fn))
    return Anew(make, lambda: _refill([(vars(fn), deepcopy(before))]), lambda: _refill([(vars(fn), own)]))


def _known(fn: FunctionType) -> list[Any]:
    """The dicts, lists and sets that a function knows by name, from around it or from its module."""
    named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            named.append(cell.cell_contents)
    return [each for each in named if type(each) in (dict, list, set)]


def _refill(kept: list[tuple[Any, Any]]) -> None:
    """Let each hold what it held."""
    for each, held in kept:
        each.clear()
        each.extend(held) if isinstance(each, list) else each.update(held)


def fresh_dtype(probe: Probe) -> torch.dtype:
    """A dtype in which no copy of a module was asked while its probe was made."""
    return torch.float32 if probe.dtype == torch.float64 else torch.float64
