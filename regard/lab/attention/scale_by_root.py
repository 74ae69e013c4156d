"""Why are scores divided by the square root of d_k?

Claim: Because the variance of q . k is d_k for random q and k of unit variance. Without the division the scores of wide
    vectors differ so much that one weight takes almost everything: the softmax saturates, and for most queries its
    gradient vanishes. With the division, variance and gradient are the same for every width. The division is not
    clipping: all scores shrink by the same factor and none is bounded. Nor is it needed against overflow, which is
    prevented by subtracting the largest score.
Measures: For growing widths, with and without the division: the variance of scores, the largest weight, the gradient at
    the scores and at q through `attend` (median and mean over queries), and the largest divided score. Whether float32
    is finite and correct for undivided scores far beyond the range of exp.
Finding: For random queries and keys with entries of mean 0 and variance 1 the variance of scores at width {{
    n.widths[-1] }} is {{ n["variance, undivided"][-1]|fixed(0) }}, after division by the root of the width {{
    n["variance, divided"][-1]|fixed }}. From width {{ n.widths[0] }} to {{ n.widths[-1] }} the mean of the largest of
    the {{ n["keys"] }} weights of a query goes from {{ n["largest weight, undivided"][0]|fixed }} to {{ n["largest
    weight, undivided"][-1]|fixed }} and the median gradient at the scores from {{ n["gradient, undivided"][0]|short }}
    to {{ n["gradient, undivided"][-1]|short }}; after division, from {{ n["largest weight, divided"][0]|fixed }} to {{
    n["largest weight, divided"][-1]|fixed }} and from {{ n["gradient, divided"][0]|short }} to {{ n["gradient,
    divided"][-1]|short }}.
Budget: 6 seconds
Source: 001 review 6, 004 2a-i
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import attention_weights
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"\mathrm{Var}(q \cdot k) = d_k, \quad \mathrm{Var}(\frac{q \cdot k}{\sqrt{d_k}}) = 1"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: random inputs of several widths, and inputs for the test of overflow.

    widths          widths d_k to compare; unless they reach from at most 16 to at least 256, the verdict is unclear
    keys            number of keys per query
    queries         number of queries; each has its own keys
    value_width     width of values
    overflow_width  width of the queries and keys in the test of overflow
    overflow_size   standard deviation of the entries of these queries and keys; large enough that scores exceed the
                    range of exp in float32
    """

    widths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    keys: int = 16
    queries: int = 1000
    value_width: int = 3
    overflow_width: int = 4096
    overflow_size: float = 4.0  # of the entries of q and k, so that scores exceed the range of exp in float32
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, keys=8, queries=200, overflow_width=64)
        if self.overflow_size**2 * self.overflow_width**0.5 < 64:
            text = "scores must exceed the largest exponent of float32, 88; raise overflow_size or overflow_width"
            raise setting_error(self, text, "overflow_size", "overflow_width")


SMOKE = Setup(queries=400)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=draws, dtype=torch.float64)

    forms: dict[str, float | None] = {"undivided": 1.0, "divided": None}
    numbers: Numbers = {"widths": list(setup.widths), "keys": setup.keys, "largest divided score": []}
    measured = (
        "variance",
        "largest weight",
        "gradient",
        "gradient of q",
        "mean gradient of q",
        "largest gradient of q",
    )
    numbers |= {f"{what}, {form}": [] for what in measured for form in forms}
    for width in setup.widths:
        # every query has its own keys, like a head
        q, k = normal(setup.queries, 1, width), normal(setup.queries, setup.keys, width)
        v, wanted = normal(setup.queries, setup.keys, setup.value_width), normal(setup.queries, 1, setup.value_width)
        products = q @ k.mT
        numbers["largest divided score"].append((products * width**-0.5).abs().max().item())
        for form, beta in forms.items():
            weights = attention_weights(attention, q, k, beta=beta)
            # the logarithm of a weight is its score plus a constant per row
            numbers[f"variance, {form}"].append(weights.log().var(-1).mean().item())
            numbers[f"largest weight, {form}"].append(weights.amax(-1).mean().item())
            q_leaf, added = q.clone().requires_grad_(), torch.zeros_like(products, requires_grad=True)
            loss = (attention(q_leaf, k, v, beta=beta, scores=added) * wanted).sum()
            to_scores, to_q = torch.autograd.grad(loss, (added, q_leaf), materialize_grads=True)
            numbers[f"gradient, {form}"].append(to_scores.norm(dim=-1).median().item())
            numbers[f"gradient of q, {form}"].append(to_q.norm(dim=-1).median().item())
            numbers[f"mean gradient of q, {form}"].append(to_q.norm(dim=-1).mean().item())
            numbers[f"largest gradient of q, {form}"].append(to_q.norm(dim=-1).max().item())
    q, k = (setup.overflow_size * normal(7, n, setup.overflow_width) for n in (1, setup.keys))
    v = normal(7, setup.keys, setup.value_width)
    single = attention(q.float(), k.float(), v.float(), beta=1.0)
    numbers["overflow: largest score"] = (q @ k.mT).max().item()
    numbers["overflow: largest exponent of float32"] = math.log(torch.finfo(torch.float32).max)
    numbers["overflow: share finite"] = single.isfinite().double().mean().item()
    numbers["overflow: error against float64"] = (
        (single - attention(q, k, v, beta=1.0)).nan_to_num(1e9).abs().max().item()
    )
    return numbers


def verdict(numbers: Numbers) -> Decision:
    widths = numbers["widths"]
    is_width = all(abs(got / d - 1) < 0.15 for got, d in zip(numbers["variance, undivided"], widths, strict=True))
    is_one = all(abs(got - 1) < 0.15 for got in numbers["variance, divided"])
    sharp, soft = numbers["largest weight, undivided"], numbers["largest weight, divided"]
    plain, scaled = numbers["gradient, undivided"], numbers["gradient, divided"]
    wide = widths[0] <= 16 and widths[-1] >= 256
    saturates = sharp[-1] > 0.9 and max(soft) < 0.5
    vanishes = plain[-1] < 0.05 * plain[0] and min(scaled) > 0.5 * max(scaled)
    # undivided scores beyond the range of exp must still give correct outputs
    beyond = numbers["overflow: largest score"] > numbers["overflow: largest exponent of float32"]
    no_overflow = (
        beyond and numbers["overflow: share finite"] == 1 and numbers["overflow: error against float64"] < 1e-2
    )
    return decide(
        is_width and is_one and no_overflow and saturates and vanishes,
        missing="" if wide else "the widths must reach from at most 16 to at least 256",
    )


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(columns=2)
    for axes, name, title in zip(panels, ("largest weight", "gradient"), ("Saturation", "Gradient"), strict=True):
        curves = {form: numbers[f"{name}, {form}"] for form in ("undivided", "divided")}
        plot_lines(axes, numbers["widths"], curves)
        axes.set(xscale="log", xlabel="d_k", ylabel=name, title=title)
    panels[1].set(yscale="log", ylabel="median gradient at the scores")
    return figure
