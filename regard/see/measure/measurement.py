"""The plate: what the eye saw with q, k and v drawn and with q and k zero, before anything is read from it."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.see.measure.read_weights import READINGS, Eye
from regard.see.measure.stats import apart

SURE = 1e-6  # a weight this large beside its row's largest is no rest of a finite mask value
FAINT = 1e-18  # a weight this small beside its row's largest is hidden, even where it is not exactly zero


@dataclass(frozen=True)
class Plate:
    """The weights of drawn and of silent q and k, who sees whom, and the notes that every reading adds to."""

    eye: Eye
    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    drawn: Float[Tensor, "b h i j"]  # the weights of q and k
    flat: Float[Tensor, "b h i j"]  # the weights of zeros: the mask and the bias alone
    visible: Bool[Tensor, "b h i j"]
    deterministic: bool
    divides: bool  # q = 0 gives NaN or hides what is visible, so `flat` only tells what is visible
    bend: float  # how far the answer to 8 v - 4 u is from those to v and to u, as a share of it
    notes: list[str]

    @property
    def awake(self) -> Bool[Tensor, "b h i"]:
        """The rows that see anything."""
        return self.visible.any(-1)

    @property
    def still(self) -> tuple[Tensor, Tensor]:
        """The q and k in which everything visible has weight: zeros, where they can be asked for."""
        return (self.q, self.k) if self.divides else (0 * self.q, 0 * self.k)

    def moved_by(self, q: Tensor, k: Tensor) -> bool:
        """Whether such q and k give other weights than zeros do."""
        return bool((self.eye.weights(q, k) - self.flat)[self.visible].abs().max() > 1e-6)


def exposed(eye: Eye, dtype: torch.dtype, seed: int) -> Plate:
    """The plate of an attention asked with numbers drawn from a seed."""
    eye, (q, k, v), notes = eye.settled(dtype, seed)
    first, *others = (eye.answer(q, k, v).nan_to_num() for _ in range(3))
    deterministic = all(torch.equal(first, other) for other in others)
    nothing = float(eye.answer(q, k, 0 * v).nan_to_num().abs().max())
    if nothing > 1e-6:
        notes.append(f"v = 0 gives up to {nothing:.2g}: something is added to the values, taken off here")
    eye = replace(eye, readings=1 if deterministic else READINGS, affine=nothing > 1e-6)
    # only rounding, or a function that is not linear at all, tells three times v from v
    coarse = apart(3 * eye.ask(q, k, v), eye.ask(q, k, 3 * v))
    eye = replace(eye, coarse=coarse if deterministic and coarse < 0.02 else 0.0)
    if eye.coarse > 1e-5:
        notes.append(f"it computes coarsely, to a share of {coarse:.0e}, so small things do not show")
    u = 1.5 * v.flip(2)
    bend = apart(8 * eye.ask(q, k, v) - 4 * eye.ask(q, k, u), eye.ask(q, k, 8 * v - 4 * u))
    turned = apart(eye.ask(q, k, v).roll(1, -1), eye.ask(q, k, v.roll(1, -1)))
    if deterministic and max(bend, 1e-4, eye.rounding) < turned and bend < 10 * eye.rounding:
        eye = replace(eye, alike=False)
        notes.append(
            "coordinates of v do not go through alike: a gate or a map acts on the values or on the output, so weights "
            "are a mean over coordinates"
        )
    flat, drawn = eye.weights(0 * q, 0 * k), eye.weights(q, k)
    divides = bool(flat.isnan().all()) and not bool(drawn.isnan().all())
    if divides:
        notes.append("q = 0 and k = 0 give NaN, so the mask is read from drawn q and k, and the bias is not")
        flat = (drawn.abs() > 0).double()
    visible = seen(flat)
    if not divides and bool((seen(drawn, SURE) & ~visible).any()):
        notes.append(
            "q = 0 and k = 0 hide keys that drawn ones see, so the mask is read from keys that win one at a time, and "
            "the bias is not"
        )
        visible, divides = winning(eye, q, k), True
        flat = visible.double()
    faint = flat.abs()[~visible & flat.isfinite()]
    if faint.numel() and faint.max() > 0:
        notes.append(f"hidden keys keep a weight of up to {float(faint.max()):.0e}: the mask value is finite")
    return Plate(eye, q, k, v, drawn, flat, visible, deterministic, divides, bend, notes)


def winning(eye: Eye, q: Tensor, k: Tensor) -> Bool[Tensor, "b h i j"]:
    """The keys that get a weight when they are like every query and all other keys are the opposite.

    What gives all to the largest score, or nothing to scores of zero, shows no other way what it may see.
    """
    one = torch.ones_like(q)
    found = []
    for key in range(k.shape[2]):
        keys = -torch.ones_like(k)
        keys[:, :, key] = 1.0
        found.append(seen(eye.weights(one, keys), SURE)[..., key])
    return torch.stack(found, -1)


def seen(weights: Float[Tensor, "b h i j"], least: float = FAINT) -> Bool[Tensor, "b h i j"]:
    """The keys that have a weight worth the name."""
    size = weights.abs()
    return (size > least * size.nan_to_num().amax(-1, keepdim=True)) & weights.isfinite()
