"""Copies of a module, one per dtype, so that probing never changes the module itself."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from regard.see.measure.probes.probe import ProbeOptions


class ModuleCopies:
    """Copies of a module, one for each dtype; the function `prepare` changes each, for example its projections.

    `reference` is a copy that `prepare` does not change. When another copy is used, it is set to the training or eval
    mode of `reference`.
    """

    def __init__(self, module: nn.Module, prepare: Callable[[nn.Module], None] = lambda copy: None) -> None:
        self.reference = deepcopy(module)
        self.prepare = prepare
        self.copies: dict[torch.dtype, nn.Module] = {}

    def at(self, dtype: torch.dtype) -> nn.Module:
        """Return the copy in this dtype, and set it to the training or eval mode of `reference`."""
        if dtype not in self.copies:
            copy = deepcopy(self.reference)
            own = next((x.dtype for x in _floating(copy)), dtype)
            if own != dtype:
                _cast(copy, dtype)
            self.copies[dtype] = copy
            self.prepare(copy)
        modes = {name: part.training for name, part in self.reference.named_modules()}
        for name, part in self.copies[dtype].named_modules():
            part.training = modes.get(name, self.reference.training)
        return self.copies[dtype]


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters and buffers of a module, in place.

    Complex buffers, such as precomputed rotary phases, stay as they are: `module.to(dtype)` would discard their
    imaginary part.
    """
    module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def dtypes_and_device(module: nn.Module | None, options: ProbeOptions) -> tuple[list[torch.dtype], torch.device]:
    """Return the dtypes to try and the device to use.

    If the module has floating-point parameters or buffers, their dtype and device are returned. Otherwise the dtypes
    are float32, bfloat16 and float64, and the device is that of `options`, or the CPU.
    """
    own = None if module is None else next(_floating(module), None)
    if own is not None:
        return [own.dtype], own.device
    return [torch.float32, torch.bfloat16, torch.float64], torch.device(options.device or "cpu")


def _floating(module: nn.Module) -> Iterator[Tensor]:
    """Return an iterator over the floating-point parameters and buffers of a module."""
    return (x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point())
