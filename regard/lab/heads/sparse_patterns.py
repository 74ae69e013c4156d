"""How can attention among many patches cost less than N^2?

Claim: By seeing fewer pairs. A window of w, a dilated window and g global tokens make pairs in proportion to N; blocks
    and then strides of root N, two stages through which every patch reaches every other, 2 N root N. A second stage
    in which all pairs meet would bring N^2 back.
Measures: Visible pairs counted exactly from the masks at growing N, and read back from attention at a small N; which
    pairs are reached within two stages; seconds of attention under each mask, which are told and not
    judged.
Budget: 30 seconds
Source: 003 12.8
"""

import math
import time
from dataclasses import dataclass
from statistics import median

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import blocks, dilated, full, global_tokens, window
from regard.core.masks.algebra import Mask
from regard.lab.claim import Attention, Numbers, Verdict, decide, join_numbers, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_lines

MATHS = r"N^2 \to N (2 w + 1), \quad N (2 w + 1) + 2 g N, \quad 2 N \sqrt{N}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Lengths that are squares, the reach of windows and their stride, global tokens, the small N to read masks at."""

    lengths: tuple[int, ...] = (256, 1024, 4096)
    reach: int = 8
    step: int = 4
    tokens: int = 2
    width: int = 16
    small: int = 100
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        odd = [n for n in (*self.lengths, self.small) if math.isqrt(n) ** 2 != n]
        if odd:
            raise ConfigError(f"lengths and small must be squares, for blocks of root N, but {odd[0]} is none")


SMOKE = Setup(lengths=(256, 1024), small=36, reach=4, repeats=1)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    curves = [_counted(setup, n, attention) for n in setup.lengths]
    small = _patterns(setup, setup.small)
    seen = {name: sum(_seen(setup.small, mask, attention) for mask in stages) for name, stages in small.items()}
    names = list(small)
    return {
        "lengths": list(setup.lengths),
        "small": setup.small,
        "reach": setup.reach,
        "step": setup.step,
        "tokens": setup.tokens,
        "pairs": {name: [pairs[name] for pairs, _ in curves] for name in names},
        "seconds": {name: [seconds[name] for _, seconds in curves] for name in names},
        "pairs at the small N": {name: sum(mask.count(setup.small) for mask in small[name]) for name in names},
        "pairs that attention sees there": seen,
        "reached in two stages": {name: _reached(setup.small, stages) for name, stages in small.items()},
    }


def _patterns(setup: Setup, n: int) -> dict[str, tuple[Mask, ...]]:
    """The masks by name, each a stage after the other."""
    root, reach = math.isqrt(n), setup.reach
    near = window(before=reach, after=reach)
    spread = window(before=reach * setup.step, after=reach * setup.step) & dilated(setup.step)
    return {
        "all pairs": (full(),),
        "window": (near,),
        "dilated window": (spread,),
        "window and global tokens": (near | global_tokens(setup.tokens),),
        "blocks, then strides": (blocks(root), dilated(root)),
        "global tokens, then all pairs": (global_tokens(setup.tokens), full()),
    }


def _counted(setup: Setup, n: int, attention: Attention) -> tuple[dict[str, int], dict[str, float]]:
    q, k, v = torch.randn(3, 1, 1, n, setup.width, generator=make_generator(setup.seed))
    pairs, seconds = {}, {}
    for name, stages in _patterns(setup, n).items():
        pairs[name] = sum(mask.count(n) for mask in stages)
        taken = []
        for _ in range(setup.repeats + 1):  # the first makes tables of blocks that later ones reuse
            start = time.perf_counter()
            for mask in stages:
                attention(q, k, v, mask=mask)
            taken.append(time.perf_counter() - start)
        seconds[name] = median(taken[1:])
    return pairs, seconds


def _seen(n: int, mask: Mask, attention: Attention) -> int:
    """Pairs that attention gives weight to: with zero queries all visible keys weigh alike, and V = I shows them."""
    q, k = torch.zeros(1, 1, n, 8, dtype=torch.float64), torch.ones(1, 1, n, 8, dtype=torch.float64)
    return int((attention(q, k, torch.eye(n, dtype=torch.float64)[None, None], mask=mask) > 0).sum())


def _reached(n: int, stages: tuple[Mask, ...]) -> float:
    """The share of pairs with a way through two stages; a single pattern is its own second stage."""
    first, second = (stages * 2)[:2]
    return float((second.dense(n).double() @ first.dense(n).double() > 0).double().mean())


def _growth(numbers: Numbers, name: str) -> float:
    """The power of N with which the pairs of a pattern grow, between the two largest lengths."""
    (a, b), (before, after) = numbers["lengths"][-2:], numbers["pairs"][name][-2:]
    return math.log(after / before) / math.log(b / a)


def verdict(numbers: Numbers) -> Verdict:
    growth = {name: _growth(numbers, name) for name in numbers["pairs"]}
    n, w, g, pairs = numbers["lengths"][-1], numbers["reach"], numbers["tokens"], numbers["pairs"]
    both = n * (2 * w + 1) - w * (w + 1)  # a window loses what lies beyond the two ends
    # global rows and columns add what the windows do not show already
    joined = both + 2 * sum(n - 1 - row - w for row in range(g))
    expected = {"all pairs": n * n, "window": both, "window and global tokens": joined}
    expected["blocks, then strides"] = 2 * n * math.isqrt(n)
    exact = all(pairs[name][-1] == count for name, count in expected.items())
    linear = all(abs(growth[name] - 1) < 0.1 for name in ("window", "dilated window", "window and global tokens"))
    reached = numbers["reached in two stages"]
    ways = reached["blocks, then strides"] == reached["window and global tokens"] == 1 > reached["window"]
    same = numbers["pairs at the small N"] == numbers["pairs that attention sees there"]
    shown = "; ".join(f"{name} {pairs[name][-1]:,} (N^{growth[name]:.2f})" for name in pairs)
    clock = ", ".join(f"{name} {taken[-1] * 1e3:.1f}" for name, taken in numbers["seconds"].items())
    return decide(
        exact and linear and ways and same and abs(growth["blocks, then strides"] - 1.5) < 0.01,
        f"Visible pairs at N={n}: {shown}. At N={numbers['small']} attention gives weight to "
        f"{join_numbers(numbers['pairs that attention sees there'].values())} pairs, where the masks have "
        f"{join_numbers(numbers['pairs at the small N'].values())}. Milliseconds: {clock}.",
    )


@wrong_answer(
    "003 12.8",
    says="Patches that attend to global tokens first, and then to the other patches, make fewer pairs.",
    right="The second stage has all N^2 pairs again, unless it is sparse too; global tokens have to replace it.",
)
def _second_stage(numbers: Numbers) -> Verdict:
    name = "global tokens, then all pairs"
    n, pairs, growth = numbers["lengths"][-1], numbers["pairs"][name][-1], _growth(numbers, name)
    return decide(
        growth < 1.9,
        f"Global tokens first and then all other patches make {pairs:,} pairs at N={n}, where all pairs are "
        f"{n * n:,}, and grow as N^{growth:.2f}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.0, height=4.0)
    for axes, what in ((left, "pairs"), (right, "seconds")):
        plot_lines(axes, numbers["lengths"], numbers[what], overlapping=True, legend=False)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="patches N", ylabel=what)
    left.set_title("Visible pairs, counted")
    right.set_title("Time of attention")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    return figure
