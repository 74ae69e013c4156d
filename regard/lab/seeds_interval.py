"""Confidence intervals of means over several seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from regard.base.confidence import student_t_quantile


def interval_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean (Student's t)."""
    return student_t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its confidence interval; sums combine the uncertainties."""

    mean: float
    half: float = 0.0

    def __add__(self, other: "Estimate | float") -> "Estimate":
        more = other if isinstance(other, Estimate) else Estimate(other)
        return Estimate(self.mean + more.mean, math.hypot(self.half, more.half))

    def __sub__(self, other: "Estimate | float") -> "Estimate":
        return self + (-other)

    def __rsub__(self, other: float) -> "Estimate":
        return -self + other

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, self.half)

    def __rmul__(self, factor: float) -> "Estimate":
        return Estimate(factor * self.mean, abs(factor) * self.half)

    @property
    def above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.mean > self.half

    @property
    def below(self) -> bool:
        """Whether the whole interval is at or below 0."""
        return self.mean <= -self.half

    def percent(self) -> str:
        """Write the mean and its interval in percent, cut at 0 % and 100 %."""
        low, high = max(self.mean - self.half, 0.0), min(self.mean + self.half, 1.0)
        return f"{self.mean:.0%} ({low:.0%} to {high:.0%})"


def estimates(means: Mapping[str, float], halves: Mapping[str, float]) -> dict[str, Estimate]:
    """Combine means and half-widths by name."""
    return {name: Estimate(mean, halves[name]) for name, mean in means.items()}
