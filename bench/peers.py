"""Attention functions of other libraries, to compare with: each takes q, k and v, and is called as its users do."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from regard.core.masks.algebra import Mask

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(causal: bool) -> Attention:
    """Return torch's scaled_dot_product_attention as an attention function, causal or without a mask."""
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_masked(visible: Tensor) -> Attention:
    """Return torch's scaled_dot_product_attention with a dense mask, which is converted to an additive mask here.

    visible  Boolean mask, True where a query sees a key
    """
    added = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -torch.inf)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=added)


def sdpa_backend(backend: SDPBackend, causal: bool) -> Attention:
    """Return torch's scaled_dot_product_attention, restricted to one of its backends."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out

    return run


def eager(visible: Tensor) -> Attention:
    """Return textbook attention, which computes the whole matrix of weights.

    visible  Boolean mask, True where a query sees a key
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        out: Tensor = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return out

    return run


def flex(see: Callable[..., Tensor] | None, n: int) -> Attention:
    """Return torch's compiled flex_attention. Its block mask is built here, so that building it is not timed.

    see  mask function of (b, h, i, j); None for no mask
    n    number of queries and of keys
    """
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    blocks = None if see is None else create_block_mask(see, None, None, n, n, device="cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=blocks)
        return out

    return run


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-linear-attention on features that are given, without the division by the sum of weights.

    It takes (b n h c), so the inputs should have this order in memory.
    """
    from fla.ops.linear_attn import chunk_linear_attn

    out: Tensor = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)[0]
    return out.transpose(1, 2)


def flex_predicate(mask: Mask) -> Callable[..., Tensor]:
    """Return the mask function (mask_mod) of flex_attention for a mask of the benchmark."""
    return {
        "causal()": lambda b, h, i, j: j <= i,
        "causal() & window(before=255)": lambda b, h, i, j: (j <= i) & (j >= i - 255),
        "causal() & window(before=255) | global_tokens(64)": lambda b, h, i, j: (
            ((j <= i) & (j >= i - 255)) | (i < 64) | (j < 64)
        ),
    }[repr(mask)]
