"""How does a small change of one query change the output, compared with a change of a key?

Claim: Only the column of that query changes, to first order by beta Cov_a(v, k) eps, where Cov_a is the covariance of
    values and keys under the query's weights. A changed key changes all columns. The error of the first order is
    quadratic in eps.
Measures: The change of the output of `attend` against the prediction, for smaller and smaller eps; how the error grows
    with eps; the change of all other columns; and how many columns change if a key changes instead.
Budget: 2 seconds
Source: 002 1.1f
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.perturbations import PerturbationSetup, first_order_error

MATHS = r"q_i \to q_i + \epsilon: \Delta h_i = \beta \sum_j a_{ji} (v_j - h_i)(k_j \cdot \epsilon) + O(\epsilon^2)"


@dataclass(frozen=True, kw_only=True)
class Setup(PerturbationSetup):
    """Random inputs, and which query changes."""

    query: int = 2


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    q, k, v, direction, one_hot = setup.sample()
    h, a = attention(q, k, v), attention(q, k, one_hot)
    own, beta = slice(setup.query, setup.query + 1), setup.width**-0.5
    spread = torch.einsum("bhj,bhje,bhjc->bhec", a[:, :, setup.query], v - h[:, :, own], k)  # Cov_a(v, k)
    slope = beta * torch.einsum("bhec,bhic->bhie", spread, direction)

    def moved(size: float) -> Tensor:
        nudged = q.clone()
        nudged[:, :, own] += size * direction
        return attention(nudged, k, v) - h

    change = moved(setup.sizes[0])
    by_key = k.clone()
    by_key[:, :, :1] += setup.sizes[0] * direction
    others = torch.arange(setup.queries) != setup.query
    return {
        **first_order_error(setup.sizes, lambda size: moved(size)[:, :, own], slope),
        "columns": setup.queries,
        "own change": change[:, :, own].abs().amax((1, 2, 3)).median().item(),
        "change of other columns": change[:, :, others].abs().max().item(),
        "columns moved by a key": int(((attention(q, by_key, v) - h).abs().amax(-1) > 1e-12).sum(2).min()),
        "change by column": change.abs().amax(-1).mean((0, 1)).tolist(),
        "change by column, a key": (attention(q, by_key, v) - h).abs().amax(-1).mean((0, 1)).tolist(),
    }


def verdict(numbers: Numbers) -> Verdict:
    error, order = numbers["relative error"][-1], numbers["order of the error"]
    alone = numbers["change of other columns"] < 1e-12 < numbers["own change"]
    return decide(
        error < 1e-4 and abs(order - 2) < 0.05 and alone and numbers["columns moved by a key"] == numbers["columns"],
        f"A change of size {numbers['sizes'][0]:g} changes the column of the query by {numbers['own change']:.2f} "
        f"and the others by {numbers['change of other columns']:.0g}; a changed key changes "
        f"{numbers['columns moved by a key']} of {numbers['columns']} columns. At size {numbers['sizes'][-1]:g} the "
        f"relative error of the prediction is {error:.0g}; the error grows as eps to the power {order:.2f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(columns=2)
    plot_lines(left, numbers["sizes"], {"error of the prediction": numbers["relative error"]})
    left.set(xscale="log", yscale="log", xlabel="size of eps", ylabel="error / change", title="First-order error")
    columns = list(range(numbers["columns"]))
    curves = {"a query nudged": numbers["change by column"], "a key nudged": numbers["change by column, a key"]}
    plot_lines(right, columns, curves, linestyle="none")
    right.set(xlabel="column of H", ylabel="change", title="Columns that change", xticks=columns)
    return figure
