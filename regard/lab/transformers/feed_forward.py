"""Does the feed-forward part of a block look at neighbours?

Claim: No. It treats every token by itself, with the same weights: a token that changes leaves every other output as
    it was, to the bit, and a token alone comes out as it does among others. What tokens learn of each other they
    learn in attention.
Measures: How far each output of a real feed-forward layer in float64 moves when one token is replaced, and how far
    each moves in self-attention; the outputs of tokens sent in one by one, and in another order.
Budget: 1 second
Source: 000 1.4d
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.nn.feedforward import FeedForward
from regard.nn.init import fan_in, init_parameters, normal

MATHS = r"y_i = W_2 f(W_1 x_i + b_1) + b_2, \quad \frac{\partial y_i}{\partial x_j} = 0 \mathrm{for} i \neq j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes of the layer, how many tokens there are, and which of them is replaced, counted from 0."""

    width: int = 24
    hidden: int = 96
    length: int = 9
    token: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2, "tokens, of which one changes and the others may")
        if not 0 <= self.token < self.length:
            raise ConfigError(f"token is one of 0 to {self.length - 1}, but is {self.token}")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = FeedForward) -> Numbers:
    """layer  makes the feed-forward layer: layer(width, hidden)"""
    draws = make_generator(setup.seed)
    made = layer(setup.width, setup.hidden).double()
    init_parameters(made, {"*.weight": fan_in(), "*.bias": normal(0.1)}, setup.seed)
    x = torch.randn(1, setup.length, setup.width, generator=draws, dtype=torch.float64)
    replaced = x.clone()
    replaced[:, setup.token] = torch.randn(setup.width, generator=draws, dtype=torch.float64)
    order = torch.randperm(setup.length, generator=draws)
    with torch.no_grad():
        out = made(x)
        alone = torch.cat([made(token) for token in x.split(1, 1)], 1)
        return {
            "token": setup.token,
            "changes": _moved(made(replaced), out),
            "changes in attention": _moved(_attended(attention, replaced), _attended(attention, x)),
            "difference alone": float((alone - out).abs().max()),
            "difference in another order": float((made(x[:, order]) - out[:, order]).abs().max()),
        }


def _attended(attention: Attention, x: Tensor) -> Tensor:
    """Self-attention of one head whose projections are the identity."""
    return attention(x[:, None], x[:, None], x[:, None])[:, 0]


def _moved(after: Tensor, before: Tensor) -> list[float]:
    moved: list[float] = (after - before)[0].abs().amax(-1).tolist()
    return moved


def _others(numbers: Numbers, name: str) -> list[float]:
    return [change for at, change in enumerate(numbers[name]) if at != numbers["token"]]


def _place(numbers: Numbers) -> str:
    """The token that was replaced, counted from 1 as readers do."""
    return f"{numbers['token'] + 1} of {len(numbers['changes'])}"


def verdict(numbers: Numbers) -> Verdict:
    own, others = numbers["changes"][numbers["token"]], max(_others(numbers, "changes"))
    attended = min(_others(numbers, "changes in attention"))
    alike = max(numbers["difference alone"], numbers["difference in another order"])
    return decide(
        own > 1e-3 and others == 0 and attended > 1e-6 and alike < 1e-12,
        f"Token {_place(numbers)} replaced, its own output moves by {own:.2f} and the others by {others:g} at most; in "
        f"self-attention every other one moves, by {attended:.1e} at least. Alone or in another order tokens come out "
        f"the same, to {alike:.0g}.",
    )


@wrong_answer(
    "000 1.4d",
    says="The feed-forward part captures local patterns between neighbouring tokens.",
    right="It sees one token at a time; only attention carries anything from one token to another.",
)
def _neighbours(numbers: Numbers) -> Verdict:
    at = numbers["token"]
    near = [change for place, change in enumerate(numbers["changes"]) if abs(place - at) == 1]
    return decide(
        max(near) > 0,
        f"Token {_place(numbers)} replaced, the outputs of its neighbours move by {max(near):g}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=5.0)
    curves = {"feed-forward": numbers["changes"], "self-attention": numbers["changes in attention"]}
    plot_lines(axes, list(range(1, len(numbers["changes"]) + 1)), curves)
    # zeros have a place on this axis, next to changes that are small
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set(xlabel="token", ylabel="change of its output", title=f"What replacing token {numbers['token'] + 1} moves")
    return figure
