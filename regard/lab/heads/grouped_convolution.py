"""What is like heads in a convolution?

Claim: Groups: as many groups as heads, then a convolution of kernel 1 for W_o. Where weights depend on j - i alone and
    each head reads its own share of the channels, the value path of attention is a grouped convolution exactly.
    One group for each channel is another thing, in which no channel of a head meets another. What convolutions do
    not have is weights that depend on the input.
Measures: Attention with given relative scores, then W_o, against conv1d(groups=heads) and a 1 x 1 convolution, on a
    ring of tokens in float64; how many input channels an output channel of a head reads; the smallest error that
    any convolution with a group for each channel can reach.
Budget: 1 second
Source: 000 1.2b
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.core.attend import attend
from regard.lab.claim import Attention, Numbers, Verdict, decide, wrong_answer
from regard.lab.drawing import Figure, make_figure, plot_bars
from regard.nn.attention import check_heads, merge_heads, split_heads

MATHS = r"h^g_i = \sum_t a^g_t W_v^g c^g_{i+t}, \quad \mathrm{kernel of group} g: w^g_t = a^g_t W_v^g"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Channels, heads, tokens on a ring and how many of them a head looks at."""

    width: int = 24
    heads: int = 4
    length: int = 41
    kernel: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        if self.kernel % 2 == 0 or self.kernel > self.length:
            raise ConfigError(f"kernel is odd and fits the ring of {self.length} tokens, but is {self.kernel}")


SMOKE = Setup(width=15, heads=3, length=11, kernel=3)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    d, heads, n, size = setup.width, setup.heads, setup.length, setup.kernel
    c = d // heads
    x = torch.randn(1, n, d, generator=draws, dtype=torch.float64)
    value = torch.randn(heads, c, c, generator=draws, dtype=torch.float64) * c**-0.5
    out = torch.randn(d, d, generator=draws, dtype=torch.float64) * d**-0.5
    taps = torch.randn(heads, size, generator=draws, dtype=torch.float64)

    # score of tap (j - i) on a ring, and only the taps of the kernel are visible
    offset = (torch.arange(n)[None] - torch.arange(n)[:, None] + size // 2) % n
    scores, seen = taps[:, offset.clamp(max=size - 1)][None], (offset < size)[None, None]

    def heads_of(x: Tensor) -> Float[Tensor, "b d n"]:
        """The heads put together, before W_o."""
        v = torch.einsum("bhnc,hec->bhne", split_heads(x, heads), value)
        nothing = torch.zeros_like(v)
        return merge_heads(attention(nothing, nothing, v, mask=seen, scores=scores)).mT

    kernel = (taps.softmax(-1)[:, None, None] * value[..., None]).flatten(0, 1)
    ring = functional.pad(x.mT, (size // 2, size // 2), mode="circular")
    grouped = functional.conv1d(ring, kernel, groups=heads)
    joined = heads_of(x)
    return {
        "width": d,
        "heads": heads,
        "error before W_o": float((joined - grouped).abs().max()),
        "error": float((joined.mT @ out.T - functional.conv1d(grouped, out[:, :, None]).mT).abs().max()),
        "channels read by a head": _read(heads_of, x),
        "channels read with a group a head": _read(lambda x: _convolved(x, kernel, heads), x),
        "channels read with a group a channel": _read(lambda x: _convolved(x, kernel[:, :1], d), x),
        "smallest error with a group a channel": _smallest_error(ring, joined, size),
    }


def _convolved(x: Tensor, kernel: Tensor, groups: int) -> Tensor:
    ends = kernel.shape[-1] // 2
    return functional.conv1d(functional.pad(x.mT, (ends, ends), mode="circular"), kernel, groups=groups)


def _read(path: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many input channels reach the first output channel, by its gradient."""
    start = x.clone().requires_grad_()
    path(start)[0, 0].sum().backward()
    return 0 if start.grad is None else int((start.grad.abs().amax((0, 1)) > 1e-12).sum())


def _smallest_error(ring: Float[Tensor, "1 d m"], wanted: Float[Tensor, "1 d n"], size: int) -> float:
    """What is left, as a share, by the best kernel of its own for each channel: a least-squares fit."""
    if not wanted.isfinite().all():
        return math.nan  # a fit of what is no number is an error of the solver
    seen = ring[0].unfold(-1, size, 1)  # channel, place, tap
    fitted = torch.linalg.lstsq(seen, wanted[0][..., None]).solution
    return float((seen @ fitted - wanted[0][..., None]).norm() / wanted.norm())


def verdict(numbers: Numbers) -> Verdict:
    share = numbers["width"] // numbers["heads"]
    exact = max(numbers["error"], numbers["error before W_o"]) < 1e-12
    alike = numbers["channels read by a head"] == numbers["channels read with a group a head"] == share
    return decide(
        exact and alike and numbers["smallest error with a group a channel"] > 0.1,
        f"With groups={numbers['heads']}, the number of heads, and a 1 x 1 convolution for W_o the outputs differ by "
        f"{numbers['error']:.0g}. A head's channel reads {numbers['channels read by a head']} channels, as one of such "
        f"a group does; with a group for each channel it reads {numbers['channels read with a group a channel']}, and "
        f"{numbers['smallest error with a group a channel']:.0%} of the output cannot be met.",
    )


@wrong_answer(
    "000 1.2b",
    says="Heads are like groups = in_channels.",
    right="groups = number of heads, each of d/h channels that mix, and a 1 x 1 convolution after it for W_o.",
)
def _a_group_a_channel(numbers: Numbers) -> Verdict:
    left = numbers["smallest error with a group a channel"]
    return decide(
        left < 1e-9, f"The best convolution with groups={numbers['width']} misses {left:.0%} of the output of heads."
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2, width=4.6)
    kinds = ("by a head", "with a group a head", "with a group a channel")
    plot_bars(left, {kind.replace(" a ", "\na ", 1): float(numbers[f"channels read {kind}"]) for kind in kinds})
    left.set(ylabel="channels read by one channel", title="Which channels meet")
    left_over = numbers["smallest error with a group a channel"]
    plot_bars(right, {"groups = heads": numbers["error before W_o"], "groups = channels": left_over})
    right.set(ylabel="difference from heads", title="How near a convolution comes")
    return figure
