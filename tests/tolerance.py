"""How far a result may be from the truth. There is one rule, and nothing, no environment variable either, softens it.

The truth is the same computation in float64. A result may be off by at most a fixed multiple of what the naive method
is off in the same dtype, and by one ulp more: `OUTPUT` times for outputs, `GRADIENT` times for gradients. In float64
the naive method is the truth itself, so that there a result may be off by `ULPS_OF_FLOAT64` alone.
"""

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
    return "" if off <= most else f"off by {off:.1e} in {naive.dtype}, {most:.1e} is allowed"  # NaN is too far
