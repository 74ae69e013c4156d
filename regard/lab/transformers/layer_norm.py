"""What does layer normalisation do?

Claim: It brings the features of each token, by itself, to mean 0 and variance 1, then applies a learned gain and bias,
    2 D numbers. Input scaled or shifted comes out the same, and its gradient is divided by the scale; so activations
    and gradients keep their size through a stack whose weights are too small or too large.
Measures: Mean and variance of each token after a real norm in float64, and what it does to other tokens, to scale and
    shift; the parts of the gradient along the ones and along the output; the size of activations and of the gradient
    of the input at growing depth of linear layers, with a norm before each and without.
Budget: 2 seconds
Source: 000 1.4e
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide, join_numbers
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.nn.init import constant, fan_in, init_parameters
from regard.nn.norms import norm

MATHS = r"y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad \mu = \frac{1}{D} \sum_c x_c"


def layer_norm(width: int) -> nn.Module:
    """The norm that the models of 2017 and after have."""
    return norm("layer", width)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How many tokens of what width, what their input is multiplied by, and the stacks: depths and gains of weights.

    gains  how much each layer's weights stretch: below 1 they are too small, above too large
    """

    width: int = 64
    length: int = 7
    factor: float = 10.0
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    gains: tuple[float, ...] = (0.5, 2.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2, "tokens, of which one changes and the others may")
        if any(gain <= 0 or gain == 1 for gain in self.gains):
            raise ConfigError(f"gains are above 0, and not 1, at which nothing grows or fades: gains={self.gains}")


SMOKE = Setup()


def run(setup: Setup, layer: Callable[[int], Any] = layer_norm) -> Numbers:
    """layer  makes the norm: layer(width)"""
    draws = make_generator(setup.seed)
    made = layer(setup.width).double()
    shape = (2, setup.length, setup.width)
    # every token of another size and around another mean
    sizes, means = 1 + 4 * torch.rand(2, *shape[:2], 1, generator=draws, dtype=torch.float64)
    x = means + sizes * torch.randn(shape, generator=draws, dtype=torch.float64)
    replaced = x.clone()
    replaced[0, 0] = torch.randn(setup.width, generator=draws, dtype=torch.float64)
    towards = torch.randn(shape, generator=draws, dtype=torch.float64)
    with torch.no_grad():
        out, moved = made(x), (made(replaced) - made(x)).abs()
        other = made(setup.factor * x + 3)
    moved[0, 0] = 0
    gradient, stretched = (_gradient(made, at, towards) for at in (x, setup.factor * x))
    return {
        "parameters": sum(parameter.numel() for parameter in made.parameters()),
        "width": setup.width,
        "largest mean": float(out.mean(-1).abs().max()),
        "largest error of variance": float((out.var(-1, correction=0) - 1).abs().max()),
        "change of other tokens": float(moved.max()),
        "factor": setup.factor,
        "difference if scaled and shifted": float((other - out).abs().max()),
        "gradient divided by": float(gradient.norm() / stretched.norm()),
        "gradient along the ones": _along(gradient, torch.ones_like(x)),
        "gradient along the output": _along(gradient, out),
        "depths": list(setup.depths),
        "gains": list(setup.gains),
    } | {
        f"{what} {how}": [[_through(setup, kind, depth, gain)[at] for depth in setup.depths] for gain in setup.gains]
        for how, kind in (("with norms", layer), ("without", None))
        for at, what in enumerate(("activations", "gradients"))
    }


def _gradient(made: Any, x: Tensor, towards: Tensor) -> Tensor:
    at = x.clone().requires_grad_()
    return torch.autograd.grad((made(at) * towards).sum(), at)[0]


def _along(gradient: Tensor, direction: Tensor) -> float:
    """The largest cosine of a token's gradient with a direction."""
    return float(torch.cosine_similarity(gradient, direction, dim=-1).abs().max())


def _through(setup: Setup, layer: Callable[[int], Any] | None, depth: int, gain: float) -> tuple[float, float]:
    """Root mean squares of what leaves a stack, and of the gradient that reaches its input, both 1 at the start."""
    d = setup.width
    parts = [
        nn.Sequential(nn.Identity() if layer is None else layer(d), nn.Linear(d, d, bias=False)) for _ in range(depth)
    ]
    stack = nn.Sequential(*parts).double()
    init_parameters(stack, {"*.1.weight": fan_in(gain), "*.weight": constant(1.0), "*.bias": constant(0.0)}, setup.seed)
    draws = make_generator(setup.seed)
    x, towards = torch.randn(2, 1, setup.length, d, generator=draws, dtype=torch.float64)
    x.requires_grad_()
    out = stack(x)
    (gradient,) = torch.autograd.grad((out * towards).sum(), x)
    return _size(out), _size(gradient)


def _size(x: Tensor) -> float:
    return math.sqrt(float(x.detach().square().mean()))


def verdict(numbers: Numbers) -> Verdict:
    d, factor, gains = numbers["width"], numbers["factor"], numbers["gains"]
    per_token = numbers["largest mean"] < 1e-12 and numbers["largest error of variance"] < 1e-4
    alone = numbers["change of other tokens"] == 0 and numbers["parameters"] == 2 * d
    # eps, small beside the variances, is all that a change of scale leaves to see
    same = numbers["difference if scaled and shifted"] < 1e-4
    divided = abs(numbers["gradient divided by"] / factor - 1) < 1e-3
    across = numbers["gradient along the ones"] < 1e-9 and numbers["gradient along the output"] < 1e-3
    kept = [numbers[f"{what} with norms"] for what in ("activations", "gradients")]
    held = all(
        gain / 3 < size < 3 * gain for what in kept for gain, row in zip(gains, what, strict=True) for size in row
    )
    lost = [numbers[f"{what} without"] for what in ("activations", "gradients")]
    depth = numbers["depths"][-1]
    gone = all(
        abs(math.log(row[-1]) / math.log(gain) / depth - 1) < 0.2
        for what in lost
        for gain, row in zip(gains, what, strict=True)
    )
    shown = [f"{row[-1]:.1e}" for row in lost[1]], [f"{row[-1]:.2f}" for row in kept[1]]
    return decide(
        per_token and alone and same and divided and across and held and gone,
        f"Every token has mean 0 to {numbers['largest mean']:.0g} and variance 1 to "
        f"{numbers['largest error of variance']:.0g}, others move by {numbers['change of other tokens']:g} when one is "
        f"replaced, and there are {numbers['parameters']} parameters for width {d}. Input times {factor:g} divides the "
        f"gradient by {numbers['gradient divided by']:.3f}. Through {depth} layers of gains {join_numbers(gains)} the "
        f"gradient comes to {', '.join(shown[0])} without norms and to {', '.join(shown[1])} with them.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2)
    for axes, what in zip(panels, ("activations", "gradients"), strict=True):
        curves = {
            f"gain {gain:g} {how}": row
            for how in ("without", "with norms")
            for gain, row in zip(numbers["gains"], numbers[f"{what} {how}"], strict=True)
        }
        plot_lines(axes, numbers["depths"], curves)
        axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="root mean square", title=what.capitalize())
    return figure
