"""When does attention spread evenly over all values?

Claim: As beta goes to 0, every weight goes to 1/m and the output to the mean of the m values, for any queries and keys:
    soft attention. With a mask it is the mean of the visible values.
Measures: How far the weights of random queries are from 1/m, from beta = 1000 down to 0. The output at 0 against the
    mean of the values, with and without a causal mask.
Finding: With {{ n["keys"] }} keys every weight differs from 1/{{ n["keys"] }} by at most {{ n["distance from
    1/m"][-2]|at_most }} at beta={{ n.betas[-2]|short }} and {{ n["distance from 1/m"][-1]|at_most }} at beta=0. At 0
    the output is the mean of the values up to {{ n["error of the mean"]|at_most }}, and with a causal mask the mean of
    the values so far up to {{ n["error of the running mean"]|at_most }}. At beta={{ n.betas[0]|short }} the entropy of
    the weights is {{ n.entropy[0]|fixed(3) }}, at 0 it is {{ n.entropy[-1]|fixed(3) }}, the logarithm of {{ n["keys"]
    }}.
Budget: 2 seconds
Source: 000 1.1d, 002 1.1d
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import causal
from regard.lab.drawing import Figure, line_figure, mark_level
from regard.lab.measure import attention_weights, largest_difference, normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"\beta \to 0: a_j \to \frac{1}{m}, \quad h \to \frac{1}{m} \sum_j v_j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the betas, and sizes of the random inputs.

    betas        inverse temperatures above 0; 0 is added. Unless they reach from 10 to 0.001, the verdict is unclear
    tokens       number of queries, and of keys
    width        width of queries and keys
    value_width  width of values
    """

    betas: tuple[float, ...] = (1000.0, 10.0, 1.0, 1e-1, 1e-2, 1e-4)
    tokens: int = 7
    width: int = 11
    value_width: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, tokens=2)
        if min(self.betas) <= 0:
            raise setting_error(self, "betas must be above 0, since 0 is added at the end", "betas")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n, c = setup.tokens, setup.width
    q, k, v = normal_tensors(draws, (1, 1, n, c), (1, 1, n, c), (1, 1, n, setup.value_width))
    betas = [*sorted(setup.betas, reverse=True), 0.0]
    weights = [attention_weights(attention, q, k, beta=beta)[0, 0] for beta in betas]
    peaked = torch.tensor([0.97, *[0.03 / (n - 1)] * (n - 1)], dtype=torch.float64)
    entropy = [torch.special.entr(rows).sum(-1).mean().item() for rows in weights]
    so_far = v.cumsum(2) / torch.arange(1, setup.tokens + 1, dtype=torch.float64)[:, None]
    return {
        "keys": setup.tokens,
        "betas": betas,
        "distance from 1/m": [(rows - 1 / setup.tokens).abs().max().item() for rows in weights],
        "largest weight": [rows.amax(-1).mean().item() for rows in weights],
        "entropy": entropy,
        "error of the mean": largest_difference(attention(q, k, v, beta=0.0), v.mean(2, keepdim=True)),
        "error of the running mean": largest_difference(attention(q, k, v, beta=0.0, mask=causal()), so_far),
        "peaked weights": peaked.tolist(),
        "entropy of the peaked weights": torch.special.entr(peaked).sum().item(),
    }


def verdict(numbers: Numbers) -> Decision:
    *_, nearly, at_zero = off = numbers["distance from 1/m"]
    falls = all(more >= less for more, less in pairwise(off))
    exact = at_zero < 1e-15 and max(numbers["error of the mean"], numbers["error of the running mean"]) < 1e-14
    reached = numbers["betas"][0] >= 10 and numbers["betas"][-2] <= 1e-3
    return decide(
        falls and exact and nearly < 1e-2 and off[0] > 0.1,
        missing="" if reached else "betas must reach from 10 to 0.001",
    )


def draw(numbers: Numbers) -> Figure:
    figure = line_figure(
        numbers["betas"][:-1],  # a log axis has no 0
        {"entropy of the weights": numbers["entropy"][:-1]},
        xscale="log",
        xlabel="beta",
        ylabel="entropy (nats)",
        title="Smaller beta, larger entropy",
    )
    mark_level(figure.axes[0], math.log(numbers["keys"]), f"ln {numbers['keys']}: uniform")
    return figure
