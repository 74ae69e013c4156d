"""When is self-attention the identity or a permutation?

Claim: When the score of one key is far above all others for every query, and no two queries select the same key. With
    one-hot positions as queries and keys and beta to infinity the weights are the identity; with the positions of the
    keys permuted they are a permutation. For orthonormal tokens the weights are far from the identity at the default
    beta; at an infinite beta the tokens are returned unchanged. Equal scores give the mean.
Measures: Weights and outputs of attention in float64 with positions as keys, for growing beta. The weight that each of
    several orthonormal tokens gives to itself at beta = d ** -0.5, and their outputs at an infinite beta. The outputs
    if all scores are zero.
Finding: With one-hot positions as queries and keys the output differs from the input by {{ n.errors[0]|fixed }} at
    beta={{ n.betas[0] }} and by {{ n.errors[-1]|short }} at beta={{ n.betas[-1] }}; with permuted keys it differs from
    the permuted input by {{ n["error of permutation"]|short }}, and by {{ n["difference if two share a key"]|fixed }}
    if two queries select the same key. Each of {{ n.length }} orthonormal tokens gives itself the weight {{ n["own
    weight of orthonormal tokens"]|fixed(3) }} at beta = d ** -0.5 and {{ n["own weight of orthonormal tokens, beta =
    1"]|fixed(3) }} at beta = 1. At an infinite beta their outputs differ from the tokens by {{ n["error of orthonormal
    tokens, beta = inf"]|short }}. Zero scores give the mean of the tokens, up to {{ n["distance to the mean at zero
    scores"]|at_most }}.
Budget: 1 second
Source: 000 1.3c, 002 1.3c
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
from regard.lab.drawing import Figure, make_figure, plot_bars, plot_lines
from regard.lab.measure import attend_matrices, largest_difference, random_permutation
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"a_{ij} = \frac{\exp(\beta p_i \cdot p_j)}{\sum_l \exp(\beta p_i \cdot p_l)} "
    r"\to \delta_{ij} \mathrm{for large} \beta"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the inputs, and the inverse temperatures.

    length  number of tokens; at least 3, because in one measurement two queries select the same key and the others
            do not
    width   width of the random values
    betas   growing inverse temperatures that end with inf
    """

    length: int = 4
    width: int = 4
    betas: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, math.inf)
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 3, "tokens: two share a key and one does not")
        check_at_least(self, betas=2)
        if self.betas[-1] != math.inf:
            raise ConfigError(f"betas must grow and end with inf: betas={self.betas}")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    n = setup.length
    values = torch.randn(1, 1, n, setup.width, generator=draws, dtype=torch.float64)
    places = torch.eye(n, dtype=torch.float64)[None, None]
    order = random_permutation(n, draws)
    # orthonormal tokens, as many as their width
    tokens = torch.linalg.qr(torch.randn(n, n, generator=draws, dtype=torch.float64))[0][None, None]
    own, plain = (attention(tokens, tokens, places, beta=beta)[0, 0] for beta in (None, 1.0))
    hard = attention(places, places, places, beta=math.inf)[0, 0]
    zero = attention(torch.zeros_like(places), places, values)
    sharing = [0, 0, *range(2, n)]
    shared = attention(places[:, :, sharing], places, values, beta=math.inf)
    return {
        "length": n,
        "betas": [beta if beta < math.inf else "infinite" for beta in setup.betas],
        "errors": [largest_difference(attention(places, places, values, beta=beta), values) for beta in setup.betas],
        "error of permutation": largest_difference(
            attention(places[:, :, order], places, values, beta=math.inf), values[:, :, order]
        ),
        "difference if two share a key": largest_difference(shared, values),
        "error if two share a key": largest_difference(shared, values[:, :, sharing]),
        "own weight of orthonormal tokens": own.diagonal().mean().item(),
        "own weight by formula": 1 / (1 + (n - 1) * math.exp(-(n**-0.5))),
        "own weight of orthonormal tokens, beta = 1": plain.diagonal().mean().item(),
        "error of orthonormal tokens, beta = inf": largest_difference(
            attention(tokens, tokens, tokens, beta=math.inf), tokens
        ),
        "tokens 1, 2, 3, ... at zero scores": _zero_score_mean(attention, n),
        "own weight with positions": hard.diagonal().mean().item(),
        "distinct outputs at zero scores": _count_different_rows(zero[0, 0]),
        "distance to the mean at zero scores": largest_difference(zero, values.mean(2, keepdim=True)),
    }


def _zero_score_mean(attention: Attention, n: int) -> float:
    """Return the output of attention for the values 1, 2, ..., n if all scores are zero."""
    tokens = torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]
    return float(attend_matrices(attention, torch.zeros_like(tokens), tokens, tokens)[0, 0])


def _count_different_rows(rows: Tensor) -> int:
    """Count the different rows of a matrix: the rows that are not equal to a row above them."""
    return sum(all((row - other).abs().max() > 1e-9 for other in rows[:at]) for at, row in enumerate(rows))


def verdict(numbers: Numbers) -> Decision:
    errors = numbers["errors"]
    falling = all(later < earlier for earlier, later in pairwise(errors) if earlier > 1e-15)
    shared = numbers["difference if two share a key"] > 1e-3 and numbers["error if two share a key"] == 0
    own = numbers["own weight of orthonormal tokens"]
    others = shared and own < 0.99 and abs(own - numbers["own weight by formula"]) < 1e-12
    exact = errors[-1] == numbers["error of permutation"] == numbers["error of orthonormal tokens, beta = inf"] == 0
    return decide(falling and exact and others and numbers["distance to the mean at zero scores"] < 1e-12)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    finite = [beta for beta in numbers["betas"] if not isinstance(beta, str)]
    # a log axis has no zero
    plot_lines(left, finite, {"error": [max(error, 1e-17) for error in numbers["errors"][: len(finite)]]})
    left.set(xscale="log", yscale="log", xlabel="beta", ylabel="distance to the identity", title="Positions as keys")
    own = {"orthonormal\ntokens": "own weight of orthonormal tokens", "positions,\nhard": "own weight with positions"}
    plot_bars(right, {shown: numbers[name] for shown, name in own.items()})
    right.set(ylabel="weight on itself", title="beta = d ** -0.5, and hard")
    return figure
