"""`softargmax`: the softmax with an inverse temperature, in which a score of -inf is hidden."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError
from regard.base.validation import LARGEST_FLOAT, check_number


def softargmax(scores: Float[Tensor, "*axes"], beta: float = 1.0, axis: int = -1) -> Float[Tensor, "*axes"]:
    """Softmax with an inverse temperature: exp(beta s) / sum exp(beta s) along an axis.

    A score of -inf is hidden and has weight 0 at any beta. If all scores of a row are hidden, all its weights
    are 0. NaN or +inf makes all weights of its row NaN.

    scores  floating-point tensor
    beta    inverse temperature. A larger beta concentrates the weights on the largest scores: 0 gives equal weights;
            inf gives all weight to the largest score, divided equally if several scores are the largest
    axis    axis along which weights sum to one

    In the example, the third score is hidden.

    >>> softargmax(torch.tensor([1.0, 1.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    beta = as_beta(beta)
    if not isinstance(scores, Tensor):
        raise DtypeError(f"scores must be a tensor, not {type(scores).__name__}; make it one with torch.as_tensor")
    if not scores.is_floating_point():
        raise DtypeError(f"scores are {scores.dtype}; softargmax takes floating numbers, so call scores.float() first")
    if scores.layout != torch.strided:
        raise DtypeError(f"scores are {scores.layout}, but softargmax needs all of them; call scores.to_dense() first")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -scores.ndim <= axis < scores.ndim:
        raise ConfigError(f"axis is {axis!r}, but scores have {scores.ndim} axes; take one of them by its number")
    if scores.numel() == 0:
        return scores * 1.0  # amax of an empty tensor would raise
    if beta <= 0:
        scores = scores.masked_fill(scores == math.inf, math.nan)  # times a negative beta it would be a hidden score
    visible = scores != -math.inf  # NaN is visible
    nonempty = visible.any(axis, keepdim=True)
    if beta > LARGEST_FLOAT:
        top = scores.detach().amax(axis, keepdim=True)  # NaN where the row holds one
        best = visible & (scores == top)
        share = best.to(scores.dtype)
        weights = share / share.sum(axis, keepdim=True).clamp(min=1)
        lost = top.isnan() | (top == math.inf)
        # gradients of zero flow back through `flat`, and of NaN where NaN or +inf is seen
        flat = torch.where(lost & visible, scores, 0) * torch.zeros_like(scores).masked_fill(lost, math.nan)
        return weights.masked_fill(lost, math.nan) + flat
    # an empty row keeps finite scores and is zeroed afterwards, so that no NaN appears, forward or backward
    finite = torch.where(visible, scores, 0)
    if abs(beta) > 1:
        # only differences matter, and the rest may overflow
        ends = finite.masked_fill(~visible, -math.inf if beta > 0 else math.inf)
        top = ends.amax(axis, keepdim=True) if beta > 0 else ends.amin(axis, keepdim=True)
        finite = torch.where(visible, scores - top.detach(), 0)
        largest = torch.finfo(scores.dtype).max
        beta = max(-largest, min(beta, largest))  # beyond that nothing gets sharper, and zero times infinity is NaN
    return torch.where(visible | ~nonempty, finite * beta, -math.inf).softmax(axis) * nonempty


def as_beta(beta: float) -> float:
    """Check an inverse temperature and return it as a float. Raises ConfigError if it is -inf, NaN or not a number."""
    number = check_number(
        "beta", beta, "the inverse temperature: 0 for the mean of what is visible, inf for hard attention"
    )
    if number < -LARGEST_FLOAT:
        raise ConfigError("beta is -inf, but takes a finite number or inf; to choose the smallest scores, negate q")
    return number
