"""Facts about conventions: visible keys, scale, heads and positions are as declared or as expected."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, write_example, write_weights
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.dependence import all_ones, row_sums
from regard.conform.inputs import QKV, AttentionInputs
from regard.conform.shrink import Detect, Violation, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.core.scores import alibi_slopes
from regard.see.measure.biases import ALIBI_DISTANCE, ALIBI_KEY, NO_BIAS
from regard.see.measure.mask_names import VisibleBand

FACTS: Registry[Fact] = Registry("fact")

LENGTHS = (11, 67)  # one block of a fast kernel, and several with a remainder
STEPS = ((1, 9), (3, 9), (1, 67), (3, 67))  # queries, and keys including cached ones
MASK_FACTS = ("diagonal-hidden", "causal-off-by-one", "causality", "window-off-by-one", "window", "all-keys-visible")
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


@fact(FACTS, "causality", explained_by=("causal-off-by-one",))
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
    def detect(inputs: AttentionInputs) -> Violation | None:
        n = inputs.q.shape[2]
        cut = n // 2
        if cut < 1 or inputs.k.shape[2] != n:
            return None
        other = replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
        for later in (other.k[:, :, cut:], other.v[:, :, cut:]):
            later.copy_(later.flip(-1) * 3 + 1)
        before, after = (a(x).detach()[:, :, :cut] for x in (inputs, other))
        if max_error(after, before) <= 1e-9 * max(1.0, before.abs().max().item()):
            return None
        changed = []
        for x in ("k", "v"):
            changed += [f"later_{x} = {x}.clone()", f"later_{x}[:, :, {cut}:] = {x}[:, :, {cut}:].flip(-1) * 3 + 1"]
        return Violation(
            f"rows before {cut} of {n} change with keys and values from {cut} on",
            after,
            before,
            lambda call: [
                *changed,
                f"expected = {call()}[:, :, :{cut}]",
                f"out = {call('q', 'later_k', 'later_v')}[:, :, :{cut}]",
            ],
        )

    return smallest_failure(a, a.random_inputs(n, n, b=b), detect, square=True)


@fact(FACTS, "window-off-by-one")
def window_off_by_one(a: MeasuredAttention) -> Failure | None:
    """A window of four neighbours shows four neighbours and the token itself.

    window_before=W shows W earlier keys and the own one: W + 1 in all.

    Usual causes: W taken for the number of visible keys (W), or for both sides (2 W + 1) (transformers#39408,
    vllm#3385)
    """
    if not a.declared.windowed:
        raise NotApplicableError("no window was declared")
    found = a.band_at(_window_length(a))
    if found is None:
        raise NotApplicableError("the visible keys are no band, so they are no window")
    for side, words, want, have in (
        ("before", "earlier", a.declared.window_before, found.before),
        ("after", "later", a.declared.after, found.after),
    ):
        if want is not None and have is not None and abs(have - want) == 1:
            return _wrong_band(
                a, want + 7, f"a row sees {have} {words} keys besides itself, not {want}", f"window_{side}={have}"
            )
    return None


def _window_length(a: MeasuredAttention) -> int:
    """A number of keys that shows the declared window."""
    return max(a.declared.window_before or 0, a.declared.window_after or 0) + 7


@fact(FACTS, "window", explained_by=("window-off-by-one", "causality", "causal-off-by-one"))
def window(a: MeasuredAttention) -> Failure | None:
    """Every token sees as far as the window, and no farther.

    The visible band is the declared one; without a declared window, every earlier key is visible.

    Usual causes: the window dropped when another mask is passed, counted in blocks, or applied to one side only
    """
    if not a.declared.windowed and not a.declared.causal:
        raise NotApplicableError("neither a window nor causal was declared")
    for n in (_window_length(a), *LENGTHS[1:]):
        seen = a.visible(n, n)
        wrong = seen != VisibleBand(a.declared.window_before, a.declared.after).visible(n, n)
        if bool(wrong.any()):
            return _wrong_band(a, n, _pair_words(n, seen, wrong), _declaration(a.band))
    return None


def _declaration(found: VisibleBand | None) -> str:
    """The options that declare a band."""
    if found is None:
        return ""
    ends = {"window_before": found.before, "window_after": None if found.after == 0 else found.after}
    return ", ".join([f"causal={found.after == 0}", *(f"{x}={end}" for x, end in ends.items() if end is not None)])


@fact(FACTS, "all-keys-visible")
def all_keys_visible(a: MeasuredAttention) -> Failure | None:
    """Without a mask every token sees every token.

    If causal=False and no window is declared, every weight at q = 0 is positive.

    Usual causes: a causal mask left on in an encoder, top-k or a threshold on weights
    """
    if a.declared.causal is not False or a.declared.windowed:
        raise NotApplicableError("not declared to see every key (causal=False)")
    for n in LENGTHS:
        seen = a.visible(n, n)
        if not bool(seen.all()):
            return _wrong_band(a, n, _pair_words(n, seen, ~seen), "causal=True")
    return None


def _require_band(a: MeasuredAttention) -> None:
    if a.declared.mask_pattern == "any":
        raise NotApplicableError("mask_pattern='any' was declared: heads, rows or lengths see different keys")


def _inconsistent_mask(
    a: MeasuredAttention, n: int, changes: Callable[[AttentionInputs], dict[str, Any]], words: str
) -> Failure:
    """The failure of a mask that differs between heads, rows or lengths."""
    detect = detect_difference(a, changes, words)
    return failure_of(a, a.random_inputs(n, n, b=1), detect, words, "mask_pattern='any'", square=True)


@fact(FACTS, "mask-differs-by-head", explained_by=MASK_FACTS)
def mask_differs_by_head(a: MeasuredAttention) -> Failure | None:
    """All heads see the same tokens.

    At q = 0 the same keys are visible in every head, unless mask_pattern='any' is declared.

    Usual causes: a mask that is applied to one head only, or one of (b i j) that is broadcast along the heads
    """
    _require_band(a)
    for n in LENGTHS:
        seen = a.visible(n, n)
        other = seen != seen[:, :1]
        if bool(other.any()):
            words = f"{_pair_words(n, seen, other)}, unlike head 0"
            return _inconsistent_mask(a, n, lambda inputs: {"visible": a.expected(inputs).visible[:, :1]}, words)
    return None


@fact(FACTS, "mask-differs-by-row", explained_by=(*MASK_FACTS, "mask-differs-by-head"))
def mask_differs_by_row(a: MeasuredAttention) -> Failure | None:
    """Every token sees equally far.

    The visible keys are a band around the diagonal, the same in every row, unless mask_pattern='any' is declared.

    Usual causes: an index that is off in some rows or blocks, a mask kept from another call, a block that is never
    visited
    """
    _require_band(a)
    if a.band is not None:
        return None
    band = a.smallest_band(11)
    if band is None:
        raise NotApplicableError("no key is visible")
    head, row, key = _first_pair(band.visible(11, 11) & ~a.visible(11, 11))
    words = f"of 11 keys, row {row} of head {head} does not see key {key}, though other rows see as far"
    return _inconsistent_mask(a, 11, lambda inputs: _band_for(band, inputs), words)


@fact(FACTS, "mask-differs-by-length", explained_by=(*MASK_FACTS, "mask-differs-by-head", "mask-differs-by-row"))
def mask_differs_by_length(a: MeasuredAttention) -> Failure | None:
    """The mask of a short text and of a long one follow the same rule.

    The band that is visible at 11 keys is visible at 7, 13, 37, 67, 131 and 301 too, unless mask_pattern='any' is
    declared.

    Usual causes: keys cut off at a block or at a context length, a mask built for another length, a last block left
    out
    """
    _require_band(a)
    band = a.band
    if band is None:
        raise NotApplicableError("the visible keys are no band: the fact `mask-differs-by-row`")
    for n in (7, 13, 37, 67, 131, LONG):
        try:
            seen = a.visible(n, n)
        except Exception:
            continue  # longer than it accepts
        other = seen != band.visible(n, n)
        if bool(other.any()):
            words = f"{_pair_words(n, seen, other)}, though of 11 keys it sees: {band}"
            return _inconsistent_mask(a, n, lambda inputs: _band_for(band, inputs), words)
    return None


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
    seen = a.weights(inputs)[0, 0] > 0
    code = write_example(
        a, inputs, seen, expected[0, 0], lambda call: [*write_weights(call), "visible = weights[0, 0] > 0"]
    )
    return Failure(words, code, declare)


@fact(FACTS, "cache-mask-off-by-one")
def cache_mask_off_by_one(a: MeasuredAttention) -> Failure | None:
    """With a KV cache, new tokens see all cached tokens and themselves.

    With j - i cached keys, row r sees the band around position j - i + r, not around a neighbour of it.

    Usual causes: the position of the first query is the length of the cache plus or minus one (transformers#30417)
    """
    for i, j in STEPS:
        seen, whole, band = _visible_in_steps(a, i, j)
        for shift in (-1, 1):
            before = band.before and band.before - shift
            moved = VisibleBand(before, None if band.after is None else band.after + shift).visible(i, j)
            shifted = bool((seen == moved).all()) and not bool((seen == whole).all())
            if a.alignment != "top-left" and shifted:
                words = f"{i} queries after {j - i} cached keys are one position too {'late' if shift > 0 else 'early'}"
                return _wrong_in_steps(a, i, j, words, whole)
    return None


@fact(FACTS, "window-in-decode", explained_by=("cache-mask-off-by-one",))
def window_in_decode(a: MeasuredAttention) -> Failure | None:
    """The window is as wide in decoding as in one pass.

    One query with j cached keys sees the window that the last row of the whole sequence sees.

    Usual causes: a decode path for i = 1 without any mask (nanochat#452)
    """
    if a.band is None or a.band.before is None:
        raise NotApplicableError("there is no window")
    return _sees_more_in_steps(a, "which it does not see in one pass")


@fact(
    FACTS,
    "causality-in-decode",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality", "causal-off-by-one"),
)
def causality_in_decode(a: MeasuredAttention) -> Failure | None:
    """New tokens that are passed together do not see each other's future.

    With cached keys, i > 1 queries are causal among each other.

    Usual causes: causal only if i = j, or switched off if there is a cache
    """
    require_causal(a)
    return _sees_more_in_steps(a, "a later one")


def _sees_more_in_steps(a: MeasuredAttention, what: str) -> Failure | None:
    for i, j in STEPS:
        seen, whole, _ = _visible_in_steps(a, i, j)
        if a.alignment != "top-left" and bool((seen & ~whole).any()):
            _, row, key = _first_pair(seen & ~whole)
            return _wrong_in_steps(a, i, j, f"{i} of {j} rows: row {row} sees key {key}, {what}", whole)
    return None


@fact(
    FACTS,
    "causal-alignment",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality-in-decode", "causality"),
)
def causal_alignment(a: MeasuredAttention) -> Failure | None:
    """With more keys than queries, the queries are the newest tokens, unless declared otherwise.

    If i < j, queries are at the end (bottom-right) or at the beginning (top-left), as declared.

    Usual causes: torch's is_causal is top-left, flash-attention's is bottom-right (pytorch#108108,
    flash-attention#581)
    """
    if a.declared.alignment is None:
        raise NotApplicableError("no alignment was declared")
    band = _visible_in_steps(a, 3, 9)[2]
    if a.alignment == a.declared.alignment:
        return None
    words = f"3 queries and 9 keys are aligned {a.alignment}, not {a.declared.alignment}"
    wanted = band.visible(3, 9, a.declared.alignment)[None, None]
    return _wrong_in_steps(a, 3, 9, words, wanted, f"alignment={a.alignment!r}")


@fact(FACTS, "grouping")
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
    return failure_of(a, a.random_inputs(2, 2, b=1, h=4, g=2), detect, words, declare)


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
    is_alibi = name.startswith((ALIBI_DISTANCE, ALIBI_KEY))
    usual = name in (NO_BIAS, ALIBI_DISTANCE, ALIBI_KEY)  # other slopes may be a mistake
    if wanted == "any" or name == wanted or (wanted is None and usual) or (wanted == "alibi" and is_alibi):
        return None
    declare = "bias='alibi'" if is_alibi else "bias='any'"
    row = ", ".join(f"{x:.4f}" for x in a.flat_weights(5, 5, a.uses_causal_argument)[0, -1].tolist())
    words = f"visible keys have different weights at q = 0, by position: {row}{f', by {name}' if is_alibi else ''}"
    if wanted is not None:
        words = f"scores have {'no bias' if name == NO_BIAS else f'the bias {name}'}, but {wanted} was declared"
    detect = detect_difference(a, lambda inputs: {"bias": _alibi(inputs) if wanted == "alibi" else None}, words)
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


@fact(FACTS, "scores", fatal=True, explained_by=("causality", "causal-off-by-one", "window", "grouping"))
def scores(a: MeasuredAttention) -> Failure | None:
    """The weight of a key depends on its product with the query, and on nothing else.

    log(weight[j] / weight[j']) = scale q . (k[j] - k[j']) for all pairs, with one scale.

    Usual causes: q or k normalised, projected or rounded, top-k, another function than exp, an undeclared soft-cap,
    values permuted against keys
    """
    if a.scores_fit:
        return None
    words, declare = "weights do not follow exp(scale q . k)", ", ".join(_score_declarations(a))
    if a.scores.residual is not None and a.scores.scale is None:
        words += f": a share of {a.scores.residual:.2g} of the scores is not explained"

    def changes(inputs: AttentionInputs) -> dict[str, Any]:
        return {"scale": a.expected_scale(inputs), "rotary": a.declared.rotary}

    for most in (1e-3, 1e-5):
        detect = detect_difference(a, changes, words, most)
        found = smallest_failure(a, a.random_inputs(7, 7, b=1), detect, words, declare)
        if found is not None:
            return found
    return Failure(words, declare=declare)


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
    # a declared number has to hold at every width and length
    if near and (a.scale_name == "1/sqrt(c)" if a.declared.scale is None else not a.scale_varies):
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
        expected = a.reference(inputs, scale=1.7)
        if any(not torch.equal(plain, other) for other in others) or max_error(plain, expected) <= 1e-3:
            return None
        lines = f"{name}=1.7"
        return Violation(
            f"{name}=1.7 changes nothing",
            plain,
            expected.to(plain.dtype),
            lambda call: [f"out = {call(*QKV, lines)}"],
        )

    try:
        return smallest_failure(a, a.random_inputs(7, 7, b=1), detect)
    except Exception:
        return None  # it accepts no number, and is listed among the untested arguments


@fact(FACTS, "rotary-pairing")
def rotary_pairing(a: MeasuredAttention) -> Failure | None:
    """Rotary positions rotate pairs of coordinates: which two form a pair is a convention.

    Pairs are (k, k + c/2) for half and (2k, 2k + 1) for interleaved, as declared.

    Usual causes: weights or code from a project with the other pairing (transformers#25199)
    """
    if a.declared.rotary is None:
        raise NotApplicableError("no rotary pairing was declared")
    have = None if a.rotary is None else a.rotary[0]
    if have == a.declared.rotary:
        return None
    words = f"the rotary pairing is {have or 'none'}, not {a.declared.rotary}"
    detect = detect_difference(a, lambda inputs: {"rotary": a.declared.rotary}, words)
    return failure_of(a, a.random_inputs(3, 3, b=1), detect, words, "" if have is None else f"rotary={have!r}")


@fact(
    FACTS,
    "last-queries-alone",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality-in-decode", "causality", "diagonal-hidden"),
)
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
    from_zero = a.rotary_alignment == "top-left"

    def detect(inputs: AttentionInputs) -> Violation | None:
        _, _, i, j = inputs.pair_shape
        together = a(inputs).detach()
        for count in (1, j // 2):
            if i != j or not 0 < count < j:
                continue
            whole, alone = together[:, :, -count:], a(replace(inputs, q=inputs.q[:, :, -count:])).detach()
            if alone.shape == whole.shape and max_error(alone, whole) > 1e-4 * max(1.0, whole.abs().max().item()):
                words = f"the last {count} of {j} queries give another output alone than among all"
                words += ": rotary positions of queries are counted from 0" if from_zero else ""
                return Violation(words, alone, whole, partial(_last_queries_lines, f"[:, :, -{count}:]"))
        return None

    for n in LENGTHS:
        inputs = a.random_inputs(n, n, b=1, dtype=torch.float32)
        found = smallest_failure(a, inputs, detect, declare="alignment='top-left'" if by_rotary else "", square=True)
        if found is not None:
            return found
    return None


def _last_queries_lines(rows: str, call: CallWriter) -> list[str]:
    return [f"expected = {call()}{rows}", f"out = {call(f'q{rows}')}"]
