"""What does a small change of one key do to the output?

Claim: Key 1 moved by eps moves every column of H, to first order by beta a_1i (v_1 - h_i)(eps . q_i): towards v_1 where
    eps agrees with the query, away from it where not. All weights of every column move, since they sum to one. What
    the first order leaves out is quadratic in eps.
Measures: The change of `attend` against the prediction, for eps of shrinking length; how its error grows with eps; how
    many columns and weights move; whether twice the eps gives twice the change, and weights of summed scores the sum
    of weights.
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
    """Inputs and nudges; it is the first key that moves."""


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    q, k, v, direction, one_hot = setup.drawn()
    nudge = torch.cat([direction, torch.zeros_like(k[:, :, 1:])], 2)  # only the first key moves
    h, a = attention(q, k, v), attention(q, k, one_hot)
    beta = setup.width**-0.5
    slope = beta * a[..., :1] * (v[:, :, :1] - h) * (q @ direction.mT)

    def moved(size: float) -> Tensor:
        return attention(q, k + size * nudge, v) - h

    large, small = setup.sizes[0], setup.sizes[-1]
    shift = attention(q, k + small * nudge, one_hot) - a
    # additive weights would be those of the keys plus those of a set of keys that holds the nudge alone
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
        f"With eps of size {numbers['sizes'][-1]:g} the prediction is off by {error:.0g} of the change, and its error "
        f"grows as eps to the power {order:.2f}. {numbers['columns moved']} of {numbers['columns']} columns and "
        f"{numbers['weights moved']} of {numbers['weights']} weights move.",
    )


@wrong_answer(
    "000 1.1e",
    says="The output changes linearly with the perturbation.",
    right="Only to first order; what is left grows with the square of eps.",
)
def _change_is_linear(numbers: Numbers) -> Verdict:
    off = numbers["off twice the change"]
    return decide(
        off < 1e-6,
        f"What twice an eps of size {numbers['sizes'][0]:g} changes is {off:.0%} away from twice what it changes once.",
    )


@wrong_answer(
    "000 1.1e",
    says="Softargmax is additive: the weights of k + eps are those of k plus those of eps.",
    right="Weights sum to one before and after, so what one key gains the others lose.",
)
def _softargmax_is_additive(numbers: Numbers) -> Verdict:
    off, total = numbers["off the added weights"], numbers["sum of added weights"]
    return decide(
        off < 1e-6,
        f"Weights of summed scores differ from summed weights by up to {off:.2f}: they sum to "
        f"{numbers['sum of weights']:.2f}, the others to {total:.2f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    plot_lines(axes, numbers["sizes"], {"error of the prediction": numbers["relative error"]})
    axes.set(
        xscale="log", yscale="log", xlabel="size of eps", ylabel="error / change", title="A nudged key: first order"
    )
    return figure
