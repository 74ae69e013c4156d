"""Confidence calibration: convert log-probabilities to the probability that an answer is correct; choose a threshold
for abstaining.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Binomial
from torch.nn.functional import binary_cross_entropy_with_logits

from regard.base.errors import ConfigError
from regard.base.validation import check_range

CONFIDENCE_LEVEL = 0.9  # probability that the threshold reaches the precision on other questions
NEVER = 2.0  # a threshold that no confidence reaches
MAX_LOG_PROBABILITY = -1e-7  # float32 cannot resolve probabilities closer to 1
PENALTY = 1e-3  # L2 penalty on the weights of the logistic regression


class AnswerLikelihood(NamedTuple):
    """The log-probabilities of an answer and of the name in its question (minus infinity if there is no name)."""

    answer: float
    name: float

    @property
    def odds(self) -> float:
        """The log-odds of the answer: log(p / (1 - p)).

        Log-odds are used because they distinguish 99 % from 99.9 %, where log-probabilities hardly differ.
        """
        answer = min(MAX_LOG_PROBABILITY, self.answer)
        return answer - math.log(-math.expm1(answer))


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """A calibrated confidence: a logistic regression on the log-probabilities of answer and name, and a threshold.

    odds       weight of the log-odds of the answer in the regression
    name       weight of the log-probability of the name
    offset     intercept of the regression
    ceiling    maximum confidence: (n + 1) / (n + 2), if n calibration answers are correct. This is the probability that
               the next answer is correct after n correct answers in a row (Laplace's rule of succession)
    precision  target fraction of correct answers among the answers that are given
    threshold  lowest confidence with which an answer is given, chosen to reach the precision on the calibration
               questions; above 1 if the precision cannot be reached
    coverage   fraction of the calibration questions that are answered, including questions about unknown people
    """

    odds: float
    name: float
    offset: float
    ceiling: float
    precision: float
    threshold: float
    coverage: float

    def score(self, likelihood: AnswerLikelihood) -> float:
        """Return the confidence: the estimated probability that the answer is correct.

        0 if the question has no name.
        """
        if likelihood.name == -math.inf:
            return 0.0
        logit = self.odds * likelihood.odds + self.name * likelihood.name + self.offset
        return min(self.ceiling, 1 / (1 + math.exp(-min(30.0, max(-30.0, logit)))))

    def accepts(self, likelihood: AnswerLikelihood) -> bool:
        """Return whether the confidence reaches the threshold, so that the answer is given."""
        return self.score(likelihood) >= self.threshold


def calibrate(likelihoods: Sequence[AnswerLikelihood], correct: Sequence[bool], precision: float) -> Confidence:
    """Fit the confidence to held-out answers, and choose the threshold that reaches the target precision.

    The threshold has a safety margin. Among the held-out answers with at least this confidence, the fraction of correct
    answers reaches the precision, and so does its one-sided 90 % lower confidence bound (Clopper and Pearson 1934). The
    threshold is never below the precision itself.

    likelihoods  for each answer, its log-probability and that of the name in its question
    correct      whether each answer is correct
    precision    target fraction of correct answers among the answers that are given
    """
    check_range("precision", precision, 0, 1, above=True)
    if not correct or len(correct) != len(likelihoods):
        raise ConfigError(f"there are {len(likelihoods)} answers, but {len(correct)} labels saying which are correct")
    odds, name, offset = _fit_logistic(likelihoods, correct)
    ceiling = (sum(correct) + 1) / (sum(correct) + 2)  # Laplace's rule of succession
    curve = Confidence(
        odds=odds, name=name, offset=offset, ceiling=ceiling, precision=precision, threshold=NEVER, coverage=0.0
    )
    order = sorted(zip(map(curve.score, likelihoods), correct, strict=True), reverse=True)
    threshold, coverage, hits = NEVER, 0.0, 0
    for count, (score, hit) in enumerate(order, 1):
        hits += hit
        following = order[count][0] if count < len(order) else -1.0
        # answers with equal confidence are given together or not at all
        if following < score >= precision and exceeds_precision(hits, count, precision):
            # halfway to the next confidence: equally good on these questions, and more robust on others
            threshold, coverage = max(precision, (score + following) / 2), count / len(order)
    return replace(curve, threshold=threshold, coverage=coverage)


def exceeds_precision(hits: int, count: int, precision: float) -> bool:
    """Return whether the true fraction of correct answers exceeds `precision`, at a confidence level of 90 %.

    This is a one-sided binomial test. The result is True if, with a true fraction equal to `precision`, the probability
    of `hits` or more correct answers would be at most 10 %.

    hits, count  number of correct answers, and of all answers
    """
    if precision >= 1 or not hits:
        return False
    tail = Binomial(count, torch.tensor(precision, dtype=torch.float64), validate_args=False).log_prob(
        torch.arange(hits, count + 1, dtype=torch.float64)
    )
    return float(tail.logsumexp(0).exp()) <= 1 - CONFIDENCE_LEVEL


def _fit_logistic(likelihoods: Sequence[AnswerLikelihood], correct: Sequence[bool]) -> tuple[float, float, float]:
    """Fit a logistic regression. Returns the weights of the log-odds and of the name's log-probability, and the
    intercept.

    Two answers are added to the data, so that a finite solution exists: a wrong answer with the lowest likelihoods, and
    a correct answer with the highest likelihoods. A feature whose weight is not positive is left out, because a
    higher likelihood must not lower the confidence.
    """
    named = [(one.odds, one.name, hit) for one, hit in zip(likelihoods, correct, strict=True) if one.name > -math.inf]
    if not named:
        return 0.0, 0.0, 0.0  # no question has a name, so the confidence is 0 anyway
    x, hits = torch.tensor(named, dtype=torch.float64).split([2, 1], 1)
    x = torch.cat([x, x.amin(0, keepdim=True), x.amax(0, keepdim=True)])
    y = torch.cat([hits[:, 0], torch.tensor([0.0, 1.0], dtype=torch.float64)])
    features = [0, 1]
    while features:
        weights = logistic_regression(x[:, features], y)
        worst = int(weights[:-1].argmin())
        if weights[worst] > 0:
            found = dict(zip(features, weights.tolist(), strict=False))
            return found.get(0, 0.0), found.get(1, 0.0), float(weights[-1])
        features.pop(worst)
    return 0.0, 0.0, float(torch.logit(y.mean()))  # the same confidence for all answers


def logistic_regression(x: Tensor, y: Tensor) -> Tensor:
    """Fit a logistic regression with L2 penalty by Newton's method. Returns the weights, then the intercept.

    The step is halved while it would increase the loss. The intercept is not penalised.
    """
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    penalty = torch.full_like(x[0], PENALTY)
    penalty[-1] = 0.0

    def loss(weights: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(x @ weights, y, reduction="sum") + (penalty * weights**2).sum() / 2

    weights = torch.zeros_like(x[0])
    for _ in range(100):
        p = (x @ weights).sigmoid()
        gradient = x.T @ (p - y) + penalty * weights
        hessian = (x.T * (p * (1 - p))) @ x + penalty.diag() + 1e-12 * torch.eye(len(weights), dtype=x.dtype)
        step = torch.linalg.solve(hessian, gradient)
        while loss(weights - step) > loss(weights) and step.abs().max() > 1e-12:
            step = step / 2
        weights = weights - step
        if step.abs().max() < 1e-10:
            break
    return weights
