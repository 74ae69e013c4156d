"""How sure an answer is: probabilities as shares of right answers, and where it is better to say nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy

from regard.base.confidence import binomial_lower_bound
from regard.base.errors import ConfigError
from regard.base.validation import check_number

SURE = 0.9  # the chance that a threshold keeps its promise beyond the questions that it was found by
NEVER = 2.0  # a threshold that no confidence reaches
SUREST = -1e-7  # the log-probability above which answers are equally likely: float32 has nothing in between


class Prediction(NamedTuple):
    """Log-probabilities of what was said: of the answer, and of the name that was asked about.

    The second is minus infinity where the question has no name.
    """

    answer: float
    name: float

    @property
    def odds(self) -> float:
        """Of the answer, as a logarithm: of nearly certain answers they tell 99 % from 99.9, and probability hardly."""
        answer = min(SUREST, self.answer)
        return answer - math.log(-math.expm1(answer))


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """A logistic curve over the log-odds of the answer and the log-probability of the name, and where answers begin.

    odds       how much the curve rises with the log-odds of the answer
    name       how much it rises with the log-probability of the name
    ceiling    the most that so few right answers can show: after n of them the next is right in n + 1 of n + 2 cases
    precision  the share of right answers that was asked for among those given
    threshold  the confidence that reaches it, as questions kept back show; above 1 where they show it of none
    coverage   the share of those questions that were answered, those about strangers among them
    """

    odds: float
    name: float
    offset: float
    ceiling: float
    precision: float
    threshold: float
    coverage: float

    def of(self, said: Prediction) -> float:
        """The share of such answers that are right, as far as is known; 0 where nobody is asked about by name."""
        if said.name == -math.inf:
            return 0.0
        height = self.odds * said.odds + self.name * said.name + self.offset
        return min(self.ceiling, 1 / (1 + math.exp(-min(30.0, max(-30.0, height)))))

    def given(self, said: Prediction) -> bool:
        return self.of(said) >= self.threshold


def calibrated(said: Sequence[Prediction], right: Sequence[bool], precision: float) -> Confidence:
    """The curve that fits answers to questions kept back, and the threshold that promises a precision of others.

    The promise is kept nine times in ten: what counts is not the share of right answers above a threshold, but the
    least share that so many right ones among so few would not surprise at (Clopper and Pearson 1934). No threshold is
    below the precision: sure answers are no excuse for one that is not.
    """
    if not 0 < check_number("precision", precision, "a share of right answers") <= 1:
        raise ConfigError(f"precision is a share of right answers, above 0 and at most 1, not {precision}")
    if not right or len(right) != len(said):
        raise ConfigError(f"there are {len(said)} answers and {len(right)} verdicts on them")
    odds, name, offset = _fitted(said, right)
    ceiling = (sum(right) + 1) / (sum(right) + 2)  # Laplace's rule of succession
    curve = Confidence(
        odds=odds, name=name, offset=offset, ceiling=ceiling, precision=precision, threshold=NEVER, coverage=0.0
    )
    order = sorted(zip(map(curve.of, said), right, strict=True), reverse=True)
    threshold, coverage, hits = NEVER, 0.0, 0
    for count, (sure, hit) in enumerate(order, 1):
        hits += hit
        following = order[count][0] if count < len(order) else -1.0
        # equal confidences are given together or not at all
        if following < sure >= precision and _at_least(hits, count) >= precision:
            # halfway to the next one, which is kept back: as good by these questions, and kinder to others
            threshold, coverage = max(precision, (sure + following) / 2), count / len(order)
    return replace(curve, threshold=threshold, coverage=coverage)


def _at_least(hits: int, count: int) -> float:
    """The lowest share of right answers that gives so many hits at least once in ten times."""
    return binomial_lower_bound(hits, count, SURE)


def _fitted(said: Sequence[Prediction], right: Sequence[bool]) -> tuple[float, float, float]:
    """How much odds and name count, and the offset, by maximum likelihood.

    One answer of each kind is added, the least and the most likely, so that a curve always exists.
    """
    named = [(one, hit) for one, hit in zip(said, right, strict=True) if one.name > -math.inf]
    if not named:
        return 0.0, 0.0, 0.0  # nobody is asked about by name, so nothing is ever sure
    x = numpy.array([(one.odds, one.name) for one, _ in named])
    x = numpy.concatenate([x, x.min(0, keepdims=True), x.max(0, keepdims=True)])
    y = numpy.array([*(hit for _, hit in named), False, True])
    weights, counted = [0.0, 0.0], [0, 1]
    while counted:
        *fitted, offset = logistic_regression(x[:, counted], y)
        worst = fitted.index(min(fitted))
        if fitted[worst] > 0:
            for column, weight in zip(counted, fitted, strict=True):
                weights[column] = weight
            return weights[0], weights[1], offset
        counted.pop(worst)  # what is likelier is not better
    return 0.0, 0.0, math.log(y.sum() / (len(y) - y.sum()))  # all are right as often


def logistic_regression(x: numpy.ndarray, y: numpy.ndarray, penalty: float = 1e-3) -> list[float]:
    """Return the weight of each column of `x` and the intercept that minimize the log loss of `y`.

    Newton's method, with half the penalty times the squared weights added so that separable data have a minimum.
    """
    columns = numpy.column_stack([x, numpy.ones(len(x))])
    ridge = numpy.diag([penalty] * x.shape[1] + [0.0])
    sign = numpy.where(y, 1.0, -1.0)

    def loss(weights: numpy.ndarray) -> float:
        return float(numpy.logaddexp(0, -sign * (columns @ weights)).sum() + weights @ ridge @ weights / 2)

    weights = numpy.zeros(columns.shape[1])
    for _ in range(100):
        p = 1 / (1 + numpy.exp(-numpy.clip(columns @ weights, -700, 700)))
        gradient = columns.T @ (p - y) + ridge @ weights
        step = numpy.linalg.solve((columns.T * (p * (1 - p))) @ columns + ridge, gradient)
        while loss(weights - step) > loss(weights) and abs(step).max() > 1e-12:
            step = step / 2
        weights = weights - step
        if abs(step).max() < 1e-10 * max(1.0, abs(weights).max()):
            break
    return [float(weight) for weight in weights]
