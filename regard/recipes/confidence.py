"""How sure an answer is: log-probabilities as shares of right answers, and where it is better to say nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from regard.base.errors import ConfigError
from regard.base.numbers import real

SURE = 0.9  # the chance that a threshold keeps its promise beyond the questions that it was found by


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """A logistic curve over the log-probability of an answer, and the confidence from which on one is given.

    precision  the share of right answers that was asked for among those given
    threshold  the lowest confidence that reaches it, as questions kept back show; above 1 where they show it of none
    coverage   the share of those questions that were answered
    """

    slope: float
    offset: float
    precision: float
    threshold: float
    coverage: float

    def of(self, log_probability: float) -> float:
        """The share of answers with this log-probability that are right, as far as is known."""
        return 1 / (1 + math.exp(-min(50.0, max(-50.0, self.slope * log_probability + self.offset))))

    def given(self, log_probability: float) -> bool:
        return self.of(log_probability) >= self.threshold


def calibrated(log_probabilities: Sequence[float], right: Sequence[bool], precision: float) -> Confidence:
    """The curve that fits answers to questions kept back, and the threshold that promises a precision of others.

    The promise is kept nine times in ten: what counts is not the share of right answers above a threshold, but the
    least share that so many right ones among so few would not surprise at (Clopper and Pearson 1934).
    """
    if not 0 < real("precision", precision, "a share of right answers") <= 1:
        raise ConfigError(f"precision is a share of right answers, above 0 and at most 1, not {precision}")
    if not right or len(right) != len(log_probabilities):
        raise ConfigError(f"there are {len(log_probabilities)} answers and {len(right)} verdicts on them")
    slope, offset = _fitted(log_probabilities, right)
    curve = Confidence(slope=slope, offset=offset, precision=precision, threshold=math.inf, coverage=0.0)
    order = sorted(zip(map(curve.of, log_probabilities), right, strict=True), reverse=True)
    threshold, coverage, hits = 2.0, 0.0, 0
    for count, (sure, hit) in enumerate(order, 1):
        hits += hit
        following = order[count][0] if count < len(order) else -1.0
        # equal confidences are given together or not at all
        if following < sure and _at_least(hits, count) >= precision:
            threshold, coverage = sure, count / len(order)
    return Confidence(slope=slope, offset=offset, precision=precision, threshold=threshold, coverage=coverage)


def _at_least(hits: int, count: int) -> float:
    """The lowest share of right answers that gives so many hits at least once in ten times."""
    from scipy.special import betaincinv

    return float(betaincinv(hits, count - hits + 1, 1 - SURE)) if hits else 0.0


def _fitted(log_probabilities: Sequence[float], right: Sequence[bool]) -> tuple[float, float]:
    """Slope and offset by maximum likelihood. One answer of each kind is added, so that a curve always exists."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    low, high = min(log_probabilities), max(log_probabilities)
    x = numpy.array([*log_probabilities, low, high])[:, None]
    y = numpy.array([*right, False, True])
    model = LogisticRegression(C=1e3).fit(x, y)
    slope, offset = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope > 0:
        return slope, offset
    return 0.0, math.log(y.sum() / (len(y) - y.sum()))  # likelier answers are not better: all are right as often
