"""What happens if one key is multiplied by a large factor?

Claim: Its weight goes to 1 for queries with k . q > 0, to 0 for queries with k . q < 0, and does not change if k . q =
    0. Outputs of the first kind become the value of that key; outputs of the second kind no longer depend on it.
Measures: The weight of a key times alpha, for queries with each sign of k . q and for random queries. The distance of
    the outputs from the value of that key, and from attention without that key.
Budget: 1 second
Source: 000 1.1f, 002 1.1g
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = (
    r"a_1 = \frac{\exp(\alpha \beta s_1)}{\exp(\alpha \beta s_1) + \sum_{j \ge 2} \exp(\beta s_j)}, \quad "
    r"s_j = k_j \cdot q"
)
SIDES = (1.0, 0.0, -1.0)  # k . q for the three queries


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes, factors alpha, and the number of random queries."""

    alphas: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 100.0, 1000.0)
    keys: int = 7
    width: int = 9
    value_width: int = 3
    queries: int = 2000
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, 1, *sizes, generator=draws, dtype=torch.float64)

    k, v = normal(setup.keys, setup.width), normal(setup.keys, setup.value_width)
    k[:, :, 0] = torch.eye(setup.width, dtype=torch.float64)[0]  # parallel to an axis, so that k . q = 0 is exact
    q = normal(len(SIDES), setup.width)
    q[..., 0] = torch.tensor(SIDES, dtype=torch.float64)
    many = normal(setup.queries, setup.width)
    one_hot = torch.eye(setup.keys, dtype=torch.float64)[None, None]

    def stretched(alpha: float) -> Tensor:
        return torch.cat([alpha * k[:, :, :1], k[:, :, 1:]], 2)

    weights = torch.stack([attention(q, stretched(alpha), one_hot)[0, 0, :, 0] for alpha in setup.alphas])
    longest = stretched(setup.alphas[-1])
    out = attention(q, longest, v)[0, 0]
    without = attention(q, k[:, :, 1:], v[:, :, 1:])[0, 0]
    by_sign = attention(many, longest, one_hot)[0, 0, :, 0] - (many[0, 0, :, 0] > 0).double()
    return {
        "alphas": list(setup.alphas),
        "towards": weights[:, 0].tolist(),
        "at a right angle": weights[:, 1].tolist(),
        "against": weights[:, 2].tolist(),
        "towards: off its value": (out[0] - v[0, 0, 0]).abs().max().item(),
        "against: off the others": (out[2] - without[2]).abs().max().item(),
        "random queries": setup.queries,
        "share by sign": (by_sign.abs() < 0.01).double().mean().item(),
    }


def verdict(numbers: Numbers) -> Verdict:
    towards, against, across = numbers["towards"], numbers["against"], numbers["at a right angle"]
    ends = towards[-1] > 1 - 1e-9 and against[-1] < 1e-9 and max(across) - min(across) < 1e-12
    outputs = numbers["towards: off its value"] < 1e-9 and numbers["against: off the others"] < 1e-9
    return decide(
        ends and outputs and numbers["share by sign"] > 0.97,
        f"At alpha={numbers['alphas'][-1]:g} the weight goes from {towards[0]:.3f} to {towards[-1]:.3f} where k . q "
        f"> 0, from {against[0]:.3f} to {against[-1]:.3f} where k . q < 0, and stays {across[-1]:.3f} where k . q = "
        f"0. Of {numbers['random queries']} random queries, {numbers['share by sign']:.1%} have a weight within 0.01 "
        "of the limit for their sign.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    curves = {
        "k . q > 0": numbers["towards"],
        "k . q = 0": numbers["at a right angle"],
        "k . q < 0": numbers["against"],
    }
    plot_lines(axes, numbers["alphas"], curves)
    axes.set(
        xscale="log",
        xlabel="alpha",
        ylabel="weight of the stretched key",
        title="Weight of a longer key, by sign of k . q",
    )
    return figure
