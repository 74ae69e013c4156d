"""Reshape between (b n d) and heads (b h n c)."""

from jaxtyping import Float
from torch import Tensor


def split_heads(x: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "b h n c"]:
    """Split the last axis into heads: (b n d) to (b h n c)."""
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def merge_heads(x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b n d"]:
    """Concatenate heads: (b h n c) to (b n d)."""
    return x.transpose(1, 2).flatten(2)
