"""What does self-attention do if its inputs are permuted?

Claim: Its outputs are permuted in the same way, Sa[XP] = Sa[X]P, where X has one token per column. The weights are
    permuted along both axes, softmax[P'SP] = P' softmax[S] P. With positions added to the tokens this no longer holds.
Measures: Self-attention of width D over N tokens, in float64, before and after a permutation of its columns: outputs
    and weights (whose columns must sum to 1), with and without sinusoidal positions; and after a permutation of its
    rows, the channels.
Budget: 1 second
Source: 003 12.3
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.positions import sinusoidal
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_bars

MATHS = (
    r"\mathrm{Sa}[X P] = V P \cdot \mathrm{softmax}[P^\top K^\top Q P] "
    r"= V P P^\top \mathrm{softmax}[K^\top Q] P = \mathrm{Sa}[X] P"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of tokens and their width."""

    width: int = 8
    length: int = 7
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    d, n = setup.width, setup.length
    x = torch.randn(d, n, generator=draws, dtype=torch.float64)
    maps = torch.randn(3, d, d, generator=draws, dtype=torch.float64) * d**-0.5
    shifts = torch.randn(3, d, 1, generator=draws, dtype=torch.float64)
    columns = torch.eye(n, dtype=torch.float64)[:, torch.randperm(n, generator=draws)]
    rows = torch.eye(d, dtype=torch.float64)[torch.randperm(d, generator=draws)]
    places = sinusoidal(n, d).double().T

    def attended(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs D x N, weights N x N and values D x N, with one token per column."""
        q, k, v = ((omega @ x + beta).T[None, None] for omega, beta in zip(maps, shifts, strict=True))
        weights = attention(q, k, torch.eye(n, dtype=torch.float64)[None, None])
        return attention(q, k, v)[0, 0].T, weights[0, 0].T, v[0, 0].T

    out, weights, values = attended(x)
    permuted, permuted_weights, _ = attended(x @ columns)
    placed, *_ = attended(x + places)
    permuted_placed, *_ = attended(x @ columns + places)
    channels, *_ = attended(rows @ x)
    return {
        "length": n,
        "width": d,
        "error": _off(permuted, out @ columns),
        "error of weights": _off(permuted_weights, columns.T @ weights @ columns),
        "error of the sums of columns": _off(weights.sum(0), torch.ones(n, dtype=torch.float64)),
        "difference with positions": _off(permuted_placed, placed @ columns),
        "difference of weights": _off(permuted_weights, weights),
        "difference by the sheet": _off(permuted, values @ columns @ weights),
        "difference of rows": _off(channels, rows @ out),
    }


def _off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def verdict(numbers: Numbers) -> Verdict:
    exact = max(numbers[name] for name in ("error", "error of weights", "error of the sums of columns"))
    return decide(
        exact < 1e-13 and numbers["difference with positions"] > 1e-3,
        f"Sa[XP] and Sa[X]P differ by {numbers['error']:.0g}, softmax[P'SP] and P' softmax[S] P by "
        f"{numbers['error of weights']:.0g}; with positions added the outputs differ by "
        f"{numbers['difference with positions']:.2f}.",
    )


@wrong_answer(
    "003 12.3",
    says="The two permutations inside the softmax cancel, so the weights of XP are those of X.",
    right="They become P' softmax[S] P; the P of VP and this P' cancel, and one P is left.",
)
def _same_weights(numbers: Numbers) -> Verdict:
    off = numbers["difference of weights"]
    return decide(
        max(off, numbers["difference by the sheet"]) < 1e-9,
        f"The weights of XP differ from those of X by up to {off:.2f}, and VP softmax[K'Q] from the outputs by up to "
        f"{numbers['difference by the sheet']:.2f}.",
    )


@wrong_answer(
    "003 12.3",
    says="Projections act on the rows of X, so the rows may be permuted.",
    right="Tokens are columns, and XP permutes columns; rows are channels, which the projections mix.",
)
def _rows_are_permuted(numbers: Numbers) -> Verdict:
    off = numbers["difference of rows"]
    return decide(
        off < 1e-9, f"If the rows of X are permuted, the outputs differ by up to {off:.2f} from permuted outputs."
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=5.4)
    shown = {
        "columns": numbers["error"],
        "columns,\nwith positions": numbers["difference with positions"],
        "rows": numbers["difference of rows"],
    }
    # a log axis has no zero
    plot_bars(axes, {name: max(value, 1e-17) for name, value in shown.items()})
    axes.set(
        yscale="log", xlabel="what is permuted", ylabel="largest difference", title="Outputs are permuted like inputs"
    )
    return figure
