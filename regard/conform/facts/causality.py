"""Facts about causality: which keys each query sees, under a causal mask, in a window and with a KV cache."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, run_lines, write_example, write_weights
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.inputs import AttentionInputs
from regard.conform.shrink import Detect, Violation, detect_lines, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.see.measure.mask_names import VisibleBand

FACTS: Registry[Fact] = Registry("fact")

LENGTHS = (11, 67)  # one block of a fast kernel, and several with a remainder
STEPS = ((1, 9), (3, 9), (1, 67), (3, 67))  # queries, and keys including cached ones
MASK_FACTS = "diagonal-hidden causal-off-by-one causality window"
CAUSAL = VisibleBand(None, 0)


def require_causal(a: MeasuredAttention) -> None:
    """Raise NotApplicableError if the attention is neither declared nor found to be causal."""
    if a.declared.causal is False:
        raise NotApplicableError("declared not causal")
    if a.declared.causal is None and not a.uses_causal_argument and not a.causal:
        raise NotApplicableError("not declared causal, has no causal argument that works alone, and is not causal")


def detect_difference(
    a: MeasuredAttention, changes: Callable[[AttentionInputs], dict[str, Any]], words: str, most: float = 1e-3
) -> Detect:
    """Return a function of inputs that returns a violation if the output differs from the expected output, else None.

    changes  function that returns, for given inputs, fields of `ExpectedAttention` to use in place of the measured
             conventions
    words    describes the failure
    most     largest allowed difference, relative to the largest expected output or, if that is below 1, absolute
    """

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
    """Return the failure of an attention whose visible keys differ from the declared window or causal mask.

    n        number of queries and keys
    words    describes the failure
    declare  options of `check` that declare this behaviour as intended
    causal   True to expect that no query sees a later key, whatever is declared; False to expect what is declared or
             measured
    """
    causal = causal or bool(
        a.declared.causal is not False and (a.declared.causal or a.uses_causal_argument or a.causal)
    )
    band = VisibleBand(a.declared.window_before, 0 if causal else a.declared.window_after)
    detect = detect_difference(a, lambda inputs: _band_for(band, inputs), words)
    return failure_of(a, a.random_inputs(n, n, b=1), detect, words, declare, square=True)


def _first_pair(pairs: Tensor) -> tuple[int, int, int]:
    """Return (head, row, key) of the first True entry of a Boolean tensor (b, h, i, j)."""
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
        return None  # later keys are reported by the fact `causality`
    if not bool(seen.diagonal(dim1=-2, dim2=-1)[:, 1:].any()) and bool(seen[:, 1:].any()):
        return _wrong_band(a, 11, "row i sees only keys before i, so the first row sees no key")
    return None


@fact(FACTS, "causal-off-by-one")
def causal_off_by_one(a: MeasuredAttention) -> Failure | None:
    """A token does not see the next token, which it has to predict.

    Under a causal mask row i does not see key i + 1: the mask is j <= i, not j <= i + 1. This fact also fails without a
    causal mask if each query sees all earlier keys and exactly one later key, unless causal=False or window_after=1 is
    declared.

    Usual causes: the diagonal of the mask: triu(diagonal=2), tril(diagonal=1); or targets not shifted by one
    """
    undeclared = a.declared.causal is None and not a.declared.windowed
    if not (undeclared and a.band == VisibleBand(None, 1)):  # such a mask is hardly intended
        require_causal(a)
    if a.band is not None and a.band.after == 1:
        declare = "causal=False, window_after=1" if a.declared.causal or a.uses_causal_argument else "window_after=1"
        return _wrong_band(a, 11, "row i sees key i + 1", declare, causal=True)
    return None


@fact(FACTS, "causality", explained_by="causal-off-by-one")
def causality(a: MeasuredAttention) -> Failure | None:
    """A token does not see the tokens after it.

    Under a causal mask no output row depends on later keys or values, at any length.

    Usual causes: is_causal ignored by a fast path, a mask that is never applied, or one built for another length
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
            if a.mask_number is not None:
                return finite_mask(a, a.mask_number, words, "causal=False")
            return _wrong_band(a, n, words, "" if inverted else "causal=False")
        if (found := _changed_by_later_keys(a, n)) is not None:
            return found
    if a.leak_in_batch is not None:
        found = _changed_by_later_keys(a, 11, b=3)
        sequence, head, row, key = a.leak_in_batch
        words = f"in a batch, row {row} of head {head} of sequence {sequence} sees key {key}"
        return Failure(words) if found is None else replace(found, found=words)
    return None


def finite_mask(a: MeasuredAttention, number: float, words: str, declare: str) -> Failure:
    """Return the failure of an attention that hides keys by adding a finite number, so that their weight is not zero.

    number   the number that is added to the scores
    words    describes the failure
    declare  options of `check` that declare this behaviour as intended
    """
    inputs = a.random_inputs(3, 3, b=1)
    got = a.flat_weights(3, 3, inputs.causal, inputs.sizes[1])
    expected = got.masked_fill(got < got.amax(-1, keepdim=True) * math.exp(number / 2), 0.0)
    example = write_example(a, inputs.neutral(), got[None], expected[None], write_weights)
    return Failure(f"{words}: keys are hidden by {number:.4g}, not by -inf", example, declare, fatal=True)


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
    """Return a number of keys greater than the declared window, so that keys outside the window exist."""
    return max(a.declared.window_before or 0, a.declared.window_after or 0) + 7


@fact(FACTS, "window", explained_by="causality causal-off-by-one")
def window(a: MeasuredAttention) -> Failure | None:
    """In a window of four neighbours a token sees four neighbours and itself; without a window it sees every token.

    If window_before=W is declared, each query sees W earlier keys and the key at its own position. Without a declared
    window each query sees every earlier key, and if causal=False is declared every later key too.

    Usual causes: W taken for the number of visible keys, or for both sides (transformers#39408, vllm#3385); the window
    ignored when another mask is passed, counted in blocks, or applied to one side only; a causal mask left on in an
    encoder; only the k largest weights kept, or weights below a threshold set to zero
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
    """Describe how many earlier or later keys a query sees instead of the declared number; "" if none is wrong."""
    found = a.band_at(n) or VisibleBand(None, None)
    sides = (("earlier", a.declared.window_before, found.before), ("later", a.declared.after, found.after))
    wrong = [(side, want, have) for side, want, have in sides if None not in (want, have) and want != have]
    return "".join(f"a row sees {have} {side} keys besides itself, not {want}" for side, want, have in wrong[:1])


def _declaration(found: VisibleBand | None) -> str:
    """Return the options of `check`, such as "causal=True, window_before=4", that declare a band of visible keys."""
    if found is None:
        return ""
    ends = {"window_before": found.before, "window_after": None if found.after == 0 else found.after}
    return ", ".join([f"causal={found.after == 0}", *(f"{x}={end}" for x, end in ends.items() if end is not None)])


@fact(FACTS, "mask-pattern", explained_by=MASK_FACTS)
def mask_pattern(a: MeasuredAttention) -> Failure | None:
    """Which keys a token sees follows the same rule for all heads, all tokens and all lengths.

    The visible keys are one band around the diagonal. It has the same width in every head and row, and with 7, 11, 13,
    37, 67, 131 and 301 keys, unless mask_pattern='any' is declared.

    Usual causes: a mask that is applied to one head only; an index that is off in some rows or blocks; a block that is
    never visited; keys hidden beyond the end of a block or beyond a context length
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
        except Exception:  # the attention does not accept this length  # nosec B112
            continue
        if bool((other := seen != band.visible(n, n)).any()):
            same = "other rows see as far" if n == 11 else f"of 11 keys it sees: {band}"
            words = f"{_pair_words(n, seen, other)}, though {same}"
            return _inconsistent_mask(a, n, lambda inputs: _band_for(band, inputs), words)
    return None


def _inconsistent_mask(
    a: MeasuredAttention, n: int, changes: Callable[[AttentionInputs], dict[str, Any]], words: str
) -> Failure:
    """Return the failure of an attention whose visible keys differ between heads, rows or lengths.

    n        number of queries and keys
    changes  function that returns, for given inputs, fields of `ExpectedAttention` to use in place of the measured
             conventions
    words    describes the failure
    """
    detect = detect_difference(a, changes, words)
    return failure_of(a, a.random_inputs(n, n, b=1), detect, words, "mask_pattern='any'", square=True)


def _visible_in_steps(a: MeasuredAttention, i: int, j: int) -> tuple[Tensor, Tensor, VisibleBand]:
    """Return two masks of what the last i of j queries see, in a decoding step and in one pass, and the visible band.

    The decoding step has i queries and j keys, as with a KV cache. The one pass has j queries and j keys, and its mask
    is cut to the last i queries. Raises NotApplicableError if the attention cannot decode in steps, if every key is
    visible, or if the visible keys form no band.
    """
    if not a.free_lengths:
        raise NotApplicableError("queries and keys have the same length, so there are no decoding steps")
    if a.band is None or a.band == VisibleBand(None, None):
        raise NotApplicableError("every key is visible, or the visible keys do not form a band")
    return a.visible(i, j), a.visible(j, j)[..., j - i :, :], a.band


def _wrong_in_steps(a: MeasuredAttention, i: int, j: int, words: str, expected: Tensor, declare: str = "") -> Failure:
    """Return the failure of a wrong mask for i queries and a larger number j of keys.

    The example shows which keys head 0 sees.

    words     describes the failure
    expected  Boolean mask of the keys that should be visible
    declare   options of `check` that declare this behaviour as intended
    """
    inputs = a.random_inputs(i, j, b=1, h=1, dtype=torch.float32).neutral()

    def lines(call: CallWriter) -> list[str]:
        return [*write_weights(call), "visible = weights[0, 0] > 0"]

    return Failure(words, write_example(a, inputs, run_lines(a, inputs, lines)[1], expected[0, 0], lines), declare)


@fact(FACTS, "mask-in-decode", explained_by="causality causal-off-by-one")
def mask_in_decode(a: MeasuredAttention) -> Failure | None:
    """With a KV cache, a new token sees the same tokens as in one pass without a cache, and no later token.

    With i queries and j keys, of which j - i are cached, the queries see the same keys as the last i of j queries
    (alignment bottom-right) or as the first i of j queries (alignment top-left, as with torch's is_causal). If an
    alignment is declared, only that one is correct.

    Usual causes: the position of the first query is the length of the cache plus or minus one (transformers#30417); a
    code path for one query that ignores the window (nanochat#452); a causal mask only if i = j, or only without a cache
    """
    wanted = a.declared.alignment or ("top-left" if a.alignment == "top-left" else "bottom-right")
    for i, j in STEPS:
        seen, whole, band = _visible_in_steps(a, i, j)
        expected = whole if wanted == "bottom-right" else band.visible(i, j, wanted).expand_as(seen)
        if bool((seen == expected).all()):
            continue
        queries = "one query" if i == 1 else f"{i} queries"
        if a.alignment in ("top-left", "bottom-right") and a.alignment != wanted:
            words = f"{queries} and {j} keys are aligned {a.alignment}, not {wanted}"
            return _wrong_in_steps(a, i, j, words, expected, f"alignment={a.alignment!r}")
        _, row, key = _first_pair(seen != expected)
        words = f"{i} of {j} rows: row {row} {'sees' if seen[0, 0, row, key] else 'does not see'} key {key}"
        words += ", a later one" if key > j - i + row else ", unlike in one pass"
        for shift in (-1, 1):
            before = band.before and band.before - shift
            moved = VisibleBand(before, None if band.after is None else band.after + shift).visible(i, j)
            if bool((seen == moved).all()):
                late = "late" if shift > 0 else "early"
                words = f"{queries} after {j - i} cached keys {'is' if i == 1 else 'are'} one position too {late}"
        return _wrong_in_steps(a, i, j, words, expected)
    return None
