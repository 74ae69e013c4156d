"""What does self-attention do if its inputs are permuted?

Claim: The outputs are permuted in the same way, Sa[XP] = Sa[X]P, where X has one token per column. The weights are
    permuted along both axes, softmax[P'SP] = P' softmax[S] P. With positions added to the tokens this no longer holds.
Measures: Self-attention of width D over N tokens, with scores that are not scaled (as on the exercise sheet), in
    float64, before and after a permutation of its columns: projections with biases, outputs and weights (whose columns
    must sum to 1), with and without sinusoidal positions; and after a permutation of its rows, the channels.
Finding: Sa[XP] and Sa[X]P differ by at most {{ n.error|at_most }}, softmax[P'SP] and P' softmax[S] P by {{ n["error of
    weights"]|at_most }}; projecting permuted tokens, with biases, equals permuting the projected tokens up to {{
    n["error of the projections"]|at_most }}. With positions added, the outputs of permuted tokens differ from the
    permuted outputs by {{ n["difference with positions"]|fixed }}.
Budget: 1 second
Source: 003 12.3
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.positions import sinusoidal
from regard.lab.drawing import Figure, bar_figure
from regard.lab.measure import attention_weights, largest_difference, normal_tensors, random_permutation
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"\mathrm{Sa}[X P] = V P \cdot \mathrm{softmax}[P^\top K^\top Q P] "
    r"= V P P^\top \mathrm{softmax}[K^\top Q] P = \mathrm{Sa}[X] P"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the input.

    width   D, the width of a token; even, because sinusoidal positions have pairs of channels
    length  N, the number of tokens
    """

    width: int = 8
    length: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, width=2, length=2)
        if self.width % 2:
            raise setting_error(self, "width must be even, for the sinusoidal positions", "width")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    d, n = setup.width, setup.length
    x, maps, shifts = normal_tensors(draws, (d, n), (3, d, d), (3, d, 1))
    maps = maps * d**-0.5
    columns = torch.eye(n, dtype=torch.float64)[:, random_permutation(n, draws)]
    rows = torch.eye(d, dtype=torch.float64)[random_permutation(d, draws)]
    places = sinusoidal(n, d).double().T

    def attended(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply self-attention to x (D x N, one token per column) and return the outputs, the weights and the values.

        The outputs and the values are D x N, the weights are N x N, with one query per column.
        """
        q, k, v = ((omega @ x + beta).T[None, None] for omega, beta in zip(maps, shifts, strict=True))
        weights = attention_weights(attention, q, k, beta=1.0)
        return attention(q, k, v, beta=1.0)[0, 0].T, weights[0, 0].T, v[0, 0].T

    out, weights, values = attended(x)
    permuted, permuted_weights, permuted_values = attended(x @ columns)
    placed, *_ = attended(x + places)
    permuted_placed, *_ = attended(x @ columns + places)
    channels, *_ = attended(rows @ x)
    return {
        "length": n,
        "width": d,
        "error": largest_difference(permuted, out @ columns),
        "error of the projections": largest_difference(permuted_values, values @ columns),
        "error of weights": largest_difference(permuted_weights, columns.T @ weights @ columns),
        "error of the sums of columns": largest_difference(weights.sum(0), torch.ones(n, dtype=torch.float64)),
        "difference with positions": largest_difference(permuted_placed, placed @ columns),
        "difference of weights": largest_difference(permuted_weights, weights),
        "difference by the sheet": largest_difference(permuted, values @ columns @ weights),
        "difference of rows": largest_difference(channels, rows @ out),
    }


def verdict(numbers: Numbers) -> Decision:
    names = ("error", "error of weights", "error of the sums of columns", "error of the projections")
    return decide(max(numbers[name] for name in names) < 1e-13 and numbers["difference with positions"] > 1e-3)


def draw(numbers: Numbers) -> Figure:
    shown = {
        "columns": numbers["error"],
        "columns,\nwith positions": numbers["difference with positions"],
        "rows": numbers["difference of rows"],
    }
    # a log axis has no zero
    values = {name: max(value, 1e-17) for name, value in shown.items()}
    labels = {"xlabel": "what is permuted", "ylabel": "largest difference", "title": "Outputs are permuted like inputs"}
    return bar_figure(values, yscale="log", **labels)
