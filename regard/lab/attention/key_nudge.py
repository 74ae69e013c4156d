"""How does a small change of one key change the output?

Claim: If key 1 changes by eps, every column of H changes, to first order by beta a_1i (v_1 - h_i)(eps . q_i): towards
    v_1 if eps . q_i > 0, away from it otherwise. All weights of every column change, because they sum to one. The error
    of the first order is quadratic in eps.
Measures: The change of the output of `attend` against the prediction, for smaller and smaller eps; how the error grows
    with eps; how many columns and weights change; whether twice the eps gives twice the change; and whether the weights
    of summed scores are the sum of weights.
Budget: 2 seconds
Source: 000 1.1e, 002 1.1e
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.perturbations import PerturbationSetup, change_norm, first_order_error

MATHS = r"k_1 \to k_1 + \epsilon: \Delta h_i = \beta a_{1i} (v_1 - h_i)(\epsilon \cdot q_i) + O(\epsilon^2)"


@dataclass(frozen=True, kw_only=True)
class Setup(PerturbationSetup):
    """Random inputs; the first key changes."""


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    q, k, v, direction, one_hot = setup.sample()
    nudge = torch.cat([direction, torch.zeros_like(k[:, :, 1:])], 2)  # only the first key changes
    h, a = attention(q, k, v), attention(q, k, one_hot)
    beta = setup.width**-0.5
    slope = beta * a[..., :1] * (v[:, :, :1] - h) * (q @ direction.mT)

    def moved(size: float) -> Tensor:
        return attention(q, k + size * nudge, v) - h

    large, small = setup.sizes[0], setup.sizes[-1]
    shift = attention(q, k + small * nudge, one_hot) - a
    # if weights were additive, they would be those of the keys plus those of the change alone
    added = a + attention(q, large * nudge, one_hot)
    return {
        **first_order_error(setup.sizes, moved, slope),
        "columns": setup.queries,
        "columns moved": int((moved(small).abs().amax(-1) > 0).sum(2).min()),
        "weights": setup.queries * setup.keys,
        "weights moved": int((shift.abs() > 0).flatten(1).sum(1).min()),
        "off twice the change": (change_norm(moved(2 * large) - 2 * moved(large)) / change_norm(moved(2 * large)))
        .median()
        .item(),
        "sum of weights": attention(q, k + large * nudge, one_hot).sum(-1).mean().item(),
        "sum of added weights": added.sum(-1).mean().item(),
        "off the added weights": (attention(q, k + large * nudge, one_hot) - added).abs().max().item(),
    }


def verdict(numbers: Numbers) -> Verdict:
    error, order = numbers["relative error"][-1], numbers["order of the error"]
    everywhere = (
        numbers["columns moved"] == numbers["columns"] and numbers["weights moved"] >= 0.98 * numbers["weights"]
    )
    return decide(
        error < 1e-4 and abs(order - 2) < 0.05 and everywhere,
        f"With eps of size {numbers['sizes'][-1]:g} the relative error of the prediction is {error:.0g}, and the "
        f"error grows as eps to the power {order:.2f}. {numbers['columns moved']} of {numbers['columns']} columns "
        f"and {numbers['weights moved']} of {numbers['weights']} weights change.",
    )


@wrong_answer(
    "000 1.1e",
    says="The output changes linearly with the perturbation.",
    right="Only to first order; the rest grows with the square of eps.",
)
def _change_is_linear(numbers: Numbers) -> Verdict:
    off = numbers["off twice the change"]
    return decide(
        off < 1e-6,
        f"The change for twice an eps of size {numbers['sizes'][0]:g} differs by {off:.0%} from twice the change for "
        "eps.",
    )


@wrong_answer(
    "000 1.1e",
    says="Softargmax is additive: the weights of k + eps are those of k plus those of eps.",
    right="Weights sum to one before and after the change, so if one weight grows, others shrink.",
)
def _softargmax_is_additive(numbers: Numbers) -> Verdict:
    off, total = numbers["off the added weights"], numbers["sum of added weights"]
    return decide(
        off < 1e-6,
        f"The weights of summed scores differ from the summed weights by up to {off:.2f}: the former sum to "
        f"{numbers['sum of weights']:.2f}, the latter to {total:.2f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_lines(axes, numbers["sizes"], {"error of the prediction": numbers["relative error"]})
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="size of eps",
        ylabel="error / change",
        title="Changed key: first-order error",
    )
    return figure
