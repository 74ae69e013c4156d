"""The bias: what is added to the scores, its name, and the sink that takes weight without giving a value."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.see.measure.linearity import ACROSS
from regard.see.measure.measurement import Plate
from regard.see.measure.stats import centred, logs, spread


@dataclass(frozen=True, kw_only=True)
class Bias:
    """What scores hold besides q . k."""

    bias: Float[Tensor, "h i j"] | None = None  # what is added to the scores, centred in each row; zero where hidden
    bias_named: str | None = None
    slopes: tuple[float, ...] | None = None  # of ALiBi, for each head
    sink: tuple[float, ...] | None = None  # the logit of each head's sink


def read_bias(plate: Plate, normalised: str | None) -> Bias:
    """The logarithm of the weights where q = 0, centred in each row."""
    if plate.divides:
        return Bias()
    if normalised in ACROSS:
        plate.notes.append("the bias was not read: that needs weights that are normalised along a row")
        return Bias()
    near = 10 * plate.eye.rounding
    each = centred(logs(plate.flat), plate.visible)
    if float((each - each[:1]).abs().max()) > near:
        plate.notes.append("the bias differs between sequences; that of the first is given")
    named, slopes = _named(each[0], plate.visible[0], near)
    sink = _sink(plate, named, slopes) if normalised is None else None
    return Bias(bias=each[0], bias_named=named, slopes=slopes, sink=sink)


def _straight(i: int, j: int) -> dict[str, Float[Tensor, "i j"]]:
    """The two forms of ALiBi, for m = 1: falling with the distance, and rising with the place of the key."""
    place = torch.arange(j, dtype=torch.float64)
    return {"-m |i - j|": -(torch.arange(i)[:, None] + j - i - place).abs(), "+m j": place.expand(i, j)}


def _named(
    bias: Float[Tensor, "h i j"], visible: Bool[Tensor, "h i j"], near: float
) -> tuple[str, tuple[float, ...] | None]:
    """The bias in words, and the slopes of each head where it is ALiBi."""
    h, i, j = bias.shape
    if float(bias.abs().max()) < near:
        return "none", None
    fits = {}
    for name, form in _straight(i, j).items():
        x = centred(form.expand(h, i, j), visible)
        slopes = (bias * x).sum((1, 2)) / (x * x).sum((1, 2)).clamp(min=1e-300)
        if float((bias - slopes[:, None, None] * x).abs().max()) < near:
            fits[name] = tuple(slopes.tolist())
    if fits:
        name, found = next(iter(fits.items()))
        both = ", which is +m j where only earlier keys are visible" if len(fits) > 1 else ""
        return f"ALiBi: {name}{both}", found
    # only differences between keys of a row are known, so they are what is compared along diagonals
    steps = bias.diff(dim=-1).masked_fill(~(visible[..., 1:] & visible[..., :-1]), torch.nan)
    if all(spread(head.diagonal(far)) < near for head in steps for far in range(1 - i, j - 1)):
        return "relative: a function of j - i, as T5's", None
    return "a bias of its own", None


def _sink(plate: Plate, named: str, slopes: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """The logit of what takes weight without giving a value: it is what a row lacks to one where q = 0."""
    eye, flat, visible, awake = plate.eye, plate.flat, plate.visible, plate.awake
    lack = 1 - flat.masked_fill(~visible, 0).sum(-1)
    uniform = bool(((flat - 1 / eye.j).abs()[visible] < 1e-6).all())
    if uniform and not bool(visible[awake].all()):
        plate.notes.append("weights are hidden after the softmax and not normalised again")
        return None
    if bool((lack[awake] < eye.rounding).any()):
        return None
    if float((plate.drawn - flat).masked_fill(~visible, 0).sum(-1).abs().max()) < 1e-6:
        plate.notes.append("rows sum to the same whatever q and k are: a gate or a factor acts on the output")
        return None
    if not named.startswith(("none", "ALiBi")):
        plate.notes.append("rows sum to less than one, but beside a bias that is known up to a constant only")
        return None
    rise = torch.tensor(slopes or [0.0] * eye.h, dtype=torch.float64)[:, None, None]
    # a bias is known up to a constant of each row; the right constants make the sink the same in all rows
    for form in _straight(eye.i, eye.j).values():
        logits = (logs(lack)[..., None] - logs(flat) + rise * form)[0]
        per_head = [logits[head][visible[0, head]] for head in range(eye.h)]
        if all(spread(one) < 100 * eye.rounding for one in per_head):
            return tuple(float(one.mean()) for one in per_head)
    plate.notes.append("rows sum to less than one, but not as if one sink stood beside all rows of a head")
    return None
