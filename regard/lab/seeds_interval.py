"""Results over several seeds: how far their mean may be from the truth, and what follows from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from regard.base.confidence import student_t_quantile


def interval_half_width(values: Sequence[float]) -> float:
    """Half of a 95 % interval of the mean, by Student's t."""
    return student_t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half of its interval. What is added or taken away is as uncertain as both are."""

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
        """Whether all of the interval lies above 0."""
        return self.mean > self.half

    @property
    def below(self) -> bool:
        """Whether nothing of the interval lies above 0."""
        return self.mean <= -self.half

    def share(self) -> str:
        """The mean and its interval in percent, of which a share has none below 0 and none above 100."""
        low, high = max(self.mean - self.half, 0.0), min(self.mean + self.half, 1.0)
        return f"{self.mean:.0%} ({low:.0%} to {high:.0%})"


def estimates(means: Mapping[str, float], halves: Mapping[str, float]) -> dict[str, Estimate]:
    """Means by name with their intervals."""
    return {name: Estimate(mean, halves[name]) for name, mean in means.items()}
