"""Attention between channels (DaViT, Ding et al. 2022, arXiv:2204.03645): channels look at channels over all positions."""

from jaxtyping import Float
from torch import Tensor

from regard.core.attend import attend


def channel_attend(
    q: Float[Tensor, "b h n c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n e"],
    *,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> Float[Tensor, "b h n c"]:
    """softargmax(beta q^T k) over the channels of each group h, applied to v: c x e weights, whatever the length.

    It is `attend` with positions and channels exchanged: a channel is a query whose features are its values at all n
    positions. beta=None is n ** -0.5, which keeps the variance of such scores at one; DaViT's own models use
    c ** -0.5 there, so pass that to reproduce them.
    """
    return attend(q.mT, k.mT, v.mT, beta=beta, dropout=dropout, kernel=kernel).mT
