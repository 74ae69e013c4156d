"""Rates over time against their closed forms."""

import math

import pytest

from regard.base.errors import ConfigError
from regard.train.schedule import Constant, Cosine, InverseRoot, Linear, Schedules

STEPS, WARMUP = 31, 7


@pytest.mark.parametrize("schedule", [Constant, Cosine, Linear, InverseRoot])
def test_the_warm_up_goes_evenly_to_the_full_rate(schedule: type[Schedules]) -> None:
    made = schedule(warmup=WARMUP)
    assert [made.at(step, STEPS) for step in range(WARMUP)] == [(step + 1) / WARMUP for step in range(WARMUP)]
    assert made.at(WARMUP, STEPS) == pytest.approx(1, abs=0.07)
    assert schedule().at(0, STEPS) == 1, "without one the full rate is there at once"


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_each_falls_by_its_formula(floor: float) -> None:
    for step in range(WARMUP, STEPS):
        over = (step - WARMUP) / (STEPS - WARMUP)
        formulas = {
            Constant: 1.0,
            Cosine: (1 + math.cos(math.pi * over)) / 2,
            Linear: 1 - over,
            InverseRoot: math.sqrt(WARMUP / (step + 1)),
        }
        for schedule, value in formulas.items():
            expected = floor + (1 - floor) * value
            assert schedule(warmup=WARMUP, floor=floor).at(step, STEPS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", [Cosine, Linear])
def test_the_end_of_the_run_is_the_floor(schedule: type[Schedules]) -> None:
    assert schedule(warmup=WARMUP, floor=0.25).at(STEPS, STEPS) == pytest.approx(0.25)
    assert schedule(warmup=WARMUP, floor=0.25).at(STEPS + 9, STEPS) == pytest.approx(0.25)


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert [Linear(warmup=10).at(step, 3) for step in range(3)] == [0.1, 0.2, 0.3]


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Cosine\(warmup\) is -1, but must be at least 0: it counts steps"):
        Cosine(warmup=-1)
    with pytest.raises(ConfigError, match="floor is a share of the rate, from 0 to 1, not 2"):
        Linear(floor=2)
