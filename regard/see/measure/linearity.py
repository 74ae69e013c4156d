"""What weights sum to, and whether they explain the output of any v."""

from dataclasses import dataclass

from regard.see.measure.measurement import Plate

AXES = {"rows": -1, "columns": -2, "heads": 1, "batch": 0}
ACROSS = ("columns", "heads", "batch")  # where the logarithms of weights are no scores of their row


@dataclass(frozen=True, kw_only=True)
class Sums:
    """How weights are normalised, and how v goes through them."""

    linear: bool | None = None  # in v: the answer to a sum is the sum of answers; None where no two calls agree
    explained: bool | None = None  # weights @ v is the output; not so where a gate acts on coordinates, for instance
    off: float | None = None  # how far the output is from weights @ v, as a share of it
    rows_sum: tuple[float, float] = (0.0, 0.0)  # least and largest sum of a row that sees anything
    normalised: str | None = None  # over what weights sum to one: rows, rows and a sink, columns, heads, batch, nothing


def read_sums(plate: Plate, groups: tuple[int, ...] | None) -> Sums:
    off = _off(plate, groups) if plate.deterministic else None
    w = plate.drawn.nan_to_num().masked_fill(~plate.visible, 0)
    sums = w.sum(-1)[plate.awake]
    if bool((w < -1e-9).any()):
        plate.notes.append("some weights are negative")
    near = 10 * plate.eye.rounding
    one = (name for name, axis in AXES.items() if bool(((w.sum(axis) - 1).abs()[plate.visible.any(axis)] < near).all()))
    normalised = next(one, None)
    if normalised in ACROSS:
        plate.notes.append(f"the softmax runs over {normalised}, not over the keys of a row")
    return Sums(
        linear=None if off is None else plate.bend < max(near, 1e-4),
        explained=None if off is None else off < max(near, 1e-4),
        off=off,
        rows_sum=(float(sums.min()), float(sums.max())),
        normalised=normalised,
    )


def _off(plate: Plate, groups: tuple[int, ...] | None) -> float:
    """How far the output is from weights @ v, as a share of it."""
    v = plate.v
    if groups is None:  # the sum over key heads is what v = identity in all of them has read
        v, groups = v[:, :1].expand_as(v), (0,) * plate.eye.h
    out = plate.eye.ask(plate.q, plate.k, v)
    known = plate.awake[..., None] & out.isfinite()
    apart = (out - plate.drawn @ v[:, list(groups)])[known].abs()
    return float(apart.max() / out[known].abs().max().clamp(min=1e-300)) if apart.numel() else 0.0
