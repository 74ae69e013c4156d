"""Measure the norms of q and k: whether they are normalised, how, and with which learned weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.seeds import make_generator
from regard.see.measure.rotary import Rotation
from regard.see.measure.scores import ScoreReader
from regard.see.measure.stats import relative_difference

EPSILONS = (0.0, 1e-8, 1e-6, 1e-5)  # epsilons that norms usually add to the mean square


@dataclass(frozen=True)
class QKNorm:
    """The measured QK norm: whether the vectors q and k are normalised, how, and with which epsilon."""

    q: bool
    k: bool
    kind: str | None = None  # "rms" or "layer"
    epsilon: float = 0.0

    def __bool__(self) -> bool:
        return self.q or self.k

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the norm that the measured attention was found to use (RMS or layer norm) to q, k or both.

        A tensor for which no norm was found is returned unchanged.
        """
        return (
            normalise(q, self.kind, self.epsilon) if self.q else q,
            normalise(k, self.kind, self.epsilon) if self.k else k,
        )


def normalise(x: Float[Tensor, "b h n c"], kind: str | None, epsilon: float = 0.0) -> Float[Tensor, "b h n c"]:
    """Normalise vectors along the last axis.

    kind  "rms": to a mean square of one; "layer": to a mean square of one after subtracting the mean; "l2": to
          length one; None: no change
    """
    if kind is None:
        return x
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    squares = x.square().sum(-1, keepdim=True) if kind == "l2" else x.square().mean(-1, keepdim=True)
    return x * (squares + epsilon).clamp(min=1e-12).rsqrt()


def read_norm(reader: ScoreReader) -> QKNorm:
    """Measure whether q and k are normalised: if so, a vector of twice the length gives the same scores.

    The compared vectors are the random q and k times 8 and times 16, because the epsilon of a norm changes the scores
    of short vectors.
    """
    q, k = reader.raw.q, reader.raw.k

    def unchanged(once: tuple[Tensor, Tensor], twice: tuple[Tensor, Tensor]) -> bool:
        return relative_difference(reader.scores(*once), reader.scores(*twice)) < 10 * reader.raw.reader.rounding

    norm = QKNorm(unchanged((8 * q, k), (16 * q, k)), unchanged((q, 8 * k), (q, 16 * k)))
    if norm:
        which = "q and k are" if norm.q and norm.k else "q is" if norm.q else "k is"
        reader.raw.notes.append(f"{which} normalised: a vector of twice the length gives the same scores")
    return norm


def fit_norm_weights(reader: ScoreReader, norm: QKNorm, rotation: Rotation | None) -> tuple[list[float], float]:
    """Fit the learned weights of the QK norm, one for each coordinate, by least squares.

    Returns the mean of the weights for each head, and the relative residual of the head that fits worst.
    """
    raw = reader.raw
    sizes, parts, measured = raw.reader, [], []
    for draw in range(16 * sizes.c // (sizes.b * sizes.i * sizes.j) + 1):  # more equations than weights
        source = make_generator(draw + 1)
        q, k = (torch.randn(x.shape, generator=source, dtype=torch.float64) for x in (raw.q, raw.k))
        measured.append(reader.scores(q, k))
        q, k = norm.apply(q, k)
        parts.append(_coordinate_products(q, reader.repeat_heads(k), rotation))
    terms, scores = torch.cat(parts), torch.cat(measured)
    means, residual = [], 0.0
    for head in range(sizes.h):
        known = scores[:, head].isfinite()
        y, x = scores[:, head][known], terms[:, head][known]
        weights = torch.linalg.lstsq(x, y, driver="gelsd").solution
        means.append(float(weights.mean()))
        residual = max(residual, float((x @ weights - y).norm() / y.norm()))
    return means, residual


def _coordinate_products(
    q: Float[Tensor, "b h i c"], k: Float[Tensor, "b h j c"], rotation: Rotation | None
) -> Float[Tensor, "b h i j terms"]:
    """Return products of single coordinates of q and k: a score is a sum of these, each times an unknown norm weight.

    If `rotation` is not None, the products are the terms of q . k after q and k are rotated.
    """
    q, k = q[:, :, :, None], k[:, :, None]
    if rotation is None:
        return q * k
    a, b = rotation.pairs()
    rest = [each for each in range(q.shape[-1]) if each not in (*a, *b)]
    i, j = (torch.arange(n, dtype=q.dtype) for n in (q.shape[2], k.shape[3]))
    phases = (i[:, None] - j)[..., None] * torch.tensor(rotation.frequencies, dtype=q.dtype)
    along = [q[..., each] * k[..., each] * phases.cos() for each in (a, b)]
    across = [q[..., a] * k[..., b] * phases.sin(), -q[..., b] * k[..., a] * phases.sin()]
    return torch.cat([*along, *across, q[..., rest] * k[..., rest]], -1)
