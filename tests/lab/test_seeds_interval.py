"""Means over seeds with their intervals, and verdicts that heed them."""

from dataclasses import astuple

import pytest

from regard.lab.claim import REFUTED, SUPPORTED, UNCLEAR, decide
from regard.lab.seeds_interval import Estimate, estimates, interval_half_width


def test_the_interval_of_three_values_is_that_of_students_t() -> None:
    assert interval_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)


def test_a_difference_combines_both_uncertainties() -> None:
    assert astuple(Estimate(0.9, 0.03) - Estimate(0.5, 0.04) - 0.1) == pytest.approx((0.3, 0.05))
    assert astuple(0.6 - Estimate(0.5, 0.04)) == pytest.approx((0.1, 0.04))
    assert astuple(3 * Estimate(0.5, 0.04)) == pytest.approx((1.5, 0.12))


def test_means_and_intervals_are_joined_by_name() -> None:
    assert estimates({"a": 1.0}, {"a": 0.5, "b": 2.0}) == {"a": Estimate(1.0, 0.5)}


def test_percentages_are_cut_at_0_and_100() -> None:
    assert Estimate(0.33, 1.69).percent() == "33% (0% to 100%)"
    assert Estimate(0.33, 0.21).percent() == "33% (12% to 54%)"


@pytest.mark.parametrize(
    ("holds", "margins", "word"),
    [
        (True, [Estimate(0.2, 0.1)], SUPPORTED),
        (True, [Estimate(0.2, 0.3)], UNCLEAR),
        (True, [Estimate(-0.2, 0.3)], UNCLEAR),
        (True, [Estimate(-0.2, 0.1)], REFUTED),
        (True, [Estimate(0.0)], REFUTED),
        (True, [Estimate(0.2, 0.1), Estimate(0.2, 0.3)], UNCLEAR),
        (True, [Estimate(0.2, 0.3), Estimate(-0.2, 0.1)], REFUTED),
        (False, [Estimate(0.2, 0.1)], REFUTED),
        (True, [], SUPPORTED),
    ],
)
def test_a_verdict_is_unclear_where_an_interval_spans_the_threshold(
    holds: bool, margins: list[Estimate], word: str
) -> None:
    assert decide(holds, "so it is", margins).word == word
