"""An attention with two usual mistakes, for the example of the Check view."""

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """It divides by the width instead of its square root, and hides keys with a large number instead of infinity."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1]
    if mask is not None:
        scores = torch.where(mask, scores, -1e9)
    return scores.softmax(-1) @ v
