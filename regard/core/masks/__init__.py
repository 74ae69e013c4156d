"""Masks: the functions that make them, one for each file in `forms/`, and `as_mask`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.base.errors import DtypeError, ShapeError
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import DenseMask, check_strided
from regard.core.masks.forms import FORMS, constructor

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Mask]: ...


globals().update({name: constructor(name) for name in FORMS})


def as_mask(mask: "Mask | Bool[Tensor, '*bh i j'] | None") -> Mask:
    """Convert the argument `mask=` to a Mask. A boolean matrix becomes a `DenseMask`, None becomes `full()`."""
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise DtypeError(f"mask must be a mask such as regard.causal() or a boolean tensor, not {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask is {mask.dtype}, but a mask is boolean with True meaning visible; "
            "pass values to add to the scores as scores="
        )
    check_strided("mask", mask)
    if not 2 <= mask.ndim <= 4:
        raise ShapeError(
            f"mask is {tuple(mask.shape)}, but a boolean matrix is (i j), (h i j) or (b h i j); "
            + ("for one row of keys write mask[None].expand(i, -1)" if mask.ndim == 1 else "reshape it to one of these")
        )
    return DenseMask(mask)
