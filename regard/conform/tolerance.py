"""Compute the tolerance of the checker: the largest allowed difference between an output and the float64 reference.

The tolerance cannot be configured. It is a multiple of the error of the naive method (attention by its definition) in
the same dtype, plus one unit in the last place (ulp). The factor is `OUTPUT_FACTOR` for outputs and `GRADIENT_FACTOR`
for gradients. In float64 the tolerance is `FLOAT64_ULPS` ulps, because the naive method in float64 is the reference
itself. In float32 the tolerance is at least `FLOAT32_ULPS` ulps, because the naive method can be exact by chance if
there are few numbers.
"""

import torch
from torch import Tensor

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
FLOAT64_ULPS = 64
FLOAT32_ULPS = {OUTPUT_FACTOR: 8, GRADIENT_FACTOR: 16}


def ulp(reference: Tensor, dtype: torch.dtype) -> float:
    """Return one unit in the last place (ulp) of the dtype at the largest absolute value of the reference."""
    return torch.finfo(dtype).eps * reference.abs().max().item() if reference.numel() else 0.0


def max_error(actual: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference of two tensors; NaN if either tensor has a NaN."""
    return (actual.double() - reference.double()).abs().max().item() if reference.numel() else 0.0


def distance(x: Tensor, y: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity if the shapes differ or a difference is NaN."""
    return (x.double() - y.double()).abs().nan_to_num(torch.inf).max().item() if x.shape == y.shape else float("inf")


def allowed_error(naive: Tensor, reference: Tensor, factor: float) -> float:
    """Return the largest allowed error of an output: a multiple of the error of the naive output, plus one ulp.

    For float64, the allowed error is FLOAT64_ULPS ulps; for float32, it is at least FLOAT32_ULPS ulps.

    naive      the output computed by the definition in the dtype under test
    reference  the output computed in float64
    factor     multiple of the error of `naive` that is allowed
    """
    if naive.dtype == torch.float64:
        return FLOAT64_ULPS * ulp(reference, torch.float64)
    most = factor * max_error(naive, reference) + ulp(reference, naive.dtype)
    return max(most, FLOAT32_ULPS[factor] * ulp(reference, naive.dtype)) if naive.dtype == torch.float32 else most


def equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape and equal entries, with NaN equal to NaN."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def same_up_to_rounding(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs differ by rounding only, with NaN equal to NaN."""
    if actual.shape != expected.shape:
        return False
    largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    most = 64 * torch.finfo(actual.dtype).eps * max(1.0, largest)
    return bool(torch.isclose(actual.double(), expected.double(), rtol=0, atol=most, equal_nan=True).all())
