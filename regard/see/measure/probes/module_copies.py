"""Copies of a module to ask in its place, so that it is never changed itself."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from regard.see.measure.probes.probe import Wanted


class ModuleCopies:
    """Copies of a module, one for each dtype asked for, changed by `prepare`.

    `shown` is the plain copy whose mode, training or not, the others take over.
    """

    def __init__(self, module: nn.Module, prepare: Callable[[nn.Module], None] = lambda copy: None) -> None:
        self.shown = deepcopy(module)
        self.prepare = prepare
        self.made: dict[torch.dtype, nn.Module] = {}

    def at(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self.made:
            copy = deepcopy(self.shown)
            own = next((x.dtype for x in _floating(copy)), dtype)
            self.made[dtype] = copy if own == dtype else copy.to(dtype)
            self.prepare(copy)
        modes = {name: part.training for name, part in self.shown.named_modules()}
        for name, part in self.made[dtype].named_modules():
            part.training = modes.get(name, self.shown.training)
        return self.made[dtype]


def home(module: nn.Module | None, wanted: Wanted) -> tuple[list[torch.dtype], torch.device]:
    """The dtypes to try and the device to work on: a module's own, where it has any."""
    own = None if module is None else next(_floating(module), None)
    if own is not None:
        return [own.dtype], own.device
    return [torch.float32, torch.bfloat16, torch.float64], torch.device(wanted.device or "cpu")


def _floating(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters and buffers that have a dtype to follow."""
    return (x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point())
