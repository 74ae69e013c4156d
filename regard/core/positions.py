"""Position encodings: sinusoidal embeddings, and rotary positions (RoPE) with context extension.

ALiBi and T5 biases are score terms in core/scores.py.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.registry import Registry
from regard.base.tracing import in_compiled_code
from regard.base.validation import check_integer, check_number, suggest

PAIRINGS = ("half", "interleaved")
LARGEST = 1e30  # of bases, factors and numbers of turns; formulas with larger numbers overflow


def sinusoidal(positions: int | Tensor, width: int, *, base: float = 10000.0) -> Float[Tensor, "n d"]:
    """Return sinusoidal position embeddings, to be added to token embeddings.

    For position n, coordinate 2k is sin(n / base^(2k/width)), and coordinate 2k + 1 is the cosine of the same angle.
    The result is float32. Vaswani et al. 2017, arXiv:1706.03762.

    positions  number of tokens, or a tensor of positions
    width      model width, an even number
    base       base of the wavelengths

    The example is the embedding of position 1, with the angles 1 and 0.01.

    >>> sinusoidal(2, 4)[1]
    tensor([0.8415, 0.5403, 0.0100, 0.9999])
    """
    if check_integer("width", width, 2, "one sin and one cos per frequency") % 2:
        raise ConfigError(f"sinusoidal needs an even width, one sin and one cos per frequency: width={width}")
    _check_base(base)
    if not isinstance(positions, Tensor):
        positions = torch.arange(check_integer("positions", positions, 0, "tokens"))
    if positions.ndim != 1:
        raise ShapeError(f"positions is {tuple(positions.shape)}, but sinusoidal takes one number per token, (n)")
    phases = positions[:, None].float() * inverse_frequencies(base, width, positions.device)
    return torch.stack((phases.sin(), phases.cos()), -1).flatten(-2)


def inverse_frequencies(base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
    """Return the RoPE frequencies base^(-2k/width) for k = 0 .. width/2 - 1, in float32 radians per position."""
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)


def grid_positions(rows: int, columns: int, device: torch.device | str | None = None) -> Int[Tensor, "n 2"]:
    """Return the (row, column) of every patch of an image, row by row.

    These are the positions for `rotary(axes=2)`.

    >>> grid_positions(1, 3).tolist()
    [[0, 0], [0, 1], [0, 2]]
    """
    row = torch.arange(check_integer("rows", rows, 0, "patches"), device=device)
    column = torch.arange(check_integer("columns", columns, 0, "patches"), device=device)
    return torch.stack(torch.meshgrid(row, column, indexing="ij"), -1).flatten(0, 1)


class RopeScaling(ABC):
    """Base class of RoPE scaling, which changes the rotary frequencies to extend the context of a trained model."""

    @abstractmethod
    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        """Return the scaled frequencies for `width` rotated coordinates, in radians per position."""


ROPE_SCALINGS: Registry[type[RopeScaling]] = Registry("rope scaling")


@ROPE_SCALINGS.add("Interpolate")
@dataclass(frozen=True, slots=True)
class Interpolate(RopeScaling):
    """Position interpolation for RoPE: all frequencies are divided by `factor`.

    Chen et al. 2023, arXiv:2306.15595. This equals dividing all positions by `factor`.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        return inverse_frequencies(base, width, device) / self.factor


@ROPE_SCALINGS.add("NTK")
@dataclass(frozen=True, slots=True)
class NTK(RopeScaling):
    """NTK-aware RoPE scaling: the base becomes base * factor^(w / (w - 2)).

    w is the number of rotated coordinates. The highest frequency is kept, and the lowest is divided by `factor`. The
    others are divided by `factor` to a power between 0 and 1. bloc97 2023, reddit.com/r/LocalLLaMA/comments/14lz7j5.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        if width < 4:
            raise ConfigError(f"NTK scales between two frequencies or more, but width={width} has one; use 4 or more")
        return inverse_frequencies(base * self.factor ** (width / (width - 2)), width, device)


@ROPE_SCALINGS.add("DynamicNTK")
@dataclass(frozen=True, slots=True)
class DynamicNTK(RopeScaling):
    """Dynamic NTK RoPE scaling: `NTK` with a factor that grows with the length n of the input.

    For n > original, the NTK factor is factor * n / original - (factor - 1). Shorter inputs are not changed.
    All frequencies except the highest change with n, so keys cached for one length are wrong for another; a KV
    cache works only up to `original` positions. emozilla 2023, reddit.com/r/LocalLLaMA/comments/14mrgpr.

    factor    increase of the NTK factor when the input grows by `original` positions: the NTK factor is 1 at
              n = original and 1 + factor at n = 2 * original
    original  context length that the model was trained with
    """

    factor: float
    original: int

    def __post_init__(self) -> None:
        _check_factor(self)
        check_integer("DynamicNTK(original)", self.original, 1, "positions")

    def at_length(self, n: int) -> NTK:
        """Return the NTK scaling for an input of n positions."""
        return NTK(max(self.factor * n / self.original - (self.factor - 1), 1.0))

    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        return inverse_frequencies(base, width, device)


@ROPE_SCALINGS.add("Llama3")
@dataclass(frozen=True, slots=True)
class Llama3(RopeScaling):
    """Llama 3's RoPE scaling, which divides low frequencies by `factor` and keeps high ones.

    Whether a frequency is low or high depends on its number of turns in the original context, original * frequency /
    (2 pi). Llama 3.1, arXiv:2407.21783 and github.com/meta-llama/llama-models.

    low       with at most this number of turns, the frequency is divided by `factor`
    high      with at least this number of turns, the frequency is kept; between `low` and `high` it is
              interpolated linearly
    original  context length that the model was trained with
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        _check_factor(self)
        if not 0 < self.low < self.high:
            raise ConfigError(f"Llama3 needs 0 < low < high turns: low={self.low}, high={self.high}")
        _check_original(self, self.original, self.low)

    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        plain = inverse_frequencies(base, width, device)
        turns = self.original * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@ROPE_SCALINGS.add("YaRN")
@dataclass(frozen=True, slots=True)
class YaRN(RopeScaling):
    """YaRN's RoPE scaling, which divides low frequencies by `factor` and keeps high ones.

    Whether a frequency is low or high depends on its number of turns in the original context, original * frequency /
    (2 pi). Between `fast` and `slow` turns, the frequencies are interpolated linearly in their index k. The frequency
    with index k(t) = w ln(original / (2 pi t)) / (2 ln base) makes t turns, where w is the number of rotated
    coordinates. The interpolation runs from floor k(fast) to ceil k(slow), as in the released code. Peng et al. 2023,
    arXiv:2309.00071.

    original          context length that the model was trained with
    fast              with at least this number of turns, the frequency is kept
    slow              with at most this number of turns, the frequency is divided by `factor`
    attention_factor  multiplies rotated queries and keys, so that scores are multiplied by its square. The
                      paper and Hugging Face use 0.1 ln(factor) + 1
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_factor(self)
        if not 0 < check_number("YaRN(attention_factor)", self.attention_factor) < math.inf:
            raise ConfigError(f"YaRN needs a positive attention_factor: attention_factor={self.attention_factor}")
        if not 1 / LARGEST <= self.slow < self.fast <= LARGEST:
            raise ConfigError(
                f"YaRN needs 0 < slow < fast turns, from {1 / LARGEST:g} to {LARGEST:g}: slow={self.slow}, "
                f"fast={self.fast}"
            )
        _check_original(self, self.original, self.slow)

    def frequencies(self, base: float, width: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        fast, slow = (
            width * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), width - 1)
        # if the ramp starts beyond the last index, every frequency is before it and kept
        last = max(last, first + 1)
        index = torch.arange(width // 2, dtype=torch.float32, device=device)
        divided = ((index - first) / (last - first)).clamp(0, 1)
        return inverse_frequencies(base, width, device) * (1 - divided + divided / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding (RoPE). Make it with `rotary`, which documents the settings."""

    base: float = 10000.0
    pairing: str = "half"
    width: int | None = None
    axes: int = 1
    scaling: Interpolate | NTK | DynamicNTK | Llama3 | YaRN | RopeScaling | None = None  # these can be written to JSON

    def __post_init__(self) -> None:
        _check_base(self.base)
        if self.pairing not in PAIRINGS:
            hint = suggest(self.pairing, PAIRINGS)
            raise ConfigError(f"unknown pairing {self.pairing!r}{hint} (there are: {', '.join(PAIRINGS)})")
        check_integer("axes", self.axes, 1, "the coordinates of a position")
        if self.width is not None and check_integer("width", self.width, 1, "the rotated coordinates") % (
            2 * self.axes
        ):
            raise ConfigError(f"width must be a positive multiple of 2 * axes = {2 * self.axes}: width={self.width}")
        if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
            raise ConfigError(
                f"scaling must be {', '.join(ROPE_SCALINGS)} or another RopeScaling, not {self.scaling!r}; "
                "to divide positions by 2 write Interpolate(2)"
            )

    def frequencies(self, c: int, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
        """Return the frequency of each pair of coordinates, in radians per position, for heads of width c."""
        width = self._rotated_width(c) // self.axes
        scaling = self.scaling
        if scaling is None:
            return inverse_frequencies(self.base, width, device)
        return scaling.frequencies(self.base, width, device)

    def __call__(self, x: Float[Tensor, "b h n c"], positions: int | Tensor | None = None) -> Float[Tensor, "b h n c"]:
        """Rotate queries or keys by their positions (RoPE).

        positions  None for 0, 1, 2 ..., the position of the first token as an integer, or a tensor of all positions
                   with the shape (n) or (b n). If `axes` is above 1, a tensor (n axes) or (b n axes) is required
        """
        if not isinstance(x, Tensor):
            raise DtypeError(f"x must be a tensor of heads, (b h n c), not {type(x).__name__}")
        if x.ndim != 4:
            raise ShapeError(f"x is {tuple(x.shape)}, but rotary rotates heads, (b h n c)")
        if not x.is_floating_point():
            raise DtypeError(f"rotary rotates floating-point heads, but x is {x.dtype}; call x.float() first")
        if isinstance(self.scaling, DynamicNTK):
            return replace(self, scaling=self._dynamic_scaling(self.scaling, x.shape[2], positions))(x, positions)
        width = self._rotated_width(x.shape[-1])
        exact = torch.promote_types(x.dtype, torch.float32)
        positions = self._token_positions(x, positions)
        frequencies = self.frequencies(x.shape[-1], x.device)
        cos, sin = (_rotations_op if in_compiled_code() else _rotations)(positions, frequencies, exact)
        if isinstance(self.scaling, YaRN) and self.scaling.attention_factor != 1:
            cos, sin = cos * self.scaling.attention_factor, sin * self.scaling.attention_factor

        half = width // self.axes // 2
        shape, pair = ((self.axes, 2, half), -2) if self.pairing == "half" else ((self.axes, half, 2), -1)
        a, b = torch.unflatten(x[..., :width].to(exact), -1, shape).unbind(pair)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), pair).flatten(-3).to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)

    def _dynamic_scaling(self, scaling: DynamicNTK, n: int, positions: int | Tensor | None) -> NTK:
        if isinstance(positions, Tensor):
            return scaling.at_length(int(positions.max()) + 1 if positions.numel() else 0)
        start = positions or 0
        if start and start + n > scaling.original:
            raise ConfigError(
                f"{scaling} changes the frequencies of earlier positions after {scaling.original}, so that cached keys "
                "cannot be used; run the whole input without a cache (use_cache=False)"
            )
        return scaling.at_length(start + n)

    def _rotated_width(self, c: int) -> int:
        """Return the number of rotated coordinates of a head of width c. Raises ShapeError if c does not fit."""
        width = c if self.width is None else self.width
        if width > c:
            raise ShapeError(
                f"rotary rotates width={width} coordinates, but x has {format_axis('c', c)}; use width <= {c}"
            )
        if width % (2 * self.axes):
            raise ShapeError(
                f"rotary over {self.axes} axes rotates a multiple of {2 * self.axes} coordinates, but x has "
                f"{format_axis('c', c)}; widen the heads or rotate a part of them with width="
            )
        return width

    def _token_positions(self, x: Tensor, positions: int | Tensor | None) -> Float[Tensor, "*b n axes"]:
        """Return the position of each token along each axis, in float32.

        The shape is (n axes), or (b 1 n axes) if the sequences have different positions.
        """
        b, _, n, _ = x.shape
        if not isinstance(positions, Tensor):
            if self.axes > 1:
                raise ConfigError(
                    f"rotary over {self.axes} axes needs positions of shape (n, {self.axes}), not {positions!r}; "
                    "see grid_positions(rows, columns)"
                )
            start = 0 if positions is None else positions
            if not isinstance(start, int | torch.SymInt):
                raise ConfigError(f"positions is {start!r}, but rotary takes None, a whole number or a tensor")
            return (torch.arange(n, device=x.device) + start)[:, None].float()
        wanted = (n,) if self.axes == 1 else (n, self.axes)
        if tuple(positions.shape) not in (wanted, (b, *wanted)):
            raise ShapeError(
                f"positions is {tuple(positions.shape)}, but x has {format_axis('b', b)} and {format_axis('n', n)}; "
                f"give {wanted} or {(b, *wanted)}"
            )
        placed = positions.to(x.device, torch.float32)
        placed = placed[..., None] if self.axes == 1 else placed
        return placed if placed.ndim == 2 else placed[:, None]


def _rotations(positions: Tensor, frequencies: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every angle position * frequency."""
    # an elementwise product: autocast casts matrix products, and a bfloat16 phase is wrong by whole turns
    phases = (positions[..., None] * frequencies).to(exact)
    return phases.cos(), phases.sin()


# torch.compile would fuse these cosines and sines into the rotation and compute them again for every head and layer,
# which takes a third of the time of small models. A custom operator is not fused.
_rotations_op = torch.library.custom_op("regard::rotations", _rotations, mutates_args=())


@_rotations_op.register_fake
def _(positions: Tensor, frequencies: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    phases = (positions[..., None] * frequencies).to(exact)
    return torch.empty_like(phases), torch.empty_like(phases)


def rotary(
    *,
    base: float = 10000.0,
    pairing: str = "half",
    width: int | None = None,
    axes: int = 1,
    scaling: RopeScaling | None = None,
) -> Rotary:
    """Return a rotary position embedding (RoPE), which rotates each pair of coordinates by position * frequency.

    The positions i and j of rotated q and k affect their score by i - j only. Su et al. 2021, arXiv:2104.09864. Call
    the result with queries or keys: `rope(x)`, `rope(x, 7)` if the first position is 7, or `rope(x, positions)`.

    base     base of the wavelengths
    pairing  "half" pairs coordinate k with k + width/2 (Llama of Hugging Face), "interleaved" pairs 2k with 2k + 1
             (GPT-J)
    width    number of coordinates to rotate, from the first; None rotates all
    axes     number of coordinates of a position. 2 is for images: the first half of the rotated coordinates is
             rotated by the row of a patch, the second half by its column
    scaling  Interpolate, NTK, DynamicNTK, Llama3 or YaRN, for contexts longer than in training

    >>> rope = rotary()
    >>> early, late = rope(q, 2) @ rope(k, 0).mT, rope(q, 7) @ rope(k, 5).mT
    >>> torch.allclose(early, late, atol=1e-5)
    True
    """
    return Rotary(base=base, pairing=pairing, width=width, axes=axes, scaling=scaling)


def _check_base(base: float) -> None:
    if not 1 < check_number("base", base) <= LARGEST:
        raise ConfigError(
            f"base must be greater than 1, so that frequencies fall from 1 towards 1/base, and at most {LARGEST:g}: "
            f"base={base}"
        )


def _check_factor(scaling: Interpolate | NTK | DynamicNTK | Llama3 | YaRN) -> None:
    name = type(scaling).__name__
    if not 1 <= check_number(f"{name}(factor)", scaling.factor) <= LARGEST:
        raise ConfigError(
            f"{name} scales by a factor of at least 1 (new context / original), at most {LARGEST:g}: "
            f"factor={scaling.factor}"
        )


def _check_original(scaling: Llama3 | YaRN, original: int, turns: float) -> None:
    check_integer(f"{type(scaling).__name__}(original)", original, 1, "positions")
    if original <= 2 * math.pi * turns:
        raise ConfigError(
            f"{type(scaling).__name__} needs an original context in which the fastest frequency makes {turns} turns: "
            f"original={original}, at least {math.ceil(2 * math.pi * turns + 1)}"
        )
