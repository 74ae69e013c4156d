"""Confidence is a share of right answers, and a threshold keeps the precision that was asked for."""

import math
import random

import pytest

from regard.base.errors import ConfigError
from regard.recipes.confidence import calibrated


def drawn(count: int, seed: int = 0) -> tuple[list[float], list[bool]]:
    """Answers that are right as often as 1 / (1 + exp(-(2 x + 3))) says."""
    source = random.Random(seed)
    sure = [source.uniform(-5, 0) for _ in range(count)]
    return sure, [source.random() < 1 / (1 + math.exp(-(2 * x + 3))) for x in sure]


def test_the_curve_is_that_of_the_answers() -> None:
    found = calibrated(*drawn(20_000), precision=0.9)
    assert found.slope == pytest.approx(2, abs=0.1)
    assert found.offset == pytest.approx(3, abs=0.15)
    assert found.of(-1.5) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("precision", [0.6, 0.8, 0.9])
def test_answers_above_the_threshold_are_right_as_often_as_was_asked(precision: float) -> None:
    found = calibrated(*drawn(4000), precision=precision)
    sure, right = drawn(20_000, seed=1)
    given = [hit for x, hit in zip(sure, right, strict=True) if found.given(x)]
    assert precision - 0.01 <= sum(given) / len(given) < precision + 0.03
    assert len(given) / len(sure) == pytest.approx(found.coverage, abs=0.03)


def test_a_stricter_precision_answers_less() -> None:
    coverage = [calibrated(*drawn(4000), precision=p).coverage for p in (0.5, 0.7, 0.9, 0.99)]
    assert coverage == sorted(coverage, reverse=True)
    assert coverage[0] > coverage[-1]


def test_luck_with_a_few_is_no_promise() -> None:
    sure = [-0.1 * number for number in range(40)]
    assert calibrated(sure[:20], [True] * 20, 0.9).coverage == 0  # nine in ten right would do that one time in eight
    assert calibrated(sure[:25], [True] * 25, 0.9).coverage == 1
    kept = []
    for seed in range(60):
        found = calibrated(*drawn(200, seed), precision=0.85)
        others, right = drawn(4000, seed + 1000)
        given = [hit for x, hit in zip(others, right, strict=True) if found.given(x)]
        kept.append(sum(given) >= 0.85 * len(given))
    assert sum(kept) >= 48


def test_where_nothing_is_right_nothing_is_said() -> None:
    found = calibrated([-1.0, -2.0, -3.0, -0.5, -0.1, -0.2], [False] * 6, precision=0.9)
    assert found.coverage == 0
    assert not found.given(0.0)


def test_answers_that_are_equally_sure_are_given_together() -> None:
    found = calibrated([-1.0] * 10, [True] * 6 + [False] * 4, precision=0.9)
    assert found.coverage == 0


@pytest.mark.parametrize("precision", [0.0, 1.5])
def test_a_precision_is_a_share(precision: float) -> None:
    with pytest.raises(ConfigError, match="precision is a share of right answers"):
        calibrated([-1.0], [True], precision)


def test_answers_without_verdicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 answers and 1 verdicts"):
        calibrated([-1.0, -2.0], [True], 0.9)


def test_where_likelier_answers_are_not_better_all_are_as_sure_as_the_share_that_is_right() -> None:
    sure = [-0.01 * number for number in range(100)]
    found = calibrated(sure, [number >= 36 for number in range(100)], 0.9)
    assert found.of(sure[0]) == found.of(sure[-1]) == pytest.approx(0.64, abs=0.01)
