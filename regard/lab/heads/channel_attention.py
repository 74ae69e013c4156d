"""Which costs more, attention between patches or between channels?

Claim: For 16 x 16 patches of width 512 the scores between patches need N^2 D = 33,554,432 multiply-adds and the scores
    between channels N D^2 = 67,108,864, exactly twice as many because D = 2 N. Including the projections the ratio is
    only 1.2. Windows of patches and groups of channels reduce both.
Measures: Multiply-adds of real passes as torch counts them: scores alone (the part that does not grow with the width of
    the values), whole layers with projections, windows of patches, and groups of channels. Whether attention between
    channels equals attention with the axes exchanged.
Finding: Scores between {{ n.patches }} patches of width {{ n.width }} need {{ n["scores between patches"]|comma }}
    multiply-adds and between channels {{ n["scores between channels"]|comma }}, {{ (n["scores between channels"] /
    n["scores between patches"])|short(3) }} times as many. With projections the layers need {{ n["patches with
    projections"]|comma }} and {{ n["channels with projections"]|comma }}, {{ (n["channels with projections"] /
    n["patches with projections"])|short(3) }} times. With windows of {{ n.windows }} x {{ n.windows }} patches the
    first layer needs {{ n["windows with projections"]|comma }}, with {{ n.groups }} groups of channels the second {{
    n["groups with projections"]|comma }}.
Budget: 5 seconds
Source: 003 12.9
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.core.channel import channel_attend
from regard.lab.drawing import Figure, make_figure, plot_bars
from regard.lab.measure import count_multiply_adds, largest_difference
from regard.lab.settings import setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import Attention as AttentionLayer
from regard.nn.channel_attention import ChannelAttention
from regard.nn.windows import partition

MATHS = r"N^2 D, \quad N D^2, \quad \frac{4 N D^2 + 2 N D^2}{4 N D^2 + 2 N^2 D} = 1.2 \mathrm{for} D = 2 N"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the image and of the layers.

    side    number of patches along a side of the image; a multiple of `window`
    width   number of channels of a patch; a multiple of `groups`
    window  side of a window in patches, for the layer with windows
    groups  number of groups of channels, for the layer with groups
    """

    side: int = 16
    width: int = 512
    window: int = 8
    groups: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.side % self.window or self.width % self.groups:
            text = "side must be a multiple of window, and width of groups"
            raise setting_error(self, text, "side", "window", "width", "groups")


SMOKE = Setup()


def run(
    setup: Setup, attention: Attention = attend, channels: Callable[[Tensor, Tensor, Tensor], Tensor] = channel_attend
) -> Numbers:
    """Return the measured numbers of the claim, by name.

    channels  channels(q, k, v) computes attention between channels; tensors are (b h n c)
    """
    n, d = setup.side**2, setup.width
    q, k, v = torch.randn(3, 1, 1, n, d, generator=make_generator(setup.seed))
    small = [x[..., :13, :5].double() for x in (q, k, v)]
    by_hand = attention(*(x.mT for x in small), beta=5**-0.5).mT
    image = torch.zeros(1, setup.side, setup.side, d)

    def cost(layer: nn.Module, x: Tensor) -> int:
        return count_multiply_adds(lambda: layer(x))

    return {
        "patches": n,
        "width": d,
        "error of channels": largest_difference(channels(*small), by_hand),
        "scores between patches": _score_cost(q, k, v, attention),
        "scores between channels": _score_cost(q.mT, k.mT, v.mT, attention),
        "patches with projections": cost(AttentionLayer(d, 1), image.flatten(1, 2)),
        "channels with projections": cost(ChannelAttention(d, 1), image.flatten(1, 2)),
        "windows": setup.window,
        "groups": setup.groups,
        "windows with projections": cost(AttentionLayer(d, 1), partition(image, setup.window)),
        "groups with projections": cost(ChannelAttention(d, setup.groups), image.flatten(1, 2)),
    }


def _score_cost(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> int:
    """Count the multiply-adds of the scores alone, without the product of weights and values.

    Only the product of weights and values depends on the width of the values. With the cost at this width and at
    twice the width, the cost of the scores is 2 * cost(width) - cost(2 * width).
    """

    def cost(v: Tensor) -> int:
        # the eager kernel has two plain products; a fused kernel may pad narrow values
        return count_multiply_adds(lambda: attention(q, k, v, kernel="eager"))

    return 2 * cost(v) - cost(torch.cat([v, v], -1))


def verdict(numbers: Numbers) -> Decision:
    n, d = numbers["patches"], numbers["width"]
    # four projections, and the two products of attention inside a layer
    projections, windows, groups = 4 * n * d * d, numbers["windows"] ** 2, d // numbers["groups"]
    expected = {
        "scores between patches": n * n * d,
        "scores between channels": n * d * d,
        "patches with projections": projections + 2 * n * n * d,
        "channels with projections": projections + 2 * n * d * d,
        "windows with projections": projections + 2 * n * windows * d,
        "groups with projections": projections + 2 * n * d * groups,
    }
    counted = all(numbers[name] == count for name, count in expected.items())
    return decide(counted and numbers["error of channels"] < 1e-12)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    plot_bars(left, {name: numbers[f"scores between {name}"] / 1e6 for name in ("patches", "channels")})
    left.set(ylabel="million multiply-adds", title="Scores alone")
    names = ("patches", "channels", "windows", "groups")
    plot_bars(right, {name: numbers[f"{name} with projections"] / 1e6 for name in names})
    right.set(ylabel="million multiply-adds", title="Whole layers")
    return figure
