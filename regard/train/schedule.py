"""Learning rate schedules: constant, cosine, linear and inverse square root, each with linear warmup."""

import math
from dataclasses import dataclass

from regard.base.validation import check_integer, check_range


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate schedule: linear warmup, then decay to a minimum.

    warmup        number of steps until the full learning rate is reached
    min_lr_ratio  lower bound of the learning rate during the decay, as a fraction of the full learning rate
    """

    warmup: int = 0
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_integer(f"{type(self).__name__}(warmup)", self.warmup, 0, "steps")
        check_range(f"{type(self).__name__}(min_lr_ratio)", self.min_lr_ratio, 0, 1)

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the factor by which the learning rate is multiplied at a step of a run.

        step   the step, counted from 0
        steps  number of steps of the run
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.decay(step, steps)

    def decay(self, step: int, steps: int) -> float:
        """Return the decay factor at a step after warmup: 1 is the full learning rate, 0 the minimum."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the fraction of the steps after warmup that are done, from 0 to 1."""
        return min(1.0, (step - self.warmup) / max(1, steps - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Learning rate schedule: constant after warmup."""

    def decay(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Learning rate schedule: cosine decay after warmup (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    def decay(self, step: int, steps: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self.progress(step, steps)))


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Learning rate schedule: linear decay after warmup."""

    def decay(self, step: int, steps: int) -> float:
        return 1 - self.progress(step, steps)


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(Schedule):
    """Learning rate schedule: decay with the inverse square root of the step.

    Vaswani et al. 2017, arXiv:1706.03762.
    """

    def decay(self, step: int, steps: int) -> float:
        return (max(1, self.warmup) / (step + 1)) ** 0.5 if step + 1 > self.warmup else 1.0
