"""Which query gets the mean of two values from orthonormal keys?

Claim: s (k_a + k_b) with a large s: it scores s on both and 0 on the n - 2 others, so that each of the two weighs
    e^s / (2 e^s + n - 2), which is 0.49991 at s = 10 with n = 10 keys. The other keys stand at right angles to the
    query; they do not oppose it.
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
    """How many keys, how wide, which two, and how large s."""

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
    # twice the query at half the beta: the same scores, unless beta is taken otherwise than it should be
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
        # a weight tells its score: ln(w_j / w_a) is the score of j less that of a
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
        f"With {numbers['keys']} keys and s={numbers['sizes'][at]:g} the two weigh {numbers['weight of a'][at]:.5f} "
        f"and {numbers['weight of b'][at]:.5f}, and the output is {numbers['off the mean of two'][at]:.0g} from their "
        f"mean; at s={numbers['sizes'][-1]:g} {numbers['off the mean of two'][-1]:.0g}. The formula says "
        f"{numbers['by formula'][at]:.5f}.",
    )


@wrong_answer(
    "001 1b",
    says="The query and the other keys are opposite.",
    right="They are orthogonal: the others score 0, and lose only because the two score s.",
)
def _others_are_opposite(numbers: Numbers) -> Verdict:
    s, lowest, lead = (
        numbers["sizes"][-1],
        numbers["lowest score of the others"][-1],
        numbers["lead over the others"][-1],
    )
    return decide(
        lowest < -0.5 * s and lead > 1.5 * s,
        f"At s={s:g} the lowest score of another key is {abs(lowest):.0g}, and its weight is e^{lead:.1f} times "
        f"smaller than that of the two: e^s times, as for a score of 0. Opposite keys would score -{s:g} and weigh "
        f"e^{2 * s:g} times less.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_lines(axes, numbers["sizes"], {"weight of a": numbers["weight of a"]}, linestyle="none")
    axes.plot(numbers["sizes"], numbers["by formula"], color="#000000", linestyle="--", label="by formula")
    axes.legend(frameon=False)
    axes.set(xlabel="s", ylabel="weight", title=f"Half and half, from {numbers['keys']} orthonormal keys")
    return figure
