"""How many parameters does self-attention have, and how many a dense layer over all its inputs?

Claim: Queries, keys and values of width D need 3 D^2 weights and 3 D biases, for any number of tokens N. The N^2
    attention weights are not parameters. A dense layer from all D N numbers to all D N numbers needs D^2 N^2 weights
    and D N biases.
Measures: The parameters of real modules of several sizes, and the size of the weights that attention gives if its
    values are the identity.
Budget: 1 second
Source: 003 12.1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, join_numbers, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.nn.attention import Attention as AttentionLayer, split_heads

MATHS = r"3 D^2 + 3 D, \quad N^2; \quad D^2 N^2 + D N"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Widths D and numbers of tokens N, in pairs.

    seed  has no effect: counts do not depend on values
    """

    widths: tuple[int, ...] = (4, 12, 32, 64, 512)
    lengths: tuple[int, ...] = (3, 5, 7, 16, 64)
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = AttentionLayer) -> Numbers:
    """layer  builds the attention layer: layer(width, heads)"""
    numbers: Numbers = {"widths": list(setup.widths), "lengths": list(setup.lengths)}
    counted: list[tuple[int, ...]] = []
    off: list[float] = []
    for d, n in zip(setup.widths, setup.lengths, strict=True):
        made = layer(d, 1)
        projections = made.query_key_value
        with torch.no_grad():
            q, k, _ = (split_heads(part, 1) for part in projections(torch.zeros(1, n, d)).chunk(3, -1))
            weights = attention(q, k, torch.eye(n)[None, None])
        off.append(float((weights.sum(-1) - 1).abs().max()))
        with torch.device("meta"):  # on the meta device: the dense layer of D=512, N=64 would need 4 GB
            dense = nn.Linear(d * n, d * n)
        biases = 0 if projections.bias is None else projections.bias.numel()
        counted.append((projections.weight.numel(), biases, weights[0, 0].numel()))
        counted[-1] += (dense.weight.numel(), dense.bias.numel())
    names = ("weights", "biases", "attention weights", "dense weights", "dense biases")
    numbers |= {name: [row[at] for row in counted] for at, name in enumerate(names)}
    return numbers | {"rows of weights off one by": off}


def verdict(numbers: Numbers) -> Verdict:
    pairs = list(zip(numbers["widths"], numbers["lengths"], strict=True))
    expected = {
        "weights": [3 * d * d for d, _ in pairs],
        "biases": [3 * d for d, _ in pairs],
        "attention weights": [n * n for _, n in pairs],
        "dense weights": [d * d * n * n for d, n in pairs],
        "dense biases": [d * n for d, n in pairs],
    }
    (d, n), last = pairs[-1], {name: numbers[name][-1] for name in expected}
    return decide(
        all(numbers[name] == counts for name, counts in expected.items())
        and max(numbers["rows of weights off one by"]) < 1e-5,
        f"At D={d} and N={n} queries, keys and values have {last['weights']:,} weights and {last['biases']:,} biases, "
        f"there are {last['attention weights']:,} attention weights, and the dense layer has {last['dense weights']:,} "
        f"weights and {last['dense biases']:,} biases.",
    )


@wrong_answer(
    "003 12.1",
    says="Queries, keys and values have 3 biases.",
    right="Each of the three biases is a vector of D numbers: 3 D.",
)
def _three_biases(numbers: Numbers) -> Verdict:
    came, widths = numbers["biases"], numbers["widths"]
    return decide(
        all(count == 3 for count in came),
        f"Layers of width {join_numbers(widths)} have {join_numbers(came)} biases, not 3.",
    )


@wrong_answer(
    "003 12.1",
    says="The fully connected network has N^2 biases.",
    right="One bias for each of its D N outputs.",
)
def _square_biases(numbers: Numbers) -> Verdict:
    came, squares = numbers["dense biases"], [n * n for n in numbers["lengths"]]
    return decide(
        came == squares,
        f"For N = {join_numbers(numbers['lengths'])} the dense layers have {join_numbers(came)} biases, not "
        f"{join_numbers(squares)}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=5.0)
    names = [f"{d}, {n}" for d, n in zip(numbers["widths"], numbers["lengths"], strict=True)]
    at = list(range(len(names)))
    attention = [a + b for a, b in zip(numbers["weights"], numbers["biases"], strict=True)]
    dense = [a + b for a, b in zip(numbers["dense weights"], numbers["dense biases"], strict=True)]
    plot_lines(axes, at, {"queries, keys and values": attention, "dense": dense})
    axes.set_xticks(at, names)
    axes.set(yscale="log", xlabel="D, N", ylabel="parameters", title="Parameters by width and length")
    return figure
