"""Which query returns the mean of two values if the keys are orthonormal?

Claim: The query s (k_a + k_b) with a large s. Its score is s on both keys and 0 on the n - 2 others, so each of the two
    has the weight e^s / (2 e^s + n - 2), which is 0.49991 for s = 10 and n = 10. The other keys are orthogonal to the
    query, not opposite to it.
Measures: The weights that `attend` gives to random orthonormal keys, the distance of the output from the mean of the
    two values, and the scores of the other keys, for growing s.
Finding: With {{ n["keys"] }} keys and s={{ n.sizes[at]|short(3) }} the two weights are {{ n["weight of a"][at]|fixed(5)
    }} and {{ n["weight of b"][at]|fixed(5) }}, and the distance of the output from the mean is {{ n["distance from the
    mean"][at]|short(1) }} (at s={{ n.sizes[-1]|short(3) }} {{ n["distance from the mean"][-1]|short(1) }}). The formula
    gives {{ n["by formula"][at]|fixed(5) }}.
Budget: 1 second
Source: 001 1b
"""

import math
from dataclasses import dataclass

import torch

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, line_figure
from regard.lab.measure import attend_matrices, attention_weights, normal_tensors
from regard.lab.settings import check_at_least, check_indices, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"q = s (k_a + k_b), \quad a_a = a_b = \frac{\exp(s)}{2 \exp(s) + n - 2}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the orthonormal keys, the query and the values.

    keys         number n of keys; at least 3, and at most `width`, because more keys cannot be orthogonal
    width        width of the keys and the query
    value_width  width of the values
    two          indices of the two keys k_a and k_b whose values are averaged
    sizes        factors s of the query s * (k_a + k_b); if the last is below 20, the verdict is unclear, because
                 the claim is about a large s
    """

    keys: int = 10
    width: int = 13
    value_width: int = 3
    two: tuple[int, int] = (2, 7)
    sizes: tuple[float, ...] = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, keys=3)
        check_indices("two", self.two, self.keys, "keys")
        if self.two[0] == self.two[1] or self.keys > self.width:
            text = "two must be different keys, and orthogonal keys need as many channels"
            raise setting_error(self, text, "two", "keys", "width")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    square, v = normal_tensors(draws, (setup.width, setup.width), (setup.keys, setup.value_width))
    k = torch.linalg.qr(square).Q[: setup.keys]
    a, b = setup.two
    others = [j for j in range(setup.keys) if j not in setup.two]
    queries = torch.tensor(setup.sizes, dtype=torch.float64)[:, None] * (k[a] + k[b])
    # twice the query at half the beta gives the same scores, unless beta is used wrongly
    weights = attention_weights(attention, 2 * queries, k, beta=0.5)
    out = attend_matrices(attention, 2 * queries, k, v, beta=0.5)
    scores = queries @ k.mT
    return {
        "keys": setup.keys,
        "sizes": list(setup.sizes),
        "weight of a": weights[:, a].tolist(),
        "weight of b": weights[:, b].tolist(),
        "by formula": [math.exp(s) / (2 * math.exp(s) + setup.keys - 2) for s in setup.sizes],
        "distance from the mean": (out - (v[a] + v[b]) / 2).abs().amax(-1).tolist(),
        "lowest score of the others": scores[:, others].amin(1).tolist(),
        # ln(w_a / w_j) is the score of a minus the score of j
        "score difference to the others": (weights[:, a, None].log() - weights[:, others].log()).amax(1).tolist(),
    }


def verdict(numbers: Numbers) -> Decision:
    pairs = [*zip(numbers["weight of a"] + numbers["weight of b"], 2 * numbers["by formula"], strict=True)]
    formula = max(abs(got - want) for got, want in pairs) < 1e-12
    large = numbers["sizes"][-1] >= 20
    return decide(
        formula and numbers["distance from the mean"][-1] < 1e-6,
        missing="" if large else "the largest s must be at least 20",
        at=numbers["sizes"].index(10.0) if 10.0 in numbers["sizes"] else -1,
    )


def draw(numbers: Numbers) -> Figure:
    return line_figure(
        numbers["sizes"],
        {"weight of a": numbers["weight of a"], "by formula": numbers["by formula"]},
        xlabel="s",
        ylabel="weight",
        title=f"Weight of each of the two, from {numbers['keys']} orthonormal keys",
    )
