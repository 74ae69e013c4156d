"""Measure the attention weights for random q and k, and for q = k = 0: the data of all other measurements."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.see.measure.read_weights import READINGS, WeightReader
from regard.see.measure.stats import relative_difference

CERTAIN = 1e-6  # a weight this large, relative to the largest of its row, is visible
HIDDEN = 1e-18  # a weight this small, relative to the largest of its row, is hidden, even if it is not exactly zero


@dataclass(frozen=True)
class RawWeights:
    """The attention weights measured for random q and k and for q = k = 0, and the visible query-key pairs.

    All other measurements start from these, and add their remarks to `notes`.
    """

    reader: WeightReader
    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    random: Float[Tensor, "b h i j"]  # the weights of q and k
    flat: Float[Tensor, "b h i j"]  # the weights at q = k = 0: mask and bias only
    visible: Bool[Tensor, "b h i j"]
    deterministic: bool
    flat_unusable: bool  # q = 0 gives NaN or hides visible keys, so `flat` holds the visible pairs only
    nonlinearity: float  # relative difference between f(8 v - 4 u) and 8 f(v) - 4 f(u)
    notes: list[str]

    @property
    def nonempty(self) -> Bool[Tensor, "b h i"]:
        """Whether each query sees at least one key, as a Boolean tensor."""
        return self.visible.any(-1)

    @property
    def neutral(self) -> tuple[Tensor, Tensor]:
        """The q and k for measurements in which every visible key needs a nonzero weight: zeros, or the random q and k.

        At q = k = 0 all visible keys have similar weights. If `flat_unusable` is True, the weights at q = k = 0 are NaN
        or hide keys, and the random q and k are returned.
        """
        return (self.q, self.k) if self.flat_unusable else (0 * self.q, 0 * self.k)

    def changes_weights(self, q: Tensor, k: Tensor) -> bool:
        """Return whether the weights for this q and k differ from the weights for q = k = 0."""
        return bool((self.reader.weights(q, k) - self.flat)[self.visible].abs().max() > 1e-6)


def read_raw_weights(reader: WeightReader, tensors: list[Tensor], notes: list[str]) -> RawWeights:
    """Measure the attention weights for random q and k, and for q = k = 0.

    tensors  random q, k and v
    notes    list to which remarks are added
    """
    q, k, v = tensors
    first, *others = (reader.raw_output(q, k, v).nan_to_num() for _ in range(3))
    deterministic = all(torch.equal(first, other) for other in others)
    constant = float(reader.raw_output(q, k, 0 * v).nan_to_num().abs().max())
    if constant > 1e-6:
        notes.append(f"v = 0 gives an output of up to {constant:.2g}: a constant is added, and subtracted here")
    reader = replace(reader, readings=1 if deterministic else READINGS, affine=constant > 1e-6)
    coarse = relative_difference(3 * reader.output(q, k, v), reader.output(q, k, 3 * v))
    reader = replace(reader, coarse=coarse if deterministic and coarse < 0.02 else 0.0)
    if reader.coarse > 1e-5:
        notes.append(f"low precision: outputs are rounded to a relative {coarse:.0e}, so small effects are not seen")
    u = 1.5 * v.flip(2)
    nonlinearity = relative_difference(
        8 * reader.output(q, k, v) - 4 * reader.output(q, k, u), reader.output(q, k, 8 * v - 4 * u)
    )
    rolled = relative_difference(reader.output(q, k, v).roll(1, -1), reader.output(q, k, v.roll(1, -1)))
    if deterministic and max(nonlinearity, 1e-4, reader.rounding) < rolled and nonlinearity < 10 * reader.rounding:
        reader = replace(reader, same_for_columns=False)
        notes.append(
            "columns of v are treated differently: a gate or a projection acts on the values or on the output, so "
            "weights are a mean over columns"
        )
    flat, random = reader.weights(0 * q, 0 * k), reader.weights(q, k)
    flat_unusable = bool(flat.isnan().all()) and not bool(random.isnan().all())
    if flat_unusable:
        notes.append("q = 0 and k = 0 give NaN, so the mask is read from random q and k, and the bias is not read")
        flat = (random.abs() > 0).double()
    visible = visible_pairs(flat)
    if not flat_unusable and bool((visible_pairs(random, CERTAIN) & ~visible).any()):
        notes.append(
            "q = 0 and k = 0 hide keys that random ones see, so the mask is read one key at a time, and the bias is "
            "not read"
        )
        visible, flat_unusable = _visible_key_by_key(reader, q, k), True
        flat = visible.double()
    faint = flat.abs()[~visible & flat.isfinite()]
    if faint.numel() and faint.max() > 0:
        notes.append(f"hidden keys have a weight of up to {float(faint.max()):.0e}: the mask value is finite")
    return RawWeights(reader, q, k, v, random, flat, visible, deterministic, flat_unusable, nonlinearity, notes)


def _visible_key_by_key(reader: WeightReader, q: Tensor, k: Tensor) -> Bool[Tensor, "b h i j"]:
    """Find the visible pairs with one call per key: this key equals the queries, all others equal minus the queries.

    The chosen key of a call has the highest score in every row, so it has a weight in each row that sees it. This
    method is needed for attention that gives all weight to the largest score, and for a function in which a score of
    zero has no weight.
    """
    ones, found = torch.ones_like(q), []
    for key in range(k.shape[2]):
        keys = -torch.ones_like(k)
        keys[:, :, key] = 1.0
        found.append(visible_pairs(reader.weights(ones, keys), CERTAIN)[..., key])
    return torch.stack(found, -1)


def visible_pairs(weights: Float[Tensor, "b h i j"], threshold: float = HIDDEN) -> Bool[Tensor, "b h i j"]:
    """Return a Boolean tensor of the pairs whose weight is above `threshold` times the largest weight of the row."""
    size = weights.abs()
    return (size > threshold * size.nan_to_num().amax(-1, keepdim=True)) & weights.isfinite()
