"""Which costs more, attention between patches or between channels?

Claim: For 16 x 16 patches of width 512 the scores between patches need N^2 D = 33,554,432 multiply-adds and the scores
    between channels N D^2 = 67,108,864, exactly twice as many because D = 2 N. Including the projections the ratio is
    only 1.2. Windows of patches and groups of channels reduce both.
Measures: Multiply-adds of real passes as torch counts them: scores alone (the part that does not grow with the width of
    the values), whole layers with projections, windows of patches, and groups of channels. Whether attention between
    channels equals attention with the axes exchanged.
Budget: 5 seconds
Source: 003 12.9
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.counting import count_flops
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.channel import channel_attend
from regard.lab.claim import Attention, Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_bars
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.channel import ChannelAttention
from regard.nn.windows import partition

MATHS = r"N^2 D, \quad N D^2, \quad \frac{4 N D^2 + 2 N D^2}{4 N D^2 + 2 N^2 D} = 1.2"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The grid of patches, the width, the window size and the number of groups."""

    side: int = 16
    width: int = 512
    window: int = 8
    groups: int = 8
    seed: int = 0


SMOKE = Setup()


def run(
    setup: Setup, attention: Attention = attend, channels: Callable[[Tensor, Tensor, Tensor], Tensor] = channel_attend
) -> Numbers:
    """channels  attention between channels of q, k and v, (b h n c)"""
    n, d = setup.side**2, setup.width
    q, k, v = torch.randn(3, 1, 1, n, d, generator=make_generator(setup.seed))
    small = [x[..., :13, :5].double() for x in (q, k, v)]
    by_hand = attention(*(x.mT for x in small), beta=5**-0.5).mT
    image = torch.zeros(1, setup.side, setup.side, d)
    return {
        "patches": n,
        "width": d,
        "error of channels": float((channels(*small) - by_hand).abs().max()),
        "scores between patches": _score_cost(q, k, v, attention),
        "scores between channels": _score_cost(q.mT, k.mT, v.mT, attention),
        "patches with projections": _count_multiply_adds(AttentionLayer(d, 1), image.flatten(1, 2)),
        "channels with projections": _count_multiply_adds(ChannelAttention(d, 1), image.flatten(1, 2)),
        "windows": setup.window,
        "groups": setup.groups,
        "windows with projections": _count_multiply_adds(AttentionLayer(d, 1), partition(image, setup.window)),
        "groups with projections": _count_multiply_adds(ChannelAttention(d, setup.groups), image.flatten(1, 2)),
    }


def _score_cost(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> int:
    """Count multiply-adds of the scores: the part that does not grow with the width of the values."""

    def cost(v: Tensor) -> int:
        # the eager kernel has two plain products; a fused kernel may pad narrow values
        return _cost(lambda: attention(q, k, v, kernel="eager"))

    return 2 * cost(v) - cost(torch.cat([v, v], -1))


def _count_multiply_adds(layer: nn.Module, x: Tensor) -> int:
    return _cost(lambda: layer(x))


def _cost(call: Callable[[], Tensor]) -> int:
    with torch.no_grad(), count_flops() as flops:
        call()
    return int(flops.get_total_flops()) // 2


def verdict(numbers: Numbers) -> Verdict:
    n, d = numbers["patches"], numbers["width"]
    between = numbers["scores between patches"], numbers["scores between channels"]
    whole = numbers["patches with projections"], numbers["channels with projections"]
    less = numbers["windows with projections"], numbers["groups with projections"]
    exact = between == (n * n * d, n * d * d) and numbers["error of channels"] < 1e-12
    # the cost of attention inside a layer: two products
    windows = 2 * n * numbers["windows"] ** 2 * d
    grouped = less == (4 * n * d * d + windows, 4 * n * d * d + 2 * n * d * (d // numbers["groups"]))
    return decide(
        exact and grouped and whole == (4 * n * d * d + 2 * n * n * d, 6 * n * d * d),
        f"Scores between {n} patches of width {d} need {between[0]:,} multiply-adds and between channels "
        f"{between[1]:,}, {between[1] / max(between[0], 1):g} times as many. With projections the layers need "
        f"{whole[0]:,} and {whole[1]:,}, {whole[1] / whole[0]:.3g} times. Windows of {numbers['windows']} x "
        f"{numbers['windows']} reduce the first to {less[0]:,}, {numbers['groups']} groups the second to {less[1]:,}.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    plot_bars(left, {name: numbers[f"scores between {name}"] / 1e6 for name in ("patches", "channels")})
    left.set(ylabel="million multiply-adds", title="Scores alone")
    names = ("patches", "channels", "windows", "groups")
    plot_bars(right, {name: numbers[f"{name} with projections"] / 1e6 for name in names})
    right.set(ylabel="million multiply-adds", title="Whole layers")
    return figure
