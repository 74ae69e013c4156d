"""Norms of q and k: whether vectors have a length, and whether a learned weight of each coordinate is the rest."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.seeds import make_generator
from regard.see.measure.rotary import Turn
from regard.see.measure.scores import Scorer
from regard.see.measure.stats import apart


@dataclass(frozen=True)
class Normed:
    """Which of q and k are normalised."""

    q: bool
    k: bool

    def __bool__(self) -> bool:
        return self.q or self.k

    def applied(self, q: Tensor, k: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        return normalise(q, kind) if self.q else q, normalise(k, kind) if self.k else k


def normalise(x: Tensor, kind: str | None) -> Tensor:
    """Vectors whose coordinates have a mean square of one; "layer" centres them first."""
    if kind is None:
        return x
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def read_norms(scorer: Scorer, scores: Tensor) -> Normed:
    """A vector twice as long changes nothing where it is normalised."""
    q, k = scorer.plate.q, scorer.plate.k
    near = 10 * scorer.plate.eye.rounding
    normed = Normed(*(apart(scores, scorer.scores(*longer)) < near for longer in ((2 * q, k), (q, 2 * k))))
    if normed:
        which = "q and k are" if normed.q and normed.k else "q is" if normed.q else "k is"
        scorer.plate.notes.append(f"{which} normalised: a vector twice as long changes nothing")
    return normed


def weighted(scorer: Scorer, normed: Normed, kind: str, turn: Turn | None) -> tuple[list[float], float]:
    """The mean weight of a coordinate in each head, and the share that no weight of coordinates explains."""
    plate = scorer.plate
    eye, parts, told = plate.eye, [], []
    for draw in range(16 * eye.c // (eye.b * eye.i * eye.j) + 1):  # for more equations than weights
        source = make_generator(draw + 1)
        q, k = (torch.randn(x.shape, generator=source, dtype=torch.float64) for x in (plate.q, plate.k))
        told.append(scorer.scores(q, k))
        q, k = normed.applied(q, k, kind)
        parts.append(_products(q, scorer.spread_out(k), turn))
    terms, scores = torch.cat(parts), torch.cat(told)
    means, left = [], 0.0
    for head in range(eye.h):
        known = scores[:, head].isfinite()
        y, x = scores[:, head][known], terms[:, head][known]
        weights = torch.linalg.lstsq(x, y, driver="gelsd").solution
        means.append(float(weights.mean()))
        left = max(left, float((x @ weights - y).norm() / y.norm()))
    return means, left


def _products(
    q: Float[Tensor, "b h i c"], k: Float[Tensor, "b h j c"], turn: Turn | None
) -> Float[Tensor, "b h i j terms"]:
    """The products of coordinates that make up a score, each turned as rotary turns it."""
    q, k = q[:, :, :, None], k[:, :, None]
    if turn is None:
        return q * k
    a, b = turn.sides()
    rest = [each for each in range(q.shape[-1]) if each not in (*a, *b)]
    i, j = (torch.arange(n, dtype=q.dtype) for n in (q.shape[2], k.shape[3]))
    phases = (i[:, None] - j)[..., None] * torch.tensor(turn.frequencies, dtype=q.dtype)
    along = [q[..., each] * k[..., each] * phases.cos() for each in (a, b)]
    across = [q[..., a] * k[..., b] * phases.sin(), -q[..., b] * k[..., a] * phases.sin()]
    return torch.cat([*along, *across, q[..., rest] * k[..., rest]], -1)
