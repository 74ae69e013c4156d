"""Which query returns the mean of two values if the keys are orthonormal?

Claim: The query s (k_a + k_b) with a large s. Its score is s on both keys and 0 on the n - 2 others, so each of the two
    has the weight e^s / (2 e^s + n - 2), which is 0.49991 for s = 10 and n = 10. The other keys are orthogonal to the
    query, not opposite to it.
Measures: The weights that `attend` gives to random orthonormal keys, the distance of the output from the mean of the
    two values, and the scores of the other keys, for growing s.
Budget: 1 second
Source: 001 1b
"""

import math
from dataclasses import dataclass

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = r"q = s (k_a + k_b), \quad a_a = a_b = \frac{\exp(s)}{2 \exp(s) + n - 2}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Number and width of the keys, which two to average, and values of s."""

    keys: int = 10
    width: int = 13
    value_width: int = 3
    two: tuple[int, int] = (2, 7)
    sizes: tuple[float, ...] = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    square = torch.randn(setup.width, setup.width, generator=draws, dtype=torch.float64)
    k = torch.linalg.qr(square).Q[: setup.keys]
    v = torch.randn(setup.keys, setup.value_width, generator=draws, dtype=torch.float64)
    a, b = setup.two
    others = [j for j in range(setup.keys) if j not in setup.two]
    queries = torch.tensor(setup.sizes, dtype=torch.float64)[:, None] * (k[a] + k[b])
    one_hot = torch.eye(setup.keys, dtype=torch.float64)
    # twice the query at half the beta gives the same scores, unless beta is used wrongly
    weights = attention(2 * queries[None, None], k[None, None], one_hot[None, None], beta=0.5)[0, 0]
    out = attention(2 * queries[None, None], k[None, None], v[None, None], beta=0.5)[0, 0]
    scores = queries @ k.mT
    return {
        "keys": setup.keys,
        "sizes": list(setup.sizes),
        "weight of a": weights[:, a].tolist(),
        "weight of b": weights[:, b].tolist(),
        "by formula": [math.exp(s) / (2 * math.exp(s) + setup.keys - 2) for s in setup.sizes],
        "off the mean of two": (out - (v[a] + v[b]) / 2).abs().amax(-1).tolist(),
        "scores of the two": scores[:, [a, b]].mean(1).tolist(),
        "lowest score of the others": scores[:, others].amin(1).tolist(),
        # ln(w_a / w_j) is the score of a minus the score of j
        "lead over the others": (weights[:, a, None].log() - weights[:, others].log()).amax(1).tolist(),
    }


def verdict(numbers: Numbers) -> Verdict:
    pairs = [*zip(numbers["weight of a"], numbers["by formula"], strict=True)]
    pairs += zip(numbers["weight of b"], numbers["by formula"], strict=True)
    formula = max(abs(got - want) for got, want in pairs) < 1e-12
    near = numbers["off the mean of two"][-1] < 1e-6
    at = numbers["sizes"].index(10.0) if 10.0 in numbers["sizes"] else -1
    return decide(
        formula and near,
        f"With {numbers['keys']} keys and s={numbers['sizes'][at]:g} the two weights are "
        f"{numbers['weight of a'][at]:.5f} and {numbers['weight of b'][at]:.5f} and the distance of the output from "
        f"the mean is {numbers['off the mean of two'][at]:.0g} (at s={numbers['sizes'][-1]:g} "
        f"{numbers['off the mean of two'][-1]:.0g}). The formula gives {numbers['by formula'][at]:.5f}.",
    )


@wrong_answer(
    "001 1b",
    says="The query and the other keys are opposite.",
    right="They are orthogonal: their score is 0, and their weight is small only because the two scores are s.",
)
def _others_are_opposite(numbers: Numbers) -> Verdict:
    s, lowest, lead = (
        numbers["sizes"][-1],
        numbers["lowest score of the others"][-1],
        numbers["lead over the others"][-1],
    )
    return decide(
        lowest < -0.5 * s and lead > 1.5 * s,
        f"At s={s:g} the lowest score of another key is {abs(lowest):.0g}, and its weight is smaller than that of "
        f"the two by a factor of e^{lead:.1f}, as for a score of 0. Opposite keys would have the score -{s:g} and a "
        f"weight smaller by a factor of e^{2 * s:g}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_lines(axes, numbers["sizes"], {"weight of a": numbers["weight of a"]}, linestyle="none")
    axes.plot(numbers["sizes"], numbers["by formula"], color="#000000", linestyle="--", label="by formula")
    axes.legend(frameon=False)
    axes.set(xlabel="s", ylabel="weight", title=f"Weight of each of the two, from {numbers['keys']} orthonormal keys")
    return figure
