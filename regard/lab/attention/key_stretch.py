"""What happens if one key is multiplied by a large factor?

Claim: The weight of this key goes to 1 for queries with k . q > 0, to 0 for queries with k . q < 0, and does not change
    if k . q = 0. If k . q > 0, the output becomes the value of the key; if k . q < 0, the output no longer depends on
    the key.
Measures: The weight of a key times alpha, for queries with each sign of k . q and for random queries. The distance of
    the outputs from the value of that key, and from attention without that key.
Finding: At alpha={{ n.alphas[-1]|short(4) }} the weight goes from {{ n["weight, positive score"][0]|fixed(3) }} to {{
    n["weight, positive score"][-1]|fixed(3) }} where k . q > 0, from {{ n["weight, negative score"][0]|fixed(3) }} to
    {{ n["weight, negative score"][-1]|fixed(3) }} where k . q < 0, and stays {{ n["weight, zero score"][-1]|fixed(3) }}
    where k . q = 0. Of {{ n["random queries"] }} random queries at alpha={{ n.alphas[-1]|short(4) }}, {{ n["share at
    the limit"]|percent(1) }} have a weight within 0.01 of the limit for their sign.
Budget: 1 second
Source: 000 1.1f, 002 1.1g
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, line_figure
from regard.lab.measure import attend_matrices, attention_weights, largest_difference, normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"a_1 = \frac{\exp(\alpha \beta s_1)}{\exp(\alpha \beta s_1) + \sum_{j \ge 2} \exp(\beta s_j)}, \quad "
    r"s_j = k_j \cdot q"
)
SIDES = (1.0, 0.0, -1.0)  # k . q for the three queries


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the factors of the key, and sizes of the random inputs.

    alphas       factors alpha of the first key, growing from at least 1; the last must be at least 1000 for a
                 decision, because the claim is about a large factor
    keys         number of keys
    width        width of queries and keys
    value_width  width of values
    queries      number of random queries, for the fraction of weights that are at their limit
    """

    alphas: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 100.0, 1000.0)
    keys: int = 7
    width: int = 9
    value_width: int = 3
    queries: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, keys=2)
        if self.alphas[0] < 1 or list(self.alphas) != sorted(self.alphas):
            raise setting_error(self, "alphas must grow from at least 1", "alphas")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    m, c = setup.keys, setup.width
    k, v, q, many = normal_tensors(draws, (m, c), (m, setup.value_width), (len(SIDES), c), (setup.queries, c))
    k[0] = torch.eye(c, dtype=torch.float64)[0]  # parallel to an axis, so that k . q = 0 is exact
    q[:, 0] = torch.tensor(SIDES, dtype=torch.float64)

    def stretched(alpha: float) -> Tensor:
        return torch.cat([alpha * k[:1], k[1:]])

    weights = torch.stack([attention_weights(attention, q, stretched(alpha))[:, 0] for alpha in setup.alphas])
    longest = stretched(setup.alphas[-1])
    out = attend_matrices(attention, q, longest, v)
    without = attend_matrices(attention, q, k[1:], v[1:])
    by_sign = attention_weights(attention, many, longest)[:, 0] - (many[:, 0] > 0).double()
    # the scores 1, 1/2 and 0, and the same with the first key twice as long
    example = [
        attention_weights(attention, torch.ones(1, 1, dtype=torch.float64), scores[:, None], beta=1.0)[0].tolist()
        for scores in torch.tensor([[1.0, 0.5, 0.0], [2.0, 0.5, 0.0]], dtype=torch.float64)
    ]
    return {
        "alphas": list(setup.alphas),
        "weight, positive score": weights[:, 0].tolist(),
        "weight, zero score": weights[:, 1].tolist(),
        "weight, negative score": weights[:, 2].tolist(),
        "distance from its value, positive score": largest_difference(out[0], v[0]),
        "distance from attention without it, negative score": largest_difference(out[2], without[2]),
        "random queries": setup.queries,
        "share at the limit": (by_sign.abs() < 0.01).double().mean().item(),
        "weights for scores 1, 1/2, 0": example[0],
        "weights with the first key doubled": example[1],
    }


def verdict(numbers: Numbers) -> Decision:
    towards, across, against = (numbers[f"weight, {sign} score"] for sign in ("positive", "zero", "negative"))
    outputs = ("distance from its value, positive score", "distance from attention without it, negative score")
    ends = towards[-1] > 1 - 1e-9 and against[-1] < 1e-9 and all(numbers[name] < 1e-9 for name in outputs)
    moves = towards == sorted(towards) and against == sorted(against, reverse=True)
    large = numbers["alphas"][-1] >= 1000
    return decide(
        moves and max(across) - min(across) < 1e-12 and ends and numbers["share at the limit"] > 0.97,
        missing="" if large else "the largest alpha must be at least 1000",
    )


def draw(numbers: Numbers) -> Figure:
    signs = {"k . q > 0": "positive", "k . q = 0": "zero", "k . q < 0": "negative"}
    return line_figure(
        numbers["alphas"],
        {shown: numbers[f"weight, {sign} score"] for shown, sign in signs.items()},
        xscale="log",
        xlabel="alpha",
        ylabel="weight of the stretched key",
        title="Weight of a longer key, by sign of k . q",
    )
