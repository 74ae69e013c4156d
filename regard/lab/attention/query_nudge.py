"""How does a small change of one query change the output, compared with a change of a key?

Claim: Only the column of that query changes, to first order by beta Cov_a(v, k) eps, where Cov_a is the covariance of
    values and keys under the query's weights. A changed key changes all columns. The error of the first order is
    quadratic in eps.
Measures: The change of the output of `attend` against the prediction, for smaller and smaller eps; how the error grows
    with eps; the change of all other columns; and how many columns change if a key changes instead.
Finding: If eps has entries of standard deviation {{ n.sizes[0]|short }}, the column of the query changes by {{
    n["change of its own column"]|fixed }} and the others by at most {{ n["change of other columns"]|at_most }}; a
    changed key changes {{ n["columns changed by a key"] }} of {{ n.columns }} columns. At a standard deviation of {{
    n.sizes[-1]|short }} the relative error of the first-order formula is {{ n["relative error"][-1]|short(1) }}; its
    error grows as eps to the power {{ n["order of the error"]|fixed }}.
Budget: 2 seconds
Source: 002 1.1f
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.drawing import Figure, plot_lines
from regard.lab.perturbations import PerturbationSetup, draw_first_order_error, first_order_error
from regard.lab.settings import check_at_least, check_indices
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"q_i \to q_i + \epsilon: \Delta h_i = \beta \sum_j a_{ji} (v_j - h_i)(k_j \cdot \epsilon) + O(\epsilon^2)"


@dataclass(frozen=True, kw_only=True)
class Setup(PerturbationSetup):
    """Random inputs in which one query changes.

    query  index of the query that changes
    """

    query: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, queries=2)
        check_indices("query", (self.query,), self.queries, "queries")


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
        "change of its own column": change[:, :, own].abs().amax((1, 2, 3)).median().item(),
        "change of other columns": change[:, :, others].abs().max().item(),
        "columns changed by a key": int(((attention(q, by_key, v) - h).abs().amax(-1) > 1e-12).sum(2).min()),
        "change by column": change.abs().amax(-1).mean((0, 1)).tolist(),
        "change by column, a key": (attention(q, by_key, v) - h).abs().amax(-1).mean((0, 1)).tolist(),
    }


def verdict(numbers: Numbers) -> Decision:
    alone = numbers["change of other columns"] < 1e-12 < numbers["change of its own column"]
    small = numbers["sizes"][-1] <= 1e-4
    exact = numbers["relative error"][-1] < 1e-4 and abs(numbers["order of the error"] - 2) < 0.05
    return decide(
        alone and numbers["columns changed by a key"] == numbers["columns"] and exact,
        missing="" if small else "the smallest size must be at most 0.0001",
    )


def draw(numbers: Numbers) -> Figure:
    figure = draw_first_order_error(numbers, "First-order error", columns=2)
    columns = list(range(numbers["columns"]))
    curves = {"a query changed": numbers["change by column"], "a key changed": numbers["change by column, a key"]}
    plot_lines(figure.axes[1], columns, curves, linestyle="none")
    figure.axes[1].set(xlabel="column of H", ylabel="change", title="Columns that change", xticks=columns)
    return figure
