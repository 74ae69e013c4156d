"""Seeds of repeated trainings, and confidence intervals of means over them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from regard.base.confidence import student_t_quantile
from regard.base.validation import check_integer


@dataclass(frozen=True, kw_only=True)
class RepeatedSetup:
    """Settings of a lab claim that repeats its training with several random seeds.

    repeats  number of trainings, each with its own seed
    seed     base seed: training number r uses the seed 1000 * seed + r
    """

    repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")

    @property
    def seeds(self) -> list[int]:
        """The random seed of each repetition."""
        return [1000 * self.seed + number for number in range(self.repeats)]


def interval_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of the values (Student's t)."""
    return student_t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Estimate:
    """A mean over random seeds with its 95 % confidence interval, from mean - half to mean + half.

    In a sum or a difference of two estimates, half is sqrt(half1^2 + half2^2), as for independent means.
    """

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
        """Whether the whole confidence interval is above 0."""
        return self.mean > self.half

    @property
    def below(self) -> bool:
        """Whether the whole confidence interval is at or below 0."""
        return self.mean <= -self.half

    def __str__(self) -> str:
        """Format the mean and its confidence interval in percent; the interval is clipped to 0 % and 100 %."""
        low, high = max(self.mean - self.half, 0.0), min(self.mean + self.half, 1.0)
        return f"{100 * self.mean:.0f} % ({100 * low:.0f} to {100 * high:.0f} %)"


def mean_and_interval(name: str, values: Any) -> dict[str, Any]:
    """Return the mean over random seeds and half the width of its confidence interval, in a dictionary.

    The keys are `name` and "interval of `name`".

    values  a list with one number per seed, or lists and dictionaries of such lists
    """
    return {name: _reduce(fmean, values), f"interval of {name}": _reduce(interval_half_width, values)}


def _reduce(function: Callable[[Sequence[float]], float], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _reduce(function, value) for name, value in values.items()}
    if isinstance(values[0], list | tuple):
        return [_reduce(function, value) for value in values]
    return function(values)


def estimates(numbers: dict[str, Any], name: str) -> Any:
    """Return the means that `mean_and_interval` stored under `name`, each as an `Estimate`.

    numbers  the measured numbers of a lab claim, by name
    """

    def combine(mean: Any, half: Any) -> Any:
        if isinstance(mean, dict):
            return {key: combine(value, half[key]) for key, value in mean.items()}
        return [*map(combine, mean, half)] if isinstance(mean, list) else Estimate(mean, half)

    return combine(numbers[name], numbers[f"interval of {name}"])
