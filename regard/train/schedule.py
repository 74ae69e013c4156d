"""Learning rates over time: what share of the full rate each step gets."""

import math
from dataclasses import dataclass

from regard.base.errors import ConfigError
from regard.base.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A warm-up, evenly upwards, and what comes after it.

    warmup  steps until the full rate is reached
    floor   the share of the rate that is left at the end
    """

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_integer(f"{type(self).__name__}(warmup)", self.warmup, 0, "steps")
        if not 0 <= check_number(f"{type(self).__name__}(floor)", self.floor) <= 1:
            raise ConfigError(f"floor is a share of the rate, from 0 to 1, not {self.floor}")

    def at(self, step: int, steps: int) -> float:
        """The share of the rate at a step, counted from 0, of a run of so many."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.floor + (1 - self.floor) * self.after(step, steps)

    def after(self, step: int, steps: int) -> float:
        """The share after the warm-up, from 1 at its end."""
        raise NotImplementedError

    def passed(self, step: int, steps: int) -> float:
        """How much of the time after the warm-up is over, from 0 to 1."""
        return min(1.0, (step - self.warmup) / max(1, steps - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The full rate to the end."""

    def after(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Down along half a wave (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    def after(self, step: int, steps: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self.passed(step, steps)))


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Evenly down to the floor."""

    def after(self, step: int, steps: int) -> float:
        return 1 - self.passed(step, steps)


@dataclass(frozen=True, kw_only=True)
class InverseRoot(Schedule):
    """Down with the root of the step (Vaswani et al. 2017, arXiv:1706.03762)."""

    def after(self, step: int, steps: int) -> float:
        return (max(1, self.warmup) / (step + 1)) ** 0.5 if step + 1 > self.warmup else 1.0


Schedules = Constant | Cosine | Linear | InverseRoot
