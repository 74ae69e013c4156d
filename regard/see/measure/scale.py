"""The scale: what q . k is multiplied by, and what else is done to it on the way to the scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from regard.see.measure.linearity import ACROSS, AXES
from regard.see.measure.measurement import Plate
from regard.see.measure.norms import Normed, normalise, read_norms, weighted
from regard.see.measure.rotary import Turn, read_turn
from regard.see.measure.scores import Scorer
from regard.see.measure.stats import capped, centred, logs, slopes


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How scores come from q and k."""

    scale: float | None = None
    scales: tuple[float, ...] | None = None  # of each head
    scale_named: str | None = None
    residual: float | None = None  # what the scores found leave unexplained, as a share of them
    softcap: float | None = None
    qk_norm: str | None = None  # "rms" or "layer", or "unknown" where q or k is normalised in another way
    rotary: str | None = None  # the pairing: "half" or "interleaved"
    rotary_base: float | None = None
    rotary_width: int | None = None  # how many coordinates turn
    frequencies: tuple[float, ...] | None = None  # radians per position of each pair


def read_scale(plate: Plate, key_heads: tuple[int, ...], normalised: str | None, steady: bool) -> Scale:
    """The scale, after everything that hides it.

    steady  weights read twice are the same
    """
    shown, notes = plate.drawn[plate.visible], plate.notes
    none = shown == 0
    if bool((none | ((shown - 1).abs() < 1e-9)).all()) and bool(none.any()):
        notes.append("hard attention shows no cap, norm or rotary")
        return Scale(scale=math.inf, scales=(math.inf,) * plate.eye.h, scale_named="hard: the largest takes all")
    if bool(none.any()) and plate.deterministic:
        share = float(none.double().mean())
        notes.append(f"a share of {share:.2g} of the visible keys gets no weight at all: only the best are kept")
    if not steady:
        notes.append("no two calls agree, so the weights are the largest of many readings, and tell no scale")
        return Scale()
    if plate.divides or normalised in ACROSS:
        return _beside(Scorer(plate, key_heads, keyed=False), AXES.get(normalised or "", -1))
    keyed = plate.moved_by(0 * plate.q, plate.k)
    if keyed:
        notes.append("keys change the weights even where q = 0: a term of k alone is left out of the scale")
    if plate.moved_by(plate.q, 0 * plate.k):
        notes.append("queries change the weights even where k = 0: a term of q and position, left out here")
    return _from_scores(Scorer(plate, key_heads, keyed), normalised)


def _from_scores(scorer: Scorer, normalised: str | None) -> Scale:
    """The simplest reading of q and k that makes the scores linear in q . k."""
    plate = scorer.plate
    scores = scorer.scores(plate.q, plate.k)
    if not bool(scores.isfinite().any()):
        plate.notes.append("no row sees two keys side by side, so nothing tells the scale")
        return Scale()
    # loud enough for a cap to show, and not so loud that weights vanish
    loud = min(max(25 / max(float(scores.nan_to_num().abs().max()), 1e-9), 1.0), 1e4) * plate.q
    louder = scorer.scores(loud, plate.k)
    plain = _fitted(scorer, louder, loud, plate.k)
    if plain is not None:
        return plain
    normed, turn = read_norms(scorer, scores), read_turn(scorer)
    found = _explained(scorer, louder, loud, normed, turn) or _sigmoid(scorer, normalised)
    found = found or _weighted(scorer, normed, turn)
    if found is not None:
        return found if turn is None else _turned(plate, found, turn)
    if turn is not None:
        plate.notes.append("the pairing of rotary is read from single coordinates; drawn q and k do not confirm more")
    each, left = slopes(louder, scorer.pairs(loud, plate.k))
    plate.notes.append(f"the scores are no linear function of q . k: a share of {left:.2g} is left unexplained")
    return Scale(
        scales=tuple(each),
        residual=left,
        qk_norm="unknown" if normed else None,
        rotary=None if turn is None else turn.pairing,
    )


def _turned(plate: Plate, found: Scale, turn: Turn) -> Scale:
    """The scale with the rotation that was needed to find it."""
    base = turn.base()
    if base is None and turn.width > 2:
        plate.notes.append("the frequencies of rotary are no powers of one base: stretched, or learned")
    return replace(found, rotary=turn.pairing, rotary_base=base, rotary_width=turn.width, frequencies=turn.frequencies)


def _explained(scorer: Scorer, scores: Tensor, queries: Tensor, normed: Normed, turn: Turn | None) -> Scale | None:
    """The scale of normalised and turned q and k, with or without a soft-cap."""
    eye = scorer.plate.eye
    for norm in ("rms", "layer") if normed else (None,):
        q, k = normed.applied(queries, scorer.plate.k, norm)
        if turn is not None:
            q, k = turn.applied(q), turn.applied(k)
        found = _fitted(scorer, scores, q, k, norm, _slack(turn))
        if found is not None:
            return found
        scale, cap, left = capped(scores, scorer.pairs(q, k))
        # a cap far beyond every score is rounding that found a shape
        if left < _slack(turn) * eye.rounding and cap < 30 * float(scores.nan_to_num().abs().max()):
            return replace(_scaled(scorer.plate, [scale] * eye.h, left, norm), softcap=cap)
    return None


def _sigmoid(scorer: Scorer, normalised: str | None) -> Scale | None:
    """The scale where each weight is a sigmoid of its own score, and nothing is normalised."""
    plate = scorer.plate
    if normalised is not None:
        return None
    scores = plate.drawn.logit() - plate.eye.weights(plate.q, 0 * plate.k).logit()
    found = _fitted(scorer, scores.masked_fill(~plate.visible, math.nan), plate.q, plate.k)
    if found is not None:
        plate.notes.append("each weight is a sigmoid of its own score")
    return found


def _weighted(scorer: Scorer, normed: Normed, turn: Turn | None) -> Scale | None:
    """The scale of normalised vectors with a learned weight for each coordinate."""
    for norm in ("rms", "layer") if normed else ():
        means, left = weighted(scorer, normed, norm, turn)
        if left < _slack(turn) * scorer.plate.eye.rounding:
            found = _scaled(scorer.plate, means, left, norm)
            scorer.plate.notes.append(
                "the norm weighs each coordinate by itself: the scale is the mean over coordinates"
            )
            return found
    return None


def _beside(scorer: Scorer, axis: int) -> Scale:
    """The scale where no zero can be asked for or another axis sums to one: logarithms centred along that axis."""
    plate = scorer.plate
    scores = centred(logs(plate.drawn) - logs(plate.flat), plate.visible, axis)
    for norm in (None, "rms", "layer"):
        pairs = scorer.pairs(normalise(plate.q, norm), normalise(plate.k, norm))
        each, left = slopes(scores, centred(pairs, plate.visible, axis))
        if left < plate.eye.rounding:
            return _scaled(plate, each, left, norm)
    plate.notes.append("the scale was not found out: the logarithms of the weights are not linear in q . k")
    return Scale()


def _slack(turn: Turn | None) -> float:
    """How many times the rounding a fit may leave; frequencies are measured, too."""
    return 3 if turn is None else 10


def _fitted(
    scorer: Scorer, scores: Tensor, q: Tensor, k: Tensor, norm: str | None = None, slack: float = 1
) -> Scale | None:
    """The scale, if the scores are a multiple of q . k."""
    each, left = slopes(scores, scorer.pairs(q, k))
    return _scaled(scorer.plate, each, left, norm) if left < slack * scorer.plate.eye.rounding else None


def _scaled(plate: Plate, each: Sequence[float], left: float, norm: str | None) -> Scale:
    """The scale of all heads, where it is one."""
    found = Scale(scales=tuple(each), residual=left, qk_norm=norm)
    known = [scale for scale in each if math.isfinite(scale)]
    largest = max((abs(scale) for scale in known), default=math.inf)
    if not known or max(known) - min(known) > 100 * plate.eye.rounding * largest + 1e-12:
        plate.notes.append("heads have scales of their own")
        return found
    scale = sum(known) / len(known)
    return replace(found, scale=scale, scale_named=scale_name(scale, plate.eye.h, plate.eye.c, norm))


def scale_name(scale: float, heads: int, c: int, norm: str | None = None) -> str | None:
    """What a scale usually is called, or None."""
    names = {
        "c ** -0.5": c**-0.5,
        "1: not scaled": 1.0,
        "1 / c: c ** -0.5 twice": 1 / c,
        "c ** 0.5: multiplied where it should be divided": c**0.5,
        "(h c) ** -0.5: from the width of all heads": (heads * c) ** -0.5,
        "0: the mean of what is visible": 0.0,
    }
    for name, value in names.items():
        if math.isclose(scale, value, rel_tol=1e-3, abs_tol=1e-9):
            return name
    return None if norm is None else f"{scale * c:.4g} on vectors of length one"
