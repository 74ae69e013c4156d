"""How sensitive is a softmax to its inputs, for example -3, 1, 100, 5, -1?

Claim: The derivatives of y = softmax(z) by z are y_i (1 - y_i) on the diagonal and -y_i y_j off it. If the largest
    input leads the n - 1 others by a gap g, no derivative exceeds (n - 1) e^-g: such a softmax is saturated, and
    insensitive. For -3, 1, 100, 5, -1 the gap is 95 and the largest derivative, that of y_3 by z_3, is 5.64e-42. In
    floating point y_3 (1 - y_3) is exactly 0, because 1 - y_3 cancels; the sum of the other weights gives its true
    value.
Measures: All derivatives in high precision, with 1 - y computed as the sum of the other weights; the same by automatic
    differentiation through `attend`; the same for inputs of ordinary size; how much the outputs change if any one input
    changes by a step.
Finding: The largest of the {{ n.inputs|length ** 2 }} derivatives is {{ n["largest derivative"]|short(3) }}{{ ": this
    softmax is saturated" if n["largest derivative"] < 1e-3 else ": this softmax is not saturated" }}. With a gap of {{
    n.gap|short(3) }} between the two largest of {{ n.inputs|length }} inputs it cannot exceed {{ n.inputs|length - 1 }}
    exp(-{{ n.gap|short(3) }}), which is at most {{ n["largest possible"]|at_most(3) }}. Automatic differentiation in
    float64 gives all but one of the derivatives up to a relative error of {{ n["error of the formula"]|at_most }}. The
    other one is that of the largest output by its own input: float64 gives y (1 - y) = {{ n["y (1 - y) of the largest
    in float64"]|short(3) }}, exactly it is {{ n["derivative of the largest"]|short(3) }}. A step of {{ n.step|short }}
    in any input changes no output by more than {{ n["largest change after a step"]|at_most(2) }}. With inputs divided
    by {{ n["divided by"]|short }} the largest derivative is {{ n["largest derivative, divided"]|short(3) }}.
Budget: 1 second
Source: 003 12.4, 003 12.4 code
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_heatmap
from regard.lab.measure import attention_weights
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"\frac{\partial y_i}{\partial z_i} = y_i (1 - y_i), \quad \frac{\partial y_i}{\partial z_j} = -y_i y_j"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the inputs of the softmax, and how they change.

    inputs      inputs of the saturated softmax; the largest leads by at most 400, so that 200 digits hold the
                derivatives
    divided_by  the same inputs divided by this number are the example of a softmax that is not saturated
    step        amount by which each input in turn rises and falls
    width       width of a query and keys whose scores are the inputs
    """

    inputs: tuple[float, ...] = (-3.0, 1.0, 100.0, 5.0, -1.0)
    divided_by: float = 100.0
    step: float = 1.0
    width: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, inputs=2)
        second, most = sorted(self.inputs)[-2:]
        if self.divided_by <= 0 or self.step <= 0:
            raise setting_error(self, "divided_by and step must be above 0", "divided_by", "step")
        if (most - second) / min(1.0, self.divided_by) > 400:
            text = "the two largest inputs must differ by at most 400, divided too, so that 200 digits hold derivatives"
            raise setting_error(self, text, "inputs", "divided_by")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    query = torch.eye(setup.width, dtype=torch.float64)[:1]

    def softmax(z: Tensor) -> Tensor:
        """Return the softmax of z, as the attention weights of a query and keys that have the scores z."""
        keys = torch.nn.functional.pad(z[:, None], (0, setup.width - 1))
        return attention_weights(attention, query, keys, beta=1.0)[0]

    def derivatives(z: Tensor) -> Tensor:
        z = z.clone().requires_grad_()
        outputs = softmax(z)
        return torch.stack([torch.autograd.grad(y, z, retain_graph=True)[0] for y in outputs])

    z = torch.tensor(setup.inputs, dtype=torch.float64)
    y, jacobian = softmax(z), derivatives(z)
    top, (second, most) = int(z.argmax()), sorted(setup.inputs)[-2:]
    exact = exact_jacobian(setup.inputs)
    steps = [(at, sign * setup.step) for at in range(len(z)) for sign in (-1, 1)]
    modest = [[float(entry) for entry in row] for row in exact_jacobian([x / setup.divided_by for x in setup.inputs])]
    return {
        "inputs": list(setup.inputs),
        "outputs": y.tolist(),
        "derivatives": [[float(entry) for entry in row] for row in exact],
        "largest derivative": float(max(abs(entry) for row in exact for entry in row)),
        "gap": most - second,
        "largest possible": (len(z) - 1) * math.exp(second - most),
        "error of the formula": max(
            abs(got - float(want)) / max(1e-290, abs(float(want)))  # relative; below 1e-290 floats lose digits
            for at, (row, wanted) in enumerate(zip(jacobian.tolist(), exact, strict=True))
            for by, (got, want) in enumerate(zip(row, wanted, strict=True))
            if (at, by) != (top, top)  # where floats cancel
        ),
        "y (1 - y) of the largest in float64": (y[top] * (1 - y[top])).item(),
        "derivative of the largest": float(exact[top][top]),
        "step": setup.step,
        "largest change after a step": max(exact_change(setup.inputs, at, step) for at, step in steps),
        "divided by": setup.divided_by,
        "largest derivative, divided": max(abs(entry) for row in modest for entry in row),
        "derivatives, divided": modest,
    }


def exact_softmax(inputs: Sequence[float]) -> list[Decimal]:
    """Return the softmax of the inputs, calculated with 200 decimal digits."""
    with localcontext(prec=200):
        powers = [Decimal(z).exp() for z in inputs]
        return [power / sum(powers) for power in powers]


def exact_jacobian(inputs: Sequence[float]) -> list[list[Decimal]]:
    """Return the Jacobian of the softmax with 200 digits: row i has the derivatives of output i."""
    with localcontext(prec=200):
        y = exact_softmax(inputs)
        return [[a * ((i == j) - b) for j, b in enumerate(y)] for i, a in enumerate(y)]


def exact_change(inputs: Sequence[float], at: int, step: float) -> float:
    """Return the largest absolute change of an output of the softmax if input `at` changes by `step`."""
    with localcontext(prec=200):
        changed = [z + step * (place == at) for place, z in enumerate(inputs)]
        pairs = zip(exact_softmax(inputs), exact_softmax(changed), strict=True)
        return float(max(abs(after - before) for before, after in pairs))


def verdict(numbers: Numbers) -> Decision:
    largest, possible = numbers["largest derivative"], numbers["largest possible"]
    bounded = largest <= possible * (1 + 1e-9) and largest <= 0.25
    cancelled = numbers["y (1 - y) of the largest in float64"] == 0 < numbers["derivative of the largest"]
    saturated = numbers["gap"] > 40
    return decide(
        bounded and numbers["error of the formula"] < 1e-9 and cancelled,
        missing="" if saturated else "the largest input must lead by more than 40, for then 1 - y is 0 in float64",
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(columns=2)
    titles = {"derivatives": ", ".join(f"{z:g}" for z in numbers["inputs"]), "derivatives, divided": "divided"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        exponents = [[math.log10(max(abs(entry), 1e-99)) for entry in row] for row in numbers[name]]
        plot_heatmap(axes, exponents, low=min(map(min, exponents)), high=max(map(max, exponents)))
        axes.set(xlabel="input j", ylabel="output i", title=f"log10 of derivatives, z = {title}")
    return figure
