"""Facts about conventions: visible keys, scale, heads and positions are as declared or as expected."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, run_lines, write_example, write_weights
from regard.conform.fact import BROKEN, POLICY, Fact, Failure, NotApplicableError, fact, first_failure
from regard.conform.facts.dependence import all_ones, row_sums
from regard.conform.inputs import QKV, AttentionInputs
from regard.conform.shrink import Detect, Violation, detect_lines, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.core.scores import alibi_slopes
from regard.see.measure.biases import ALIBI_DISTANCE, ALIBI_KEY, NO_BIAS
from regard.see.measure.mask_names import VisibleBand
from regard.see.measure.rotary import Rotation, usual_rotations

FACTS: Registry[Fact] = Registry("fact")

LENGTHS = (11, 67)  # one block of a fast kernel, and several with a remainder
STEPS = ((1, 9), (3, 9), (1, 67), (3, 67))  # queries, and keys including cached ones
MASK_FACTS = "diagonal-hidden causal-off-by-one causality window"
CAUSAL = VisibleBand(None, 0)


def require_causal(a: MeasuredAttention) -> None:
    """The fact applies to causal attentions only."""
    if a.declared.causal is False:
        raise NotApplicableError("declared not causal")
    if a.declared.causal is None and not a.uses_causal_argument and not a.causal:
        raise NotApplicableError("not declared causal, has no causal argument that works alone, and is not causal")


def detect_difference(
    a: MeasuredAttention, changes: Callable[[AttentionInputs], dict[str, Any]], words: str, most: float = 1e-3
) -> Detect:
    """Detects outputs that differ from the expected ones, with some conventions changed."""

    def detect(inputs: AttentionInputs) -> Violation | None:
        expected = a.reference(inputs, **changes(inputs))
        got = a(inputs).detach()
        if max_error(got, expected) <= most * max(1.0, expected.abs().max().item()):
            return None
        return Violation(words, got, expected.to(got.dtype))

    return detect


def _band_for(band: VisibleBand, inputs: AttentionInputs) -> dict[str, Any]:
    return {"visible": band.visible(*inputs.pair_shape[2:])[None, None]}


def _wrong_band(a: MeasuredAttention, n: int, words: str, declare: str = "", causal: bool = False) -> Failure:
    """The failure of a mask, with an output under the declared band. `causal` expects no later key in any case."""
    causal = causal or bool(
        a.declared.causal is not False and (a.declared.causal or a.uses_causal_argument or a.causal)
    )
    band = VisibleBand(a.declared.window_before, 0 if causal else a.declared.window_after)
    detect = detect_difference(a, lambda inputs: _band_for(band, inputs), words)
    return failure_of(a, a.random_inputs(n, n, b=1), detect, words, declare, square=True)


def _first_pair(pairs: Tensor) -> tuple[int, int, int]:
    """The head, row and key of the first marked pair."""
    _, head, row, key = pairs.nonzero()[0].tolist()
    return head, row, key


def _pair_words(n: int, seen: Tensor, wrong: Tensor) -> str:
    head, row, key = _first_pair(wrong)
    verb = "sees" if bool(seen[0, head, row, key]) else "does not see"
    return f"of {n} keys, row {row} of head {head} {verb} key {key}"


@fact(FACTS, "diagonal-hidden", fatal=True)
def diagonal_hidden(a: MeasuredAttention) -> Failure | None:
    """A token sees itself.

    Under a causal mask row i sees key i: the mask is j <= i, not j < i.

    Usual causes: triu(diagonal=0) filled with -inf in place of diagonal=1; tril(diagonal=-1)
    """
    require_causal(a)
    seen = a.visible(11, 11)[0]
    if bool(seen.triu(1).any()):
        return None  # it sees later keys: the fact `causality`
    if not bool(seen.diagonal(dim1=-2, dim2=-1)[:, 1:].any()) and bool(seen[:, 1:].any()):
        return _wrong_band(a, 11, "row i sees only keys before i, so the first row sees no key")
    return None


@fact(FACTS, "causal-off-by-one")
def causal_off_by_one(a: MeasuredAttention) -> Failure | None:
    """A token that sees the next one sees the answer.

    Under a causal mask row i does not see key i + 1: the mask is j <= i, not j <= i + 1. All earlier keys and one
    later one are reported here, unless causal=False or window_after=1 is declared.

    Usual causes: the diagonal of the mask: triu(diagonal=2), tril(diagonal=1); or targets not shifted by one
    """
    undeclared = a.declared.causal is None and not a.declared.windowed
    if not (undeclared and a.band == VisibleBand(None, 1)):  # such a mask is hardly on purpose
        require_causal(a)
    if a.band is not None and a.band.after == 1:
        declare = "causal=False, window_after=1" if a.declared.causal or a.uses_causal_argument else "window_after=1"
        return _wrong_band(a, 11, "row i sees key i + 1", declare, causal=True)
    return None


@fact(FACTS, "causality", explained_by="causal-off-by-one")
def causality(a: MeasuredAttention) -> Failure | None:
    """A token does not see the tokens after it.

    Under a causal mask no output row depends on later keys or values, at any length.

    Usual causes: is_causal dropped on a fast path, a mask that is never applied, or one built for another length
    (transformers#45811, pytorch#99282); tril in place of triu
    """
    require_causal(a)
    for n in LENGTHS:
        seen = a.visible(n, n)
        later = seen & ~CAUSAL.visible(n, n)
        if bool(later.any()):
            words = _pair_words(n, seen, later)
            inverted = not bool((seen & CAUSAL.visible(n, n)).any())
            words = f"row i sees only keys after i, so the last row sees no key: {words}" if inverted else words
            return _wrong_band(a, n, words, "" if inverted else "causal=False")
        if (found := _changed_by_later_keys(a, n)) is not None:
            return found
    if a.leak_in_batch is not None:
        found = _changed_by_later_keys(a, 11, b=3)
        sequence, head, row, key = a.leak_in_batch
        words = f"in a batch, row {row} of head {head} of sequence {sequence} sees key {key}"
        return Failure(words) if found is None else replace(found, found=words)
    return None


def _changed_by_later_keys(a: MeasuredAttention, n: int, b: int = 1) -> Failure | None:
    def lines(call: CallWriter) -> list[str]:
        cut, changed = call.inputs.q.shape[2] // 2, []
        for x in ("k", "v"):
            changed += [f"later_{x} = {x}.clone()", f"later_{x}[:, :, {cut}:] = {x}[:, :, {cut}:].flip(-1) * 3 + 1"]
        expected = f"expected = {call()}[:, :, :{cut}]"
        return [*changed, expected, f"out = {call('q', 'later_k', 'later_v')}[:, :, :{cut}]"]

    def same(after: Tensor, before: Tensor) -> bool:
        return not before.numel() or max_error(after, before) <= 1e-9 * max(1.0, before.abs().max().item())

    detect = detect_lines(a, "rows of the first half change with keys and values of the second half", lines, same)
    return smallest_failure(a, a.random_inputs(n, n, b=b), detect, square=True)


def _window_length(a: MeasuredAttention) -> int:
    """A number of keys that shows the declared window."""
    return max(a.declared.window_before or 0, a.declared.window_after or 0) + 7


@fact(FACTS, "window", explained_by="causality causal-off-by-one")
def window(a: MeasuredAttention) -> Failure | None:
    """A window of four neighbours shows four neighbours and the token itself; without a window everything is visible.

    The visible band is the declared one: window_before=W shows W earlier keys and the own one. Without a declared
    window every earlier key is visible, and every key if causal=False is declared.

    Usual causes: W taken for the number of visible keys, or for both sides (transformers#39408, vllm#3385); the window
    dropped when another mask is passed, counted in blocks, or applied to one side only; a causal mask left on in an
    encoder, top-k or a threshold on weights
    """
    if not a.declared.windowed and a.declared.causal is None:
        raise NotApplicableError("neither a window nor causal was declared")
    for n in (_window_length(a), *LENGTHS):
        seen = a.visible(n, n)
        wrong = seen != VisibleBand(a.declared.window_before, a.declared.after).visible(n, n)
        if bool(wrong.any()):
            return _wrong_band(a, n, _window_words(a, n) or _pair_words(n, seen, wrong), _declaration(a.band))
    return None


def _window_words(a: MeasuredAttention, n: int) -> str:
    """How many neighbours are visible in place of the declared number; empty if the visible keys are no such window."""
    found = a.band_at(n) or VisibleBand(None, None)
    sides = (("earlier", a.declared.window_before, found.before), ("later", a.declared.after, found.after))
    wrong = [(side, want, have) for side, want, have in sides if None not in (want, have) and want != have]
    return "".join(f"a row sees {have} {side} keys besides itself, not {want}" for side, want, have in wrong[:1])


def _declaration(found: VisibleBand | None) -> str:
    """The options that declare a band."""
    if found is None:
        return ""
    ends = {"window_before": found.before, "window_after": None if found.after == 0 else found.after}
    return ", ".join([f"causal={found.after == 0}", *(f"{x}={end}" for x, end in ends.items() if end is not None)])


@fact(FACTS, "mask-pattern", explained_by=MASK_FACTS)
def mask_pattern(a: MeasuredAttention) -> Failure | None:
    """All heads, all tokens and all lengths follow the same rule of what is visible.

    The visible keys are one band around the diagonal, the same in every head and row, and at 7, 11, 13, 37, 67, 131 and
    301 keys, unless mask_pattern='any' is declared.

    Usual causes: a mask that is applied to one head only; an index that is off in some rows or blocks; a block that is
    never visited; keys cut off at a block or at a context length
    """
    if a.declared.mask_pattern == "any":
        raise NotApplicableError("mask_pattern='any' was declared: heads, rows or lengths see different keys")
    for n in LENGTHS:
        seen = a.visible(n, n)
        if bool((other := seen != seen[:, :1]).any()):
            words = f"{_pair_words(n, seen, other)}, unlike head 0"
            return _inconsistent_mask(a, n, lambda inputs: {"visible": a.expected(inputs).visible[:, :1]}, words)
    band = a.band or a.smallest_band(11)
    if band is None:
        raise NotApplicableError("no key is visible")
    for n in (11, 7, 13, 37, 67, 131, LONG):
        try:
            seen = a.visible(n, n)
        except Exception:
            continue  # longer than it accepts
        if bool((other := seen != band.visible(n, n)).any()):
            same = "other rows see as far" if n == 11 else f"of 11 keys it sees: {band}"
            words = f"{_pair_words(n, seen, other)}, though {same}"
            return _inconsistent_mask(a, n, lambda inputs: _band_for(band, inputs), words)
    return None


def _inconsistent_mask(
    a: MeasuredAttention, n: int, changes: Callable[[AttentionInputs], dict[str, Any]], words: str
) -> Failure:
    """The failure of a mask that differs between heads, rows or lengths."""
    detect = detect_difference(a, changes, words)
    return failure_of(a, a.random_inputs(n, n, b=1), detect, words, "mask_pattern='any'", square=True)


def _visible_in_steps(a: MeasuredAttention, i: int, j: int) -> tuple[Tensor, Tensor, VisibleBand]:
    """What the last i of j rows see when they are passed alone, when all rows are passed, and the band."""
    if not a.free_lengths:
        raise NotApplicableError("queries and keys have the same length, so there are no decoding steps")
    if a.band is None or a.band == VisibleBand(None, None):
        raise NotApplicableError("every key is visible, or the visible keys are no band")
    return a.visible(i, j), a.visible(j, j)[..., j - i :, :], a.band


def _wrong_in_steps(a: MeasuredAttention, i: int, j: int, words: str, expected: Tensor, declare: str = "") -> Failure:
    """The failure of a mask of fewer queries than keys; the example shows what head 0 sees."""
    inputs = a.random_inputs(i, j, b=1, h=1, dtype=torch.float32).neutral()

    def lines(call: CallWriter) -> list[str]:
        return [*write_weights(call), "visible = weights[0, 0] > 0"]

    return Failure(words, write_example(a, inputs, run_lines(a, inputs, lines)[1], expected[0, 0], lines), declare)


@fact(FACTS, "mask-in-decode", explained_by="causality causal-off-by-one")
def mask_in_decode(a: MeasuredAttention) -> Failure | None:
    """With a KV cache, new tokens see the cached tokens that they see in one pass, and none of each other's future.

    With j - i cached keys, i queries see the keys that the last i of j rows see (bottom-right), or the first i rows
    (top-left, as torch's is_causal); the alignment is the declared one.

    Usual causes: the position of the first query is the length of the cache plus or minus one (transformers#30417); a
    path for i = 1 without the window (nanochat#452); causal only if i = j, or switched off if there is a cache
    """
    wanted = a.declared.alignment or ("top-left" if a.alignment == "top-left" else "bottom-right")
    for i, j in STEPS:
        seen, whole, band = _visible_in_steps(a, i, j)
        expected = whole if wanted == "bottom-right" else band.visible(i, j, wanted).expand_as(seen)
        if bool((seen == expected).all()):
            continue
        if a.alignment in ("top-left", "bottom-right"):
            words = f"{i} queries and {j} keys are aligned {a.alignment}, not {wanted}"
            return _wrong_in_steps(a, i, j, words, expected, f"alignment={a.alignment!r}")
        _, row, key = _first_pair(seen != expected)
        words = f"{i} of {j} rows: row {row} {'sees' if seen[0, 0, row, key] else 'does not see'} key {key}"
        words += ", a later one" if key > j - i + row else ", unlike in one pass"
        for shift in (-1, 1):
            before = band.before and band.before - shift
            moved = VisibleBand(before, None if band.after is None else band.after + shift).visible(i, j)
            if bool((seen == moved).all()):
                late = "late" if shift > 0 else "early"
                words = f"{i} queries after {j - i} cached keys are one position too {late}"
        return _wrong_in_steps(a, i, j, words, expected)
    return None


@fact(FACTS, "grouping", grade=POLICY)
def grouping(a: MeasuredAttention) -> Failure | None:
    """If several query heads share a key head, neighbouring ones share it.

    Query head h uses key head h // (h_count / g_count): repeat (0 0 1 1), unless tile is declared.

    Usual causes: k.repeat(1, n, 1, 1) in place of repeat_interleave(n, 1) (onnx#7274), for both or for one of k and
    v
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


@fact(FACTS, "key-order")
def key_order(a: MeasuredAttention) -> Failure | None:
    """The order of the keys does not matter, unless positions are added on purpose.

    At q = 0 all visible keys have the same weight, unless bias='alibi' or bias='any' is declared; a bias is the
    same at every width of heads.

    Usual causes: a bias by index, a decay, or keys paired with the values of other rows; a bias that is added
    before the scores are divided by sqrt(c)
    """
    wanted, name = a.declared.bias, a.bias_name
    if (found := _bias_changes_with_width(a)) is not None:
        return found
    inverted = max(a.bias_reading[1] or (0.0,)) < 0  # no declaration allows it
    is_alibi = name.startswith((ALIBI_DISTANCE, ALIBI_KEY)) and not inverted
    usual = name in (NO_BIAS, ALIBI_DISTANCE, ALIBI_KEY)  # other slopes may be a mistake
    allowed = wanted == "any" or name == wanted or (wanted is None and usual) or (wanted == "alibi" and is_alibi)
    if allowed and not inverted:
        return None
    declare = "" if inverted else "bias='alibi'" if is_alibi else "bias='any'"
    row = ", ".join(f"{x:.4f}" for x in a.flat_weights(5, 5, a.uses_causal_argument)[0, -1].tolist())
    words = f"visible keys have different weights at q = 0, by position: {row}{f', by {name}' if is_alibi else ''}"
    if inverted:
        words = "ALiBi has the wrong sign: farther keys get more weight"
    elif wanted is not None:
        words = f"scores have {'no bias' if name == NO_BIAS else f'the bias {name}'}, but {wanted} was declared"
    with_alibi = wanted == "alibi" or inverted
    detect = detect_difference(a, lambda inputs: {"bias": _alibi(inputs) if with_alibi else None}, words)
    return failure_of(a, a.random_inputs(7, 7, b=1), detect, words, declare, square=True)


def _bias_changes_with_width(a: MeasuredAttention) -> Failure | None:
    """The failure of a bias that differs between widths of heads, because it is scaled with q . k."""
    c, inputs = a.random_inputs(c=4).sizes[5], a.random_inputs(5, 5, b=1, c=12)
    h, other = inputs.sizes[1], inputs.sizes[5]
    narrow, wide = (a.bias(5, 5, inputs.causal, h, width) for width in (c, other))
    if narrow is None or wide is None or max_error(wide, narrow) <= max(10 * a.precision, 1e-4):
        return None
    share = ((narrow * wide).sum() / narrow.square().sum()).item()
    words = f"the bias by position depends on the width of heads: at c={other} it is {share:.4g} times that at c={c}"
    got, expected = (a.flat_weights(5, 5, inputs.causal, h, c=width)[None] for width in (other, c))
    return Failure(words, write_example(a, inputs.neutral(), got, expected, write_weights))


def _alibi(inputs: AttentionInputs) -> Tensor:
    _, h, i, j = inputs.pair_shape
    distance = (torch.arange(j - i, j)[:, None] - torch.arange(j)[None, :]).abs()
    return -(alibi_slopes(h).double()[:, None, None] * distance)[None]


@fact(FACTS, "scores", fatal=True, explained_by="causality causal-off-by-one window grouping")
def scores(a: MeasuredAttention) -> Failure | None:
    """The weight of a key depends on its product with the query, and on nothing else.

    log(weight[j] / weight[j']) = scale q . (k[j] - k[j']) for all pairs, with one scale.

    Usual causes: q or k normalised, projected or rounded, top-k, another function than exp, an undeclared soft-cap,
    values permuted against keys
    """
    early = _softcap_before_scale(a)
    if a.scores_fit and not early:
        return None
    words, declare = "weights do not follow exp(scale q . k)", "" if early else ", ".join(_score_declarations(a))
    if early:
        words += f": {early}"
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
    """In words that the soft-cap falls with the scale, or is the declared one times the scale; empty if it is not."""
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
    """The options that declare the measured soft-cap and norm."""
    found, declared = a.scores, a.declared
    if found.softcap is not None and declared.softcap is None:
        yield f"softcap={found.softcap:.4g}"
    both = found.norm is not None and found.norm.q and found.norm.k
    if both and found.qk_norm in ("rms", "layer") and declared.qk_norm is None:
        usual = found.scale_name == "1/sqrt(c)" or found.qk_norm == "layer"
        yield f"qk_norm={found.qk_norm if usual else 'l2'!r}"


@fact(FACTS, "scale")
def scale(a: MeasuredAttention) -> Failure | None:
    """Longer vectors have larger products, so products are divided by the square root of the length.

    The factor of q . k is 1/sqrt(c), where c is the width per head of q and k, unless a scale is declared; a scale
    argument changes it.

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
    """The failure of a scale argument that changes nothing. Zero is tried too, since the argument may be a switch."""
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
        return None  # it accepts no number, and is listed among the untested arguments


def usual_rotation(a: MeasuredAttention, inputs: AttentionInputs) -> Rotation | None:
    """The declared rotation with the usual base; None if no rotary was declared."""
    found = (each for each in usual_rotations(inputs.sizes[5]) if each.pairing == a.declared.rotary)
    return next(found, None)


@fact(FACTS, "rotary-pairing")
def rotary_pairing(a: MeasuredAttention) -> Failure | None:
    """Rotary positions rotate pairs of coordinates: which two form a pair is a convention.

    Pairs are (k, k + c/2) for half and (2k, 2k + 1) for interleaved, as declared.

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

    The last i of j queries, passed alone with all j keys, give the output that they give among all j queries,
    unless alignment='top-left' is declared.

    Usual causes: positions of queries counted from 0: a bias or rotary phase that ignores the length of the cache,
    as rotary(q) and rotary(k) that both start at 0 in a step of decoding
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
