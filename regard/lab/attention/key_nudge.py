"""How does a small change of one key change the output?

Claim: If key 1 changes by eps, every column h_i of the output H changes, to first order by beta a_1i (v_1 - h_i)(eps .
    q_i), where a_1i is the weight that query q_i gives to key 1 and v_1 its value: towards v_1 if eps . q_i > 0, away
    from it otherwise. All weights of every column change, because they sum to one. If eps is random with mean 0, so is
    the change to first order, and its mean squared length is beta^2 a_1i^2 |v_1 - h_i|^2 sigma^2 |q_i|^2, where sigma
    is the standard deviation of the entries of eps. The error of the first order is quadratic in eps.
Measures: The change of the output of `attend` against the prediction, for smaller and smaller eps; how the error grows
    with eps; the mean and the mean squared length of the change over draws of eps; how many columns and weights change;
    whether twice the eps gives twice the change; and whether the weights of summed scores are the sum of weights.
Finding: If the entries of eps have the standard deviation {{ n.sizes[-1]|short }}, the first-order formula has a
    relative error of {{ n["relative error"][-1]|short(1) }}, and its error grows as eps to the power {{ n["order of the
    error"]|fixed }}. {{ n["columns changed"] }} of {{ n.columns }} columns of the output and {{ n["weights changed"] }}
    of {{ n.weights }} weights change. Over {{ n.draws|comma }} draws of eps the mean squared change of a column is {{
    n["mean squared change, measured by formula"][0]|fixed }} to {{ n["mean squared change, measured by
    formula"][1]|fixed }} times that of the formula, and the mean change is at most {{ n["mean change by root mean
    square"]|at_most }} of the root of the mean squared change.
Budget: 2 seconds
Source: 000 1.1e, 002 1.1e
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure
from regard.lab.measure import attention_weights, largest_difference, normal_tensors
from regard.lab.perturbations import PerturbationSetup, change_norm, draw_first_order_error, first_order_error
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"k_1 \to k_1 + \epsilon: \Delta h_i = \beta a_{1i} (v_1 - h_i)(\epsilon \cdot q_i) + O(\epsilon^2)"


@dataclass(frozen=True, kw_only=True)
class Setup(PerturbationSetup):
    """Settings of the claim: those of `PerturbationSetup`, and of an example with three keys of scores 1, 1/2 and 0.

    nudge  how much the first score of the example grows
    """

    nudge: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, nudge=0.01)


SMOKE = Setup()
DRAWS = 20_000  # number of draws of eps, for the mean and the mean squared length of the change


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    q, k, v, direction, one_hot = setup.sample()
    nudge = torch.cat([direction, torch.zeros_like(k[:, :, 1:])], 2)  # only the first key changes
    h, a = attention(q, k, v), attention(q, k, one_hot)
    beta = setup.width**-0.5
    slope = beta * a[..., :1] * (v[:, :, :1] - h) * (q @ direction.mT)

    def moved(size: float) -> Tensor:
        return attention(q, k + size * nudge, v) - h

    def deviation(size: float) -> float:
        """Return how much the effect of twice the change of the key differs from twice the effect; 0 if it is linear.

        The result is the median over inputs of |f(2 size) - 2 f(size)| / |f(2 size)|, where f(s) is the change of
        the output if the key changes by s times the random direction.
        """
        twice = moved(2 * size)
        return (change_norm(twice - 2 * moved(size)) / change_norm(twice)).median().item()

    large, small = setup.sizes[0], setup.sizes[-1]
    shift = attention(q, k + small * nudge, one_hot) - a
    together = attention(q, k + large * nudge, one_hot)
    # the sheet adds the weight of eps . q alone to the first entry, and nothing to the others
    added = torch.cat([a[..., :1] + attention(q, large * nudge, one_hot)[..., :1], a[..., 1:]], -1)
    return {
        **first_order_error(setup.sizes, moved, slope),
        **_compare_moments(setup, attention),
        "columns": setup.queries,
        "columns changed": int((moved(small).abs().amax(-1) > 0).sum(2).min()),
        "weights": setup.queries * setup.keys,
        "weights changed": int((shift.abs() > 0).flatten(1).sum(1).min()),
        "deviation from twice the change": [deviation(size) for size in setup.sizes],
        "sum of weights": together.sum(-1).mean().item(),
        "sum of added weights": added.sum(-1).mean().item(),
        "difference to the added weights": largest_difference(together, added),
        "nudge": setup.nudge,
        "other weights, before and after": _other_weights(attention, setup.nudge),
    }


def _compare_moments(setup: Setup, attention: Attention) -> Numbers:
    """Compare the change of the output over random draws of eps with the first-order formula.

    Each output has a mean squared length of its change, which is divided by that of the formula; the smallest and the
    largest quotient are returned. Each output also has a mean change, whose length is divided by the root of the mean
    squared length; the largest quotient is returned. One random input is used, with the smallest standard deviation of
    eps.
    """
    q, k, v, _, one_hot = (each[:1] for each in setup.sample())
    h, a = attention(q, k, v), attention(q, k, one_hot)
    size, beta = setup.sizes[-1], setup.width**-0.5
    (noise,) = normal_tensors(make_generator(setup.seed + 1), (DRAWS, 1, 1, setup.width))
    keys = torch.cat([k[:, :, :1] + size * noise, k[:, :, 1:].expand(DRAWS, -1, -1, -1)], 2)
    change = attention(q.expand(DRAWS, -1, -1, -1), keys, v.expand(DRAWS, -1, -1, -1)) - h
    towards = (v[:, :, :1] - h).square().sum(-1)
    expected = (beta * size * a[..., 0]).square() * towards * q.square().sum(-1)
    squared = change.square().sum(-1).mean(0)
    ratio, mean = squared / expected[0], change.mean(0).norm(dim=-1) / squared.sqrt()
    return {
        "draws": DRAWS,
        "mean squared change, measured by formula": [ratio.min().item(), ratio.max().item()],
        "mean change by root mean square": mean.max().item(),
    }


def _other_weights(attention: Attention, nudge: float) -> list[list[float]]:
    """Return the weights of keys 2 and 3 of three keys, before and after the score of key 1 grows by `nudge`."""
    scores = torch.tensor([[1.0, 0.5, 0.0], [1.0 + nudge, 0.5, 0.0]], dtype=torch.float64)
    rows = [attention_weights(attention, torch.ones(1, 1, dtype=row.dtype), row[:, None], beta=1.0) for row in scores]
    return [row[0, 1:].tolist() for row in rows]


def verdict(numbers: Numbers) -> Decision:
    everywhere = numbers["columns changed"] == numbers["columns"]
    everywhere &= numbers["weights changed"] >= 0.98 * numbers["weights"]
    low, high = numbers["mean squared change, measured by formula"]
    random = 0.95 < low <= high < 1.05 and numbers["mean change by root mean square"] < 0.05
    close = numbers["relative error"][-1] < 1e-4 and abs(numbers["order of the error"] - 2) < 0.05
    small = numbers["sizes"][-1] <= 1e-4
    return decide(
        everywhere and random and close,
        missing="" if small else "the smallest size must be at most 0.0001",
    )


def draw(numbers: Numbers) -> Figure:
    return draw_first_order_error(numbers, "Changed key: first-order error")
