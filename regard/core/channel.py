"""Channel attention: channels attend to channels over all positions."""

from inspect import signature

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.axes import format_shape
from regard.base.errors import DtypeError, ShapeError
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.core.attend import attend


def channel_attend(
    q: Float[Tensor, "b h n c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    *,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
    **unknown: UnknownKeyword,
) -> Float[Tensor, "b h n c"]:
    """Channel attention: softargmax (softmax) of beta q^T k over the channels, times v.

    It is computed in each of h groups of c channels, so the weights of a group are c x c for any number of positions.
    This is `attend` with positions and channels exchanged: the feature vector of a channel consists of its values at
    all n positions. Ding et al. 2022 (DaViT), arXiv:2204.03645.

    beta     inverse temperature; None is c ** -0.5
    dropout  dropout probability of the weights; pass 0 outside training
    kernel   name of the kernel to use, as in `attend`

    >>> q, k, v = torch.randn(3, 1, 2, 49, 8)
    >>> channel_attend(q, k, v).shape
    torch.Size([1, 2, 49, 8])
    """
    if unknown:
        reject_keywords("channel_attend", unknown, signature(channel_attend).parameters)
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
        raise ShapeError(f"{format_shape('q', q.shape, 'b h n c')}, but there must be at least one channel")
    if not q.shape[2]:
        return torch.zeros_like(q)  # no positions, so nothing to mix
    beta = q.shape[-1] ** -0.5 if beta is None else beta
    return attend(q.mT, k.mT, v.mT, beta=beta, dropout=dropout, kernel=kernel).mT
