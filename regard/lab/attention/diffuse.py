"""When does attention spread evenly over all values?

Claim: As beta goes to 0, every weight goes to 1/m and the output to the mean of the m values, for any queries and keys.
    With a mask it is the mean of the visible values.
Measures: How far the weights of random queries are from 1/m, from beta = 1000 down to 0. The output at 0 against the
    mean of the values, with and without a causal mask.
Budget: 2 seconds
Source: 000 1.1d
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import causal
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = r"\beta \to 0: a_j \to \frac{1}{m}, \quad h \to \frac{1}{m} \sum_j v_j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes, and betas besides 0."""

    betas: tuple[float, ...] = (1000.0, 10.0, 1.0, 1e-1, 1e-2, 1e-4)
    tokens: int = 7
    width: int = 11
    value_width: int = 3
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    q, k = torch.randn(2, 1, 1, setup.tokens, setup.width, generator=draws, dtype=torch.float64)
    v = torch.randn(1, 1, setup.tokens, setup.value_width, generator=draws, dtype=torch.float64)
    one_hot = torch.eye(setup.tokens, dtype=torch.float64)[None, None]
    betas = [*sorted(setup.betas, reverse=True), 0.0]
    weights = [attention(q, k, one_hot, beta=beta)[0, 0] for beta in betas]
    entropy = [torch.special.entr(rows).sum(-1).mean().item() for rows in weights]
    so_far = v.cumsum(2) / torch.arange(1, setup.tokens + 1, dtype=torch.float64)[:, None]
    return {
        "keys": setup.tokens,
        "betas": betas,
        "off uniform": [(rows - 1 / setup.tokens).abs().max().item() for rows in weights],
        "largest weight": [rows.amax(-1).mean().item() for rows in weights],
        "entropy": entropy,
        "off the mean": (attention(q, k, v, beta=0.0) - v.mean(2, keepdim=True)).abs().max().item(),
        "off the mean so far": (attention(q, k, v, beta=0.0, mask=causal()) - so_far).abs().max().item(),
    }


def verdict(numbers: Numbers) -> Verdict:
    *_, small, _ = numbers["betas"]
    *_, nearly, at_zero = off = numbers["off uniform"]
    falls = all(more >= less for more, less in pairwise(off)) and off[0] > 0.1
    exact = at_zero < 1e-15 and numbers["off the mean"] < 1e-14 and numbers["off the mean so far"] < 1e-14
    return decide(
        falls and exact and nearly < 1e-2,
        f"With {numbers['keys']} keys every weight differs from 1/{numbers['keys']} by at most {nearly:.0g} at "
        f"beta={small:g} and {at_zero:.0g} at beta=0. At 0 the output is the mean of the values up to "
        f"{numbers['off the mean']:.0g}, and with a causal mask the mean of the values so far up to "
        f"{numbers['off the mean so far']:.0g}.",
    )


@wrong_answer(
    "000 1.1d",
    says="Attention spreads when beta is very large.",
    right="It spreads when beta is small; a very large beta puts all weight on one key.",
)
def _large_beta_spreads(numbers: Numbers) -> Verdict:
    beta, off, largest = numbers["betas"][0], numbers["off uniform"][0], numbers["largest weight"][0]
    return decide(
        off < 0.01,
        f"At beta={beta:g} the largest weight of a query is {largest:.3f} on average, not 1/{numbers['keys']}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_lines(axes, numbers["betas"][:-1], {"entropy of the weights": numbers["entropy"][:-1]})  # a log axis has no 0
    axes.axhline(math.log(numbers["keys"]), color="#000000", linestyle="--", label=f"ln {numbers['keys']}: uniform")
    axes.legend(frameon=False)
    axes.set(xscale="log", xlabel="beta", ylabel="entropy (nats)", title="Smaller beta, larger entropy")
    return figure
