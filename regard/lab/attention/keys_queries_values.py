"""Why use separate keys, queries and values instead of the tokens themselves?

Claim: Queries and keys decide where a token looks; values decide what it returns. Let u_a .. u_d be orthogonal vectors
    of a large length, x1 = u_d + u_b, x2 = u_a, x3 = u_c + u_b. With q = k = v = x the output c2 is u_a, and no
    multiple of u_d or u_c added to x2 makes it u_b, because the score of a token with itself is the largest. With K =
    I, Q = (u_d u_a' + u_c u_d') / beta^2 and V = (u_b u_b' - u_c u_c') / beta^2, where beta is the length, c2 is u_b
    and c1 is u_b - u_c.
Measures: The distance of the outputs of `attend` from those vectors, relative to the length, for both constructions.
    The distance from u_b after adding many multiples of u_d and u_c to x2.
Finding: With the tokens themselves as queries, keys and values c2 is u_a (up to {{ n["distance of c2 from u_a, tokens
    alone"]|at_most }} of its length). If {{ n.multiples|join_numbers }} times u_d or u_c is added to x2, the distance
    of c2 from u_b is at least {{ never|at_least(3) }} times that length. With the three matrices c2 is u_b (up to {{
    n["distance of c2 from u_b, with Q, K, V"]|at_most }} of its length) and c1 is u_b - u_c (up to {{ n["distance of
    c1 from u_b - u_c, with Q, K, V"]|at_most }}).
Budget: 1 second
Source: 001 review 4, 001 1e-i, 001 1e-ii
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, mark_level, plot_lines
from regard.lab.measure import attend_matrices
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = (
    r"V = \frac{u_b u_b^\top - u_c u_c^\top}{\beta^2}, \quad K = I, \quad "
    r"Q = \frac{u_d u_a^\top + u_c u_d^\top}{\beta^2}"
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the orthogonal vectors u_a, u_b, u_c and u_d, and what is added to a token.

    length     norm of each vector, called beta in the claim; below 6 the verdict is unclear, because the claim is
               about a large length
    width      width of the vectors; at least 4, because four vectors are orthogonal
    multiples  multiples of u_d and of u_c that are added to the token x2 in the first construction
    """

    length: float = 6.0
    width: int = 7
    multiples: tuple[float, ...] = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, width=4)
        if self.length <= 0:
            raise setting_error(self, "length must be above 0", "length")


SMOKE = Setup()


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    square = torch.randn(setup.width, setup.width, generator=make_generator(setup.seed), dtype=torch.float64)
    a, b, c, d = u = setup.length * torch.linalg.qr(square).Q[:4]
    x = torch.stack([d + b, a, c + b])

    def off(got: Tensor, want: Tensor) -> float:
        return torch.dist(got, want).item() / setup.length

    def with_more(direction: Tensor, times: float) -> Tensor:
        changed = x.clone()
        changed[1] += times * direction
        return attend_matrices(attention, changed, changed, changed, beta=1.0)[1]

    Q = (torch.outer(d, a) + torch.outer(c, d)) / setup.length**2
    V = (torch.outer(b, b) - torch.outer(c, c)) / setup.length**2
    out = attend_matrices(attention, x @ Q.mT, x, x @ V.mT, beta=1.0)
    alone = attend_matrices(attention, x, x, x, beta=1.0)
    return {
        "length": setup.length,
        "distance of c2 from u_a, tokens alone": off(alone[1], a),
        "distance of c2 from u_b, tokens alone": off(alone[1], b),
        "distance of c from x, tokens alone": off(alone, x),
        "multiples": list(setup.multiples),
        "distance from u_b, u_d added": [off(with_more(d, times), b) for times in setup.multiples],
        "distance from u_b, u_c added": [off(with_more(c, times), b) for times in setup.multiples],
        "distance of c2 from u_b, with Q, K, V": off(out[1], b),
        "distance of c1 from u_b - u_c, with Q, K, V": off(out[0], b - c),
        "outputs along u": (out[:2] @ u.mT / setup.length**2).tolist(),
    }


def verdict(numbers: Numbers) -> Decision:
    never = min(numbers["distance from u_b, u_d added"] + numbers["distance from u_b, u_c added"])
    near = [value for name, value in numbers.items() if name.startswith("distance of c") and "u_b, tokens" not in name]
    long = numbers["length"] >= 6
    return decide(
        never > 1 and max(near) < 1e-9,
        missing="" if long else "the vectors must have a length of at least 6",
        never=never,
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    curves = {f"{u} added to x2": numbers[f"distance from u_b, {u} added"] for u in ("u_d", "u_c")}
    plot_lines(axes, numbers["multiples"], curves, overlapping=True)
    mark_level(axes, numbers["distance of c2 from u_b, with Q, K, V"], "with Q, K and V")
    axes.set(xlabel="multiple added", ylabel="distance of c2 from u_b, in lengths", title="Tokens alone: never u_b")
    return figure
