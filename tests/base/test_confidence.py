"""Quantiles compared with scipy."""

import pytest

from regard.base.confidence import student_t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 301])
def test_student_t_quantiles_are_those_of_scipy(degrees: int) -> None:
    special = pytest.importorskip("scipy.special")
    for probability in (0.6, 0.95, 0.975, 0.999):
        assert student_t_quantile(probability, degrees) == pytest.approx(
            special.stdtrit(degrees, probability), rel=1e-9
        )
