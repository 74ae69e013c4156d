"""Reset the state of a callable, to test that earlier calls do not change later ones."""

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

STATELESS_MODULES = ("torch", "triton", "functools", "builtins")  # modules whose objects are assumed to have no state


@dataclass(frozen=True)
class StateReset:
    """Resets an attention to the state that it had before its first call.

    make_probe  function that wraps the attention again with `as_probe`
    reset       function that sets the state of the attention to the state before its first call
    restore     function that sets the saved state again after the test, with the original objects in place of copies
    """

    make_probe: Callable[[], Probe]
    reset: Callable[[], None] = lambda: None
    restore: Callable[[], None] = lambda: None  # put back the very objects that the callable held

    def fresh_probe(self) -> Probe:
        """Return the attention, wrapped as a `Probe`, in the state before its first call.

        If the attention is a module, the caller must use inputs of the dtype `fresh_dtype(probe)`, because the module
        was never called in this dtype before.
        """
        probe = self.make_probe()
        self.reset()
        return probe


def find_reset(fn: object, make_probe: Callable[[], Probe]) -> StateReset | None:
    """Return the `StateReset` of an attention module, function or object; None if the state cannot be reset.

    A module needs no reset: `make_probe` wraps it with a copy for each dtype, and only the copy in the module's own
    dtype has been called. For another object, its attributes are reset. For a function, the contents of all dicts,
    lists and sets that it refers to by name are reset.
    """
    if isinstance(fn, Probe):
        return None
    if isinstance(fn, nn.Module):
        return StateReset(make_probe)
    if isinstance(fn, FunctionType):
        saved = [(each, copy(each)) for each in _containers(fn)]
        return StateReset(make_probe, partial(_refill, saved), partial(_refill, saved))
    if type(fn).__module__.partition(".")[0] in STATELESS_MODULES or not hasattr(fn, "__dict__"):
        return None
    try:
        before = deepcopy(vars(fn))
    except Exception:  # a lock or a file cannot be copied
        return None
    own = dict(vars(fn))
    return StateReset(make_probe, lambda: _refill([(vars(fn), deepcopy(before))]), lambda: _refill([(vars(fn), own)]))


def _containers(fn: FunctionType) -> list[Any]:
    """Return the dicts, lists and sets that a function refers to by name, in its closure or its module."""
    named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            named.append(cell.cell_contents)
    return [each for each in named if type(each) in (dict, list, set)]


def _refill(saved: list[tuple[Any, Any]]) -> None:
    """Reset dicts, lists and sets in place: replace the contents of each by its saved contents.

    saved  pairs of a dict, list or set and its saved contents
    """
    for each, contents in saved:
        each.clear()
        each.extend(contents) if isinstance(each, list) else each.update(contents)


def fresh_dtype(probe: Probe) -> torch.dtype:
    """Return a dtype other than the probe's own, in which no copy of the module has been called."""
    return torch.float32 if probe.dtype == torch.float64 else torch.float64
