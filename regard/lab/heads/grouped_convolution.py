"""What corresponds to heads in a convolution?

Claim: Groups: as many groups as heads, followed by a convolution with kernel 1 for W_o. If the weight of key j for
    query i depends only on j - i and each head reads its own part of the channels, the value path of attention is
    exactly a grouped convolution. One group per channel mixes no channels, so that a convolution with kernel 1 has to
    do it. Convolutions have no weights that depend on the input.
Measures: Attention with given relative scores, then W_o, against conv1d(groups=heads) and a 1 x 1 convolution, on a
    ring of tokens in float64. How many input channels an output channel of a head reads. The smallest error of any
    convolution with one group per channel, and the error of the one with the weights of the heads and a 1 x 1
    convolution after it.
Finding: Attention whose heads each read only their own {{ (n.width / n.heads)|fixed(0) }} of {{ n.width }} channels,
    followed by W_o, differs from a convolution with groups={{ n.heads }}, the number of heads, and a 1 x 1 convolution
    by at most {{ n.error|at_most }}. An output channel of such a head reads {{ n["channels read by a head"] }} input
    channels, as an output channel of a group does. In standard attention it would read all {{ n.width }}, because W_v
    does. With one group per channel an output reads {{ n["channels read with groups = channels"] }} input channel{{ ""
    if n["channels read with groups = channels"] == 1 else "s" }}. Alone, even the best such convolution misses the
    output by {{ n["smallest error with groups = channels"]|percent }} of its size (its norm). Followed by a 1 x 1
    convolution that holds W_v and W_o, one with the weights of the heads differs from attention by at most
    {{ n["error with groups = channels and kernel 1"]|at_most }}.
Budget: 1 second
Source: 000 1.2b, 002 1.2b
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.drawing import Figure, make_figure, plot_bars
from regard.lab.measure import largest_difference, normal_tensors
from regard.lab.settings import check_at_least, setting_error
from regard.lab.verdict import Attention, Decision, Numbers, decide
from regard.nn.attention import merge_heads, split_heads

MATHS = r"h^g_i = \sum_t a^g_t W_v^g c^g_{i+t}, \quad \mathrm{kernel of group} g: w^g_t = a^g_t W_v^g"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of the attention layer and of the convolutions.

    width   number of channels; at least 2 * `heads`, because a head of one channel has no other channel to read
    heads   number of heads, and of groups of the convolution
    length  number of tokens; they form a ring, in which the first token follows the last
    kernel  kernel size, odd, and at most a third of the length
    """

    width: int = 24
    heads: int = 4
    length: int = 41
    kernel: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, width=2 * self.heads)  # a head of one channel has no other channel to read
        if self.kernel % 2 == 0 or 3 * self.kernel > self.length:
            raise setting_error(self, "kernel must be odd and at most a third of the length", "kernel", "length")


SMOKE = Setup(width=15, heads=3, length=11, kernel=3)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    d, heads, n, size = setup.width, setup.heads, setup.length, setup.kernel
    c = d // heads
    x, value, out, taps = normal_tensors(draws, (1, n, d), (heads, c, c), (d, d), (heads, size))
    value, out = value * c**-0.5, out * d**-0.5

    # the score of tap (j - i) on a ring; only the taps of the kernel are visible
    offset = (torch.arange(n)[None] - torch.arange(n)[:, None] + size // 2) % n
    scores, seen = taps[:, offset.clamp(max=size - 1)][None], (offset < size)[None, None]

    def heads_of(x: Tensor) -> Float[Tensor, "b d n"]:
        """Return the concatenated outputs of the heads, before W_o."""
        v = torch.einsum("bhnc,hec->bhne", split_heads(x, heads), value)
        nothing = torch.zeros_like(v)
        return merge_heads(attention(nothing, nothing, v, mask=seen, scores=scores)).mT

    kernel = (taps.softmax(-1)[:, None, None] * value[..., None]).flatten(0, 1)
    ring = functional.pad(x.mT, (size // 2, size // 2), mode="circular")
    grouped = functional.conv1d(ring, kernel, groups=heads)
    joined = heads_of(x)
    attended = joined.mT @ out.T
    # all channels of a head have its weights; W_v and W_o are one matrix
    alone = functional.conv1d(ring, taps.softmax(-1).repeat_interleave(c, 0)[:, None], groups=d)
    mixed = functional.conv1d(alone, (out @ torch.block_diag(*value))[:, :, None])
    return {
        "width": d,
        "heads": heads,
        "error before W_o": largest_difference(joined, grouped),
        "error": largest_difference(attended, functional.conv1d(grouped, out[:, :, None]).mT),
        "channels read by a head": _count_channels_read(heads_of, x),
        "channels read with groups = heads": _count_channels_read(lambda x: _convolve(x, kernel, heads), x),
        "channels read with groups = channels": _count_channels_read(lambda x: _convolve(x, kernel[:, :1], d), x),
        "smallest error with groups = channels": _smallest_error(ring, joined, size),
        "error with groups = channels and kernel 1": largest_difference(attended, mixed.mT),
    }


def _convolve(x: Tensor, kernel: Tensor, groups: int) -> Tensor:
    ends = kernel.shape[-1] // 2
    return functional.conv1d(functional.pad(x.mT, (ends, ends), mode="circular"), kernel, groups=groups)


def _count_channels_read(path: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Count the input channels at which the first output channel of `path(x)` has a nonzero gradient."""
    start = x.clone().requires_grad_()
    path(start)[0, 0].sum().backward()
    return 0 if start.grad is None else int((start.grad.abs().amax((0, 1)) > 1e-12).sum())


def _smallest_error(ring: Float[Tensor, "1 d m"], wanted: Float[Tensor, "1 d n"], size: int) -> float:
    """Return the relative error of the depthwise convolution that comes closest to an output, by least squares.

    ring    the input, extended at both ends so that positions form a ring
    wanted  the output to reproduce
    size    kernel size of the convolution
    """
    if not wanted.isfinite().all():
        return math.nan  # the solver raises an error for NaN
    seen = ring[0].unfold(-1, size, 1)  # channel, position, tap
    fitted = torch.linalg.lstsq(seen, wanted[0][..., None]).solution
    return float((seen @ fitted - wanted[0][..., None]).norm() / wanted.norm())


def verdict(numbers: Numbers) -> Decision:
    errors = ("error", "error before W_o", "error with groups = channels and kernel 1")
    exact = max(numbers[name] for name in errors) < 1e-12
    read = numbers["channels read by a head"], numbers["channels read with groups = heads"]
    alike = set(read) == {numbers["width"] // numbers["heads"]}
    return decide(exact and alike and numbers["smallest error with groups = channels"] > 0.1)


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=4.6)
    kinds = ("by a head", "with groups = heads", "with groups = channels")
    plot_bars(left, {kind.replace(" = ", "\n= "): float(numbers[f"channels read {kind}"]) for kind in kinds})
    left.set(ylabel="channels read by one channel", title="Channels that are mixed")
    error = numbers["smallest error with groups = channels"]
    plot_bars(right, {"groups = heads": numbers["error before W_o"], "groups = channels": error})
    right.set(ylabel="difference from heads", title="Error of the convolution")
    return figure
