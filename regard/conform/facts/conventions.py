"""Facts about conventions: scale, heads, bias and positions are as declared or as expected."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import MeasuredAttention
from regard.conform.example import CallWriter, write_example, write_weights
from regard.conform.fact import BROKEN, POLICY, Fact, Failure, NotApplicableError, fact, first_failure
from regard.conform.facts.causality import LENGTHS, detect_difference, finite_mask
from regard.conform.facts.dependence import all_ones, row_sums
from regard.conform.facts.score_causes import name_score_cause, share_without_weight
from regard.conform.inputs import QKV, AttentionInputs
from regard.conform.shrink import Violation, detect_lines, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.core.scores import alibi_slopes
from regard.see.measure.biases import ALIBI_DISTANCE, ALIBI_KEY, NO_BIAS
from regard.see.measure.rotary import Rotation, usual_rotations

FACTS: Registry[Fact] = Registry("fact")


@fact(FACTS, "grouping", grade=POLICY)
def grouping(a: MeasuredAttention) -> Failure | None:
    """If several query heads share one key head, they are neighbouring query heads.

    With H query heads and G key heads, query head h uses key head h // (H / G), unless grouping='tile' is declared. For
    H = 4 and G = 2 the order is 0 0 1 1, called repeat; the order tile is 0 1 0 1.

    Usual causes: k.repeat(1, n, 1, 1) in place of repeat_interleave(n, 1) (onnx#7274), for both or for one of k and v
    """
    if a.grouping is None:
        raise NotApplicableError("it has as many key heads as query heads")
    wanted = a.declared.grouping or "repeat"
    if a.grouping == wanted:
        return None
    words = f"query heads use key heads by {a.grouping}, not by {wanted}"
    if a.grouping.startswith("keys by"):
        words = f"query heads use {a.grouping}, so that weights are applied to the values of another head"
    detect = detect_difference(a, lambda inputs: {"grouping": wanted}, words)
    declare = f"grouping={a.grouping!r}" if a.grouping == "tile" else ""
    grade = POLICY if declare and a.declared.grouping is None else BROKEN
    return failure_of(a, a.random_inputs(2, 2, b=1, h=4, g=2), detect, words, declare, grade=grade)


@fact(FACTS, "key-order", explained_by="causality")
def key_order(a: MeasuredAttention) -> Failure | None:
    """The order of the keys does not matter, unless positions are added on purpose.

    With queries of zero, all visible keys have the same weight, or the weights that ALiBi with its usual slopes gives.
    If bias='none' is declared, only the same weight is correct; if bias='any' is declared, every position bias is. A
    position bias is the same at every head width.

    Usual causes: a bias or a decay that depends on the position, or keys paired with the values of other rows; a bias
    that is added before the scores are divided by sqrt(c); keys hidden by a small number such as -100 in place of -inf
    """
    wanted, name = a.declared.bias, a.bias_name
    raw = a.measurement().raw
    if raw.changes_weights(0 * raw.q, raw.k):
        words = "the weights at q = 0 depend on the keys: scores have a term of k alone, as a distance or a norm has"
        detect = detect_difference(a, lambda inputs: {"bias": None}, words)
        inputs = a.random_inputs(5, 5, b=1).with_zero_queries()
        return replace(failure_of(a, inputs, detect, words), fatal=True)
    if (found := _bias_changes_with_width(a)) is not None:
        return found
    if a.mask_number is not None and wanted != "any":
        words = f"some keys have {math.exp(a.mask_number):.1e} of the weight of others"
        return finite_mask(a, a.mask_number, words, "bias='any'")
    inverted = max(a.bias_reading[1] or (0.0,)) < 0  # no declaration allows it
    is_alibi = name.startswith((ALIBI_DISTANCE, ALIBI_KEY)) and not inverted
    usual = name in (NO_BIAS, ALIBI_DISTANCE, ALIBI_KEY)  # other slopes may be a mistake
    allowed = wanted == "any" or name == wanted or (wanted is None and usual) or (wanted == "alibi" and is_alibi)
    if allowed and not inverted:
        return None
    declare = "" if inverted else "bias='alibi'" if is_alibi else "bias='any'"
    row = ", ".join(f"{x:.4f}" for x in _most_unequal_row(a.flat_weights(5, 5, a.uses_causal_argument)).tolist())
    words = f"visible keys have different weights at q = 0, by position: {row}{f', by {name}' if is_alibi else ''}"
    if inverted:
        words = "ALiBi has the wrong sign: farther keys get more weight"
    elif wanted is not None:
        words = f"scores have {'no bias' if name == NO_BIAS else f'the bias {name}'}, but {wanted} was declared"
    with_alibi = wanted == "alibi" or inverted
    detect = detect_difference(a, lambda inputs: {"bias": _alibi(inputs) if with_alibi else None}, words)
    return failure_of(a, a.random_inputs(7, 7, b=1), detect, words, declare, square=True)


def _bias_changes_with_width(a: MeasuredAttention) -> Failure | None:
    """Return a failure if the position bias depends on the head width c, else None.

    It depends on c if it is divided by sqrt(c) together with q . k.
    """
    c, inputs = a.random_inputs(c=4).sizes[5], a.random_inputs(5, 5, b=1, c=12)
    h, other = inputs.sizes[1], inputs.sizes[5]
    narrow, wide = (a.bias(5, 5, inputs.causal, h, width) for width in (c, other))
    if narrow is None or wide is None or max_error(wide, narrow) <= max(10 * a.precision, 1e-4):
        return None
    share = ((narrow * wide).sum() / narrow.square().sum()).item()
    words = f"the bias by position depends on the width of heads: at c={other} it is {share:.4g} times that at c={c}"
    got, expected = (a.flat_weights(5, 5, inputs.causal, h, c=width)[None] for width in (other, c))
    return Failure(words, write_example(a, inputs.neutral(), got, expected, write_weights))


def _most_unequal_row(weights: Float[Tensor, "h i j"]) -> Float[Tensor, "j"]:
    """Return the row of weights with the largest ratio between its largest and its smallest nonzero weight."""
    rows = weights.flatten(0, 1)
    smallest = rows.masked_fill(rows == 0, torch.inf).amin(-1)
    return rows[(rows.amax(-1) / smallest).nan_to_num(0.0).argmax()]


def _alibi(inputs: AttentionInputs) -> Tensor:
    _, h, i, j = inputs.pair_shape
    distance = (torch.arange(j - i, j)[:, None] - torch.arange(j)[None, :]).abs()
    return -(alibi_slopes(h).double()[:, None, None] * distance)[None]


@fact(FACTS, "scores", fatal=True, explained_by="causality causal-off-by-one window grouping")
def scores(a: MeasuredAttention) -> Failure | None:
    """The weight of a key depends on its product with the query, and on nothing else.

    For every query q and two visible keys k[j] and k[m], log(weight[j] / weight[m]) = scale * q . (k[j] - k[m]), with
    one scale for all.

    Usual causes: q or k normalised, projected or rounded, rotary positions on one of them alone, only the k largest
    scores kept, scores clamped, softmax applied twice, another function than exp, an undeclared soft-cap, values in
    another order than keys
    """
    early = _softcap_before_scale(a)
    if a.scores_fit and not early and not share_without_weight(a):
        return None
    words, declare = "weights do not follow exp(scale q . k)", "" if early else ", ".join(_score_declarations(a))
    if cause := early or name_score_cause(a):
        words += f": {cause}"
    elif a.score_span is not None:
        words += f": scores are clamped or capped, since they differ by {a.score_span:.4g} at most"
    elif a.scores.residual is not None and a.scores.scale is None:
        words += f": a share of {a.scores.residual:.2g} of the scores is not explained"

    def changes(inputs: AttentionInputs) -> dict[str, Any]:
        return {"scale": a.expected_scale(inputs), "rotation": usual_rotation(a, inputs)}

    for most in (1e-3, 1e-5):
        detect = detect_difference(a, changes, words, most)
        found = smallest_failure(a, a.random_inputs(7, 7, b=1), detect, words, declare)
        if found is not None:
            return found
    return Failure(words, declare=declare)


def _softcap_before_scale(a: MeasuredAttention) -> str:
    """Describe a soft-cap that is applied before the scale instead of after the scale; "" if there is none.

    It is recognised by a measured soft-cap that varies with the head width, or that equals the declared soft-cap times
    the scale.
    """
    caps = {c: a.measurement(c=c).scores.softcap for c in (a.random_inputs(c=width).sizes[5] for width in (4, 12))}
    cap, *others = caps.values()
    varies = any(cap and other and not math.isclose(cap, other, rel_tol=1e-2) for other in others)
    declared, scale = a.declared.softcap, a.scores.scale
    scaled = declared and cap and scale and math.isclose(cap, declared * scale, rel_tol=1e-2) and scale < 0.99
    if not varies and not scaled:
        return ""
    sizes = ", ".join(f"{cap or 0:.4g} at c={c}" for c, cap in caps.items())
    return f"the soft-cap is applied before the scale, so that it is {sizes}"


def _score_declarations(a: MeasuredAttention) -> Iterator[str]:
    """Yield keyword arguments of `regard.check`, as code, that declare the measured soft-cap and norm of q and k."""
    found, declared = a.scores, a.declared
    if found.softcap is not None and declared.softcap is None:
        yield f"softcap={found.softcap:.4g}"
    both = found.norm is not None and found.norm.q and found.norm.k
    if both and found.qk_norm in ("rms", "layer") and declared.qk_norm is None:
        usual = found.scale_name == "1/sqrt(c)" or found.qk_norm == "layer"
        yield f"qk_norm={found.qk_norm if usual else 'l2'!r}"


@fact(FACTS, "scale")
def scale(a: MeasuredAttention) -> Failure | None:
    """Wider vectors have larger dot products, so the products are divided by the square root of the width.

    The factor of q . k is 1/sqrt(c), where c is the width per head of q and k, unless a scale is declared. If the
    attention has a scale argument, the argument changes the factor.

    Usual causes: scaled twice (in q and in the kernel), inverted, missing, or computed from the width of the model,
    of v or of all heads (transformers#44380, x-transformers#190); an argument that is not passed on
    """
    inputs = a.random_inputs(7, 7, b=1)
    have, want = a.scales[0][1], a.expected_scale(a.random_inputs(7, 7, b=1, c=4))
    near = abs(have - want) <= 10 * a.precision * want
    usual = a.scale_name.endswith(("1/sqrt(c)", "the scale of YaRN"))
    # a declared number has to hold at every width and length
    if near and (usual if a.declared.scale is None else not a.scale_varies):
        return _scale_argument_ignored(a)
    if not a.declared.sink and not all(
        all_ones(row_sums(a, a.random_inputs(n, n, b=1, c=c))) for c, n in ((4, 7), (12, 7), (4, 9))
    ):
        raise NotApplicableError("weights of a row do not sum to one, so that no scale can be measured")
    words = f"q . k is multiplied by {a.scale_name}, not by {'1/sqrt(c)' if a.declared.scale is None else want}"
    detect = detect_difference(a, lambda inputs: {"scale": a.expected_scale(inputs)}, words)
    declare = f"scale={have:.6g}" + (f", width={inputs.sizes[5]}" if a.scale_varies else "")
    declare = declare if 0 < have < float("inf") else ""
    for call in (inputs, a.random_inputs(7, 7, b=1, c=12), a.random_inputs(9, 9, b=1)):
        if (found := smallest_failure(a, call, detect, words, declare)) is not None:
            return found
    return Failure(words, declare=declare)


def _scale_argument_ignored(a: MeasuredAttention) -> Failure | None:
    """Return a failure if the scale argument of the attention has no effect, else None.

    The value 0 is tried too, because the argument may be a Boolean.
    """
    name = a.scale_argument
    if name is None:
        return None

    def detect(inputs: AttentionInputs) -> Violation | None:
        plain = a(inputs).detach()
        others = [a(inputs, **{name: size}).detach() for size in (0.0, 0.37, 1.7)]
        expected = a.reference(inputs, scale=1.7).to(plain.dtype)
        if any(not torch.equal(plain, other) for other in others) or max_error(plain, expected) <= 1e-3:
            return None
        words = f"{name}=1.7 changes nothing"
        return Violation(words, plain, expected, lambda call: [f"out = {call(*QKV, f'{name}=1.7')}"])

    try:
        return smallest_failure(a, a.random_inputs(7, 7, b=1), detect)
    except Exception:
        return None  # the argument accepts no number; the report lists it as untested


def usual_rotation(a: MeasuredAttention, inputs: AttentionInputs) -> Rotation | None:
    """Return a rotary embedding with the declared rotary pairing and base 10000; None if no pairing is declared."""
    found = (each for each in usual_rotations(inputs.sizes[5]) if each.pairing == a.declared.rotary)
    return next(found, None)


@fact(FACTS, "rotary-pairing")
def rotary_pairing(a: MeasuredAttention) -> Failure | None:
    """Rotary positions rotate pairs of coordinates. Which two coordinates form a pair is a convention.

    Two coordinates form a pair as declared. At head width c, pair n is (n, n + c/2) for half, and (2n, 2n + 1) for
    interleaved.

    Usual causes: weights or code from a project with the other pairing (transformers#25199)
    """
    if a.declared.rotary is None:
        raise NotApplicableError("no rotary pairing was declared")
    have = None if a.rotary is None else a.rotary.pairing
    if have == a.declared.rotary:
        return None
    words = f"the rotary pairing is {have or 'none'}, not {a.declared.rotary}"
    detect = detect_difference(a, lambda inputs: {"rotation": usual_rotation(a, inputs)}, words)
    return failure_of(a, a.random_inputs(3, 3, b=1), detect, words, "" if have is None else f"rotary={have!r}")


@fact(FACTS, "last-queries-alone", explained_by="mask-in-decode causality diagonal-hidden")
def last_queries_alone(a: MeasuredAttention) -> Failure | None:
    """A token has the same position whether it is passed alone or with the tokens before it.

    The last i of j queries, passed with all j keys, give the same output alone as together with the other queries,
    unless alignment='top-left' is declared.

    Usual causes: positions of queries counted from 0 in a step of decoding, so that a bias or rotary(q) ignores the
    length of the cache
    """
    if not a.free_lengths:
        raise NotApplicableError("queries and keys have the same length, so there are no decoding steps")
    if a.declared.alignment == "top-left":
        raise NotApplicableError("alignment='top-left' was declared")
    by_rotary = a.alignment is None and a.rotary is not None  # every key is visible, and positions still matter
    if a.alignment != "bottom-right" and not by_rotary:
        raise NotApplicableError("fewer queries than keys are not at the end")
    from_zero = ": rotary positions of queries are counted from 0" if a.rotary_alignment == "top-left" else ""
    declare = "alignment='top-left'" if by_rotary else ""

    def lines(share: int, call: CallWriter) -> list[str]:
        rows = f"[:, :, {-(call.inputs.k.shape[2] // share or 1)}:]"
        return [f"expected = {call()}{rows}", f"out = {call(f'q{rows}')}"]

    def same(alone: Tensor, whole: Tensor) -> bool:
        return alone.shape != whole.shape or max_error(alone, whole) <= 1e-4 * max(1.0, whole.abs().max().item())

    def find(n: int, share: int) -> Failure | None:
        inputs = a.random_inputs(n, n, b=1, dtype=torch.float32)
        words = f"the last of {n} queries give another output alone than among all{from_zero}"
        return smallest_failure(a, inputs, detect_lines(a, words, partial(lines, share), same), words, declare, True)

    return first_failure(find(n, share) for n in LENGTHS for share in (n, 2))
