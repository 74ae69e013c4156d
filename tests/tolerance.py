"""How far a result may be from the truth: one rule for all tests, and no setting that softens it.

The truth is the naive method in float64. A result may be `OUTPUT` or `GRADIENT` times as far from it as the naive
method is in the dtype of the result, and one ulp farther. In float64 the naive method is the truth itself, so there a
result may be `ULPS_OF_FLOAT64` away.
"""

import math

import torch
from torch import Tensor

OUTPUT, GRADIENT = 2.0, 3.0
ULPS_OF_FLOAT64 = 16


def ulp(truth: Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of that dtype, at the largest magnitude of the truth."""
    return torch.finfo(dtype).eps * truth.abs().max().item() if truth.numel() else 0.0


def error(actual: Tensor, truth: Tensor) -> float:
    """The largest difference, NaN where there is one."""
    return (actual.double() - truth).abs().max().item() if truth.numel() else 0.0


def allowed(naive: Tensor, truth: Tensor, factor: float) -> float:
    """The largest error that a result may have in the dtype of the naive one."""
    if naive.dtype == torch.float64:
        return ULPS_OF_FLOAT64 * ulp(truth, torch.float64)
    return factor * error(naive, truth) + ulp(truth, naive.dtype)


def too_far(actual: Tensor, naive: Tensor, truth: Tensor, factor: float) -> str:
    """What is wrong with a result, in words, or nothing where it is near enough: `assert not too_far(...)`."""
    if truth.dtype != torch.float64:
        return f"the truth is in {truth.dtype}, not in float64"
    for name, x in (("the naive result", naive), ("the result", actual)):
        if x.shape != truth.shape:
            return f"{name} has shape {tuple(x.shape)}, not {tuple(truth.shape)}"
    if actual.dtype != naive.dtype:
        return f"the result is {actual.dtype}, not {naive.dtype}"
    off, most = error(actual, truth), allowed(naive, truth, factor)
    if not math.isfinite(most):
        return "the naive result or the truth is not finite, so nothing can be held against it"
    return "" if off <= most else f"off by {off:.1e} in {naive.dtype}, {most:.1e} is allowed"  # NaN is too far
