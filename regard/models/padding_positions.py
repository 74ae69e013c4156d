"""Positions of tokens in padded sequences. Padding is not counted."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask


def token_positions(padding: Mask | None, start: int, n: int, device: torch.device) -> Int[Tensor, "*b n"]:
    """Return the position ids of n tokens of each sequence, beginning with column `start`.

    Positions are counted from the first real token of each sequence, so that the positions of real tokens do not
    depend on the padding. Padding tokens on the left get position 0. The shape is (b n) with left padding, else (n).
    """
    columns = torch.arange(start, start + n, device=device)
    before = _left_padding(padding, device)
    return columns if before is None else (columns - before[:, None]).clamp(min=0)


def first_tokens(x: Float[Tensor, "b n d"], padding: Mask | None) -> Float[Tensor, "b d"]:
    """Return the vector of the first real token of each sequence.

    For a sequence of left padding only, return its last vector.
    """
    before = _left_padding(padding, x.device)
    if before is None:
        return x[:, 0]
    return x[torch.arange(x.shape[0], device=x.device), before.clamp(max=x.shape[1] - 1)]


def is_left_padded(padding: Mask | None) -> bool:
    """Return whether the padding mask has padding before the real tokens."""
    return isinstance(padding, PaddingMask) and padding.width is not None


def _left_padding(padding: Mask | None, device: torch.device) -> Int[Tensor, "b"] | None:
    """Return the number of padding tokens before each sequence. None if the padding is not on the left."""
    if not isinstance(padding, PaddingMask) or padding.width is None:
        return None
    return padding.width - padding.data.to(device)
