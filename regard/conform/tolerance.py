"""How far a result may be from the truth: one rule, and no setting that softens it.

The truth is the definition in float64. A result may be `OUTPUT` or `GRADIENT` times as far from it as the naive method
is in the dtype of the result, and one ulp farther. In float64 the naive method is the truth itself, so there a result
may be `ULPS_OF_FLOAT64` away, and in float32 `FLOOR` ulps are always allowed.
"""

import torch
from torch import Tensor

OUTPUT, GRADIENT = 2.0, 3.0
ULPS_OF_FLOAT64 = 64
FLOOR = {OUTPUT: 8, GRADIENT: 16}  # ulps of float32: among few numbers the naive method's own error is a matter of luck


def near(dtype: torch.dtype) -> float:
    """What two ways to the same sum may leave between them, of the largest number."""
    return 64 * torch.finfo(dtype).eps


def ulp(truth: Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of that dtype, at the largest magnitude of the truth."""
    return torch.finfo(dtype).eps * truth.abs().max().item() if truth.numel() else 0.0


def error(actual: Tensor, truth: Tensor) -> float:
    """The largest difference, NaN where there is one."""
    return (actual.double() - truth.double()).abs().max().item() if truth.numel() else 0.0


def allowed(naive: Tensor, truth: Tensor, factor: float) -> float:
    """The largest error that a result may have in the dtype of the naive one."""
    if naive.dtype == torch.float64:
        return ULPS_OF_FLOAT64 * ulp(truth, torch.float64)
    most = factor * error(naive, truth) + ulp(truth, naive.dtype)
    return max(most, FLOOR[factor] * ulp(truth, naive.dtype)) if naive.dtype == torch.float32 else most


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results of one method differ by no more than rounding; NaN equals NaN."""
    if actual.shape != expected.shape:
        return False
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    most = near(actual.dtype) * max(1.0, largest)
    return bool(torch.isclose(actual.double(), expected.double(), rtol=0, atol=most, equal_nan=True).all())
