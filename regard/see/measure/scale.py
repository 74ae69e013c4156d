"""Measure the scale of q . k in the scores, also if q and k are normalised or rotated, or scores are soft-capped."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from regard.see.measure.linearity import OTHER_AXES
from regard.see.measure.norms import EPSILONS, QKNorm, fit_norm_weights, read_norm
from regard.see.measure.raw_weights import RawWeights
from regard.see.measure.rotary import Rotation, read_rotation, usual_rotations
from regard.see.measure.scores import ScoreReader
from regard.see.measure.stats import fit_slopes, fit_softcap

Sizes = tuple[int, int, int, int]  # c, e, h and j of a call
SCALES: dict[str, Callable[[int, int, int, int], float]] = {
    "1/sqrt(c)": lambda c, e, h, j: c**-0.5,
    "1 (none)": lambda c, e, h, j: 1.0,
    "1/c (applied twice)": lambda c, e, h, j: 1 / c,
    "sqrt(c) (multiplied instead of divided)": lambda c, e, h, j: c**0.5,
    "1/sqrt(h c) (the width of all heads)": lambda c, e, h, j: (h * c) ** -0.5,
    "1/sqrt(e) (the width of v)": lambda c, e, h, j: e**-0.5,
    "1/sqrt(j) (the number of keys)": lambda c, e, h, j: j**-0.5,
    "c^-1/4 (on q alone, or on k alone)": lambda c, e, h, j: c**-0.25,
    "ln(2)/sqrt(c) (exp2 in place of exp)": lambda c, e, h, j: math.log(2) * c**-0.5,
    "ln(j)/sqrt(c) (the logarithm of the number of keys)": lambda c, e, h, j: math.log(j) * c**-0.5,
    "c (multiplied)": lambda c, e, h, j: float(c),
    "1/h (the number of heads)": lambda c, e, h, j: 1 / h,
    "0 (the mean of all visible values)": lambda c, e, h, j: 0.0,
}


@dataclass(frozen=True, kw_only=True)
class ScoreReading:
    """The measured computation of scores from q and k: scale, soft-cap, norm and rotary positions."""

    scale: float | None = None  # None if it is unknown or differs between heads
    scales: tuple[float, ...] | None = None  # scale of each head
    scale_name: str | None = None
    residual: float | None = None  # the share of the scores that is not explained
    softcap: float | None = None
    qk_norm: str | None = None  # "rms" or "layer", or "unknown" if q or k is normalised in another way
    norm: QKNorm | None = None
    rotary: str | None = None  # the pairing: "half" or "interleaved"
    rotary_base: float | None = None
    rotary_width: int | None = None  # the number of coordinates that are rotated
    frequencies: tuple[float, ...] | None = None  # radians per position of each pair
    rotation: Rotation | None = None


def read_scores(raw: RawWeights, key_heads: tuple[int, ...], normalised: str | None, steady: bool) -> ScoreReading:
    """Measure how scores are computed: scale, soft-cap, norm and rotary positions.

    key_heads   the key head of each query head
    normalised  the axis along which the weights sum to one, as in `LinearityReading`
    steady      whether two readings of the weights with the same input agree
    """
    shown, notes = raw.random[raw.visible], raw.notes
    zero = shown == 0
    if bool((zero | ((shown - 1).abs() < 1e-9)).all()) and bool(zero.any()):
        notes.append("hard attention: soft-cap, norm and rotary cannot be measured")
        return ScoreReading(
            scale=math.inf, scales=(math.inf,) * raw.reader.h, scale_name="inf (the largest score takes all)"
        )
    if bool(zero.any()) and raw.deterministic:
        notes.append(f"{float(zero.double().mean()):.0%} of the visible keys have no weight: only the best are kept")
    if not steady:
        notes.append("two equal calls differ, so the weights are the largest of many readings, and show no scale")
        return ScoreReading()
    if raw.flat_unusable or normalised in OTHER_AXES:
        notes.append("the scale was not measured: that needs weights at q = 0 that are normalised along a row")
        return ScoreReading()
    if raw.changes_weights(0 * raw.q, raw.k):
        notes.append("keys change the weights at q = 0: scores have a term of k alone")
    if raw.changes_weights(raw.q, 0 * raw.k):
        notes.append("queries change the weights at k = 0: scores have a term of q and position")
    return _explain_scores(ScoreReader(raw, key_heads))


def _explain_scores(reader: ScoreReader) -> ScoreReading:
    """Find the simplest combination of norm, rotary embedding and soft-cap that explains the measured scores."""
    raw = reader.raw
    scores = reader.scores(raw.q, raw.k)
    if not bool(scores.isfinite().any()):
        raw.notes.append("no row sees two neighbouring keys, so the scale cannot be measured")
        return ScoreReading()
    # scores up to 25 show a cap, and their weights do not vanish
    q, k = min(max(25 / max(float(scores.nan_to_num().abs().max()), 1e-9), 1.0), 1e4) * raw.q, raw.k
    large = reader.scores(q, k)
    plain = _fit(reader, large, q, k, None, None)
    if plain is not None:
        return _with_notes(raw, plain)
    sides = read_norm(reader)
    norms = [replace(sides, kind=kind, epsilon=e) for kind in ("rms", "layer") for e in EPSILONS] if sides else [None]
    fits = [_fit(reader, large, q, k, norm, None) for norm in norms]
    rotation = read_rotation(reader) if not any(fits) else None
    if not any(fits):
        rotations = (
            [*usual_rotations(raw.reader.c), *([rotation] if rotation else [])] if raw.reader.i == raw.reader.j else []
        )
        fits = [_fit(reader, large, q, k, norm, each) for each in rotations for norm in norms]
    known = [fit for fit in fits if fit is not None]
    if known:
        return _with_notes(raw, min(known, key=lambda fit: fit.residual or 0.0))
    candidates = [(norm, each) for norm in norms if norm is None or not norm.epsilon for each in (None, rotation)]
    for norm, each in dict.fromkeys(candidates):
        capped = _fit_capped(reader, large, q, k, norm, each)
        if capped is not None:
            return _with_notes(raw, capped)
    for norm in (norm for norm in norms if norm is not None and not norm.epsilon):
        means, residual = fit_norm_weights(reader, norm, rotation)
        if residual < _slack(rotation) * raw.reader.rounding:
            raw.notes.append("the norm has a weight for each coordinate: the scale is the mean over coordinates")
            return _with_notes(raw, _reading(raw, means, residual, norm, rotation))
    if rotation is not None:
        raw.notes.append("the pairing of rotary is read from basis vectors; random q and k do not confirm it")
    each_head, residual = fit_slopes(large, reader.products(q, k))
    raw.notes.append(f"scores are not a linear function of q . k: a share of {residual:.2g} is not explained")
    return ScoreReading(
        scales=tuple(each_head),
        residual=residual,
        qk_norm="unknown" if sides else None,
        rotary=None if rotation is None else rotation.pairing,
    )


def prepare_products(
    reader: ScoreReader, q: Tensor, k: Tensor, norm: QKNorm | None, rotation: Rotation | None, start: int = 0
) -> Tensor:
    """Return q . k after applying a norm and a rotary embedding to q and k.

    start  position of the first query; the first key is at position 0
    """
    q, k = (q, k) if norm is None else norm.apply(q, k)
    q, k = (q, k) if rotation is None else (rotation.apply(q, start), rotation.apply(k))
    return reader.products(q, k)


def read_rotary_alignment(reader: ScoreReader, reading: ScoreReading) -> str | None:
    """Measure which positions rotary embedding gives to the queries if there are more keys than queries.

    Returns "bottom-right" (the queries are at the last positions), "top-left" (at the first), or None if neither fits.

    reading  how scores are computed, measured with equal numbers of queries and keys of the same width
    """
    raw, size = reader.raw, reader.raw.reader
    scores = reader.scores(raw.q, raw.k)
    for name, start in (("bottom-right", size.j - size.i), ("top-left", 0)):
        products = prepare_products(reader, raw.q, raw.k, reading.norm, reading.rotation, start)
        residual = fit_slopes(scores, products)[1] if reading.softcap is None else fit_softcap(scores, products)[2]
        if residual < _slack(reading.rotation) * size.rounding:
            return name
    return None


def _fit(
    reader: ScoreReader, scores: Tensor, q: Tensor, k: Tensor, norm: QKNorm | None, rotation: Rotation | None
) -> ScoreReading | None:
    """Fit scores = scale * q . k after applying the norm and rotation to q and k; None if the fit is bad."""
    each, residual = fit_slopes(scores, prepare_products(reader, q, k, norm, rotation))
    if residual >= _slack(rotation, norm) * reader.raw.reader.rounding:
        return None
    return _reading(reader.raw, each, residual, norm, rotation)


def _fit_capped(
    reader: ScoreReader, scores: Tensor, q: Tensor, k: Tensor, norm: QKNorm | None, rotation: Rotation | None
) -> ScoreReading | None:
    """Fit scores = cap * tanh(scale q . k / cap) where q and k are normed and rotated; None if the fit is bad."""
    scale, cap, residual = fit_softcap(scores, prepare_products(reader, q, k, norm, rotation))
    # a cap far beyond every score fits rounding
    if residual >= 3 * _slack(rotation) * reader.raw.reader.rounding or cap >= 30 * float(
        scores.nan_to_num().abs().max()
    ):
        return None
    return replace(_reading(reader.raw, [scale] * reader.raw.reader.h, residual, norm, rotation), softcap=cap)


def _slack(rotation: Rotation | None, norm: QKNorm | None = None) -> float:
    """Return the largest relative residual of a good fit, as a multiple of `WeightReader.rounding`.

    The result is 10 with a rotation, because the measured frequencies of the rotation have errors. It is 3 with a norm
    only, because the epsilon of the norm is unknown, and 1 otherwise.
    """
    return 10 if rotation is not None else 1 if norm is None else 3


def _with_notes(raw: RawWeights, found: ScoreReading) -> ScoreReading:
    if found.rotation is not None and found.rotary_base is None and found.rotation.width > 2:
        scheme = found.rotation.scheme()
        named = f": {scheme}" if scheme is not None else ": scaled, or learned"
        raw.notes.append(f"the frequencies of rotary are not powers of one base{named}")
    if found.scale is None:
        raw.notes.append("heads have different scales")
    return found


def _reading(
    raw: RawWeights, each: Sequence[float], residual: float, norm: QKNorm | None, rotation: Rotation | None
) -> ScoreReading:
    found = ScoreReading(
        scales=tuple(each),
        residual=residual,
        qk_norm=None if norm is None else norm.kind,
        norm=norm,
        rotary=None if rotation is None else rotation.pairing,
        rotary_base=None if rotation is None else rotation.base(),
        rotary_width=None if rotation is None else rotation.width,
        frequencies=None if rotation is None else rotation.frequencies,
        rotation=rotation,
    )
    known = [scale for scale in each if math.isfinite(scale)]
    largest = max((abs(scale) for scale in known), default=math.inf)
    if not known or max(known) - min(known) > 100 * raw.reader.rounding * largest + 1e-12:
        return found
    scale, sizes = sum(known) / len(known), raw.reader
    name = name_scale([((sizes.c, sizes.value_width(sizes.j), sizes.h, sizes.j), scale)])
    if name is None and norm is not None:
        name = f"{scale * sizes.c:.4g} on vectors of length one"
    return replace(found, scale=scale, scale_name=name)


def name_scale(measured: Sequence[tuple[Sizes, float]], near: float = 1e-3) -> str | None:
    """Return the name of the scale rule, such as 1/sqrt(c), that gives all measured scales; None if no rule fits.

    measured  for each measurement, a pair: the sizes (c, e, h, j) of its tensors, and the measured scale
    near      largest relative difference between the measured scale and the rule
    """
    for name, rule in SCALES.items():
        if all(math.isclose(scale, rule(*sizes), rel_tol=near, abs_tol=1e-9) for sizes, scale in measured):
            return name
    return None
