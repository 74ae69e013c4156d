"""Measure and name the bias that is added to the scores (ALiBi, for example), and the logit of an attention sink."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.see.measure.linearity import OTHER_AXES
from regard.see.measure.raw_weights import RawWeights
from regard.see.measure.stats import centre_rows, safe_log, value_range

NO_BIAS, ALIBI_DISTANCE, ALIBI_KEY = "none", "ALiBi, -m |i - j|", "ALiBi, +m j"


@dataclass(frozen=True, kw_only=True)
class BiasReading:
    """The measured bias of the scores, with the slopes if the bias is ALiBi, and the logits of attention sinks."""

    bias: Float[Tensor, "h i j"] | None = None  # the bias that is added to the scores, shifted to mean zero in each row
    bias_name: str | None = None
    slopes: tuple[float, ...] | None = None  # ALiBi slope of each head
    sink: tuple[float, ...] | None = None  # the logit of each head's sink


def read_bias(raw: RawWeights, normalised: str | None) -> BiasReading:
    """Measure the bias that is added to the scores.

    At q = 0 every product q . k is zero, so the logarithm of a weight is the bias plus a constant for each row. The
    result is shifted to mean zero in each row.

    normalised  the axis along which the weights sum to one, as in `LinearityReading`
    """
    if raw.flat_unusable:
        return BiasReading()
    if normalised in OTHER_AXES:
        raw.notes.append("the bias was not read: that needs weights that are normalised along a row")
        return BiasReading()
    near = 10 * raw.reader.rounding
    biases = centre_rows(safe_log(raw.flat), raw.visible)
    if float((biases - biases[:1]).abs().max()) > near:
        raw.notes.append("the bias differs between sequences; this is the bias of the first")
    name, slopes = name_bias(biases[0], raw.visible[0], near)
    sink = _read_sink(raw, name, slopes) if normalised is None else None
    return BiasReading(bias=biases[0], bias_name=name, slopes=slopes, sink=sink)


def _alibi_forms(i: int, j: int) -> dict[str, Float[Tensor, "i j"]]:
    """Return both variants of the ALiBi bias for slope 1, by name: minus the distance, and the position of the key."""
    position = torch.arange(j, dtype=torch.float64)
    distance = (torch.arange(i)[:, None] + j - i - position).abs()
    return {ALIBI_DISTANCE: -distance, ALIBI_KEY: position.expand(i, j)}


def name_bias(
    bias: Float[Tensor, "h i j"], visible: Bool[Tensor, "h i j"], near: float
) -> tuple[str, tuple[float, ...] | None]:
    """Return the name of a measured bias, and the slope of each head if the bias is ALiBi, else None.

    ALiBi has two variants, minus slope times distance and slope times key position. Under a causal mask, both give the
    same weights.

    bias  the bias, shifted so that the mean of each row is zero
    near  largest difference between a measured and an expected bias that counts as equal
    """
    h, i, j = bias.shape
    if float(bias.abs().max()) < near:
        return NO_BIAS, None
    for name, form in _alibi_forms(i, j).items():
        x = centre_rows(form.expand(h, i, j), visible)
        slopes = (bias * x).sum((1, 2)) / (x * x).sum((1, 2)).clamp(min=1e-300)
        if float((bias - slopes[:, None, None] * x).abs().max()) < near:
            return name, tuple(slopes.tolist())
    # a row is known up to a constant, so differences between neighbouring keys are compared along diagonals
    steps = bias.diff(dim=-1).masked_fill(~(visible[..., 1:] & visible[..., :-1]), torch.nan)
    if all(value_range(head.diagonal(far)) < near for head in steps for far in range(1 - i, j - 1)):
        return "relative, a function of j - i", None
    return "other", None


def _read_sink(raw: RawWeights, name: str, slopes: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """Measure the logit of each head's attention sink; None if there is no sink.

    A sink is an additional logit in the softmax: it takes weight but adds no value. At q = 0 the weight of the sink is
    1 minus the sum of the row.

    name, slopes  the name and the slopes of the measured bias, as `name_bias` returns them
    """
    reader, flat, visible, nonempty = raw.reader, raw.flat, raw.visible, raw.nonempty
    missing = 1 - flat.masked_fill(~visible, 0).sum(-1)
    uniform = bool(((flat - 1 / reader.j).abs()[visible] < 1e-6).all())
    if uniform and not bool(visible[nonempty].all()):
        raw.notes.append("the mask is applied after the softmax, and weights are not normalised again")
        return None
    if bool((missing[nonempty] < reader.rounding).any()):
        return None
    if float((raw.random - flat).masked_fill(~visible, 0).sum(-1).abs().max()) < 1e-6:
        raw.notes.append("rows have the same sum for every q and k: a gate or a factor acts on the output")
        return None
    if name not in (NO_BIAS, ALIBI_DISTANCE, ALIBI_KEY):
        raw.notes.append("rows sum to less than one, but the bias is known up to a constant per row only")
        return None
    slope = torch.tensor(slopes or [0.0] * reader.h, dtype=torch.float64)[:, None, None]
    # a bias is known up to a constant per row; the right constants give the same sink in all rows
    for form in _alibi_forms(reader.i, reader.j).values():
        logits = (safe_log(missing)[..., None] - safe_log(flat) + slope * form)[0]
        per_head = [logits[head][visible[0, head]] for head in range(reader.h)]
        if all(value_range(one) < 100 * reader.rounding for one in per_head):
            return tuple(float(one.mean()) for one in per_head)
    raw.notes.append("rows sum to less than one, but not by one sink logit per head")
    return None
