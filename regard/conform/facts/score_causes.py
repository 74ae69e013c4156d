"""Explain why weights are not softmax(scale q . k): compare the measured weights with the results of usual mistakes."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.conform.conventions import MeasuredAttention
from regard.conform.tolerance import max_error
from regard.see.measure.rotary import Rotation, usual_rotations


def name_score_cause(a: MeasuredAttention) -> str:
    """Return a description of the known mistake that explains the attention weights; "" if no known mistake does."""
    norm, kind = a.scores.norm, a.scores.qk_norm
    if kind is not None and kind != a.declared.qk_norm:
        which = "q and k are" if norm is None or (norm.q and norm.k) else "q alone is" if norm.q else "k alone is"
        return f"{which} normalised" + (f" ({kind})" if kind != "unknown" else "")
    scales = a.scores.scales or ()
    if a.scores.scale is None and a.scores.residual is not None and a.scores.residual < a.precision:
        return f"heads have different scales: {', '.join(f'{each:.4g}' for each in scales)}"
    if share := share_without_weight(a):
        return f"{share:.0%} of the visible keys have no weight, by their scores, as with top-k, ReLU or sparsemax"
    if a.score_span is None and (ends := _clamped_ends(a)):
        return f"scores are clamped from {ends}: those of a row are equal there"
    inputs = a.random_inputs(7, 7, b=1)
    found = a.weights(inputs).double()
    return next((words for words, weights in _hypotheses(a) if max_error(found, weights) <= 1e-4), "")


def share_without_weight(a: MeasuredAttention) -> float:
    """Return the fraction of query-key pairs whose weight is zero although the expected weight is more than 1e-6."""
    found = a.weights(a.random_inputs(7, 7, b=1))
    expected = _weights(a, a.scale(a.random_inputs(7, 7, b=1)))
    wrong = (found == 0) & (expected > 1e-6)
    return float(wrong.double().mean())


def _clamped_ends(a: MeasuredAttention) -> str:
    """Return where scores are clamped: "below", "above", "below and above", or "" if they are not clamped.

    Scores count as clamped below if, in the last row of every head, at least two keys have the lowest weight. They
    count as clamped above if at least two keys have the highest weight.
    """
    inputs = a.random_inputs(11, 11, b=1)
    weights = a.weights(inputs.with_tensors(q=20 * inputs.q)).double()[..., -1, :]
    known = weights.masked_fill(weights == 0, torch.nan).log()

    def ties(end: Tensor) -> bool:
        return bool(((known - end[..., None]).abs() < 1e-6).sum(-1).ge(2).all())

    low, high = known.nan_to_num(torch.inf).amin(-1), known.nan_to_num(-torch.inf).amax(-1)
    return " and ".join(name for name, end in (("below", low), ("above", high)) if ties(end))


def _hypotheses(a: MeasuredAttention) -> Iterator[tuple[str, Float[Tensor, "1 h i j"]]]:
    """Yield usual mistakes in computing scores: a description of each, and the attention weights that it gives."""
    inputs = a.random_inputs(7, 7, b=1)
    scale = a.expected_scale(inputs)
    yield "the softmax is applied twice", _weights(a, scale).softmax(-1)
    q, k, _ = _prepare_inputs(a)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    words = "the scores of later keys are set to zero, not to -inf, so that they still get weight"
    yield words, (q @ k.mT * scale).masked_fill(later, 0.0).softmax(-1)
    rotations = list(usual_rotations(inputs.sizes[5]))
    for rotation in rotations:
        turn, turned = rotation.apply, f"({_describe(rotation)})"
        backwards = replace(rotation, frequencies=tuple(-each for each in rotation.frequencies))
        yield f"rotary positions are applied to q alone {turned}", _weights(a, scale, turn(q), k)
        yield f"rotary positions are applied to k alone {turned}", _weights(a, scale, q, turn(k))
        both = _weights(a, scale, turn(q), backwards.apply(k))
        yield f"rotary rotates q and k in opposite directions {turned}, so that scores depend on i + j", both
        for shift in (-1, 1):
            words = f"rotary positions of keys are {shift:+d} from those of queries {turned}"
            yield words, _weights(a, scale, turn(q, 1), turn(k, 1 + shift))
        for other in rotations:
            if other != rotation:
                words = f"rotary differs between q ({_describe(rotation)}) and k ({_describe(other)})"
                yield words, _weights(a, scale, turn(q), other.apply(k))
        for words, cos, sin in _wrong_phases(rotation):
            yield (
                f"{words} ({_describe(rotation)})",
                _weights(a, scale, *(_rotate(rotation, x, cos, sin) for x in (q, k))),
            )


def _wrong_phases(rotation: Rotation) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield usual mistakes in rotary angles: a description of the mistake, and the wrong cosines and sines.

    Both tensors have the shape (7, width), for positions 0 to 6.
    """
    frequencies, positions = torch.tensor(rotation.frequencies, dtype=torch.float64), torch.arange(7.0)
    angles = positions[:, None].double() * frequencies
    halves, neighbours = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    right, wrong = (halves, neighbours) if rotation.pairing == "half" else (neighbours, halves)
    layout = "cat((x, x))" if rotation.pairing == "interleaved" else "repeat_interleave(2)"
    yield f"rotary angles are in the order of the other pairing, by {layout}", wrong.cos(), wrong.sin()
    for dtype in (torch.bfloat16, torch.float16):
        rounded = (positions.to(dtype)[:, None] * frequencies.to(dtype)).double()
        for each in (rounded, angles.float().to(dtype).double()):
            phases = torch.cat((each, each), -1) if rotation.pairing == "half" else each.repeat_interleave(2, -1)
            yield f"rotary angles are rounded to {dtype}", phases.cos(), phases.sin()
        cos, sin = (x.to(dtype).double() for x in (right.cos(), right.sin()))
        yield f"rotary cosines and sines are rounded to {dtype}", cos, sin


def _rotate(rotation: Rotation, x: Float[Tensor, "b h n c"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h n c"]:
    """Return x after a rotary embedding with the given cosines and sines, in the pairing of `rotation`.

    Both tensors have the shape (n, c), for n positions.
    """
    a, b = rotation.pairs()
    turned = torch.empty_like(x)
    turned[..., a], turned[..., b] = -x[..., b], x[..., a]
    return x * cos + turned * sin


def _describe(rotation: Rotation) -> str:
    return f"{rotation.pairing} pairs, base {rotation.base():g}"


def _prepare_inputs(a: MeasuredAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v in float64, normalised as declared, with one key head per query head."""
    inputs = a.random_inputs(7, 7, b=1).to(torch.float64)
    q, k, v = replace(a.expected(inputs), rotation=None).prepare(inputs)
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v


def _weights(
    a: MeasuredAttention, scale: float, q: Tensor | None = None, k: Tensor | None = None
) -> Float[Tensor, "1 h i j"]:
    """Return the attention weights of q and k with the measured mask and bias.

    scale  factor of q . k
    q, k   queries and keys after rotary embedding; None for random ones with the measured rotary embedding
    """
    expected = a.expected(a.random_inputs(7, 7, b=1))
    if q is None or k is None:
        q, k, _ = _prepare_inputs(a)
        q, k = (x if expected.rotation is None else expected.rotation.apply(x) for x in (q, k))
    scores = q @ k.mT * scale
    scores = scores if expected.bias is None else scores + expected.bias.double()
    return scores.masked_fill(~expected.visible, -torch.inf).softmax(-1)
