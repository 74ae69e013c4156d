"""How many parameters does self-attention have, and how many a dense layer over all its inputs?

Claim: Queries, keys and values of width D need 3 D^2 weights and 3 D biases, for any number of tokens N. The N^2
    attention weights are not parameters. A dense layer from all D N numbers to all D N numbers needs D^2 N^2 weights
    and D N biases.
Measures: The number of parameters of real modules of several sizes. The number of attention weights, which are the
    outputs of attention if the values are the identity matrix.
Finding: At D={{ n.widths[-1] }} and N={{ n.lengths[-1] }} queries, keys and values have {{ n.weights[-1]|comma }}
    weights and {{ n.biases[-1]|comma }} biases, there are {{ n["attention weights"][-1]|comma }} attention weights, and
    the dense layer has {{ n["dense weights"][-1]|comma }} weights and {{ n["dense biases"][-1]|comma }} biases.
Budget: 1 second
Source: 003 12.1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.core.attend import attend
from regard.lab.drawing import Figure, line_figure
from regard.lab.settings import setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer, split_heads

MATHS = r"3 D^2 + 3 D, \quad N^2; \quad D^2 N^2 + D N"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the layers, one layer for each pair of a width and a length.

    widths   widths D
    lengths  numbers of tokens N, as many as widths
    seed     has no effect: counts do not depend on values
    """

    widths: tuple[int, ...] = (4, 12, 32, 64, 512)
    lengths: tuple[int, ...] = (3, 5, 7, 16, 64)
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.lengths):
            raise setting_error(self, "widths and lengths are pairs", "widths", "lengths")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = AttentionLayer) -> Numbers:
    """Return the measured numbers of the claim, by name.

    layer  builds the attention layer: layer(width, heads)
    """
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
    return numbers | {"error of the row sums": off}


def verdict(numbers: Numbers) -> Decision:
    pairs = list(zip(numbers["widths"], numbers["lengths"], strict=True))
    expected = {
        "weights": [3 * d * d for d, _ in pairs],
        "biases": [3 * d for d, _ in pairs],
        "attention weights": [n * n for _, n in pairs],
        "dense weights": [d * d * n * n for d, n in pairs],
        "dense biases": [d * n for d, n in pairs],
    }
    counted = all(numbers[name] == counts for name, counts in expected.items())
    return decide(counted and max(numbers["error of the row sums"]) < 1e-5)


def draw(numbers: Numbers) -> Figure:
    names = [f"{d}, {n}" for d, n in zip(numbers["widths"], numbers["lengths"], strict=True)]
    curves = {
        "queries, keys and values": list(map(sum, zip(numbers["weights"], numbers["biases"], strict=True))),
        "dense": list(map(sum, zip(numbers["dense weights"], numbers["dense biases"], strict=True))),
    }
    labels = {"xlabel": "D, N", "ylabel": "parameters", "title": "Parameters by width and length"}
    figure = line_figure(range(len(names)), curves, yscale="log", **labels)
    figure.axes[0].set_xticks(range(len(names)), names)
    return figure
