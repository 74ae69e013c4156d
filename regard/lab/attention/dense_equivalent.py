"""Can a fully connected layer copy or average values like attention?

Claim: Yes, for one input. A layer over positions with identity weights copies every value, one with weights 1/m
    averages them, and one with the weights of attention returns the output of attention. But its weights do not change
    with the input, and their number depends on the length. The weights of attention depend on the input, and any length
    works.
Measures: Linear layers over positions against `attend`: hard attention on orthogonal keys, beta = 0, and the general
    case. The same layer and `attend` after keys and values have moved to other positions. The number of parameters of
    the layer.
Finding: A linear layer over the positions with identity weights copies the values up to {{ n["error of
    copying"]|at_most }}, one with weights 1/{{ n.tokens }} averages them up to {{ n["error of averaging"]|at_most }}.
    If keys and values are reordered, attention returns the same output (up to {{ n["change of attention after the
    move"]|at_most }}); the linear layer with the weights of attention does not (its output changes by {{ n["change of
    the dense layer after the move"]|fixed }}). The layer has {{ n["dense parameters"] }} parameters and accepts {{
    n["dense inputs"] }} tokens only; attention also accepts {{ n["longer length"] }}.
Budget: 1 second
Source: 000 1.1c-d, 002 1.1c-d
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, bar_figure
from regard.lab.measure import attention_weights, largest_difference, normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"H = V W, \quad W = I \to h_i = v_i; \quad "
    r"W_{ji} = \frac{1}{m} \to h_i = \frac{1}{m} \sum_j v_j; \quad A = A(Q, K)"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the inputs of attention and of the dense layer.

    tokens       number of queries, and of keys; at least 3, because the keys are moved by two positions
    longer       number of keys of another input, which attention accepts and the dense layer does not
    width        width of queries and keys
    value_width  width of values
    """

    tokens: int = 7
    longer: int = 11
    width: int = 9
    value_width: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, tokens=3)
        if self.longer == self.tokens:
            raise setting_error(self, "longer must differ from tokens", "longer")


SMOKE = Setup()


def dense(weights: Tensor) -> nn.Linear:
    """Return a linear layer over positions, without bias: output i is the sum over j of weights[i, j] * input j."""
    layer = nn.Linear(weights.shape[1], weights.shape[0], bias=False, dtype=weights.dtype)
    layer.weight = nn.Parameter(weights)
    return layer.requires_grad_(False)


def over_positions(layer: nn.Linear, v: Tensor) -> Tensor:
    """Apply a linear layer along the positions of values (j, e), instead of along the channels."""
    out: Tensor = layer(v.mT).mT
    return out


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    n, c, e = setup.tokens, setup.width, setup.value_width
    q, k, v = normal_tensors(draws, (1, 1, n, c), (1, 1, n, c), (1, 1, n, e))
    one_hot = torch.eye(n, dtype=torch.float64)
    axes = one_hot[None, None]  # orthogonal keys, each selected by its own query
    layer = dense(attention_weights(attention, q, k)[0, 0])
    out = attention(q, k, v)
    # the same tokens at other positions: the correct output is the same
    order = torch.arange(n).roll(2)
    moved = attention(q, k[:, :, order], v[:, :, order])
    long_k, long_v = normal_tensors(draws, (1, 1, setup.longer, c), (1, 1, setup.longer, e))
    averaging = dense(torch.full_like(one_hot, 1 / n))
    return {
        "tokens": n,
        "error of copying": largest_difference(
            over_positions(dense(one_hot), v), attention(axes, axes, v, beta=math.inf)
        ),
        "error of averaging": largest_difference(over_positions(averaging, v), attention(q, k, v, beta=0.0)),
        "error for the same input": largest_difference(over_positions(layer, v), out),
        "change of attention after the move": largest_difference(moved, out),
        "change of the dense layer after the move": largest_difference(over_positions(layer, v[:, :, order]), out),
        "dense parameters": sum(weight.numel() for weight in layer.parameters()),
        "longer length": setup.longer,
        "queries at the longer length": attention(q, long_k, long_v).shape[2],
        "dense inputs": layer.in_features,
    }


def verdict(numbers: Numbers) -> Decision:
    n = numbers["tokens"]
    exact = ("error of copying", "error of averaging", "error for the same input", "change of attention after the move")
    tied = numbers["dense parameters"] == n**2 and numbers["dense inputs"] == n
    return decide(
        all(numbers[name] < 1e-12 for name in exact)
        and tied
        and numbers["change of the dense layer after the move"] > 0.01
        and numbers["queries at the longer length"] == n
    )


def draw(numbers: Numbers) -> Figure:
    changes = {
        "attention": numbers["change of attention after the move"],
        "dense layer,\nsame weights": numbers["change of the dense layer after the move"],
    }
    return bar_figure(changes, ylabel="change of the output", title="The same tokens at other positions")
