"""Facts about decoders: which tokens a token may see alone, in a batch, with padding, packed and through a KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import DOCUMENT_NAMES
from regard.conform.decoder import CACHE_NAMES, START, DecoderCache, DecoderUnderTest, token_embedding
from regard.conform.decoder_example import (
    change_code,
    compare_bits,
    compare_logits,
    difference,
    fail,
    keyword_lines,
    keyword_logits,
    logits_code,
    logits_in_steps,
    padding_code,
    steps_code,
)
from regard.conform.example import Raised
from regard.conform.fact import Fact, Failure, NotApplicableError, fact, first_failure

FACTS: Registry[Fact] = Registry("fact")

LONG = 67  # tokens: several blocks of a fast kernel, and a remainder


def _require_causal(d: DecoderUnderTest) -> None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not causal")


def _change_token(d: DecoderUnderTest, tokens: Tensor, at: int | slice) -> Tensor:
    """Return a copy of the tokens with different tokens at one position or slice."""
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % d.vocab
    return other


@fact(FACTS, "runs", fatal=True)
def runs(d: DecoderUnderTest) -> Failure | None:
    """A decoder returns logits for tokens.

    A call with tokens of shape (2, 9) does not raise.

    Usual causes: a required argument, a vocabulary smaller than declared, a maximum length below 9 tokens
    """
    tokens = d.random_tokens()
    try:
        d(tokens)
    except Exception as error:  # the function of the user may raise any exception
        raised = Raised.from_error(error)
        words = f"an ordinary call raises {raised}"
        if d.logits_or_none(d.random_tokens(3)) is not None:
            words += "; 3 tokens do not raise: if its context is shorter than 9 tokens, check one with a longer context"
        return fail(d, words, tokens, [f"logits = {logits_code(d)}"], raised)
    return None


@fact(FACTS, "output-shape", fatal=True)
def output_shape(d: DecoderUnderTest) -> Failure | None:
    """Every token gets a score for each possible next token.

    Tokens of shape (b, n) give logits of shape (b, n, w), where w is the size of the vocabulary.

    Usual causes: only the logits of the last position are returned, or logits of shape (b, w, n), as a loss function
    takes them
    """
    tokens = d.random_tokens(7, 3)
    out = d(tokens)
    if out.ndim == 3 and out.shape[:2] == tokens.shape:
        return None
    words = f"tokens (3, 7) give {tuple(out.shape)}, not (3, 7, w)"
    if "targets" in d.parameters and "targets" not in d.extra:
        words += "; if all logits are returned with targets only, pass extra={'targets': lambda tokens: tokens}"
    if out.ndim != 3:
        return fail(d, words, tokens, [f"axes = {logits_code(d)}.ndim"], out.ndim, 3)
    return fail(d, words, tokens, [f"sizes = tuple({logits_code(d)}.shape[:2])"], tuple(out.shape[:2]), (3, 7))


@fact(FACTS, "inputs-changed", fatal=True)
def inputs_changed(d: DecoderUnderTest) -> Failure | None:
    """A call does not change its tokens.

    The tokens hold the same numbers after the call as before.

    Usual causes: an in-place operation that shifts or fills the argument
    """
    tokens = d.random_tokens()
    given = tokens.clone()
    d.call(given)
    if torch.equal(given, tokens):
        return None
    return fail(d, "the call changes its tokens", tokens, [logits_code(d), "after = tokens"], given, tokens)


@fact(FACTS, "dropout-in-eval", fatal=True)
def dropout_in_eval(d: DecoderUnderTest) -> Failure | None:
    """Dropout is for training. In eval mode every output is exact.

    After eval(), two calls with different random seeds return outputs that are equal bit for bit.

    Usual causes: F.dropout(x, p) without training=self.training; a part that eval() does not reach (pytorch#124464)
    """
    first, tokens = f"first = {logits_code(d)}", d.random_tokens()

    def compare(seed: int) -> Failure | None:
        second = [f"torch.manual_seed({seed})", f"second = {logits_code(d)}"]
        words = "two seeds give logits that differ by {}"
        return compare_bits(d, words, tokens, ["torch.manual_seed(0)", first, *second])

    if compare(0) is not None:
        return None  # changes between calls are reported by `state-between-calls`
    return compare(1) or compare(2)


@fact(FACTS, "state-between-calls", fatal=True)
def state_between_calls(d: DecoderUnderTest) -> Failure | None:
    """An output depends on the tokens, not on earlier calls.

    If the decoder is called with x, then y, then x again, the first and the last output are equal bit for bit.

    Usual causes: a cache that is not emptied, a mask kept from a call with another length
    """
    words = "the same tokens give other logits after a call with other tokens"

    def compare(other: Tensor) -> Failure | None:
        call = logits_code(d, f"torch.tensor({other.tolist()})")
        lines = [f"first = {logits_code(d)}", f"other = {call}", f"second = {logits_code(d)}"]
        return compare_bits(d, words, d.random_tokens(), lines)

    return compare(d.random_tokens(9, seed=1)) or compare(d.random_tokens(5, 1, seed=2))


def dependence(d: DecoderUnderTest, sizes: tuple[int, ...] = (9,)) -> Tensor:
    """Return a Boolean matrix (n, n): entry [t, s] is True if the logits at position t change when token s changes.

    sizes  number of tokens of each decoding step with a KV cache; a tuple with one number means a single forward pass
           without a cache
    """

    def run(tokens: Tensor) -> Tensor:
        return d(tokens) if len(sizes) == 1 else logits_in_steps(d, tokens, list(sizes))

    def measure() -> Tensor:
        tokens = d.random_tokens(9, 1)
        before = run(tokens)
        changed = [(run(_change_token(d, tokens, at)) - before).abs().amax(-1)[0] for at in range(9)]
        return torch.stack(changed, 1) > before.abs().max() * 1e-6

    found: Tensor = d.once(("dependence", sizes), measure)
    return found


@fact(FACTS, "targets-leaked")
def targets_leaked(d: DecoderUnderTest) -> Failure | None:
    """A decoder that sees the next token copies it in place of predicting it.

    Logits at position t predict token t + 1 and do not change with token t + 1. This fact also fails if the logits
    change with a few more later tokens: if each layer shows one later token, L layers show L later tokens.

    Usual causes: the diagonal of the causal mask, triu(diagonal=2) or tril(diagonal=1), which shows one more token
    in every layer; inputs and targets not shifted against each other (attention-is-all-you-need-pytorch#19)
    """
    _require_causal(d)
    steps = _visible_later_tokens(d)
    if steps is None:
        return None
    words = "logits at t change with token t + 1, and with none after it"
    if steps > 1:
        words = f"logits at t change with the next {steps} tokens, not with all later ones: one more in each layer"
    return _show_later_token(d, words)


def _visible_later_tokens(d: DecoderUnderTest) -> int | None:
    """Return the number of later tokens that the logits of each position depend on.

    Returns None if logits depend on no later token or on all of them, or if some later token between those is without
    effect.
    """
    seen = dependence(d)
    later = seen.triu(1)
    if not bool(later.diagonal(1).all()):
        return None
    rows, tokens = later.nonzero().unbind(1)
    steps = int((tokens - rows).max())
    # the farthest tokens have little influence, which may be lost in rounding
    contiguous = all(bool(row[n + 1 : n + 1 + int(row.sum())].all()) for n, row in enumerate(later))
    if steps < len(seen) - 1:
        return steps if contiguous else None
    for n in (LONG, 33, 17):
        tokens = d.random_tokens(n, 1)
        if (before := d.logits_or_none(tokens)) is None:
            continue  # the decoder does not accept this length
        moved = (d(_change_token(d, tokens, -1)) != before).any(-1)[0]
        first = int(moved.int().argmax())
        return n - 1 - first if first and bool(moved[first:].all()) else None
    return None


def _show_later_token(d: DecoderUnderTest, words: str) -> Failure:
    """Return the failure of a decoder whose logits depend on later tokens.

    The example changes the last token and shows that earlier logits change. It has as few tokens as possible.

    words  describes the failure
    """
    tokens = d.random_tokens(9, 1)
    return first_failure(_changed_from(d, words, tokens[:, :n], n - 1) for n in range(2, 10)) or Failure(words)


def _changed_from(d: DecoderUnderTest, words: str, tokens: Tensor, cut: int) -> Failure | None:
    """Change all tokens from position `cut` on; return a failure if logits before `cut` change, else None.

    words  describes the failure
    """
    before, after = (f"{logits_code(d, name)}[:, :{cut}]" for name in ("tokens", "other"))
    return compare_logits(d, words, tokens, change_code(d, f":, {cut}:"), after, before)


@fact(FACTS, "causality", explained_by="targets-leaked")
def causality(d: DecoderUnderTest) -> Failure | None:
    """A token does not see the tokens after it.

    Logits at position t do not change with any token after t.

    Usual causes: no causal mask in some layer, a norm or mean over the sequence, a mask ignored by a fused kernel
    (transformers#45811)
    """
    _require_causal(d)
    later = dependence(d).triu(1)
    if bool(later.any()):
        row, token = later.nonzero()[0].tolist()
        return _show_later_token(d, f"logits at position {row} change with token {token}")
    for n in (13, 17, 33, 48, LONG):
        tokens, cut = d.random_tokens(n, 1), n // 2
        if d.logits_or_none(tokens) is None:
            return None  # the decoder does not accept this length
        words = f"of {n} tokens, logits before {cut} change with tokens from {cut} on"
        if (found := _changed_from(d, words, tokens, cut)) is not None:
            return found
    return None


@fact(FACTS, "causality-by-gradient", explained_by="targets-leaked causality")
def causality_by_gradient(d: DecoderUnderTest) -> Failure | None:
    """Logits have no gradient with respect to later tokens.

    The gradient of the logits at position t with respect to the embeddings of tokens after t is exactly zero.

    Usual causes: a leak that is too small to see in the logits, or a hand-written backward pass
    """
    _require_causal(d)
    if d.module is None:
        raise NotApplicableError("it is a function")
    path = token_embedding(d.module)
    if path is None:
        raise NotApplicableError("no part of it embeds the tokens")
    lines = [
        "embedded = []",
        "keep = lambda part, given, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]",
        f"hook = model.get_submodule({path!r}).register_forward_hook(keep)",
        f"logits = {logits_code(d)}",
        "hook.remove()",
    ]
    tokens = d.random_tokens(7, 1)
    if not d.run_code(tokens, lines, gradients=True)["logits"].requires_grad:
        raise NotApplicableError("its logits have no gradient")
    for at in range(6):
        gradient = f"gradient = torch.autograd.grad(logits[:, {at}].square().sum(), embedded[0])[0]"
        code = [*lines, gradient, f"later = gradient[:, {at + 1}:].abs().max().item()"]
        if later := d.run_code(tokens, code, gradients=True)["later"]:
            return fail(d, f"logits at {at} have a gradient with respect to later tokens", tokens, code, later, 0.0)
    return None


@fact(FACTS, "context-ignored")
def context_ignored(d: DecoderUnderTest) -> Failure | None:
    """The prediction of the next token depends on earlier tokens.

    The logits at the last position change with the token before the last one.

    Usual causes: attention that is never added to the residual stream, a mask that hides everything but the
    diagonal
    """
    if bool(dependence(d)[-1, -2]):
        return None
    lines = [
        *change_code(d, ":, -2"),
        f"before, after = {logits_code(d)}[:, -1], {logits_code(d, 'other')}[:, -1]",
        "changes = bool((after - before).abs().max() > before.abs().max() * 1e-6)",
    ]
    return fail(d, "the last logits do not change with the token before", d.random_tokens(9, 1), lines, False, True)


@fact(FACTS, "batch-mixed")
def batch_mixed(d: DecoderUnderTest) -> Failure | None:
    """Sequences of a batch do not affect each other.

    Changing one sequence of a batch does not change the logits of the other sequences.

    Usual causes: a norm or mean over axis 0, a reshape that mixes the axes of batch and position, position ids shared
    by accident
    """
    words = "changing the last sequence changes the logits of others"
    got, expected = f"{logits_code(d, 'other')}[:2]", f"{logits_code(d)}[:2]"
    return compare_logits(d, words, d.random_tokens(7, 3), change_code(d, "2"), got, expected)


@fact(FACTS, "batch-size", explained_by="batch-mixed")
def batch_size(d: DecoderUnderTest) -> Failure | None:
    """Logits do not depend on the size of the batch.

    Five sequences give the same logits in one batch as in five calls with one sequence each, up to rounding.

    Usual causes: another code path for batches, padding to a common size without a mask (transformers#26869)
    """
    words = "five sequences in one batch differ from one at a time"
    lines = [f"alone = torch.cat([{logits_code(d, 'row[None]')} for row in tokens])"]
    return compare_logits(d, words, d.random_tokens(7, 5), lines, logits_code(d), "alone")


def _require_cache(d: DecoderUnderTest) -> DecoderCache:
    if d.cache is None:
        raise NotApplicableError(
            f"it has no known KV cache: one of {', '.join(CACHE_NAMES)} that a call returns, cache= with a cache() "
            f"method, or {START}"
        )
    return d.cache


@fact(FACTS, "static-cache-unmasked", explained_by="causality targets-leaked")
def static_cache_unmasked(d: DecoderUnderTest) -> Failure | None:
    """Empty slots of a cache are not attended to.

    A KV cache with more slots than tokens gives the same logits as one forward pass without a cache. The contents of
    slots after the current position do not change the logits.

    Usual causes: unused slots take part in the softmax with scores of zero, as if a step of one token needed no
    mask (transformers#30417)
    """
    cache = _require_cache(d)
    if cache == DecoderCache(START):
        return _later_slots_seen(d)
    if cache != DecoderCache("cache"):
        raise NotApplicableError("it has no cache() method that takes a capacity, and keeps none inside")
    tokens, sizes, words = (
        d.random_tokens(7, 2),
        [3, 1, 3],
        "with 13 slots for 7 tokens logits differ by {} from one pass",
    )
    try:
        found = compare_logits(d, words, tokens, steps_code(d, sizes, capacity=13), "steps", logits_code(d))
    except TypeError as error:
        raise NotApplicableError("its cache() takes no capacity") from error
    # steps that differ without empty slots too break the fact `cache`
    return found if difference(logits_in_steps(d, tokens, sizes), d(tokens)) <= 1 else None


def _later_slots_seen(d: DecoderUnderTest) -> Failure | None:
    """Return a failure if the contents of the cache slots 5 and 6 change the logits of token 3, else None.

    This tests decoders that store their KV cache in the module and take an argument `start_pos`.
    """
    tokens = d.random_tokens(7, 1)
    if difference(logits_in_steps(d, tokens, [3, 1, 1, 2]), d(tokens)) <= 1:
        return None
    calls = [logits_code(d, f"each[:, {at}]", f"{START}={at[0]}") for at in ("0:3", "5:7", "3:4")]
    lines = [
        *change_code(d, ":, 5:"),
        "steps = []",
        "for each in (tokens, other):",
        *(f"    {line}" for line in calls[:2]),
        f"    steps += [{calls[2]}, {calls[2]}]",
    ]
    words = "logits of token 3 change with the contents of slots 5 and 6 of the cache, which are later"
    try:
        first, again, *_ = d.run_code(tokens, lines)["steps"]
        found = compare_logits(d, words, tokens, lines, "steps[2]", "steps[0]")
    except Exception as error:  # the function of the user may raise any exception
        raise NotApplicableError(f"it accepts no steps out of order: {str(error)[:80]}") from error
    if not torch.equal(first, again):
        raise NotApplicableError("its cache has no slots: a step that is repeated is stored twice")
    return found


@fact(FACTS, "longer-input-changes-prefix", explained_by="causality targets-leaked static-cache-unmasked")
def longer_input_changes_prefix(d: DecoderUnderTest) -> Failure | None:
    """Adding a token does not change the logits of earlier tokens.

    The first n tokens alone give the same logits as within the whole sequence, for every n.

    Usual causes: a norm, scale or bias that depends on the length; positions counted from the end
    """
    _require_causal(d)

    def compare(tokens: Tensor, n: int) -> Failure | None:
        words = f"the first {n} tokens alone give other logits than within {tokens.shape[1]}"
        return compare_logits(d, words, tokens, [], logits_code(d, f"tokens[:, :{n}]"), f"{logits_code(d)}[:, :{n}]")

    tokens = d.random_tokens(9, 1)
    for n in range(1, 9):
        if compare(tokens, n) is not None:
            return first_failure(compare(tokens[:, :m], n) for m in range(n + 1, 10))
    tokens = d.random_tokens(LONG, 1)
    return None if d.logits_or_none(tokens) is None else compare(tokens, LONG // 2)


SMALL_PADDING = ((1, 2), (2, 3), (1, 4), (3, 5), (5, 7))  # real tokens, and tokens with padding


def _smallest_padding(test: Callable[[int, int, int], Failure | None]) -> Failure | None:
    """Test a batch of 2 sequences whose 5 tokens are padded to 9; return a failure with the smallest sizes that fail.

    Returns None if this first test passes. Otherwise smaller sizes are tried.

    test  function of the number of real tokens, the padded length and the batch size, which returns a failure or None
    """
    found = test(5, 9, 2)
    smaller = (test(real, n, b) for real, n in SMALL_PADDING for b in (1, 2))
    return found and (first_failure(smaller) or found)


def _padding_differs(d: DecoderUnderTest, side: str, real: int, n: int, b: int) -> Failure | None:
    """Return a failure if padding `real` tokens to n tokens changes the logits of the real tokens, else None.

    side  side of the padding: "left" or "right"
    b     batch size, 1 or 2; the first sequence is padded, the second is not
    """
    tokens, given = d.random_tokens(n, b), padding_code(d, [real, n][:b], n, side)
    rows = slice(0, real) if side == "right" else slice(n - real, n)
    at = f"[:1, {rows.start}:{rows.stop}]"
    words = f"{real} token{'s' * (real != 1)} padded on the {side} to {n} give logits that differ by {{}} from alone"

    def compare(filler: int) -> Failure | None:
        filled = tokens.clone()
        filled[0] = filler
        filled[0, rows] = tokens[0, :real]
        padded, alone = f"{keyword_logits(d, 'tokens', given)}{at}", logits_code(d, f"tokens{at}")
        return compare_logits(d, words, filled, keyword_lines(given), padded, alone)

    return compare(0) or compare(d.vocab - 1)


def _padding_seen(d: DecoderUnderTest, real: int, n: int, b: int) -> Failure | None:
    """Return a failure if the logits of `real` tokens depend on the padding tokens before them, else None.

    real  number of real tokens
    n     number of tokens with padding
    b     batch size, 1 or 2; the first sequence is padded, the second is not
    """
    given = padding_code(d, [real, n][:b], n, "left")
    # NaN in padded rows is allowed
    before, after = (f"{keyword_logits(d, name, given)}[:1, {n - real}:].nan_to_num()" for name in ("tokens", "other"))
    lines = keyword_lines(given) + change_code(d, f"0, :{n - real}")
    words = f"logits of real tokens change with the contents of the padding before them, {n - real} of {n} tokens"
    return compare_logits(d, words, d.random_tokens(n, b), lines, after, before)


def _require_padding(d: DecoderUnderTest) -> None:
    if d.padding_argument is None:
        raise NotApplicableError("it has no padding argument")


@fact(FACTS, "padding-leaks", explained_by="causality targets-leaked batch-mixed longer-input-changes-prefix")
def padding_leaks(d: DecoderUnderTest) -> Failure | None:
    """Padding does not change the logits of real tokens.

    With padding on the right and a padding mask, the logits of real tokens are the same as without padding. With
    padding on the left, the contents of the padding do not change the logits of real tokens.

    Usual causes: the padding mask is not passed on (with padding on the right, a causal mask conceals this); or it
    replaces the causal mask
    """
    _require_padding(d)
    right = _smallest_padding(lambda real, n, b: _padding_differs(d, "right", real, n, b))
    return right or _smallest_padding(lambda real, n, b: _padding_seen(d, real, n, b))


@fact(FACTS, "left-padding", explained_by="padding-leaks causality targets-leaked")
def left_padding(d: DecoderUnderTest) -> Failure | None:
    """With padding on the left, positions are counted from the first real token.

    With padding on the left, and position ids that count the real tokens, the logits of real tokens are the same as
    without padding.

    Usual causes: positions that count the padding too, position ids ignored or not passed on (transformers#18388,
    #22161, trl#6800)
    """
    _require_padding(d)
    return _smallest_padding(lambda real, n, b: _padding_differs(d, "left", real, n, b))


@fact(FACTS, "packed-documents-leak", explained_by="causality targets-leaked left-padding")
def packed_documents_leak(d: DecoderUnderTest) -> Failure | None:
    """Documents that are packed into one row do not see each other.

    Several documents in one row, with document ids, give the same logits as each document alone.

    Usual causes: document ids not passed on, positions that do not start at 0 in each document (transformers#46634,
    pytorch#177378)
    """
    tokens, ids = d.random_tokens(9, 1), f"torch.tensor({[[0] * 4 + [1] * 5]})"
    name = d.find_parameter(DOCUMENT_NAMES)
    given = {name: ids} if name is not None else {}
    if name is None and d.padding_argument == "padding":
        given = {"padding": f"masks.documents({ids})"}
    has_ids = bool(given)
    if d.positions_argument is not None:
        given[d.positions_argument] = "torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])"
    if not given:
        raise NotApplicableError("it has no argument for document ids")
    for at in ("[:, 0:4]", "[:, 4:9]"):
        packed, alone = f"{keyword_logits(d, 'tokens', given)}{at}", logits_code(d, f"tokens{at}")
        words = f"the document at {at[4]} gives other logits packed than alone"
        found = compare_logits(d, words, tokens, keyword_lines(given), packed, alone)
        if found is not None and not has_ids:
            raise NotApplicableError("positions that restart do not separate documents")
        if found is not None:
            return found
    return None


STEPS = ((1,) * 9, (4, 5), (5, 1, 3))


def _differs_in_steps(d: DecoderUnderTest, wrong: Callable[[Tensor, Tensor], Tensor], changes: bool) -> Failure | None:
    """Return a failure if logits depend on other tokens in steps with a KV cache than in one forward pass, else None.

    wrong    function of two Boolean matrices (position, token), which say on which tokens the logits depend in one
             forward pass and in steps; it returns a Boolean matrix of the wrong pairs
    changes  whether the logits of a wrong pair depend on the token in steps
    """
    _require_cache(d)
    whole = dependence(d)
    for sizes in STEPS:
        pairs = wrong(whole, dependence(d, sizes))
        if not bool(pairs.any()):
            continue
        row, token = pairs.nonzero()[0].tolist()
        lines = [
            *change_code(d, f":, {token}"),
            *steps_code(d, list(sizes)),
            "before = steps",
            *steps_code(d, list(sizes), "other"),
            f"moved = (steps - before).abs().amax(-1)[0, {row}]",
            "changes = bool(moved > before.abs().max() * 1e-6)",
        ]
        words = f"in steps of {list(sizes)} logits at {row} {'see' if changes else 'do not see'} token {token}"
        return fail(d, words, d.random_tokens(9, 1), lines, changes, not changes)
    return None


@fact(FACTS, "cache-mask-off-by-one", explained_by="static-cache-unmasked causality targets-leaked")
def cache_mask_off_by_one(d: DecoderUnderTest) -> Failure | None:
    """With a KV cache, new tokens see all cached tokens and themselves.

    With a cache, logits at position t depend on all tokens that they depend on in one forward pass without a cache.

    Usual causes: the newest or oldest slot of the cache is masked (transformers#30417)
    """
    return _differs_in_steps(d, lambda whole, steps: whole & ~steps, False)


@fact(FACTS, "window-in-decode", explained_by="static-cache-unmasked causality targets-leaked")
def window_in_decode(d: DecoderUnderTest) -> Failure | None:
    """The sliding window is as wide in decoding steps as in one forward pass.

    With a cache, logits at position t depend on no token that they do not depend on in one forward pass without a
    cache.

    Usual causes: a decoding path without the window or without the causal mask (nanochat#452)
    """
    return _differs_in_steps(d, lambda whole, steps: steps & ~whole, True)


@fact(
    FACTS,
    "cache",
    explained_by="static-cache-unmasked cache-mask-off-by-one window-in-decode causality targets-leaked",
)
def cache(d: DecoderUnderTest) -> Failure | None:
    """Decoding with a KV cache gives the same logits as one forward pass without a cache.

    This holds for steps of any number of tokens.

    Usual causes: positions that start at 0 in every step, keys stored before they are rotated, the newest key
    masked, a cache shared by layers
    """
    _require_cache(d)
    long = [LONG // 2, 1, LONG - LONG // 2 - 1]
    for sizes in ([1] * 9, *([n, 9 - n] for n in range(1, 9)), [2, 3, 4], long):
        tokens = d.random_tokens(sum(sizes), 1 if sizes == long else 2)
        if d.logits_or_none(tokens) is None:
            break  # the decoder does not accept this length
        words = f"in steps of {sizes} logits differ by {{}} from one pass"
        if (found := compare_logits(d, words, tokens, steps_code(d, sizes), "steps", logits_code(d))) is not None:
            return found
    return None
