"""Quantiles and bounds compared with scipy."""

import pytest

from regard.base.confidence import binomial_lower_bound, student_t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 301])
def test_student_t_quantiles_are_those_of_scipy(degrees: int) -> None:
    special = pytest.importorskip("scipy.special")
    for probability in (0.6, 0.95, 0.975, 0.999):
        assert student_t_quantile(probability, degrees) == pytest.approx(
            special.stdtrit(degrees, probability), rel=1e-9
        )


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (1, 1), (1, 7), (5, 5), (43, 50), (900, 1000), (1000, 1000)])
def test_the_lower_bound_of_a_proportion_is_that_of_scipy(hits: int, count: int) -> None:
    special = pytest.importorskip("scipy.special")
    for confidence in (0.5, 0.9, 0.99):
        expected = special.betaincinv(hits, count - hits + 1, 1 - confidence) if hits else 0.0
        assert binomial_lower_bound(hits, count, confidence) == pytest.approx(expected, rel=1e-9)
