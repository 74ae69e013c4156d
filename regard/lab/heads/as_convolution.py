"""When is self-attention a convolution with a kernel larger than 1?

Claim: When there is one head per offset of the kernel, its relative-position scores are one-hot at that offset, and its
    value projection is that tap of the kernel. Three heads are conv1d with kernel 3, nine are conv2d with kernel 3 x 3.
Measures: Attention with such scores, in whole numbers so that nothing is rounded, against torch's conv1d and conv2d
    with zero padding; and the difference with one head less. Whether a shift of the input shifts the outputs, also if
    each token attends to all tokens of its phrase, a block of tokens.
Finding: {{ n["heads on a line"] }} heads differ from conv1d by {{ n["error of conv1d"]|short }} and {{ n["heads on a
    grid"] }} heads from conv2d by {{ n["error of conv2d"]|short }}, for outputs up to {{ n["largest output"]|fixed(0)
    }}, zero padding included. With one head less they differ by {{ n["difference with one head less"]|fixed(0) }} and
    {{ n["difference with one head less on a grid"]|fixed(0) }}. If the input is shifted by one token, the outputs of
    the heads are shifted too, up to {{ n["shifted input: difference of the heads"]|short }}; if each token attends to
    its phrase of {{ n.phrase }} tokens instead, they differ from the shifted outputs by up to {{ n["shifted input:
    difference of the phrases"]|fixed(0) }}.
Budget: 1 second
Source: 000 1.3e, 002 1.3d
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
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.positions import grid_positions
from regard.core.scores import shaw
from regard.lab.drawing import Figure, bar_figure
from regard.lab.measure import attend_matrices, largest_difference
from regard.lab.settings import check_at_least
from regard.lab.verdict import Attention, Decision, Numbers, decide

MATHS = r"H_i = \sum_{t=-1}^{1} W_t \sum_j a^t_{ij} c_j, \quad a^t_{ij} = \delta_{j, i+t}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: sizes of a token sequence, of an image and of the convolutions.

    width    number of input channels
    out      number of output channels
    length   number of tokens of the sequence, the input of conv1d
    rows     height in tokens of the image, the input of conv2d
    columns  width of the image in tokens
    kernel   kernel size of both convolutions, odd, so that a kernel has a centre
    phrase   number of tokens of a phrase, a block of neighbouring tokens; for comparison, each token attends to all
             tokens of its phrase
    """

    width: int = 8
    out: int = 6
    length: int = 31
    rows: int = 11
    columns: int = 9
    kernel: int = 3
    phrase: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if check_integer("kernel", self.kernel, 3, "offsets") % 2 == 0:
            raise ConfigError(f"kernel must be odd: kernel={self.kernel}; try {self.kernel + 1}")
        check_at_least(self, phrase=2, rows=self.kernel, columns=self.kernel)
        check_at_least(self, length=max(self.kernel + 3, 2 * self.phrase))


SMOKE = Setup(width=5, out=3, length=11, rows=5, columns=4)


def run(setup: Setup, attention: Attention = attend) -> Numbers:
    draws = make_generator(setup.seed)
    size, ends = setup.kernel, setup.kernel // 2
    row = torch.randint(-9, 10, (1, setup.width, setup.length), generator=draws).double()
    taps = torch.randint(-9, 10, (setup.out, setup.width, size), generator=draws).double()
    line = functional.conv1d(row, taps, padding=ends)[0].T
    heads = _heads_on_line(row, size, attention)

    image = torch.randint(-9, 10, (1, setup.width, setup.rows, setup.columns), generator=draws).double()
    squares = torch.randint(-9, 10, (setup.out, setup.width, size, size), generator=draws).double()
    plane = functional.conv2d(image, squares, padding=ends)[0].flatten(1).T
    grid_heads = _heads_on_grid(image, size, attention)
    return {
        "kernel": size,
        "heads on a line": len(heads),
        "heads on a grid": len(grid_heads),
        "error of conv1d": largest_difference(_mix_heads(heads, taps), line),
        "error of conv2d": largest_difference(_mix_heads(grid_heads, squares.flatten(2)), plane),
        "difference with one head less": largest_difference(_mix_heads(heads[1:], taps[:, :, 1:]), line),
        "difference with one head less on a grid": largest_difference(
            _mix_heads(grid_heads[1:], squares.flatten(2)[:, :, 1:]), plane
        ),
        "largest output": float(torch.cat([line, plane]).abs().max()),
        "phrase": setup.phrase,
        **_differences_after_a_shift(row, taps, setup, attention),
    }


def _differences_after_a_shift(
    row: Float[Tensor, "1 d n"], taps: Float[Tensor, "m d k"], setup: Setup, attention: Attention
) -> dict[str, float]:
    """Return how much the outputs of a shifted input differ from the shifted outputs (0 means equivariant).

    There are two results: one for the heads that form a convolution, and one for attention of each token to all tokens
    of its phrase. The shift is cyclic, so the tokens at both ends are left out.
    """
    ends = setup.kernel // 2 + 1
    phrases = functional.one_hot(torch.arange(row.shape[2]) // setup.phrase).double()

    def heads(tokens: Tensor) -> Tensor:
        return _mix_heads(_heads_on_line(tokens, setup.kernel, attention), taps)

    def whole_phrases(tokens: Tensor) -> Tensor:
        # exp(-1000) is 0, so each token attends equally to all tokens of its phrase
        return attend_matrices(attention, phrases, phrases, tokens[0].mT, beta=1000.0)

    def difference(layer: Callable[[Tensor], Tensor]) -> float:
        return largest_difference(layer(row.roll(1, 2))[ends:-ends], layer(row).roll(1, 0)[ends:-ends])

    return {
        "shifted input: difference of the heads": difference(heads),
        "shifted input: difference of the phrases": difference(whole_phrases),
    }


def _heads_on_line(row: Float[Tensor, "1 d n"], size: int, attention: Attention) -> Float[Tensor, "h n d"]:
    """Return the output of `size` heads on a sequence; each head copies the token at a fixed offset from the query.

    Queries and relative keys (Shaw et al.) are one-hot, so that a score is 1 at the head's offset and 0 elsewhere.
    """
    ends, n = size // 2, row.shape[2]
    # relative keys are clipped to the last distance, so add one on each side
    keys = functional.pad(torch.eye(size, dtype=torch.float64), (0, 0, 1, 1))
    q = torch.eye(size, dtype=torch.float64)[None, :, None].expand(1, size, n, size)
    padded = functional.pad(row, (ends, ends)).mT[:, None].expand(1, size, n + 2 * ends, -1)
    k = torch.zeros(1, size, n + 2 * ends, size, dtype=torch.float64)
    # exp(-1000) is 0 in floating point, so the weights are exactly one-hot
    return attention(q, k, padded, scores=shaw(keys), beta=1000.0, positions=Positions(ends))[0]


def _heads_on_grid(image: Float[Tensor, "1 d y x"], size: int, attention: Attention) -> Float[Tensor, "h n d"]:
    """Return the output of `size` * `size` heads on an image; each head copies the token at a fixed offset.

    A key is the one-hot row and column of its token. A query is the one-hot row and column of its token's position
    plus the head's offset.
    """
    ends, (rows, columns) = size // 2, image.shape[2:]
    high, wide = rows + 2 * ends, columns + 2 * ends
    inner, outer, offsets = grid_positions(rows, columns), grid_positions(high, wide), grid_positions(size, size)

    def named(places: Tensor) -> Tensor:
        one_hot = functional.one_hot(places[..., 0], high), functional.one_hot(places[..., 1], wide)
        return torch.cat(one_hot, -1).double()

    q = named(inner[None] + offsets[:, None])[None]
    k = named(outer)[None, None].expand(1, size * size, -1, -1)
    padded = functional.pad(image, (ends,) * 4).flatten(2).mT[:, None].expand(1, size * size, -1, -1)
    return attention(q, k, padded, beta=math.inf)[0]


def _mix_heads(heads: Float[Tensor, "h n d"], taps: Float[Tensor, "m d h"]) -> Float[Tensor, "n m"]:
    """Multiply the output of each head by a matrix of `taps`, and sum over the heads.

    taps  taps[:, :, h] is the product of the value projection of head h and its part of W_o: one tap of the kernel
    """
    return torch.einsum("hnd,mdh->nm", heads, taps)


def verdict(numbers: Numbers) -> Decision:
    exact = numbers["error of conv1d"] == 0 and numbers["error of conv2d"] == 0
    needed = ("difference with one head less", "difference with one head less on a grid")
    moved = numbers["shifted input: difference of the heads"] == 0
    return decide(exact and moved and all(numbers[name] > 1 for name in needed))


def draw(numbers: Numbers) -> Figure:
    line, grid = numbers["heads on a line"], numbers["heads on a grid"]
    differences = {
        f"conv1d,\n{line} heads": numbers["error of conv1d"],
        f"conv1d,\n{line - 1} heads": numbers["difference with one head less"],
        f"conv2d,\n{grid} heads": numbers["error of conv2d"],
        f"conv2d,\n{grid - 1} heads": numbers["difference with one head less on a grid"],
    }
    return bar_figure(differences, ylabel="largest difference", title="One head per tap")
