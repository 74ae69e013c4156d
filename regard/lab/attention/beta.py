"""What does beta do to the weights?

Claim: A larger beta makes the weights sharper. Near 0 every key has the weight 1/m; for a very large beta the key with
    the largest score has all the weight. d ** -0.5 is a convenient choice, because it keeps the variance of the scores
    at 1 for every width d.
Measures: The weights that `attend` gives to the scores 1, 2, 3, 4 for several betas, against the formula. The variance
    of q . k for random vectors of width d, and of the scores recovered from the weights at the default beta.
Finding: For the scores {{ n.scores|map("short", 3)|join(", ") }} the weights at beta={{ n.betas[0]|short(3) }} are {{
    n.weights[0]|each(3) }}; at beta={{ n.betas[-1]|short(3) }} the largest score has the weight {{
    n.weights[-1]|max|fixed(3) }}. The weights of `attend` and those of the formula differ by at most {{ off|at_most }}.
    The variance of scores at width {{ n.width }} is {{ n.variance|fixed(1) }}, or {{ n["scaled variance"]|fixed(2) }}
    after multiplying by d ** -0.5.
Budget: 5 seconds
Source: 000 1.1b, 002 1.1b
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.drawing import Figure, line_figure
from regard.lab.measure import attention_weights
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"a_j = \frac{\exp(\beta s_j)}{\sum_l \exp(\beta s_l)}"

MOST_PAIRS = 100_000  # pairs whose scores are recovered from weights


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: scores and betas that show the sharpness, and random vectors that show the variance.

    scores  scores of one query, at least two different ones
    betas   inverse temperatures that are applied to these scores
    width   width d of the random queries and keys
    pairs   number of random pairs of a query and a key; at least 10,000, so that the variances are known within 5 %
    """

    scores: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    betas: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    width: int = 64
    pairs: int = 400_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, pairs=10_000)  # for variances up to 5 %
        if len(set(self.scores)) < 2 or not all(map(math.isfinite, self.scores)):
            raise setting_error(self, "scores must be finite, at least two different ones", "scores")
        if len(self.betas) < 2 or not all(0 < beta < math.inf for beta in self.betas):
            raise setting_error(self, "betas must be finite and above 0, at least two", "betas")


SMOKE = Setup(pairs=20_000)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    # one number wide, so that q = 1 has the scores k
    q, k = torch.ones(1, 1, dtype=torch.float64), torch.tensor(setup.scores, dtype=torch.float64)[:, None]
    betas = sorted(setup.betas)
    weights = [attention_weights(attention, q, k, beta=beta)[0].tolist() for beta in betas]
    formula = [(beta * k[:, 0]).softmax(0).tolist() for beta in betas]
    draws = torch.Generator().manual_seed(setup.seed)
    a, b = torch.randn(2, setup.pairs, setup.width, generator=draws, dtype=torch.float64)
    products = (a * b).sum(-1)
    # enough pairs for two digits, in parts that need little memory
    parts = zip(a[:MOST_PAIRS].split(20_000), b[:MOST_PAIRS].split(20_000), strict=True)
    return {
        "scores": list(setup.scores),
        "betas": betas,
        "weights": weights,
        "by formula": formula,
        "variance": products.var().item(),
        "scaled variance": torch.cat([_scores(attention, *part) for part in parts]).var().item(),
        "width": setup.width,
    }


def _scores(attention: Attention, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the score of each query and its key at the default beta, recovered from the attention weights.

    Each query attends to its own key and to a zero key, whose score is 0. With the weights w and w0 of the two
    keys, the score times beta is ln(w / w0).
    """
    k = torch.stack([keys, torch.zeros_like(keys)], 1)[:, None]
    weights = attention_weights(attention, queries[:, None, None], k)[:, 0, 0]
    recovered: Tensor = (weights[:, 0] / weights[:, 1]).log()
    return recovered


def verdict(numbers: Numbers) -> Decision:
    pairs = zip(numbers["weights"], numbers["by formula"], strict=True)
    off = max(abs(w - want) for row, wanted in pairs for w, want in zip(row, wanted, strict=True))
    largest = [max(row) for row in numbers["weights"]]
    sharper = all(later > earlier or later > 1 - 1e-12 for earlier, later in pairwise(largest))
    variances = abs(numbers["variance"] / numbers["width"] - 1) < 0.05 and abs(numbers["scaled variance"] - 1) < 0.05
    betas, (*_, second, most) = numbers["betas"], [-math.inf, *sorted(numbers["scores"])]
    flat, sharp = numbers["weights"][0], numbers["weights"][-1]
    # betas that reach both limits for these scores
    reached = betas[0] * (most - min(numbers["scores"])) < 0.04 and betas[-1] * (most - second) > 8
    limits = max(abs(w - 1 / len(flat)) for w in flat) < 0.01 and sharp[numbers["scores"].index(most)] > 0.999
    return decide(
        off < 1e-12 and variances and limits and sharper,
        missing="" if reached else "it needs smaller and larger betas, and one largest score",
        off=off,
    )


def draw(numbers: Numbers) -> Figure:
    columns = zip(numbers["scores"], zip(*numbers["weights"], strict=True), strict=True)
    curves = {f"score {score:g}": weights for score, weights in columns}
    labels = {"xlabel": "beta", "ylabel": "weight", "title": "Larger beta, sharper weights"}
    return line_figure(numbers["betas"], curves, xscale="log", **labels)
