"""Learning rate schedules compared with their closed forms."""

import math

import pytest

from regard.base.errors import ConfigError
from regard.train.schedule import Constant, Cosine, InverseSquareRoot, Linear, Schedule

STEPS, WARMUP = 31, 7


@pytest.mark.parametrize("schedule", [Constant, Cosine, Linear, InverseSquareRoot])
def test_warmup_is_linear_up_to_the_full_learning_rate(schedule: type[Schedule]) -> None:
    built = schedule(warmup=WARMUP)
    assert [built.lr_factor(step, STEPS) for step in range(WARMUP)] == [(step + 1) / WARMUP for step in range(WARMUP)]
    assert built.lr_factor(WARMUP, STEPS) == pytest.approx(1, abs=0.07)
    assert schedule().lr_factor(0, STEPS) == 1, "without warmup the first step has the full learning rate"


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_each_schedule_follows_its_formula(floor: float) -> None:
    for step in range(WARMUP, STEPS):
        over = (step - WARMUP) / (STEPS - WARMUP)
        formulas = {
            Constant: 1.0,
            Cosine: (1 + math.cos(math.pi * over)) / 2,
            Linear: 1 - over,
            InverseSquareRoot: math.sqrt(WARMUP / (step + 1)),
        }
        for schedule, value in formulas.items():
            expected = floor + (1 - floor) * value
            assert schedule(warmup=WARMUP, min_lr_ratio=floor).lr_factor(step, STEPS) == pytest.approx(
                expected, rel=1e-12
            )


@pytest.mark.parametrize("schedule", [Cosine, Linear])
def test_the_last_learning_rate_is_the_minimum(schedule: type[Schedule]) -> None:
    assert schedule(warmup=WARMUP, min_lr_ratio=0.25).lr_factor(STEPS, STEPS) == pytest.approx(0.25)
    assert schedule(warmup=WARMUP, min_lr_ratio=0.25).lr_factor(STEPS + 9, STEPS) == pytest.approx(0.25)


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    assert [Linear(warmup=10).lr_factor(step, 3) for step in range(3)] == [0.1, 0.2, 0.3]


def test_invalid_settings_raise_an_error() -> None:
    with pytest.raises(ConfigError, match=r"Cosine\(warmup\) is -1, but must be at least 0: it counts steps"):
        Cosine(warmup=-1)
    with pytest.raises(ConfigError, match=r"Linear\(min_lr_ratio\) must be at least 0 and at most 1, not 2"):
        Linear(min_lr_ratio=2)
