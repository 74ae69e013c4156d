"""How can attention among many patches cost less than N^2?

Claim: By seeing fewer pairs. With a window along the sequence, square windows of the image, a dilated window or g
    global tokens the number of pairs is proportional to N. Blocks followed by strides of root N, two stages that
    connect every patch with every other, have 2 N root N pairs. A second stage with all pairs would have N^2 again.
Measures: Visible pairs counted exactly from the masks for growing N, and measured from attention at a small N. Which
    pairs are connected within two stages. Seconds of attention with each mask, which are reported but do not decide.
Finding: Windows reach {{ n.window }} patches to each side, dilated ones as many steps of {{ n.stride }}; square windows
    have {{ n.side }} x {{ n.side }} patches; global tokens: {{ n["global tokens"] }}. Visible pairs at N={{
    n.lengths[-1]|comma }}, in brackets how they grow with N: {% for name in n.pairs %}{{ name }} {{
    n.pairs[name][-1]|comma }} (N^{{ growth[name]|fixed }}){{ "; " if not loop.last else ". " }}{% endfor %}At N={{
    n["small length"] }} attention gives nonzero weights to {{ n["pairs with nonzero weight at the small
    length"].values()|join_numbers }} pairs, in the same order, {% if n["pairs at the small length"] == n["pairs with
    nonzero weight at the small length"] %}as many as the masks have{% else %}but the masks have {{ n["pairs at the
    small length"].values()|join_numbers }}{% endif %}. Time of attention at N={{ n.lengths[-1]|comma }}, as a share of
    the time of all pairs: {% for name in share %}{{ name }} {{ share[name]|percent(1) }}{{ ", " if not loop.last else
    "." }}{% endfor %}
Budget: 30 seconds
Source: 003 12.8
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.masks import blocks, dilated, full, global_tokens, window
from regard.core.masks.algebra import Mask
from regard.lab.drawing import Figure, make_figure, plot_lines
from regard.lab.measure import growth_exponent, measure_seconds
from regard.lab.settings import check_at_least, check_growing
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"N^2 \to N (2 w + 1), \quad N p^2, \quad N (2 w + 1) + 2 g N, \quad 2 N \sqrt{N}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the sparse masks, and the lengths at which pairs are counted and attention is timed.

    lengths  increasing numbers of tokens; square numbers n, because one mask has blocks of sqrt(n) tokens
    reach    number of visible keys on each side of a query in the windows
    side     side of the square windows, in patches
    step     distance between visible keys in the dilated window
    tokens   number of global tokens
    width    width of queries, keys and values in the timings
    small    a small square number of tokens at which the masks are compared with the nonzero attention weights
    repeats  number of rounds; each round times every pattern once, and the fastest time of a pattern counts
    """

    lengths: tuple[int, ...] = (256, 1024, 4096)
    reach: int = 8
    side: int = 4
    step: int = 4
    tokens: int = 2
    width: int = 16
    small: int = 144
    repeats: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, lengths=2, small=16)
        check_growing(self, "lengths")
        odd = [n for n in (*self.lengths, self.small) if math.isqrt(n) ** 2 != n]
        if odd:
            raise ConfigError(f"lengths and small must be squares, but {odd[0]} is not")
        cut = [n for n in (*self.lengths, self.small) if math.isqrt(n) % self.side]
        if cut:
            raise ConfigError(
                f"an image of {math.isqrt(cut[0])} x {math.isqrt(cut[0])} patches cannot be cut into square windows of "
                f"side {self.side}; choose lengths and small whose square roots are multiples of side"
            )


SMOKE = Setup(lengths=(256, 1024), small=64, reach=4, repeats=1)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    curves = [_count_pairs(setup, n, attention) for n in setup.lengths]
    small = _masks(setup, setup.small)
    seen = {
        name: sum(_attended_pairs(setup.small, mask, attention) for mask in stages) for name, stages in small.items()
    }
    names = list(small)
    return {
        "lengths": list(setup.lengths),
        "small length": setup.small,
        "window": setup.reach,
        "side": setup.side,
        "stride": setup.step,
        "global tokens": setup.tokens,
        "pairs": {name: [pairs[name] for pairs, _ in curves] for name in names},
        "seconds": {name: [seconds[name] for _, seconds in curves] for name in names},
        "pairs at the small length": {name: sum(mask.count(setup.small) for mask in small[name]) for name in names},
        "pairs with nonzero weight at the small length": seen,
        "pairs connected in two stages": {
            name: _share_connected(setup.small, stages) for name, stages in small.items()
        },
    }


def _masks(setup: Setup, n: int) -> dict[str, tuple[Mask, ...]]:
    """Return the masks for `n` tokens by name of the pattern: a tuple with one mask per attention layer."""
    root, reach = math.isqrt(n), setup.reach
    near = window(before=reach, after=reach)
    spread = window(before=reach * setup.step, after=reach * setup.step) & dilated(setup.step)
    return {
        "all pairs": (full(),),
        "window": (near,),
        # the patches are numbered window by window
        "square windows": (blocks(setup.side**2),),
        "dilated window": (spread,),
        "window and global tokens": (near | global_tokens(setup.tokens),),
        "blocks, then strides": (blocks(root), dilated(root)),
        "global tokens, then all pairs": (global_tokens(setup.tokens), full()),
    }


def _count_pairs(setup: Setup, n: int, attention: Attention) -> tuple[dict[str, int], dict[str, float]]:
    q, k, v = torch.randn(3, 1, 1, n, setup.width, generator=make_generator(setup.seed))
    masks = _masks(setup, n)
    pairs = {name: sum(mask.count(n) for mask in stages) for name, stages in masks.items()}

    def call(name: str) -> None:
        for mask in masks[name]:
            attention(q, k, v, mask=mask)

    for name in masks:
        call(name)  # builds block tables that later calls reuse
    # patterns in turn, and the fastest round of each, because other programs slow down single rounds
    rounds = [{name: measure_seconds(partial(call, name), 1) for name in masks} for _ in range(setup.repeats)]
    return pairs, {name: min(each[name] for each in rounds) for name in masks}


def _attended_pairs(n: int, mask: Mask, attention: Attention) -> int:
    """Count the pairs of query and key with a nonzero attention weight under a mask.

    The queries are zero, so all visible keys of a query have equal weights.
    """
    q, k = torch.zeros(1, 1, n, 8, dtype=torch.float64), torch.ones(1, 1, n, 8, dtype=torch.float64)
    return int((attention(q, k, torch.eye(n, dtype=torch.float64)[None, None], mask=mask) > 0).sum())


def _share_connected(n: int, stages: tuple[Mask, ...]) -> float:
    """Return the fraction of pairs of tokens that are connected by two attention layers, one after the other.

    A pair is connected if the first token sees, in the second layer, some token that sees the other token in the first
    layer.

    stages  the mask of each layer; a single mask is used in both layers
    """
    first, second = (stages * 2)[:2]
    return float((second.dense(n).double() @ first.dense(n).double() > 0).double().mean())


def verdict(numbers: Numbers) -> Decision:
    n, w, g, pairs = (numbers[name] for name in ("lengths", "window", "global tokens", "pairs"))
    growth = {name: growth_exponent(n[-2:], counts[-2:]) for name, counts in pairs.items()}
    n = n[-1]
    both = n * (2 * w + 1) - w * (w + 1)  # a window is cut at both ends
    # global rows and columns add the pairs outside the windows
    joined = both + 2 * sum(n - 1 - row - w for row in range(g))
    expected = {"all pairs": n * n, "window": both, "window and global tokens": joined}
    expected["square windows"] = n * numbers["side"] ** 2
    expected["blocks, then strides"] = 2 * n * math.isqrt(n)
    exact = all(pairs[name][-1] == count for name, count in expected.items())
    linear = all(abs(growth[name] - 1) < 0.1 for name in ("window", "dilated window", "window and global tokens"))
    linear &= abs(growth["blocks, then strides"] - 1.5) < 0.01
    reached = numbers["pairs connected in two stages"]
    all_reached = reached["blocks, then strides"] == reached["window and global tokens"] == 1 > reached["window"]
    same = numbers["pairs at the small length"] == numbers["pairs with nonzero weight at the small length"]
    times = {name: seconds[-1] for name, seconds in numbers["seconds"].items()}
    share = {name: time / times["all pairs"] for name, time in times.items() if name != "all pairs"}
    farthest = 2 * w * numbers["stride"] + 1 + 2 * g
    long = 3 * farthest <= numbers["lengths"][-2] and 2 * w < numbers["small length"] - 1
    return decide(
        exact and linear and all_reached and same,
        missing="" if long else "the lengths must be much longer than windows and global tokens",
        growth=growth,
        share=share,
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=5.0, height=4.0)
    for axes, what in ((left, "pairs"), (right, "seconds")):
        plot_lines(axes, numbers["lengths"], numbers[what], overlapping=True, legend=False)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="patches N", ylabel=what)
    left.set_title("Visible pairs, counted")
    right.set_title("Seconds of attention")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    return figure
