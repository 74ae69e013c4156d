"""Rotary: which pairs of coordinates turn with position, and how fast."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.see.measure.scores import Scorer
from regard.see.measure.stats import spread

SMALL = 0.35  # the length of basis vectors: their scores stay where a soft-cap does not bend them


@dataclass(frozen=True)
class Turn:
    """A rotation of coordinates by position."""

    pairing: str  # "half" or "interleaved"
    first: int  # the first coordinate that turns
    frequencies: tuple[float, ...]  # radians per position of each pair

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    def sides(self) -> tuple[list[int], list[int]]:
        """The first and the second coordinates of all pairs."""
        turning = list(range(self.first, self.first + self.width))
        half = len(self.frequencies)
        return (turning[:half], turning[half:]) if self.pairing == "half" else (turning[::2], turning[1::2])

    def applied(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n c"]:
        phases = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor(self.frequencies, dtype=x.dtype)
        a, b = self.sides()
        turned = x.clone()
        turned[..., a] = x[..., a] * phases.cos() - x[..., b] * phases.sin()
        turned[..., b] = x[..., a] * phases.sin() + x[..., b] * phases.cos()
        return turned

    def base(self) -> float | None:
        """The base whose falling powers the frequencies are, or None where they are no such row."""
        found = torch.tensor(self.frequencies, dtype=torch.float64)
        steps = torch.arange(len(found), dtype=torch.float64) / len(found)
        if len(found) < 2 or bool((found <= 0).any()):
            return None
        trust = found**2  # a slow turn is measured less exactly
        base = math.exp(-float((trust * steps * found.log()).sum() / (trust * steps**2).sum()))
        return base if bool((found / base**-steps - 1).abs().max() < 0.02) else None


def read_turn(scorer: Scorer) -> Turn | None:
    """The rotation of q and k by position, if there is one, from the scores of basis vectors."""
    eye, notes = scorer.plate.eye, scorer.plate.notes
    if eye.i != eye.j or eye.rounding > 1e-3:
        needed = "as many keys as queries" if eye.i != eye.j else "finer numbers"
        notes.append(f"rotary was not looked for: that needs {needed}")
        return None
    every = list(range(eye.c))
    own = _coupled(scorer, every, every)
    first = next((a for a in every if spread(own[a]) > 1e-3 * max(float(own[a, 0].abs()), 1e-12)), None)
    if first is None:
        return None
    across = [spread(scores) for scores in _coupled(scorer, [first] * eye.c, every)]
    across[first] = 0.0
    step = across.index(max(across)) - first
    if step < 1 or first + 2 * step > eye.c:
        notes.append("scores change with position, but not as if pairs of coordinates turned by i - j")
        return None
    pairing = "interleaved" if step == 1 and eye.c > 2 else "half"
    count = step if pairing == "half" else (eye.c - first) // 2
    a, b = Turn(pairing, first, (0.0,) * count).sides()
    there, back = _coupled(scorer, a, b), _coupled(scorer, b, a)
    # both ways together, so that a weight that one of the coordinates has of its own drops out
    sines = there.sign() * (there * back).abs().sqrt() / (own[a, :1] * own[b, :1]).abs().sqrt()
    phases = torch.atan2(sines * own[a, :1].sign(), own[a] / own[a, :1])
    found = [_frequency(each.tolist()) for each in phases]
    while pairing == "interleaved" and found and abs(found[-1]) * eye.i < 1e-5:
        found.pop()  # beyond the last pair that turns
    if len(found) == 1:
        notes.append("a single pair turns, which is half and interleaved at once")
        pairing = "half"
    return Turn(pairing, first, tuple(found))


def _coupled(scorer: Scorer, a: list[int], b: list[int]) -> Float[Tensor, "pairs distances"]:
    """The score of q = e_a and k = e_b by distance i - j = 0, 1, ..: the mean over all pairs that far apart."""
    eye = scorer.plate.eye
    try:
        rows = _scores_of(scorer, a, b)
    except Exception:  # it takes no more sequences than it was asked with
        starts = range(0, len(a), eye.b)
        rows = torch.cat([_scores_of(scorer, a[at : at + eye.b], b[at : at + eye.b]) for at in starts])
    return torch.stack([rows.diagonal(-far, 1, 2).nanmean(-1) for far in range(eye.i)], -1)


def _scores_of(scorer: Scorer, a: list[int], b: list[int]) -> Float[Tensor, "pairs i j"]:
    """The first head's scores of pairs of basis vectors, one pair in each sequence."""
    plate = scorer.plate
    size = max(len(a), plate.eye.b)
    q, k = (x.new_zeros(size, *x.shape[1:]) for x in (plate.q, plate.k))
    for at, (one, other) in enumerate(zip(a, b, strict=True)):
        q[at, ..., one] = k[at, ..., other] = SMALL
    return scorer.scores(q, k)[: len(a), 0]


def _frequency(phases: list[float]) -> float:
    """Radians per position, from the angles turned at distances 0, 1, .., which are known up to whole turns."""
    total, weight, guess = 0.0, 0.0, phases[1]
    for far, phase in enumerate(phases):
        if far and math.isfinite(phase):
            turns = round((guess * far - phase) / (2 * math.pi))
            total += far * (phase + 2 * math.pi * turns)
            weight += far * far
            guess = total / weight
    return guess
