"""An attention with two usual mistakes, for the example of the Check view."""

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute attention with two common bugs, as an example for the explorer's Check view.

    The function divides the scores by the width instead of its square root, and gives hidden keys the score -1e9
    instead of -inf.
    """
    scores = q @ k.transpose(-2, -1) / q.shape[-1]
    if mask is not None:
        scores = torch.where(mask, scores, -1e9)
    return scores.softmax(-1) @ v
