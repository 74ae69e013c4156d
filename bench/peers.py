"""Attention of other libraries, called as their users call it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from regard.core.masks.algebra import Mask

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(causal: bool) -> Attention:
    """torch's scaled_dot_product_attention."""
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_masked(visible: Tensor) -> Attention:
    """torch's scaled_dot_product_attention with a dense mask, which is made additive beforehand."""
    added = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -torch.inf)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=added)


def sdpa_backend(backend: SDPBackend, causal: bool) -> Attention:
    """torch's scaled_dot_product_attention with one of its backends."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out

    return run


def eager(visible: Tensor) -> Attention:
    """Textbook attention with a dense mask."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        out: Tensor = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return out

    return run


def flex(see: Callable[..., Tensor] | None, n: int) -> Attention:
    """torch's flex_attention, compiled, with a block mask that is built once and not timed."""
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
    """The masks of the benchmark as functions for flex_attention."""
    return {
        "causal()": lambda b, h, i, j: j <= i,
        "causal() & window(before=255)": lambda b, h, i, j: (j <= i) & (j >= i - 255),
        "causal() & window(before=255) | global_tokens(64)": lambda b, h, i, j: (
            ((j <= i) & (j >= i - 255)) | (i < 64) | (j < 64)
        ),
    }[repr(mask)]
