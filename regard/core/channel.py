"""Attention between channels: channels look at channels, over all positions at once."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.axes import format_shape
from regard.base.errors import DtypeError, ShapeError
from regard.core.attend import attend


def channel_attend(
    q: Float[Tensor, "b h n c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    *,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> Float[Tensor, "b h n c"]:
    """softargmax(beta q^T k) over the channels of each group h, applied to v: c x c weights, whatever the length.

    DaViT, Ding et al. 2022, arXiv:2204.03645. It is `attend` with positions and channels exchanged: a channel is a
    query whose features are its values at all n positions. beta=None is c ** -0.5, as everywhere.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} must be a tensor read as (b h n c), not {type(x).__name__}")
        if x.ndim != 4:
            raise ShapeError(f"{name} has {x.ndim} axes, {tuple(x.shape)}, but is read as (b h n c)")
        if x.shape != q.shape:
            raise ShapeError(
                f"{format_shape(name, x.shape, 'b h n c')}, but q is {tuple(q.shape)}; "
                "channel attention mixes channels of the "
                "same positions, so q, k and v have one shape"
            )
    if not q.shape[3]:
        raise ShapeError(f"{format_shape('q', q.shape, 'b h n c')}, but there must be at least one channel to look at")
    if not q.shape[2]:
        return torch.zeros_like(q)  # no positions, so nothing to mix
    beta = q.shape[-1] ** -0.5 if beta is None else beta
    return attend(q.mT, k.mT, v.mT, beta=beta, dropout=dropout, kernel=kernel).mT
