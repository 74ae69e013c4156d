"""Measure rotary positions: which pairs of coordinates are rotated, and with which frequencies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.see.measure.scores import ScoreReader
from regard.see.measure.stats import value_range

SMALL = 0.35  # the length of basis vectors: a soft-cap hardly changes their scores
USUAL_BASES = (10000.0, 500000.0)


@dataclass(frozen=True)
class Rotation:
    """A rotary position embedding: pairs of coordinates are rotated by an angle proportional to the position."""

    pairing: str  # "half" or "interleaved"
    first: int  # the first coordinate that is rotated
    frequencies: tuple[float, ...]  # radians per position of each pair

    @property
    def width(self) -> int:
        """The number of rotated coordinates."""
        return 2 * len(self.frequencies)

    def pairs(self) -> tuple[list[int], list[int]]:
        """Return the indices of the first and of the second coordinates of all pairs."""
        rotated = list(range(self.first, self.first + self.width))
        half = len(self.frequencies)
        return (rotated[:half], rotated[half:]) if self.pairing == "half" else (rotated[::2], rotated[1::2])

    def apply(self, x: Float[Tensor, "b h n c"], start: int = 0) -> Float[Tensor, "b h n c"]:
        """Rotate vectors that are at positions `start`, `start` + 1, ..."""
        positions = torch.arange(start, start + x.shape[2], dtype=torch.float64)
        phases = positions[:, None] * torch.tensor(self.frequencies, dtype=torch.float64)
        cos, sin = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
        a, b = self.pairs()
        rotated = x.clone()
        rotated[..., a] = x[..., a] * cos - x[..., b] * sin
        rotated[..., b] = x[..., a] * sin + x[..., b] * cos
        return rotated

    def base(self) -> float | None:
        """Return the base of the frequencies; None if they are not powers of one base.

        With a base, pair n of N has the frequency base**(-n / N), for n from 0. The base is rounded to two digits if
        the rounded number fits closely.
        """
        return _common_base(torch.tensor(self.frequencies, dtype=torch.float64))

    def scheme(self) -> "RotaryScheme | None":
        """Return the base of the frequencies and their scaling for a longer context; None if no known scheme fits."""
        found = torch.tensor(self.frequencies, dtype=torch.float64)
        if (base := _common_base(found)) is not None:
            return RotaryScheme(base)
        if len(found) < 3 or bool((found <= 0).any()):
            return None
        factor = 1 / float(found[0])
        if (base := _common_base(factor * found)) is not None:
            return RotaryScheme(base, "linear scaling", factor)
        return _blended_scheme(found)

    def with_base(self, base: float) -> "Rotation":
        """Return the same rotation with the frequency base**(-n / N) for pair n of N, for n from 0."""
        count = len(self.frequencies)
        return replace(self, frequencies=tuple(base ** -(pair / count) for pair in range(count)))


@dataclass(frozen=True)
class RotaryScheme:
    """How rotary frequencies are computed: powers of a base, possibly scaled for a longer context."""

    base: float
    scaling: str = ""  # "linear scaling", "Llama 3" or "YaRN"; empty if there is none
    factor: float = 1.0

    def __str__(self) -> str:
        return f"base {self.base:g}" + (f", {self.scaling} by {self.factor:.4g}" if self.scaling else "")

    @property
    def beta_factor(self) -> float:
        """The factor by which YaRN multiplies the scale of q . k; 1 for other schemes."""
        return (0.1 * math.log(self.factor) + 1) ** 2 if self.scaling == "YaRN" else 1.0


def _common_base(found: Float[Tensor, "pairs"]) -> float | None:
    exponents = torch.arange(len(found), dtype=torch.float64) / len(found)
    if len(found) < 2 or bool((found <= 0).any()):
        return None
    trust = found**2  # a low frequency is measured less exactly
    base = math.exp(-float((trust * exponents * found.log()).sum() / (trust * exponents**2).sum()))
    if bool((found / base**-exponents - 1).abs().max() >= 0.02):
        return None
    return _round_base(base)


def _blended_scheme(found: Float[Tensor, "pairs"]) -> RotaryScheme | None:
    """Find the parameters of Llama 3 or YaRN scaling from the frequencies; None if neither fits.

    Both scalings keep high frequencies and divide low frequencies by a factor. In between, they interpolate linearly
    between a kept and a divided frequency. The interpolation depends on the frequency in Llama 3, and on the index of
    the pair in YaRN.
    """
    count = len(found)
    index = torch.arange(count, dtype=torch.float64)
    base = _round_base(float(found[1] / found[0]) ** -count)
    plain = base ** -(index / count)
    share = found / plain  # 1 where a frequency is kept, 1 / factor where it is divided
    factor = 1 / float(share[-1])
    kept = (share - 1 / factor) / (1 - 1 / factor)
    between = ((kept > 0.01) & (kept < 0.99)).nonzero()[:, 0]
    ends = kept[1] > 0.99 and kept[-2] < 0.01  # some frequencies are kept, and some are divided by the whole factor
    if not ends or not 1.01 < factor < 1e4 or base < 100 or len(between) < 2:
        return None
    residuals = {}
    for name, x in (("Llama 3", plain[between]), ("YaRN", index[between])):
        x, y = x - x.mean(), kept[between] - kept[between].mean()
        residuals[name] = float((y - x * (x * y).sum() / (x * x).sum()).norm() / y.norm())
    best = min(residuals, key=lambda name: residuals[name])
    return RotaryScheme(base, best, factor) if residuals[best] < 0.05 else None


def _round_base(base: float) -> float:
    rounded = float(f"{base:.2g}")
    return rounded if math.isclose(rounded, base, rel_tol=2e-3) else base


def usual_rotations(width: int) -> Iterator[Rotation]:
    """Yield rotations of all coordinates, with the bases and the pairings of coordinates that most models use."""
    exponents = [2 * pair / width for pair in range(width // 2)]
    for base in USUAL_BASES if width % 2 == 0 else ():
        frequencies = tuple(base**-exponent for exponent in exponents)
        yield from (Rotation(pairing, 0, frequencies) for pairing in ("half", "interleaved"))


def read_rotation(reader: ScoreReader) -> Rotation | None:
    """Measure the rotary embedding of q and k from the scores of basis vectors; None if q and k are not rotated."""
    sizes, notes = reader.raw.reader, reader.raw.notes
    if sizes.i != sizes.j or sizes.rounding > 1e-3:
        needed = "as many keys as queries" if sizes.i != sizes.j else "a higher precision"
        notes.append(f"rotary was not measured: that needs {needed}")
        return None
    every = list(range(sizes.c))
    own = _basis_scores(reader, every, every)
    first = next((a for a in every if value_range(own[a]) > 1e-3 * max(float(own[a, 0].abs()), 1e-12)), None)
    if first is None:
        return None
    across = [value_range(scores) for scores in _basis_scores(reader, [first] * sizes.c, every)]
    across[first] = 0.0
    step = across.index(max(across)) - first
    if step < 1 or first + 2 * step > sizes.c:
        notes.append("scores change with position, but not by a rotation of pairs of coordinates")
        return None
    pairing = "interleaved" if step == 1 and sizes.c > 2 else "half"
    count = step if pairing == "half" else (sizes.c - first) // 2
    a, b = Rotation(pairing, first, (0.0,) * count).pairs()
    there, back = _basis_scores(reader, a, b), _basis_scores(reader, b, a)
    # the geometric mean of both directions removes a learned weight of one of the coordinates
    sines = there.sign() * (there * back).abs().sqrt() / (own[a, :1] * own[b, :1]).abs().sqrt()
    phases = torch.atan2(sines * own[a, :1].sign(), own[a] / own[a, :1])
    found = [_frequency(each.tolist()) for each in phases]
    while pairing == "interleaved" and found and abs(found[-1]) * sizes.i < 1e-5:
        found.pop()  # beyond the last pair that is rotated
    if len(found) == 1:
        notes.append("one pair is rotated, so half and interleaved pairing are the same")
        pairing = "half"
    return Rotation(pairing, first, tuple(found))


def _basis_scores(reader: ScoreReader, a: list[int], b: list[int]) -> Float[Tensor, "pairs distances"]:
    """Return the scores of basis vectors q = e_a and k = e_b, as a mean over pairs with distance i - j = 0, 1, ...

    e_a is nonzero in coordinate a only.

    a, b  lists of coordinates, one pair (a, b) for each row of the result
    """
    sizes = reader.raw.reader
    try:
        rows = _scores_of_pairs(reader, a, b)
    except Exception:  # it accepts no larger batch than the first one
        starts = range(0, len(a), sizes.b)
        rows = torch.cat([_scores_of_pairs(reader, a[at : at + sizes.b], b[at : at + sizes.b]) for at in starts])
    return torch.stack([rows.diagonal(-far, 1, 2).nanmean(-1) for far in range(sizes.i)], -1)


def _scores_of_pairs(reader: ScoreReader, a: list[int], b: list[int]) -> Float[Tensor, "pairs i j"]:
    """Return the scores of head 0 for basis vectors q = e_a and k = e_b: in sequence n, pair n of the lists a and b."""
    raw = reader.raw
    size = max(len(a), raw.reader.b)
    q, k = (x.new_zeros(size, *x.shape[1:]) for x in (raw.q, raw.k))
    for at, (one, other) in enumerate(zip(a, b, strict=True)):
        q[at, ..., one] = k[at, ..., other] = SMALL
    return reader.scores(q, k)[: len(a), 0]


def _frequency(phases: list[float]) -> float:
    """Fit a frequency, in radians per position, to the angles measured at distances 0, 1, ...

    Each angle is the frequency times the distance, and is known only up to multiples of 2 pi.
    """
    total, weight, guess = 0.0, 0.0, phases[1]
    for far, phase in enumerate(phases):
        if far and math.isfinite(phase):
            turns = round((guess * far - phase) / (2 * math.pi))
            total += far * (phase + 2 * math.pi * turns)
            weight += far * far
            guess = total / weight
    return guess
