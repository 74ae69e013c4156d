"""Why does a head have the width D/H?

Claim: With heads of width D/H each of the projections of queries, keys and values has D^2 weights for any number of
    heads, and a layer needs 4 N D^2 + 2 N^2 D multiply-adds. Heads of the full width D would multiply both by H.
Measures: Weights of real layers with 1, 2, 4, ... heads of width D/H and of width D. Multiply-adds of a real pass, as
    torch counts matrix products and attention.
Finding: With {{ n.heads|join_numbers }} heads of width {{ n.width }}/H a projection of all heads together has {{
    n.weights|join_numbers }} weights, and the layer needs {{ n["multiply-adds"]|join_numbers }} multiply-adds for {{
    n.length }} tokens. If every head has width {{ n.width }}, the projection has {{ n["weights at full
    width"]|join_numbers }} weights and the layer needs {{ n["multiply-adds at full width"]|join_numbers }}
    multiply-adds. For one head of width {{ n.width }}/H, a projection costs {{ n["multiply-adds of a head's projection
    per token"]|join_numbers }} multiply-adds per token, and its scores cost {{ n["multiply-adds of a head's
    scores"]|join_numbers }} for all tokens.
Budget: 5 seconds
Source: 001 review 8, 003 12.5
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import count_multiply_adds
from regard.lab.settings import check_at_least
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer

MATHS = r"H \cdot \frac{D}{H} \cdot D = D^2, \quad \mathrm{cost} = 4 N D^2 + 2 N^2 D"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the layers.

    width   D, the width of the layer
    heads   numbers of heads to compare
    length  number of tokens
    seed    has no effect: counts do not depend on values
    """

    width: int = 512
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, heads=2)


SMOKE = Setup(heads=(1, 4, 8), length=8)


def run(setup: Setup, layer: Callable[..., Any] = AttentionLayer) -> Numbers:
    """Return the measured numbers of the claim, by name.

    layer  builds the attention layer: layer(width, heads), with head_width=width for heads of the full width
    """
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
        "multiply-adds of a head's projection per token": [_head_cost(setup, heads, 1) for heads in setup.heads],
        "multiply-adds of a head's scores": [_head_cost(setup, heads, setup.length) for heads in setup.heads],
    }


def _weights_and_cost(layer: Any, setup: Setup) -> tuple[int, int]:
    """Return the number of weights of one input projection, and the multiply-adds of a forward pass."""
    cost = count_multiply_adds(lambda: layer(torch.zeros(1, setup.length, setup.width)))
    return layer.query_key_value.weight.numel() // 3, cost


def _head_cost(setup: Setup, heads: int, tokens: int) -> int:
    """Count the multiply-adds of one part of a head of width D/H: its projection or its scores.

    tokens  1: the projection of one token to a query, key or value of the head; a larger number: the scores of this
            number of queries and keys
    """
    width = setup.width // heads
    first, second = (setup.width, width) if tokens == 1 else (width, tokens)
    return count_multiply_adds(lambda: torch.zeros(tokens, first) @ torch.zeros(first, second))


def verdict(numbers: Numbers) -> Decision:
    width, length = numbers["width"], numbers["length"]
    cost = 4 * length * width**2 + 2 * length**2 * width
    steady = set(numbers["weights"]) == {width**2} and set(numbers["multiply-adds"]) == {cost}
    grows = numbers["weights at full width"] == [heads * width**2 for heads in numbers["heads"]]
    grows &= numbers["multiply-adds at full width"] == [heads * cost for heads in numbers["heads"]]
    return decide(steady and grows)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for axes, what in ((left, "weights"), (right, "multiply-adds")):
        plot_lines(axes, numbers["heads"], {"width D/H": numbers[what], "width D": numbers[f"{what} at full width"]})
        axes.set(xscale="log", yscale="log", xlabel="heads H", ylabel=what)
        axes.set_xticks(numbers["heads"], [str(heads) for heads in numbers["heads"]])
    left.set_title("One projection")
    right.set_title("The whole layer")
    return figure
