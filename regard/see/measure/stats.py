"""Measures of maps of which only some places are known: how far apart, how spread, how linear in each other."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def apart(a: Tensor, b: Tensor) -> float:
    """How far two maps are from each other, as a share of the first."""
    known = a.isfinite() & b.isfinite()
    return float((a - b)[known].norm() / a[known].norm()) if bool(known.any()) else math.inf


def spread(values: Tensor) -> float:
    """The range of those that are known."""
    known = values[values.isfinite()]
    return float(known.max() - known.min()) if known.numel() else 0.0


def logs(weights: Tensor) -> Tensor:
    """Logarithms, finite also of zero."""
    return weights.clamp(min=1e-300).log()


def centred(x: Float[Tensor, "*b i j"], seen: Bool[Tensor, "*b i j"], axis: int = -1) -> Float[Tensor, "*b i j"]:
    """What is seen, less its mean along an axis; zero elsewhere."""
    mean = x.masked_fill(~seen, 0).sum(axis, keepdim=True) / seen.sum(axis, keepdim=True).clamp(min=1)
    return (x - mean).masked_fill(~seen, 0)


def slopes(scores: Float[Tensor, "b h i j"], pairs: Float[Tensor, "b h i j"]) -> tuple[list[float], float]:
    """The slope of each head's scores on q . k, and the largest share that it leaves unexplained."""
    known = scores.isfinite()
    s, x = (each.masked_fill(~known, 0).transpose(0, 1).flatten(1) for each in (scores, pairs))
    found = (s * x).sum(1) / (x * x).sum(1)
    left, size = (s - found[:, None] * x).norm(dim=1), s.norm(dim=1)
    share = torch.where(size > 1e-9 * x.norm(dim=1), left / size, 0)[found.isfinite()]
    return found.tolist(), float(share.max()) if share.numel() else math.inf


def capped(scores: Tensor, pairs: Tensor) -> tuple[float, float, float]:
    """The scale and the cap of cap tanh(scale q . k / cap) that explain the scores best, and the share they leave."""
    known = scores.isfinite()
    s, x = scores[known], pairs[known]
    start = float((s * x).sum() / (x * x).sum())
    sign = math.copysign(1.0, start)
    best = torch.tensor([abs(start) * 1.5, float(s.abs().max()) * 1.5 + 1e-12], dtype=torch.float64).log()

    def left_by(logs: Tensor) -> Tensor:
        scale, cap = logs.exp().unbind()
        return cap * torch.tanh(sign * scale * x / cap) - s

    damping, left = 1e-3, left_by(best)
    for _ in range(80):  # Levenberg and Marquardt: a step is taken where it helps, and is shorter where it did not
        tilt = torch.func.jacfwd(left_by)(best)
        squares = tilt.T @ tilt
        step = torch.linalg.solve(squares + damping * torch.diag(squares.diagonal() + 1e-30), tilt.T @ left)
        further = left_by(best - step)
        helps = bool(further.isfinite().all()) and float(further.norm()) < float(left.norm())
        best, left, damping = (best - step, further, damping / 3) if helps else (best, left, damping * 4)
    scale, cap = best.exp().tolist()
    return sign * scale, cap, float(left.norm() / s.norm()) if float(s.norm()) else math.inf
