"""Does the feed-forward part of a block use neighbouring tokens?

Claim: No. It processes every token by itself with the same weights. If one token changes, every other output stays the
    same, bit for bit, and a token alone gives the same output as among others. Only attention connects tokens.
Measures: How much each output of a real feed-forward layer in float64 changes if one token is replaced, and how much
    each changes in self-attention. The outputs of tokens passed one by one and in another order.
Finding: If token {{ n.token + 1 }} of {{ n.changes|length }} is replaced, its own output changes by {{ own|fixed }} and
    the others by at most {{ others|short }}; in self-attention every other output changes, by at least {{
    attended|at_least(2) }}. Alone or in another order the outputs are the same up to {{ alike|at_most }}.
Budget: 1 second
Source: 000 1.4d, 002 1.4d
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import largest_difference, normal_tensors, random_permutation
from regard.lab.settings import setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.feedforward import FeedForward
from regard.nn.init import fan_in, init_parameters, normal

MATHS = r"y_i = W_2 f(W_1 x_i + b_1) + b_2, \quad \frac{\partial y_i}{\partial x_j} = 0 \mathrm{for} i \neq j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the feed-forward layer and of its input.

    width   width of the tokens
    hidden  width of the hidden layer
    length  number of tokens
    token   index of the token that is replaced
    """

    width: int = 24
    hidden: int = 96
    length: int = 9
    token: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2, "tokens, of which one is replaced")
        if not 0 <= self.token < self.length:
            raise setting_error(self, f"token must be between 0 and {self.length - 1}", "token")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = FeedForward) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    attention  the attention function to test
    layer      builds the feed-forward layer: layer(width, hidden)
    """
    draws = make_generator(setup.seed)
    made = layer(setup.width, setup.hidden).double()
    init_parameters(made, {"*.weight": fan_in(), "*.bias": normal(0.1)}, setup.seed)
    (x,) = normal_tensors(draws, (1, setup.length, setup.width))
    replaced = x.clone()
    replaced[:, setup.token] = torch.randn(setup.width, generator=draws, dtype=torch.float64)
    order = random_permutation(setup.length, draws)
    with torch.no_grad():
        out = made(x)
        alone = torch.cat([made(token) for token in x.split(1, 1)], 1)
        return {
            "token": setup.token,
            "changes": _change_per_token(made(replaced), out),
            "changes in attention": _change_per_token(*(_self_attention(attention, each) for each in (replaced, x))),
            "difference alone": largest_difference(alone, out),
            "difference in another order": largest_difference(made(x[:, order]), out[:, order]),
        }


def _self_attention(attention: Attention, x: Tensor) -> Tensor:
    """Apply self-attention with one head and identity projections."""
    return attention(x[:, None], x[:, None], x[:, None])[:, 0]


def _change_per_token(after: Tensor, before: Tensor) -> list[float]:
    moved: list[float] = (after - before)[0].abs().amax(-1).tolist()
    return moved


def _without_token(numbers: Numbers, name: str) -> list[float]:
    return [change for at, change in enumerate(numbers[name]) if at != numbers["token"]]


def verdict(numbers: Numbers) -> Decision:
    own, others = numbers["changes"][numbers["token"]], max(_without_token(numbers, "changes"))
    attended = min(_without_token(numbers, "changes in attention"))
    alike = max(numbers["difference alone"], numbers["difference in another order"])
    holds = own > 1e-3 and others == 0 and attended > 1e-6 and alike < 1e-12
    return decide(holds, own=own, others=others, attended=attended, alike=alike)


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=5.0)
    curves = {"feed-forward": numbers["changes"], "self-attention": numbers["changes in attention"]}
    plot_lines(axes, list(range(1, len(numbers["changes"]) + 1)), curves)
    # a linear axis near 0, which shows zeros
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set(xlabel="token", ylabel="change of its output", title=f"Effect of replacing token {numbers['token'] + 1}")
    return figure
