"""What does one more token cost in causal attention?

Claim: One query, key and value for the new token, and the attention of this query to N + 1 keys: 2 (N + 1) D
    multiply-adds besides the projections. Recomputing everything would cost 2 (N + 1)^2 D. No earlier output changes,
    because no earlier query may see the new key. So it is enough to cache keys and values.
Measures: Causal attention over N + 1 tokens with two different new tokens: whether earlier rows are equal bit for bit.
    The new row from its one query against the whole pass. Multiply-adds, cache bytes and seconds of a real layer for
    growing N, one step against recomputing everything; the seconds are reported but do not decide.
Finding: If the token after the first {{ n.lengths[-1]|comma }} is replaced by another, the earlier rows change by {{
    n["change of earlier rows"]|short }}; the new row, computed from its one query and the keys and values in the cache,
    equals that of a whole pass up to {{ n["error of the step"]|at_most }} in float64. A step needs {{ n["multiply-adds
    of a step"][-1]|comma }} multiply-adds and {{ n["cache bytes"][-1]|comma }} bytes of keys and values in float32;
    recomputing everything needs {{ n["multiply-adds of recomputing"][-1]|comma }} multiply-adds ({{ n["multiply-adds of
    the visible pairs"][-1]|comma }} if masked pairs are left out), all besides the projections. In time this is {{
    (n["seconds of a step"][-1] * 1e3)|fixed }} ms against {{ (n["seconds of recomputing"][-1] * 1e3)|fixed }} ms.
Budget: 10 seconds
Source: 003 12.7
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from regard.base.seeds import make_generator
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.cache import DynamicCache
from regard.core.masks import causal
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import count_multiply_adds, largest_difference, measure_seconds
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer

MATHS = r"h_{N+1} = \sum_{j=1}^{N+1} a_j v_j, \quad a = \mathrm{softmax}(\beta K^\top q_{N+1})"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the layer, and the timings.

    width    width of the layer
    heads    number of heads
    lengths  numbers N of tokens before the new token
    repeats  number of timings per length; the median is used
    """

    width: int = 64
    heads: int = 4
    lengths: tuple[int, ...] = (63, 127, 255, 511, 1023)
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, lengths=2)


SMOKE = Setup(lengths=(31, 63, 127), repeats=1)


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = AttentionLayer) -> Numbers:
    """Return the measured numbers of the claim, by name.

    layer  builds the attention layer: layer(width, heads)
    """
    n, c = setup.lengths[-1], setup.width // setup.heads
    draws = make_generator(setup.seed)
    q, k, v = torch.randn(3, 1, setup.heads, n + 1, c, generator=draws, dtype=torch.float64)
    other = [torch.cat([x[:, :, :n], -5 * x[:, :, n:]], 2) for x in (q, k, v)]
    whole, changed = attention(q, k, v, mask=causal()), attention(*other, mask=causal())
    before = attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], mask=causal())
    step = attention(q[:, :, n:], k, v, mask=causal(), positions=Positions(n))
    costs = [_measure_cost(layer, setup, length) for length in setup.lengths]
    return {
        "width": setup.width,
        "lengths": list(setup.lengths),
        "change of earlier rows": largest_difference(whole[:, :, :n], changed[:, :, :n]),
        "difference to N tokens alone": largest_difference(whole[:, :, :n], before),
        "change of the new row": largest_difference(whole[:, :, n:], changed[:, :, n:]),
        "error of the step": largest_difference(whole[:, :, n:], step),
        "multiply-adds of the visible pairs": [2 * setup.width * causal().count(n + 1) for n in setup.lengths],
    } | {name: [cost[name] for cost in costs] for name in costs[0]}


def _measure_cost(layer: Callable[[int, int], Any], setup: Setup, n: int) -> dict[str, float]:
    """Measure the cost of one new token after `n` tokens: of a step with a KV cache, and of recomputing all tokens.

    Multiply-adds are counted without the projections.
    """
    made = layer(setup.width, setup.heads)
    x = torch.randn(1, n + 1, setup.width, generator=make_generator(setup.seed))

    @torch.no_grad()
    def cached() -> DynamicCache:
        """Return the KV cache after `n` tokens."""
        cache = DynamicCache()
        made(x[:, :n], mask=causal(), cache=cache)
        return cache

    def step(cache: DynamicCache) -> Callable[[], Any]:
        return lambda: made(x[:, n:], mask=causal(), cache=cache)

    def recompute() -> Any:
        return made(x, mask=causal())

    kept = cached().nbytes
    with torch.no_grad():
        seconds = [measure_seconds(step(cached()), 1) for _ in range(setup.repeats)]
        recomputed = measure_seconds(recompute, setup.repeats)
    # three input projections and one output projection per token
    projections = 4 * setup.width**2
    return {
        "multiply-adds of a step": count_multiply_adds(step(cached())) - projections,
        "multiply-adds of recomputing": count_multiply_adds(recompute) - projections * (n + 1),
        "cache bytes": kept,
        "seconds of a step": median(seconds),
        "seconds of recomputing": recomputed,
    }


def verdict(numbers: Numbers) -> Decision:
    d, lengths = numbers["width"], numbers["lengths"]
    counted = numbers["multiply-adds of a step"] == [2 * (n + 1) * d for n in lengths]
    counted &= numbers["multiply-adds of recomputing"] == [2 * (n + 1) ** 2 * d for n in lengths]
    counted &= numbers["cache bytes"] == [2 * n * d * 4 for n in lengths]
    same = numbers["change of earlier rows"] == 0 and numbers["difference to N tokens alone"] < 1e-12
    new = numbers["change of the new row"] > 1e-3 and numbers["error of the step"] < 1e-12
    return decide(counted and same and new)


def draw(numbers: Numbers) -> Figure:
    figure, panels = make_figure(2)
    titles = {"multiply-adds": "Attention alone", "seconds": "The whole layer in seconds"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        curves = {"one step": numbers[f"{what} of a step"], "recomputing": numbers[f"{what} of recomputing"]}
        plot_lines(axes, numbers["lengths"], curves)
        axes.set(xscale="log", yscale="log", xlabel="earlier tokens", ylabel=what, title=title)
    return figure
