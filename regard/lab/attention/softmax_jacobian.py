"""How sensitive is a softmax whose inputs are -3, 1, 100, 5, -1?

Claim: Hardly at all: it is saturated. The derivatives are y_i (1 - y_i) on the diagonal and -y_i y_j off it, and the
    largest one in floating point is e^-95 = 5.5e-42. For the winning input y (1 - y) is exactly 0 in floating point,
    because 1 - y cancels; its true value is the sum of the other weights.
Measures: The 25 derivatives by automatic differentiation through `attend`, against the formula; the same for scores of
    ordinary size; how much the outputs change if any one input changes by 1.
Budget: 1 second
Source: 003 12.4
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_heatmap

MATHS = r"\frac{\partial y_i}{\partial z_i} = y_i (1 - y_i), \quad \frac{\partial y_i}{\partial z_j} = -y_i y_j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The inputs of the softmax, a divisor for an unsaturated softmax, and a step."""

    inputs: tuple[float, ...] = (-3.0, 1.0, 100.0, 5.0, -1.0)
    divided_by: float = 100.0
    step: float = 1.0
    width: int = 3
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    one_hot = torch.eye(len(setup.inputs), dtype=torch.float64)
    query = torch.eye(setup.width, dtype=torch.float64)[:1]

    def softmax(z: Tensor) -> Tensor:
        """Return the weights of attention for the scores z; query and keys are parallel to the first axis."""
        keys = torch.nn.functional.pad(z[:, None], (0, setup.width - 1))
        return attention(query[None, None], keys[None, None], one_hot[None, None], beta=1.0)[0, 0, 0]

    def derivatives(z: Tensor) -> Tensor:
        z = z.clone().requires_grad_()
        outputs = softmax(z)
        return torch.stack([torch.autograd.grad(y, z, retain_graph=True)[0] for y in outputs])

    z = torch.tensor(setup.inputs, dtype=torch.float64)
    y, jacobian = softmax(z), derivatives(z)
    formula = torch.diag(y) * (1 - y) - torch.outer(y, y) * (1 - one_hot)
    top = int(z.argmax())
    steps = [sign * setup.step * row for row in one_hot for sign in (-1, 1)]
    modest = derivatives(z / setup.divided_by)
    return {
        "inputs": list(setup.inputs),
        "outputs": y.tolist(),
        "derivatives": jacobian.tolist(),
        "largest derivative": jacobian.abs().max().item(),
        "e to the gap": math.exp(sorted(setup.inputs)[-2] - max(setup.inputs)),
        "off the formula": (jacobian - formula).abs().max().item(),
        "y (1 - y) of the winner in floats": (y[top] * (1 - y[top])).item(),
        "derivative of the winner": y[z < z.max()].sum().item(),
        "step": setup.step,
        "largest change after a step": max((softmax(z + step) - y).abs().max().item() for step in steps),
        "divided by": setup.divided_by,
        "largest derivative, divided": modest.abs().max().item(),
        "derivatives, divided": modest.tolist(),
    }


def verdict(numbers: Numbers) -> Verdict:
    largest, gap = numbers["largest derivative"], numbers["e to the gap"]
    formula = abs(largest / gap - 1) < 0.01 and numbers["off the formula"] < 1e-12 * gap
    cancelled = numbers["y (1 - y) of the winner in floats"] == 0 < numbers["derivative of the winner"] < 2 * gap
    awake = numbers["largest derivative, divided"] > 0.1
    return decide(
        formula and cancelled and awake and numbers["largest change after a step"] < 1e-40,
        f"The largest of the 25 derivatives is {largest:.1e}, e to the gap of the two largest inputs {gap:.1e}. For "
        f"the winner floating point gives y (1 - y) = {numbers['y (1 - y) of the winner in floats']:g}, while the "
        f"other weights sum to {numbers['derivative of the winner']:.1e}. A step of {numbers['step']:g} in any input "
        f"changes no output by more than {numbers['largest change after a step']:.0g}. With inputs divided by "
        f"{numbers['divided by']:g} the largest derivative is {numbers['largest derivative, divided']:.2f}.",
    )


@wrong_answer(
    "003 12.4",
    says="Since all derivatives are near zero, the softmax is very sensitive to its inputs.",
    right="With derivatives near zero outputs do not change: a saturated softmax is insensitive and cannot learn.",
)
def _very_sensitive(numbers: Numbers) -> Verdict:
    change = numbers["largest change after a step"]
    return decide(
        change > 0.01,
        f"A step of {numbers['step']:g} in any input changes no output by more than {change:.0g}: the softmax is "
        "insensitive.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(columns=2)
    shown = ", ".join(f"{z:g}" for z in numbers["inputs"])
    for axes, matrix, title in (
        (panels[0], numbers["derivatives"], f"z = {shown}"),
        (panels[1], numbers["derivatives, divided"], f"z / {numbers['divided by']:g}"),
    ):
        exponents = [[math.log10(max(abs(entry), 1e-99)) for entry in row] for row in matrix]
        plot_heatmap(axes, exponents, low=min(map(min, exponents)), high=max(map(max, exponents)))
        axes.set(xlabel="input j", ylabel="output i", title=f"log10 of derivatives, {title}")
    return figure
