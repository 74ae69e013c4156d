"""What does layer normalisation do?

Claim: Layer norm normalises the features of each token to mean 0 and variance 1, then applies a learned gain and bias,
    2 D parameters. Scaling or shifting the input does not change the output, and scaling divides the gradient by the
    scale. So activations and gradients keep their size through a stack whose weights are too small or too large.
Measures: Mean and variance of each token after a real norm in float64, and its effect on other tokens, on scale and on
    shift. The components of the gradient along the vector of ones and along the output. The size of activations and of
    the input gradient for growing depth of linear layers, with and without a norm before each.
Finding: Every token has mean 0 up to {{ n["largest mean"]|at_most }} and variance 1 up to {{ n["largest error of
    variance"]|at_most }}. If one token is replaced, the others change by {{ n["change of other tokens"]|short }}. There
    are {{ n.parameters }} parameters for width {{ n.width }}. Multiplying the input by {{ n.factor|short }} divides the
    gradient by {{ n["gradient divided by"]|fixed(3) }}. The gradient at the input of {{ n.depths[-1] }} linear layers
    of gains {{ n.gains|join_numbers }} is {% for row in n["gradients without norms"] %}{{ row[-1]|short }}{{ " and " if
    not loop.last }}{% endfor %} without norms and {% for row in n["gradients with norms"] %}{{ row[-1]|fixed }}{{ " and
    " if not loop.last }}{% endfor %} with a norm before each.
Budget: 2 seconds
Source: 000 1.4e
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import count_parameters, largest_difference
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.init import constant, fan_in, init_parameters
from regard.nn.norms import norm

MATHS = r"y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad \mu = \frac{1}{D} \sum_c x_c"


def layer_norm(width: int) -> nn.Module:
    """Build the layer norm that the models of this package use."""
    return norm("layer", width)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: random tokens, and stacks of linear layers with and without layer norm.

    width   width of the tokens; at least 8, because a token of smaller width can have a variance as small as the
            norm's eps
    length  number of tokens; at least 2, because one is replaced
    factor  factor by which the input is multiplied, at least 1
    depths  numbers of layers of the stacks, at most 64
    gains   gains of the weights of each layer; signals shrink with a gain below 1 and grow with a gain above 1
    """

    width: int = 64
    length: int = 7
    factor: float = 10.0
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    gains: tuple[float, ...] = (0.5, 2.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2, "tokens, of which one is replaced")
        check_at_least(self, width=8, factor=1)  # a smaller variance would be of the size of the norm's eps
        if self.depths[-1] > 64:
            raise setting_error(self, "depths must be at most 64", "depths")
        if any(gain <= 0 or gain == 1 for gain in self.gains):
            raise setting_error(self, "gains must be above 0 and not 1", "gains")


SMOKE = Setup()


def run(setup: Setup, layer: Callable[[int], Any] = layer_norm) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    layer  builds the norm: layer(width)
    """
    draws = make_generator(setup.seed)
    made = layer(setup.width).double()
    shape = (2, setup.length, setup.width)
    # every token has its own scale and mean
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
        "parameters": count_parameters(made),
        "width": setup.width,
        "largest mean": float(out.mean(-1).abs().max()),
        "largest error of variance": float((out.var(-1, correction=0) - 1).abs().max()),
        "change of other tokens": float(moved.max()),
        "factor": setup.factor,
        "difference if scaled and shifted": largest_difference(other, out),
        "gradient divided by": float(gradient.norm() / stretched.norm()),
        "gradient along the ones": _largest_cosine(gradient, torch.ones_like(x)),
        "gradient along the output": _largest_cosine(gradient, out),
        "depths": list(setup.depths),
        "gains": list(setup.gains),
    } | {
        f"{what} {how}": [
            [_measure_stack(setup, kind, depth, gain)[at] for depth in setup.depths] for gain in setup.gains
        ]
        for how, kind in (("with norms", layer), ("without norms", None))
        for at, what in enumerate(("activations", "gradients"))
    }


def _gradient(made: Any, x: Tensor, towards: Tensor) -> Tensor:
    at = x.clone().requires_grad_()
    return torch.autograd.grad((made(at) * towards).sum(), at)[0]


def _largest_cosine(gradient: Tensor, direction: Tensor) -> float:
    """Return the largest absolute cosine similarity of a token's gradient and its direction, over all tokens."""
    return float(torch.cosine_similarity(gradient, direction, dim=-1).abs().max())


def _measure_stack(setup: Setup, layer: Callable[[int], Any] | None, depth: int, gain: float) -> tuple[float, float]:
    """Return the root mean square of the output of a stack of linear layers, and of the gradient at its input.

    layer  builds the norm before each linear layer; None for no norm
    gain   gain of the weights
    """
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
    return _root_mean_square(out), _root_mean_square(gradient)


def _root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.detach().square().mean()))


def verdict(numbers: Numbers) -> Decision:
    factor, gains, depth = numbers["factor"], numbers["gains"], numbers["depths"][-1]
    per_token = numbers["largest mean"] < 1e-12 and numbers["largest error of variance"] < 1e-4
    alone = numbers["change of other tokens"] == 0 and numbers["parameters"] == 2 * numbers["width"]
    # only eps, which is small compared with the variances, depends on the scale
    same = numbers["difference if scaled and shifted"] < 1e-4
    divided = abs(numbers["gradient divided by"] / factor - 1) < 1e-3
    across = numbers["gradient along the ones"] < 1e-9 and numbers["gradient along the output"] < 1e-3
    kept, lost = (
        [each for what in ("activations", "gradients") for each in zip(gains, numbers[f"{what} {how}"], strict=True)]
        for how in ("with norms", "without norms")
    )
    steady = all(gain / 3 < size < 3 * gain for gain, row in kept for size in row)
    powers = all(abs(math.log(row[-1]) / math.log(gain) / depth - 1) < 0.2 for gain, row in lost)
    # narrow stacks and gains near 1 depend on the random weights
    clear = numbers["width"] >= 64 and all(gain <= 0.7 or gain >= 1.4 for gain in gains)
    lacks = [
        "the width must be at least 64, and every gain at most 0.7 or at least 1.4" * (not clear),
        "gains above and below 1 are needed" * (not min(gains) < 1 < max(gains)),
        "at least 8 layers are needed" * (depth < 8),
        "the factor must be at least 2" * (factor < 2),
    ]
    return decide(
        per_token and alone and same and divided and across and steady and powers,
        missing="; ".join(filter(None, lacks)),
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2)
    for axes, what in zip(panels, ("activations", "gradients"), strict=True):
        curves = {
            f"gain {gain:g} {how}": row
            for how in ("without norms", "with norms")
            for gain, row in zip(numbers["gains"], numbers[f"{what} {how}"], strict=True)
        }
        plot_lines(axes, numbers["depths"], curves)
        axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="root mean square", title=what.capitalize())
    return figure
