"""Why does a head have the width D/H?

Claim: With heads of width D/H each of the projections of queries, keys and values has D^2 weights for any number of
    heads, and a layer needs 4 N D^2 + 2 N^2 D multiply-adds. Heads of the full width D would multiply both by H.
Measures: Weights of real layers with 1, 2, 4, ... heads of width D/H and of width D. Multiply-adds of a real pass, as
    torch counts matrix products and attention.
Budget: 5 seconds
Source: 003 12.5
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regard.base.counting import count_flops
from regard.lab.claim import Numbers, Verdict, decide, join_numbers, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.nn.attention import Attention as AttentionLayer

MATHS = r"H \cdot \frac{D}{H} \cdot D = D^2, \quad \mathrm{cost} = 4 N D^2 + 2 N^2 D"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The width D, numbers of heads, and the number of tokens.

    seed  has no effect: counts do not depend on values
    """

    width: int = 512
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    length: int = 64
    seed: int = 0


SMOKE = Setup(heads=(1, 4, 8), length=8)


def run(setup: Setup, layer: Callable[..., Any] = AttentionLayer) -> Numbers:
    """layer  builds the attention layer: layer(width, heads), or with head_width= for heads of the full width"""
    split = [_weights_and_cost(layer(setup.width, heads), setup) for heads in setup.heads]
    kept = [_weights_and_cost(layer(setup.width, heads, head_width=setup.width), setup) for heads in setup.heads]
    return {
        "width": setup.width,
        "length": setup.length,
        "heads": list(setup.heads),
        "weights": [weights for weights, _ in split],
        "multiply-adds": [cost for _, cost in split],
        "weights at full width": [weights for weights, _ in kept],
        "multiply-adds at full width": [cost for _, cost in kept],
    }


def _weights_and_cost(layer: Any, setup: Setup) -> tuple[int, int]:
    """Return the weights of one projection and the multiply-adds of a pass."""
    with torch.no_grad(), count_flops() as flops:
        layer(torch.zeros(1, setup.length, setup.width))
    return layer.query_key_value.weight.numel() // 3, flops.get_total_flops() // 2


def verdict(numbers: Numbers) -> Verdict:
    width, length = numbers["width"], numbers["length"]
    cost = 4 * length * width**2 + 2 * length**2 * width
    steady = set(numbers["weights"]) == {width**2} and set(numbers["multiply-adds"]) == {cost}
    grows = numbers["weights at full width"] == [heads * width**2 for heads in numbers["heads"]]
    grows &= numbers["multiply-adds at full width"] == [heads * cost for heads in numbers["heads"]]
    return decide(
        steady and grows,
        f"With {join_numbers(numbers['heads'])} heads of width {width}/H a projection has "
        f"{join_numbers(numbers['weights'])} weights, and {length} tokens need "
        f"{join_numbers(numbers['multiply-adds'])} multiply-adds. If every head has width {width}, it has "
        f"{join_numbers(numbers['weights at full width'])} weights and needs "
        f"{join_numbers(numbers['multiply-adds at full width'])} multiply-adds.",
    )


@wrong_answer(
    "003 12.5",
    says="H heads of width D/H have H (D/H)^2 = D^2/H weights.",
    right="Every head reads all D channels, so a head has D (D/H) weights and all heads have D^2, for any H.",
)
def _fewer_weights(numbers: Numbers) -> Verdict:
    said = [heads * (numbers["width"] // heads) ** 2 for heads in numbers["heads"]]
    return decide(
        numbers["weights"] == said,
        f"With {join_numbers(numbers['heads'])} heads this would be {join_numbers(said)} weights, but there are "
        f"{join_numbers(numbers['weights'])}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for axes, what in ((left, "weights"), (right, "multiply-adds")):
        plot_lines(axes, numbers["heads"], {"width D/H": numbers[what], "width D": numbers[f"{what} at full width"]})
        axes.set(xscale="log", yscale="log", xlabel="heads H", ylabel=what)
        axes.set_xticks(numbers["heads"], [str(heads) for heads in numbers["heads"]])
    left.set_title("One projection")
    right.set_title("The whole layer")
    return figure
