"""What does one more token cost in causal attention?

Claim: One query, key and value for the new token, and the attention of this query to N + 1 keys: 2 (N + 1) D
    multiply-adds besides the projections. Recomputing everything would cost 2 (N + 1)^2 D. No earlier output changes,
    because no earlier query may see the new key. So it is enough to cache keys and values.
Measures: Causal attention over N + 1 tokens with two different new tokens: whether earlier rows are equal bit for bit.
    The new row from its one query against the whole pass. Multiply-adds, cache bytes and seconds of a real layer for
    growing N, one step against recomputing everything; the seconds are reported but do not decide.
Budget: 10 seconds
Source: 003 12.7
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from regard.base.counting import count_flops
from regard.base.seeds import make_generator
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.cache import DynamicCache
from regard.core.masks import causal
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.nn.attention import Attention as AttentionLayer

MATHS = r"h_{N+1} = \sum_{j=1}^{N+1} a_j v_j, \quad a = \mathrm{softmax}(\beta K^\top q_{N+1})"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The layer, numbers of earlier tokens, and the number of timings."""

    width: int = 64
    heads: int = 4
    lengths: tuple[int, ...] = (63, 127, 255, 511, 1023)
    repeats: int = 5
    seed: int = 0


SMOKE = Setup(lengths=(31, 63, 127), repeats=1)


def run(setup: Setup, attention: Attention = attend, layer: Callable[[int, int], Any] = AttentionLayer) -> Numbers:
    """layer  builds the attention layer: layer(width, heads)"""
    n, c = setup.lengths[0], setup.width // setup.heads
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
        "change of earlier rows": float((whole - changed)[:, :, :n].abs().max()),
        "difference to N tokens alone": float((whole[:, :, :n] - before).abs().max()),
        "change of the new row": float((whole - changed)[:, :, n:].abs().max()),
        "error of the step": float((whole[:, :, n:] - step).abs().max()),
    } | {name: [cost[name] for cost in costs] for name in costs[0]}


def _measure_cost(layer: Callable[[int, int], Any], setup: Setup, n: int) -> dict[str, float]:
    """Measure the cost of the token after n others, with the cache and by recomputing everything."""
    made = layer(setup.width, setup.heads)
    x = torch.randn(1, n + 1, setup.width, generator=make_generator(setup.seed))
    held = DynamicCache()
    with torch.no_grad():
        made(x[:, :n], mask=causal(), cache=held)
        kept = held.nbytes
        with count_flops() as stepped:
            made(x[:, n:], mask=causal(), cache=held)
        with count_flops() as recomputed:
            made(x, mask=causal())
        seconds: dict[str, list[float]] = {"step": [], "anew": []}
        for _ in range(setup.repeats):
            caches = DynamicCache()
            made(x[:, :n], mask=causal(), cache=caches)
            start = time.perf_counter()
            made(x[:, n:], mask=causal(), cache=caches)
            between = time.perf_counter()
            made(x, mask=causal())
            seconds["step"].append(between - start)
            seconds["anew"].append(time.perf_counter() - between)
    # three input projections and one output projection per token
    projections = 4 * setup.width**2
    return {
        "multiply-adds of a step": stepped.get_total_flops() // 2 - projections,
        "multiply-adds anew": recomputed.get_total_flops() // 2 - projections * (n + 1),
        "cache bytes": kept,
        "seconds of a step": median(seconds["step"]),
        "seconds anew": median(seconds["anew"]),
    }


def verdict(numbers: Numbers) -> Verdict:
    d, lengths = numbers["width"], numbers["lengths"]
    steps = numbers["multiply-adds of a step"] == [2 * (n + 1) * d for n in lengths]
    recomputed = numbers["multiply-adds anew"] == [2 * (n + 1) ** 2 * d for n in lengths]
    kept = numbers["cache bytes"] == [2 * n * d * 4 for n in lengths]
    still = numbers["change of earlier rows"] == 0 and numbers["difference to N tokens alone"] < 1e-12
    felt = numbers["change of the new row"] > 1e-3 and numbers["error of the step"] < 1e-12
    return decide(
        steps and recomputed and kept and still and felt,
        f"Another new token changes earlier rows by {numbers['change of earlier rows']:g}; its own row follows from "
        f"one query up to {numbers['error of the step']:.0g}. After {lengths[-1]} tokens a step needs "
        f"{numbers['multiply-adds of a step'][-1]:,} multiply-adds and {numbers['cache bytes'][-1]:,} bytes of keys "
        f"and values; recomputing everything needs {numbers['multiply-adds anew'][-1]:,} multiply-adds. In time this "
        f"is {numbers['seconds of a step'][-1] * 1e3:.2f} ms against {numbers['seconds anew'][-1] * 1e3:.2f} ms.",
    )


@wrong_answer(
    "003 12.7",
    says="The new key is compared with the queries of all tokens.",
    right="The mask hides it from every earlier query; the new query is compared with all keys.",
)
def _all_queries(numbers: Numbers) -> Verdict:
    moved = numbers["change of earlier rows"]
    return decide(moved > 0, f"For any new token, earlier outputs change by {moved:g}.")


@wrong_answer(
    "003 12.7",
    says="Weights and outputs of all tokens have to be computed again.",
    right="Only the new row is computed, from cached keys and values: O(N D).",
)
def _recompute(numbers: Numbers) -> Verdict:
    off, cost = numbers["error of the step"], numbers["multiply-adds of a step"][-1]
    return decide(
        off > 1e-9,
        f"One query and {cost:,} multiply-adds give the new row up to {off:.0g}; recomputing all rows would need "
        f"{numbers['multiply-adds anew'][-1]:,}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    for axes, what in ((left, "multiply-adds"), (right, "seconds")):
        plot_lines(
            axes, numbers["lengths"], {"one step": numbers[f"{what} of a step"], "anew": numbers[f"{what} anew"]}
        )
        axes.set(xscale="log", yscale="log", xlabel="earlier tokens", ylabel=what)
    left.set_title("Attention alone")
    right.set_title("The whole layer in seconds")
    return figure
