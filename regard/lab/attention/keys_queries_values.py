"""Why use separate keys, queries and values instead of the tokens themselves?

Claim: They separate where a token looks from what it returns. Let u_a .. u_d be orthogonal vectors of a large length,
    x1 = u_d + u_b, x2 = u_a, x3 = u_c + u_b. With q = k = v = x the output c2 is u_a, and no multiple of u_d or u_c
    added to x2 makes it u_b, because the score of a token with itself is the largest. With K = I, Q = (u_d u_a' + u_c
    u_d') / beta^2 and V = (u_b u_b' - u_c u_c') / beta^2, where beta is the length, c2 is u_b and c1 is u_b - u_c.
Measures: The distance of the outputs of `attend` from those vectors, relative to the length, for both constructions.
    The distance from u_b after adding many multiples of u_d and u_c to x2.
Budget: 1 second
Source: 001 1e
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = (
    r"V = \frac{u_b u_b^\top - u_c u_c^\top}{\beta^2}, \quad K = I, \quad "
    r"Q = \frac{u_d u_a^\top + u_c u_d^\top}{\beta^2}"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The length and the width of the vectors u, and the multiples to add to x2."""

    length: float = 6.0
    width: int = 7
    multiples: tuple[float, ...] = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)
    seed: int = 0


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    square = torch.randn(setup.width, setup.width, generator=make_generator(setup.seed), dtype=torch.float64)
    a, b, c, d = u = setup.length * torch.linalg.qr(square).Q[:4]
    x = torch.stack([d + b, a, c + b])

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None, None], k[None, None], v[None, None], beta=1.0)[0, 0]

    def off(got: Tensor, want: Tensor) -> float:
        return torch.dist(got, want).item() / setup.length

    def with_more(direction: Tensor, times: float) -> Tensor:
        changed = x.clone()
        changed[1] += times * direction
        return attended(changed, changed, changed)[1]

    Q = (torch.outer(d, a) + torch.outer(c, d)) / setup.length**2
    V = (torch.outer(b, b) - torch.outer(c, c)) / setup.length**2
    out = attended(x @ Q.mT, x, x @ V.mT)
    alone = attended(x, x, x)
    return {
        "length": setup.length,
        "tokens: c2 off u_a": off(alone[1], a),
        "tokens: c2 off u_b": off(alone[1], b),
        "tokens: c off x": off(alone, x),
        "multiples": list(setup.multiples),
        "off u_b with u_d": [off(with_more(d, times), b) for times in setup.multiples],
        "off u_b with u_c": [off(with_more(c, times), b) for times in setup.multiples],
        "matrices: c2 off u_b": off(out[1], b),
        "matrices: c1 off u_b - u_c": off(out[0], b - c),
        "outputs along u": (out[:2] @ u.mT / setup.length**2).tolist(),
    }


def verdict(numbers: Numbers) -> Verdict:
    never = min(numbers["off u_b with u_d"] + numbers["off u_b with u_c"])
    itself = numbers["tokens: c2 off u_a"]
    second, first = numbers["matrices: c2 off u_b"], numbers["matrices: c1 off u_b - u_c"]
    return decide(
        itself < 1e-9 and numbers["tokens: c off x"] < 1e-9 and never > 1 and second < 1e-9 and first < 1e-9,
        f"With the tokens themselves c2 is u_a (relative distance {itself:.0g}), and its distance from u_b is at "
        f"least {never:.2f} lengths whatever is added. With the three matrices c2 is u_b (distance {second:.0g}) and "
        f"c1 is u_b - u_c (distance {first:.0g}).",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    curves = {"u_d added to x2": numbers["off u_b with u_d"], "u_c added to x2": numbers["off u_b with u_c"]}
    plot_lines(axes, numbers["multiples"], curves, overlapping=True)
    axes.axhline(numbers["matrices: c2 off u_b"], color="#000000", linestyle="--", label="with Q, K and V")
    axes.legend(frameon=False)
    axes.set(
        xlabel="multiple added", ylabel="distance of c2 from u_b, in lengths", title="Tokens alone cannot reach u_b"
    )
    return figure
