"""Why should self-attention have equal input and output sizes?

Claim: Layers with equal input and output sizes can be stacked to any depth. The residual sum x + f(x) needs equal
    sizes, and without residual sums the gradient vanishes in a deep stack.
Measures: Which output widths a next layer and a residual sum accept, tested with real layers. The gradient at the input
    of a stack of pre-norm layers, with and without residual sums.
Finding: A layer of width {{ n.width }} has outputs of width {{ n["output width"] }}. Of the output widths {{
    n.outputs|join_numbers }} the residual sum accepts {{ accepted["sum"]|join_numbers or "none" }} and the next layer
    {{ accepted["next layer"]|join_numbers or "none" }}. {% if n.depths %}Through {{ n.depths[-1] }} layers the gradient
    is {{ n["gradient with sums"][-1]|short }} with residual sums and {{ n["gradient without sums"][-1]|short }}
    without. {%- else %}It cannot be stacked.{% endif %}
Budget: 5 seconds
Source: 003 12.2
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.lab.drawing import Figure, line_figure
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.init import fan_in, init_parameters, normal

MATHS = r"x_{l+1} = x_l + f_l(x_l), \quad f_l: R^{N D} \to R^{N D}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the attention layer and of stacks of such layers.

    width    width of the input
    heads    number of heads
    length   number of tokens
    outputs  output widths to test; must contain `width`
    depths   numbers of layers of the stacks
    """

    width: int = 24
    heads: int = 3
    length: int = 11
    outputs: tuple[int, ...] = (12, 23, 24, 25, 48)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, length=2, depths=2)
        if self.width not in self.outputs or len(set(self.outputs)) == 1:
            raise setting_error(self, f"outputs must contain the width, {self.width}, and another", "outputs")


SMOKE = Setup(depths=(1, 4, 16))


def run(setup: Setup, layer: Callable[[int, int], Any] = AttentionLayer) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    layer  builds the attention layer: layer(width, heads)
    """
    x = torch.randn(1, setup.length, setup.width, generator=make_generator(setup.seed), dtype=torch.float64)
    attended = _build_layer(layer, setup, 0)(x).detach()
    own = attended.shape[-1]
    adds, stacks = [], []
    for width in setup.outputs:
        out = attended if width == own else nn.Linear(own, width).double()(attended)
        adds.append(_accepts(x.add, out))
        stacks.append(_accepts(_build_layer(layer, setup, 2), out))
    depths = setup.depths if own == setup.width else ()  # layers of different sizes cannot be stacked
    return {
        "width": setup.width,
        "output width": own,
        "outputs": list(setup.outputs),
        "accepted by the sum": adds,
        "accepted by the next layer": stacks,
        "depths": list(depths),
        "gradient with sums": [_gradient(layer, setup, x, depth, 1.0) for depth in depths],
        "gradient without sums": [_gradient(layer, setup, x, depth, 0.0) for depth in depths],
    }


def _build_layer(layer: Callable[[int, int], Any], setup: Setup, number: int) -> Any:
    made = layer(setup.width, setup.heads).double()
    init_parameters(made, {"*.weight": fan_in(), "*.bias": normal(0.1)}, 1000 * setup.seed + number)
    return made


def _accepts(taker: Callable[[Tensor], Any], x: Tensor) -> bool:
    try:
        taker(x)
    except (RuntimeError, ValueError):  # torch refuses the sum, our layer the input
        return False
    return True


def _gradient(layer: Callable[[int, int], Any], setup: Setup, x: Tensor, depth: int, kept: float) -> float:
    """Return the norm of the gradient at the input of a stack of layers.

    The differentiated number is the difference between the first and the last output row, because this difference
    vanishes if the rows become equal in the stack.

    depth  number of attention layers in the stack
    kept   factor of the residual connection: 1.0 with, 0.0 without
    """
    start = x.clone().requires_grad_()
    out = start
    for number in range(depth):
        out = kept * out + _build_layer(layer, setup, number)(functional.layer_norm(out, (setup.width,)))
    # a difference of rows, because the stack must not make all rows equal
    (out[0, 0] - out[0, -1]).sum().backward()
    return float(start.grad.norm()) if start.grad is not None else 0.0


def verdict(numbers: Numbers) -> Decision:
    width, outputs = numbers["width"], numbers["outputs"]
    accepted = {
        by: [at for at, fits in zip(outputs, numbers[f"accepted by the {by}"], strict=True) if fits]
        for by in ("sum", "next layer")
    }
    only = numbers["output width"] == width and all(found == [width] for found in accepted.values())
    kept, lost = numbers["gradient with sums"], numbers["gradient without sums"]
    # there is no depth at all if a layer cannot follow another
    deep = not kept or numbers["depths"][-1] >= 16
    trained = bool(kept) and kept[-1] > 0.5 * kept[0] and lost[-1] < 1e-3 * lost[0]
    return decide(
        only and trained, missing="" if deep else "stacks of at least 16 layers are needed", accepted=accepted
    )


def draw(numbers: Numbers) -> Figure:
    curves = {"x + f(x)": numbers["gradient with sums"], "f(x)": numbers["gradient without sums"]}
    labels = {"xlabel": "layers", "ylabel": "gradient at the input", "title": "Effect of residual sums"}
    return line_figure(numbers["depths"], curves, xscale="log", yscale="log", **labels)
