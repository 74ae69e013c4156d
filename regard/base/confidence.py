"""Confidence intervals: quantiles of Student's t distribution."""

import math
from collections.abc import Callable


def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for a whole number of degrees of freedom.

    probability  from 0.5 to below 1

    >>> round(student_t_quantile(0.975, 4), 3)
    2.776
    """
    angle = _bisect(lambda x: 0.5 + 0.5 * _central_probability(x, degrees), probability, 0.0, math.pi / 2)
    return math.tan(angle) * math.sqrt(degrees)


def _central_probability(angle: float, degrees: int) -> float:
    """Return the probability that |t| < tan(angle) * sqrt(degrees) for Student's t distribution.

    The probability is computed as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    degrees  number of degrees of freedom
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Solve rising(x) = target by bisection between `low` and `high`, for an increasing function `rising`.

    The solution must be between `low` and `high`. The interval is halved until no float lies between its two ends.
    """
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return middle
