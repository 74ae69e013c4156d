"""Why are scores divided by the square root of d_k?

Claim: Because the variance of q . k is d_k for random q and k of unit variance. Without the division the scores of wide
    vectors differ so much that one weight takes almost everything: the softmax saturates, and for most queries its
    gradient vanishes. With it, both are the same for every width. It is not clipping: all scores shrink by the same
    factor and none is bounded. It is not needed against overflow either, which subtracting the largest score prevents.
Measures: For growing widths, with and without the division: the variance of scores, the largest weight, the gradient at
    the scores and at q through `attend` (median and mean over queries), and the largest divided score. Whether float32
    is finite and correct for undivided scores far beyond the range of exp.
Budget: 6 seconds
Source: 001 review, 004 2a
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = r"\mathrm{Var}(q \cdot k) = d_k, \quad \mathrm{Var}(\frac{q \cdot k}{\sqrt{d_k}}) = 1"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Widths to compare, the number of keys per query, and the number of queries."""

    widths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    keys: int = 16
    queries: int = 1000
    value_width: int = 3
    overflow_width: int = 4096
    overflow_size: float = 4.0  # of the entries of q and k, so that scores exceed the range of exp in float32
    seed: int = 0


SMOKE = Setup(queries=400)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=draws, dtype=torch.float64)

    one_hot = torch.eye(setup.keys, dtype=torch.float64)[None, None]
    forms: dict[str, float | None] = {"plain": 1.0, "scaled": None}
    numbers: Numbers = {"widths": list(setup.widths), "largest scaled score": []}
    measured = ("variance", "largest weight", "gradient", "gradient of q", "mean gradient of q")
    numbers |= {f"{what}, {form}": [] for what in measured for form in forms}
    for width in setup.widths:
        # every query has its own keys, like a head
        q, k = normal(setup.queries, 1, width), normal(setup.queries, setup.keys, width)
        v, wanted = normal(setup.queries, setup.keys, setup.value_width), normal(setup.queries, 1, setup.value_width)
        products = q @ k.mT
        numbers["largest scaled score"].append((products * width**-0.5).abs().max().item())
        for form, beta in forms.items():
            weights = attention(q, k, one_hot.expand(-1, setup.queries, -1, -1), beta=beta)
            # the logarithm of a weight is its score plus a constant per row
            numbers[f"variance, {form}"].append(weights.log().var(-1).mean().item())
            numbers[f"largest weight, {form}"].append(weights.amax(-1).mean().item())
            q_leaf, added = q.clone().requires_grad_(), torch.zeros_like(products, requires_grad=True)
            loss = (attention(q_leaf, k, v, beta=beta, scores=added) * wanted).sum()
            to_scores, to_q = torch.autograd.grad(loss, (added, q_leaf), materialize_grads=True)
            numbers[f"gradient, {form}"].append(to_scores.norm(dim=-1).median().item())
            numbers[f"gradient of q, {form}"].append(to_q.norm(dim=-1).median().item())
            numbers[f"mean gradient of q, {form}"].append(to_q.norm(dim=-1).mean().item())
    q, k = (setup.overflow_size * normal(7, n, setup.overflow_width) for n in (1, setup.keys))
    v = normal(7, setup.keys, setup.value_width)
    single = attention(q.float(), k.float(), v.float(), beta=1.0)
    numbers["overflow: largest score"] = (q @ k.mT).max().item()
    numbers["overflow: exp holds up to"] = math.log(torch.finfo(torch.float32).max)
    numbers["overflow: share finite"] = single.isfinite().double().mean().item()
    numbers["overflow: off float64"] = (single - attention(q, k, v, beta=1.0)).nan_to_num(1e9).abs().max().item()
    return numbers


def verdict(numbers: Numbers) -> Verdict:
    widths, last = numbers["widths"], numbers["widths"][-1]
    is_width = all(abs(got / d - 1) < 0.15 for got, d in zip(numbers["variance, plain"], widths, strict=True))
    is_one = all(abs(got - 1) < 0.15 for got in numbers["variance, scaled"])
    sharp, soft = numbers["largest weight, plain"], numbers["largest weight, scaled"]
    plain, scaled = numbers["gradient, plain"], numbers["gradient, scaled"]
    saturates = sharp[-1] > 0.9 and max(soft) < 0.5
    vanishes = plain[-1] < 0.05 * plain[0] and min(scaled) > 0.5 * max(scaled)
    # undivided scores beyond the range of exp must still give correct outputs
    beyond = numbers["overflow: largest score"] > numbers["overflow: exp holds up to"]
    no_overflow = beyond and numbers["overflow: share finite"] == 1 and numbers["overflow: off float64"] < 1e-2
    return decide(
        is_width and is_one and saturates and vanishes and no_overflow,
        f"At width {last} the variance of scores is {numbers['variance, plain'][-1]:.0f}, after division "
        f"{numbers['variance, scaled'][-1]:.2f}. From width {widths[0]} to {last} the largest weight goes from "
        f"{sharp[0]:.2f} to {sharp[-1]:.2f} and the median gradient at the scores from {plain[0]:.1e} to "
        f"{plain[-1]:.1e}; after division, from {soft[0]:.2f} to {soft[-1]:.2f} and from {scaled[0]:.1e} to "
        f"{scaled[-1]:.1e}.",
    )


@wrong_answer(
    "001 review",
    says="Dividing clips the scores, so that gradients do not explode.",
    right="Dividing keeps the variance at 1 and bounds nothing; without it most gradients vanish.",
)
def _clips_against_explosion(numbers: Numbers) -> Verdict:
    plain, scaled, last = numbers["gradient, plain"], numbers["gradient, scaled"], numbers["widths"][-1]
    to_q, mean = numbers["gradient of q, plain"], numbers["mean gradient of q, plain"]
    return decide(
        plain[-1] > scaled[-1] and to_q[-1] > to_q[0],
        f"Without division the median gradient at the scores is {plain[-1]:.0g} at width {last}, with division "
        f"{scaled[-1]:.0g}. Without division the median gradient at q falls from {to_q[0]:.1e} to {to_q[-1]:.1e}: "
        f"for most queries it vanishes, while the few queries near a tie raise the mean from {mean[0]:.1f} to "
        f"{mean[-1]:.1f}. Nothing is clipped: divided scores reach {numbers['largest scaled score'][-1]:.1f}.",
    )


@wrong_answer(
    "004 2a",
    says="Without dividing, the exponentials of the softmax grow too large for stable numbers.",
    right="Subtracting the largest score prevents overflow; dividing prevents the softmax from saturating.",
)
def _prevents_overflow(numbers: Numbers) -> Verdict:
    largest, holds = numbers["overflow: largest score"], numbers["overflow: exp holds up to"]
    finite, off = numbers["overflow: share finite"], numbers["overflow: off float64"]
    return decide(
        largest > holds and (finite < 1 or off > 1e-2),
        f"For undivided scores up to {largest:.0f}, while exp in float32 overflows above {holds:.0f}, {finite:.0%} "
        f"of the outputs are finite and differ from float64 by at most {off:.0g}: the largest score is subtracted "
        "first.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(columns=2)
    forms = {"undivided": "plain", "divided by the root": "scaled"}
    plot_lines(left, numbers["widths"], {name: numbers[f"largest weight, {form}"] for name, form in forms.items()})
    left.set(xscale="log", xlabel="d_k", ylabel="largest weight", title="Saturation")
    plot_lines(right, numbers["widths"], {name: numbers[f"gradient, {form}"] for name, form in forms.items()})
    right.set(xscale="log", yscale="log", xlabel="d_k", ylabel="median gradient at the scores", title="Gradient")
    return figure
