"""Can a fully connected layer copy or average values like attention?

Claim: Yes, for one input. A layer over positions with identity weights copies every value, one with weights 1/m
    averages them, and one with the weights of attention returns the output of attention. But its weights do not change
    with the input, and their number depends on the length. The weights of attention depend on the input, and any length
    works.
Measures: Linear layers over positions against `attend`: hard attention on orthogonal keys, beta = 0, and the general
    case. The same layer and `attend` after keys and values have moved to other positions. The number of parameters of
    the layer.
Budget: 1 second
Source: 000 1.1c-d
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_bars

MATHS = (
    r"H = V W, \quad W = I \to h_i = v_i; \quad "
    r"W_{ji} = \frac{1}{m} \to h_i = \frac{1}{m} \sum_j v_j; \quad A = A(Q, K)"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of queries and keys, the widths, and a longer input to test."""

    tokens: int = 7
    longer: int = 11
    width: int = 9
    value_width: int = 5
    seed: int = 0


SMOKE = Setup()


def dense(weights: Tensor) -> nn.Linear:
    """Apply a fully connected layer over positions with weights (i, j)."""
    layer = nn.Linear(weights.shape[1], weights.shape[0], bias=False, dtype=weights.dtype)
    layer.weight = nn.Parameter(weights)
    return layer.requires_grad_(False)


def over_positions(layer: nn.Linear, v: Tensor) -> Tensor:
    out: Tensor = layer(v.mT).mT
    return out


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, 1, *sizes, generator=draws, dtype=torch.float64)

    n = setup.tokens
    q, k, v = normal(n, setup.width), normal(n, setup.width), normal(n, setup.value_width)
    one_hot = torch.eye(n, dtype=torch.float64)
    axes = one_hot[None, None]  # orthogonal keys, each selected by its own query
    weights = attention(q, k, axes)[0, 0]
    layer = dense(weights)
    out = attention(q, k, v)
    # the same tokens at other positions: the correct output is the same
    order = torch.arange(n).roll(2)
    moved = attention(q, k[:, :, order], v[:, :, order])
    long_k, long_v = normal(setup.longer, setup.width), normal(setup.longer, setup.value_width)

    def off(first: Tensor, second: Tensor) -> float:
        return (first - second).abs().max().item()

    return {
        "tokens": n,
        "copy off": off(over_positions(dense(one_hot), v), attention(axes, axes, v, beta=math.inf)),
        "average off": off(over_positions(dense(torch.full_like(one_hot, 1 / n)), v), attention(q, k, v, beta=0.0)),
        "same input off": off(over_positions(layer, v), out),
        "attention after the move off": off(moved, out),
        "dense after the move off": off(over_positions(layer, v[:, :, order]), out),
        "dense parameters": sum(weight.numel() for weight in layer.parameters()),
        "longer": setup.longer,
        "queries answered at the longer": attention(q, long_k, long_v).shape[2],
        "dense inputs": layer.in_features,
    }


def verdict(numbers: Numbers) -> Verdict:
    n = numbers["tokens"]
    equal = all(numbers[name] < 1e-12 for name in ("copy off", "average off", "same input off"))
    follows = numbers["attention after the move off"] < 1e-12 and numbers["dense after the move off"] > 0.01
    tied = numbers["dense parameters"] == n**2 and numbers["dense inputs"] == n
    return decide(
        equal and follows and tied and numbers["queries answered at the longer"] == n,
        f"Identity weights copy up to {numbers['copy off']:.0g}, 1/{n} averages up to {numbers['average off']:.0g}. "
        f"When tokens move, attention's output changes by {numbers['attention after the move off']:.0g} and the "
        f"output of the layer with the same weights by {numbers['dense after the move off']:.2f}. The layer has "
        f"{numbers['dense parameters']} parameters and accepts {numbers['dense inputs']} tokens only; attention also "
        f"accepts {numbers['longer']}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_bars(
        axes,
        {
            "attention": numbers["attention after the move off"],
            "dense layer,\nsame weights": numbers["dense after the move off"],
        },
    )
    axes.set(ylabel="change of the output", title="The same tokens at other positions")
    return figure
