"""Replace projections that are bare parameters, such as `self.W_Q`, so that `x @ self.W_Q` is the chosen q, k or v."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

OUTPUT_WEIGHTS = ("W_O", "W_o", "w_o", "Wo", "WO", "wo", "W_out", "w_out", "out_proj_weight")
LENGTH = 1009  # length of a sequence that shows the position axis of a product

Axes = tuple[int, int]  # axis of positions, in the other factor and in the product
Replace = Callable[[Tensor, Axes], Tensor]  # the result of the product of a weight with another tensor


@dataclass(frozen=True, eq=False)
class BareWeight:
    """An object in place of a weight parameter: its product with another tensor is computed by `replace`.

    weight      the original parameter
    replace     function that returns the product. Its arguments are the other tensor and a pair of axes: the axis of
                positions in the other tensor, and that in the product
    time_first  whether the layer's tensors are (n, b, ...), with positions before sequences
    """

    weight: Tensor
    replace: Replace
    time_first: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = tree_leaves((args, kwargs))
        own = next(each for each in found if isinstance(each, cls))
        other = next((each for each in found if isinstance(each, Tensor)), None)
        if other is None:  # transposed or reshaped
            return own._wrap(func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs or {})))
        return own.replace(other, own._position_axes(partial(_run_on_meta, func, args, kwargs or {}), other))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.weight, name)
        return (lambda *args: self._wrap(found(*args))) if callable(found) else self._wrap(found)

    def __len__(self) -> int:
        return len(self.weight)

    def _wrap(self, found: Any) -> Any:
        return dataclasses.replace(self, weight=found) if isinstance(found, Tensor) else found

    def _position_axes(self, product: Callable[[Tensor, Tensor], torch.Size], other: Tensor) -> Axes:
        """Return the axis of positions in `other`, and that in its product with the weight.

        Each possible axis of `other` is tried: the axis gets the unusual size LENGTH, and the product is computed on
        the meta device. The axis of size LENGTH in the shape of the product is then the axis of positions.

        product  function that returns the shape of the product: product(other, tensor to use in place of other)
        """
        for axis in (0 if self.time_first else 1,) if other.ndim == 3 else (1, 2):
            shape = [LENGTH if n == axis else size for n, size in enumerate(other.shape)]
            try:
                return axis, product(other, torch.empty(shape, device="meta", dtype=other.dtype)).index(LENGTH)
            except (RuntimeError, ValueError):  # this axis is that of the heads
                continue
        raise ValueError("a product with a bare weight has no axis of positions")


def _unwrap(value: Any) -> Any:
    return value.weight if isinstance(value, BareWeight) else value


def _run_on_meta(func: Any, args: Any, kwargs: Any, other: Tensor, longer: Tensor) -> torch.Size:
    """Call a torch function on the meta device, which computes shapes only, and return the shape of the result.

    other   one of the tensors in `args` and `kwargs`
    longer  a tensor on the meta device that is passed in place of `other`, with a longer sequence
    """

    def move(value: Any) -> Any:
        value = longer if value is other else _unwrap(value)
        return value.to("meta") if isinstance(value, Tensor) else value

    shape: torch.Size = func(*tree_map(move, args), **tree_map(move, kwargs)).shape
    return shape


def bare_weight(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter of this name of the module itself, not of a submodule; None if there is none."""
    return dict(module.named_parameters(recurse=False)).get(name)


def set_bare_weight(module: nn.Module, name: str, replace: Replace, time_first: bool) -> None:
    """Replace a weight parameter by a `BareWeight`, and set the bias of the same projection to zero."""
    weight = module._parameters.pop(name)
    assert weight is not None
    object.__setattr__(module, name, BareWeight(weight.detach(), replace, time_first))
    lower = {key.lower(): value for key, value in module._parameters.items() if value is not None}
    for bias in {name.lower().replace("weight", "bias"), name.lower().replace("w", "b", 1)}:
        if bias in lower:
            nn.init.zeros_(lower[bias])


def heads_before_output(heads: Tensor, axes: Axes) -> Tensor:
    """Concatenate the heads, instead of multiplying them by the weight of the output projection.

    The result has the shape (b, n, h * e). A tensor of three axes is returned unchanged, because its heads are
    concatenated already.

    axes  the axis of positions in the input of the projection, and that in its output
    """
    if heads.ndim == 3:
        return heads
    return heads.flatten(2) if axes[0] == 1 else heads.transpose(1, 2).flatten(2)
