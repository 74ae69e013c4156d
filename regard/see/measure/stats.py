"""Fit by least squares and compare matrices in which only some entries are known."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |a|, where |x| is the square root of the sum of squares over entries finite in both tensors.

    Returns inf if there are no such entries.
    """
    known = a.isfinite() & b.isfinite()
    return float((a - b)[known].norm() / a[known].norm()) if bool(known.any()) else math.inf


def value_range(values: Tensor) -> float:
    """Return the difference of the largest and the smallest finite entry; 0 if no entry is finite."""
    known = values[values.isfinite()]
    return float(known.max() - known.min()) if known.numel() else 0.0


def safe_log(weights: Tensor) -> Tensor:
    """Return the logarithm, with values below 1e-300 replaced by 1e-300, so that zero gives a finite number."""
    return weights.clamp(min=1e-300).log()


def centre_rows(x: Float[Tensor, "*b i j"], visible: Bool[Tensor, "*b i j"]) -> Float[Tensor, "*b i j"]:
    """Subtract the mean over the visible entries of each row; hidden entries become zero."""
    mean = x.masked_fill(~visible, 0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return (x - mean).masked_fill(~visible, 0)


def fit_slopes(scores: Float[Tensor, "b h i j"], products: Float[Tensor, "b h i j"]) -> tuple[list[float], float]:
    """Fit scores = factor * products for each head by least squares.

    Returns the factor of each head, and the relative residual of the head that fits worst.
    """
    known = scores.isfinite()
    s, x = (each.masked_fill(~known, 0).transpose(0, 1).flatten(1) for each in (scores, products))
    factors = (s * x).sum(1) / (x * x).sum(1)
    residual, size = (s - factors[:, None] * x).norm(dim=1), s.norm(dim=1)
    relative = torch.where(size > 1e-9 * x.norm(dim=1), residual / size, 0)[factors.isfinite()]
    return factors.tolist(), float(relative.max()) if relative.numel() else math.inf


def fit_softcap(scores: Tensor, products: Tensor) -> tuple[float, float, float]:
    """Fit scores = cap * tanh(scale * products / cap) by least squares.

    Returns the scale, the cap and the relative residual.
    """
    known = scores.isfinite()
    s, x = scores[known], products[known]
    start = float((s * x).sum() / (x * x).sum())
    sign = math.copysign(1.0, start)
    best = torch.tensor([abs(start) * 1.5, float(s.abs().max()) * 1.5 + 1e-12], dtype=torch.float64).log()

    def residual_and_jacobian(logs: Tensor) -> tuple[Tensor, Tensor]:
        scale, cap = logs.exp().tolist()
        score = sign * scale * x
        bent = torch.tanh(score / cap)
        slope = score * (1 - bent.square())
        return cap * bent - s, torch.stack([slope, cap * bent - slope], 1)

    damping, (residual, jacobian) = 1e-3, residual_and_jacobian(best)
    for _ in range(80):  # Levenberg-Marquardt
        squares = jacobian.T @ jacobian
        damped = squares + damping * torch.diag(squares.diagonal() + 1e-30)
        trial = best - torch.linalg.solve(damped, jacobian.T @ residual)
        values = residual_and_jacobian(trial)
        if bool(values[0].isfinite().all()) and float(values[0].norm()) < float(residual.norm()):
            best, (residual, jacobian), damping = trial, values, damping / 3
        else:
            damping *= 4
    scale, cap = best.exp().tolist()
    return sign * scale, cap, float(residual.norm() / s.norm()) if float(s.norm()) else math.inf
