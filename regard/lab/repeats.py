"""Results over several seeds: how far their mean may be from the truth."""

from collections.abc import Sequence
from statistics import stdev


def interval(values: Sequence[float]) -> float:
    """Half of a 95 % interval of the mean, by Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975) * stdev(values) / len(values) ** 0.5)
