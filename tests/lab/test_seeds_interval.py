"""Means over seeds with their intervals, and verdicts that heed them."""

from dataclasses import astuple

import pytest

from regard.base.errors import ConfigError
from regard.lab.seeds_interval import Estimate, RepeatedSetup, estimates, interval_half_width, mean_and_interval
from regard.lab.verdict import REFUTED, SUPPORTED, UNCLEAR, decide


def test_the_interval_of_three_values_is_that_of_students_t() -> None:
    assert interval_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)


def test_a_difference_combines_both_uncertainties() -> None:
    assert astuple(Estimate(0.9, 0.03) - Estimate(0.5, 0.04) - 0.1) == pytest.approx((0.3, 0.05))
    assert astuple(0.6 - Estimate(0.5, 0.04)) == pytest.approx((0.1, 0.04))
    assert astuple(3 * Estimate(0.5, 0.04)) == pytest.approx((1.5, 0.12))


def test_means_and_intervals_keep_their_names_and_nesting() -> None:
    numbers = mean_and_interval("accuracy", {"a": [1.0, 3.0], "b": [[2.0, 2.0], [4.0, 6.0]]})
    assert numbers["accuracy"] == {"a": 2.0, "b": [2.0, 5.0]}
    assert numbers["interval of accuracy"]["b"][0] == 0.0
    found = estimates(numbers, "accuracy")
    assert found["b"][1] == Estimate(5.0, interval_half_width([4.0, 6.0]))
    assert set(found) == {"a", "b"}


def test_repeated_setups_have_different_seeds_and_at_least_two() -> None:
    assert RepeatedSetup(repeats=3, seed=2).seeds == [2000, 2001, 2002]
    with pytest.raises(ConfigError, match="an interval needs two"):
        RepeatedSetup(repeats=1)


def test_percentages_are_cut_at_0_and_100() -> None:
    assert str(Estimate(0.33, 1.69)) == "33 % (0 to 100 %)"
    assert str(Estimate(0.33, 0.21)) == "33 % (12 to 54 %)"


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
    assert decide(holds, margins).word == word


def test_a_setup_that_cannot_decide_makes_a_claim_unclear() -> None:
    assert decide(True, missing="larger betas are needed").word == UNCLEAR
    assert decide(False, missing="larger betas are needed").word == UNCLEAR
    assert decide(False).word == REFUTED
