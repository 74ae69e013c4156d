"""When is self-attention the identity or a permutation?

Claim: When the score of one key is far above all others for every query, and no two queries select the same key. With
    one-hot positions as queries and keys and beta to infinity the weights are the identity; with the positions of the
    keys permuted they are a permutation. Orthonormal tokens at the default beta are far from it, and equal scores give
    the mean.
Measures: Weights and outputs of attention in float64 with positions as keys, for growing beta. The weight that each of
    four orthonormal tokens gives to itself at beta = d ** -0.5. The outputs if all scores are zero.
Budget: 1 second
Source: 000 1.3c
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_bars, plot_lines

MATHS = (
    r"a_{ij} = \frac{\exp(\beta p_i \cdot p_j)}{\sum_l \exp(\beta p_i \cdot p_l)} "
    r"\to \delta_{ij} \mathrm{for large} \beta"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of tokens, and growing betas that end with inf."""

    length: int = 4
    width: int = 4
    betas: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, math.inf)
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 3, "tokens: two share a key and one does not")
        if not self.betas or self.betas[-1] != math.inf:
            raise ConfigError(f"betas must grow and end with inf: betas={self.betas}")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n = setup.length
    values = torch.randn(1, 1, n, setup.width, generator=draws, dtype=torch.float64)
    places = torch.eye(n, dtype=torch.float64)[None, None]
    order = torch.randperm(n, generator=draws)
    while torch.equal(order, torch.arange(n)):
        order = torch.randperm(n, generator=draws)
    # orthonormal tokens, as many as their width
    tokens = torch.linalg.qr(torch.randn(n, n, generator=draws, dtype=torch.float64))[0][None, None]
    own = attention(tokens, tokens, places)[0, 0]
    hard = attention(places, places, places, beta=math.inf)[0, 0]
    zero = attention(torch.zeros_like(places), places, values)
    sharing = [0, 0, *range(2, n)]
    shared = attention(places[:, :, sharing], places, values, beta=math.inf)
    return {
        "length": n,
        "betas": [beta if beta < math.inf else "infinite" for beta in setup.betas],
        "errors": [_off(attention(places, places, values, beta=beta), values) for beta in setup.betas],
        "error of permutation": _off(
            attention(places[:, :, order], places, values, beta=math.inf), values[:, :, order]
        ),
        "difference if two share a key": _off(shared, values),
        "error if two share a key": _off(shared, values[:, :, sharing]),
        "own weight of orthonormal tokens": own.diagonal().mean().item(),
        "own weight by formula": 1 / (1 + (n - 1) * math.exp(-(n**-0.5))),
        "own weight with positions": hard.diagonal().mean().item(),
        "different rows at zero scores": _count_different_rows(zero[0, 0]),
        "distance to the mean at zero scores": _off(zero, values.mean(2, keepdim=True)),
    }


def _off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _count_different_rows(rows: Tensor) -> int:
    """Count the different rows."""
    return sum(all((row - other).abs().max() > 1e-9 for other in rows[:at]) for at, row in enumerate(rows))


def verdict(numbers: Numbers) -> Verdict:
    errors = numbers["errors"]
    falling = all(later < earlier for earlier, later in pairwise(errors) if earlier > 1e-15)
    holds = falling and errors[-1] == 0 and numbers["error of permutation"] == 0
    shared = numbers["difference if two share a key"] > 1e-3 and numbers["error if two share a key"] == 0
    own = numbers["own weight of orthonormal tokens"]
    others = shared and own < 0.99 and abs(own - numbers["own weight by formula"]) < 1e-12
    return decide(
        holds and others and numbers["distance to the mean at zero scores"] < 1e-12,
        f"With positions as keys the error is {errors[0]:.2f} at beta={numbers['betas'][0]} and {errors[-1]:g} at "
        f"beta={numbers['betas'][-1]}, {numbers['error of permutation']:g} for a permutation, and "
        f"{numbers['difference if two share a key']:.2f} if two queries share a key. Orthonormal tokens give "
        f"themselves the weight {own:.3f}; zero scores give the mean, up to "
        f"{numbers['distance to the mean at zero scores']:.0g}.",
    )


@wrong_answer(
    "000 1.3c",
    says="With orthonormal X and Q = K = V = X the weights are the identity.",
    right="The scores are the identity, and the weights are its softmax; only a large beta makes them one-hot.",
)
def _orthonormal(numbers: Numbers) -> Verdict:
    own = numbers["own weight of orthonormal tokens"]
    return decide(
        own > 0.99, f"Each of {numbers['length']} orthonormal tokens gives itself the weight {own:.3f}, not 1."
    )


@wrong_answer(
    "000 1.3c",
    says="Scores that are all zero permute the tokens.",
    right="They give all tokens the same weight: every output is the mean of the values.",
)
def _zero_permutes(numbers: Numbers) -> Verdict:
    rows, n = numbers["different rows at zero scores"], numbers["length"]
    return decide(rows == n, f"At zero scores {n} outputs have {rows} different value; a permutation has {n}.")


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    finite = [beta for beta in numbers["betas"] if not isinstance(beta, str)]
    # a log axis has no zero
    plot_lines(left, finite, {"error": [max(error, 1e-17) for error in numbers["errors"][: len(finite)]]})
    left.set(xscale="log", yscale="log", xlabel="beta", ylabel="distance to the identity", title="Positions as keys")
    plot_bars(
        right,
        {
            "orthonormal\ntokens": numbers["own weight of orthonormal tokens"],
            "positions,\nbeta infinite": numbers["own weight with positions"],
        },
    )
    right.set(ylabel="weight on itself", title="beta = d ** -0.5, and hard")
    return figure
