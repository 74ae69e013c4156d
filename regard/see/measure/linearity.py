"""Measure along which axis the attention weights sum to one, and whether the output is weights @ v."""

from dataclasses import dataclass

from regard.see.measure.raw_weights import RawWeights

AXES = {"rows": -1, "columns": -2, "heads": 1, "batch": 0}
OTHER_AXES = ("columns", "heads", "batch")  # axes of a softmax whose log weights are not the scores of a row


@dataclass(frozen=True, kw_only=True)
class LinearityReading:
    """The axis along which the measured weights sum to one, and whether the output is linear in v."""

    linear: bool | None = None  # f(8 v - 4 u) = 8 f(v) - 4 f(u); None if two equal calls differ
    equals_weights_at_v: bool | None = None  # False if a gate or a projection acts on columns of v
    linearity_error: float | None = None  # relative difference between the output and weights @ v
    row_sums: tuple[float, float] = (0.0, 0.0)  # smallest and largest sum over a row that sees a key
    normalised: str | None = None  # what sums to one: rows, rows and a sink, columns, heads, batch; None if nothing


def read_linearity(raw: RawWeights, value_heads: tuple[int, ...] | None) -> LinearityReading:
    """Compare the measured output with weights @ v, and find the axis along which the weights sum to one.

    value_heads  for each query head, the key head whose values it reads; None if a query head reads none or several
    """
    error = _error_of_weights_at_v(raw, value_heads) if raw.deterministic else None
    w = raw.random.nan_to_num().masked_fill(~raw.visible, 0)
    sums = w.sum(-1)[raw.nonempty]
    if bool((w < -1e-9).any()):
        raw.notes.append("some weights are negative")
    near = 10 * raw.reader.rounding
    ones = (name for name, axis in AXES.items() if bool(((w.sum(axis) - 1).abs()[raw.visible.any(axis)] < near).all()))
    normalised = next(ones, None)
    if normalised in OTHER_AXES:
        raw.notes.append(f"the softmax is over {normalised}, not over the keys of a row")
    return LinearityReading(
        linear=None if error is None else raw.nonlinearity < max(near, 1e-4),
        equals_weights_at_v=None if error is None else error < max(near, 1e-4),
        linearity_error=error,
        row_sums=(float(sums.min()), float(sums.max())),
        normalised=normalised,
    )


def _error_of_weights_at_v(raw: RawWeights, value_heads: tuple[int, ...] | None) -> float:
    v = raw.v
    if value_heads is None:  # v = identity in all key heads has read the sum over key heads
        v, value_heads = v[:, :1].expand_as(v), (0,) * raw.reader.h
    out = raw.reader.output(raw.q, raw.k, v)
    known = raw.nonempty[..., None] & out.isfinite()
    difference = (out - raw.random @ v[:, list(value_heads)])[known].abs()
    return float(difference.max() / out[known].abs().max().clamp(min=1e-300)) if difference.numel() else 0.0
