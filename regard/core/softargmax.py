"""The soft choice among scores, at any inverse temperature."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError
from regard.base.validation import LARGEST_FLOAT, check_number


def softargmax(scores: Float[Tensor, "*axes"], beta: float = 1.0, axis: int = -1) -> Float[Tensor, "*axes"]:
    """Weights exp(beta s) / sum exp(beta s) along an axis. Larger beta is sharper.

    0 gives the mean of what is visible, infinity the largest score (ties share). A score of -inf is hidden and weighs
    nothing at any beta; where all are hidden, all weights are zero. NaN or +inf makes all weights of its row NaN.
    """
    beta = as_beta(beta)
    if not isinstance(scores, Tensor):
        raise DtypeError(f"scores must be a tensor, not {type(scores).__name__}; make it one with torch.as_tensor")
    if not scores.is_floating_point():
        raise DtypeError(f"scores are {scores.dtype}; softargmax takes floating numbers, so call scores.float() first")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -scores.ndim <= axis < scores.ndim:
        raise ConfigError(f"axis is {axis!r}, but scores have {scores.ndim} axes; take one of them by its number")
    if scores.numel() == 0:
        return scores * 1.0  # there is no largest of nothing
    if beta <= 0:
        scores = scores.masked_fill(scores == math.inf, math.nan)  # times a negative beta it would be a hidden score
    visible = scores != -math.inf  # NaN is visible
    awake = visible.any(axis, keepdim=True)
    if beta > LARGEST_FLOAT:
        top = scores.detach().amax(axis, keepdim=True)  # NaN where the row holds one
        best = visible & (scores == top)
        share = best.to(scores.dtype)
        flat = scores.masked_fill(torch.ones_like(visible), 0)  # zeros through which a gradient of zero flows back
        weights = share / share.sum(axis, keepdim=True).clamp(min=1) + flat
        return weights.masked_fill(top.isnan() | (top == math.inf), math.nan)
    # a blind row keeps finite scores and is zeroed afterwards: no NaN exists, forward or backward
    finite = torch.where(visible, scores, 0)
    if abs(beta) > 1e4:
        # only differences count, and a large beta may overflow everything else
        ends = finite.masked_fill(~visible, -math.inf if beta > 0 else math.inf)
        top = ends.amax(axis, keepdim=True) if beta > 0 else ends.amin(axis, keepdim=True)
        finite = torch.where(visible, scores - top.detach(), 0)
        largest = torch.finfo(scores.dtype).max
        beta = max(-largest, min(beta, largest))  # beyond that nothing gets sharper, and zero times infinity is NaN
    return torch.where(visible | ~awake, finite * beta, -math.inf).softmax(axis) * awake


def as_beta(beta: float) -> float:
    """A usable inverse temperature, as a float."""
    number = check_number(
        "beta", beta, "the inverse temperature: 0 for the mean of what is visible, inf for hard attention"
    )
    if number < -LARGEST_FLOAT:
        raise ConfigError("beta is -inf, but takes a finite number or inf; to choose the smallest scores, negate q")
    return number
