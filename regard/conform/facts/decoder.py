"""Facts about decoders: what a token may see, alone, in a batch, with padding, packed and through a KV cache."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.registry import Registry
from regard.conform.attention_under_test import DOCUMENT_NAMES
from regard.conform.decoder import CACHE_NAMES, START, DecoderCache, DecoderUnderTest, get_logits
from regard.conform.decoder_example import difference, fail, fail_difference, logits_code, steps_code
from regard.conform.example import Raised
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import seed_all
from regard.conform.tolerance import equal
from regard.core.masks import documents

FACTS: Registry[Fact] = Registry("fact")

LONG = 67  # tokens: several blocks of a fast kernel, and a remainder


def _require_causal(d: DecoderUnderTest) -> None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not causal")


def _change_token(d: DecoderUnderTest, tokens: Tensor, at: int | slice) -> Tensor:
    """The same tokens, with others at one position or slice."""
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % d.vocab
    return other


def _change_code(d: DecoderUnderTest, at: str) -> list[str]:
    return ["other = tokens.clone()", f"other[{at}] = (other[{at}] + 1) % {d.vocab}"]


def _shrink_tokens(tokens: Tensor, broken: Callable[[Tensor], bool]) -> Tensor:
    """Fewer sequences, fewer tokens and smaller numbers, as long as the rule is broken."""
    for _ in range(3):
        cuts = [tokens[:1], tokens[-1:], *(tokens[:, :n] for n in range(2, tokens.shape[1])), tokens % 2, tokens % 3]
        for smaller in cuts:
            if smaller.shape != tokens.shape or not torch.equal(smaller, tokens):
                try:
                    if broken(smaller):
                        tokens = smaller
                        break
                except Exception:
                    continue
        else:
            break
    return tokens


@fact(FACTS, "runs", fatal=True)
def runs(d: DecoderUnderTest) -> Failure | None:
    """A decoder returns logits for tokens.

    tokens (2, 9) do not raise.

    Usual causes: a required argument, a smaller vocabulary or a shorter context
    """
    tokens = d.random_tokens()
    try:
        d(tokens)
    except Exception as error:  # a foreign function may raise anything
        raised = Raised.from_error(error)
        words = f"an ordinary call raises {raised}"
        if d.logits_or_none(d.random_tokens(3)) is not None:
            words += "; 3 tokens do not raise: if its context is shorter than 9 tokens, check one with a longer context"
        return fail(d, words, tokens, [f"logits = {logits_code(d)}"], raised)
    return None


@fact(FACTS, "output-shape", fatal=True)
def output_shape(d: DecoderUnderTest) -> Failure | None:
    """Every token gets a score for each possible next token.

    tokens (b n) -> logits (b n w).

    Usual causes: only the last position is returned, or (b w n) as a loss function takes it
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


@fact(FACTS, "dropout-in-eval", fatal=True)
def dropout_in_eval(d: DecoderUnderTest) -> Failure | None:
    """Dropout is for training. In eval mode every output is exact.

    In eval() two calls with different seeds are equal bit for bit.

    Usual causes: F.dropout(x, p) without training=self.training; a part that eval() does not reach (pytorch#124464)
    """
    tokens, outs = d.random_tokens(), []
    for seed in (0, 0, 1, 2):
        seed_all(seed)
        outs.append(d(tokens))
    if not equal(outs[0], outs[1]) or all(equal(outs[0], out) for out in outs[2:]):
        return None
    seed = 1 if not equal(outs[0], outs[2]) else 2
    lines = [
        "torch.manual_seed(0)",
        f"first = {logits_code(d)}",
        f"torch.manual_seed({seed})",
        f"second = {logits_code(d)}",
        "same = torch.equal(first, second)",
    ]
    words = f"two seeds give logits that differ by {(outs[0] - outs[seed + 1]).abs().max():.1e}"
    return fail(d, words, tokens, lines, False, True)


@fact(FACTS, "state-between-calls", fatal=True)
def state_between_calls(d: DecoderUnderTest) -> Failure | None:
    """An output depends on the tokens, not on earlier calls.

    f(x), f(y), f(x): the first and the last are equal bit for bit.

    Usual causes: a cache that is not emptied, a mask kept from another length
    """
    tokens = d.random_tokens()
    first = d(tokens)
    for other in (d.random_tokens(9, seed=1), d.random_tokens(5, 1, seed=2)):
        d(other)
        if not equal(first, d(tokens)):
            lines = [
                f"first = {logits_code(d)}",
                f"other = {logits_code(d, f'torch.tensor({other.tolist()})')}",
                f"again = {logits_code(d)}",
                "same = torch.equal(first, again)",
            ]
            return fail(
                d, "the same tokens give other logits after a call with other tokens", tokens, lines, False, True
            )
    return None


@fact(FACTS, "inputs-changed")
def inputs_changed(d: DecoderUnderTest) -> Failure | None:
    """A call does not change its tokens.

    tokens hold the same numbers after the call as before.

    Usual causes: an in-place shift or fill of the argument
    """
    tokens = d.random_tokens()
    given = tokens.clone()
    d.call(given)
    if torch.equal(given, tokens):
        return None
    return fail(d, "the call changes its tokens", tokens, [logits_code(d), "after = tokens"], given, tokens)


def dependence(d: DecoderUnderTest, sizes: tuple[int, ...] = (9,)) -> Tensor:
    """Which logits change with which token: (positions, tokens) of booleans. Several sizes are steps with a cache."""

    def run(tokens: Tensor) -> Tensor:
        return d(tokens) if len(sizes) == 1 else d.in_steps(tokens, list(sizes))

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

    Logits at t do not change with token t + 1, which they predict, nor with the next few tokens, one more per
    layer.

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
    """How many next tokens every position sees; None if it sees none or all later ones."""
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
            continue  # longer than it accepts
        moved = (d(_change_token(d, tokens, -1)) != before).any(-1)[0]
        first = int(moved.int().argmax())
        return n - 1 - first if first and bool(moved[first:].all()) else None
    return None


def _show_later_token(d: DecoderUnderTest, words: str) -> Failure:
    """The failure with the fewest tokens for which earlier logits change with the last token."""

    def logits(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return d(_change_token(d, tokens, -1))[:, :-1], d(tokens)[:, :-1]

    tokens = _shrink_tokens(d.random_tokens(9, 1), lambda tokens: difference(*logits(tokens)) > 1)
    x, y = f"{logits_code(d, 'other')}[:, :-1]", f"{logits_code(d)}[:, :-1]"
    return fail_difference(d, words, tokens, _change_code(d, ":, -1"), *logits(tokens), x, y)


@fact(FACTS, "causality", explained_by=("targets-leaked",))
def causality(d: DecoderUnderTest) -> Failure | None:
    """A token does not see the tokens after it.

    Logits at t do not change with any token after t.

    Usual causes: no causal mask in some layer, a norm or mean over the sequence, a mask dropped on a fused path
    (transformers#45811)
    """
    _require_causal(d)
    later = dependence(d).triu(1)
    if bool(later.any()):
        row, token = later.nonzero()[0].tolist()
        return _show_later_token(d, f"logits at position {row} change with token {token}")
    for n in (13, 17, 33, 48, LONG):
        tokens, cut = d.random_tokens(n, 1), n // 2
        if (before := d.logits_or_none(tokens)) is None:
            return None
        after = d(_change_token(d, tokens, slice(cut, None)))[:, :cut]
        if difference(after, before[:, :cut]) > 1:
            words = f"of {n} tokens, logits before {cut} change with tokens from {cut} on"
            x, y = f"{logits_code(d, 'other')}[:, :{cut}]", f"{logits_code(d)}[:, :{cut}]"
            return fail_difference(d, words, tokens, _change_code(d, f":, {cut}:"), after, before[:, :cut], x, y)
    return None


@fact(FACTS, "causality-by-gradient", explained_by=("targets-leaked", "causality"))
def causality_by_gradient(d: DecoderUnderTest) -> Failure | None:
    """Logits have no gradient with respect to later tokens.

    The gradient of logits at t with respect to embeddings after t is exactly zero.

    Usual causes: a leak that is too small to see in the logits, or a hand-written backward pass
    """
    _require_causal(d)
    if d.module is None:
        raise NotApplicableError("it is a function")
    found: list[tuple[nn.Module, Tensor]] = []
    tokens = d.random_tokens(7, 1)

    def replace_embedding(module: nn.Module, given: tuple[Any, ...], out: Any) -> Tensor | None:
        reads = bool(given) and isinstance(given[0], Tensor) and given[0].shape == tokens.shape
        if found or not reads or not isinstance(out, Tensor) or out.shape[:-1] != tokens.shape:
            return None
        found.append((module, out.detach().requires_grad_()))
        return found[0][1]

    hooks = [part.register_forward_hook(replace_embedding) for part in d.module.modules() if part is not d.module]
    try:
        rows = get_logits(d.call(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise NotApplicableError("no part of it embeds the tokens")
    if not rows.requires_grad:
        raise NotApplicableError("its logits have no gradient")
    embedding, embedded = found[0]
    for at in range(6):
        (gradient,) = torch.autograd.grad(rows[:, at].square().sum(), embedded, retain_graph=True)
        if bool(gradient[:, at + 1 :].any()):
            path = next(path for path, part in d.module.named_modules() if part is embedding)
            lines = [
                "embedded = []",
                "keep = lambda part, given, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]",
                f"hook = model.get_submodule({path!r}).register_forward_hook(keep)",
                f"logits = {logits_code(d)}",
                "hook.remove()",
                f"gradient = torch.autograd.grad(logits[:, {at}].square().sum(), embedded[0])[0]",
                f"later = gradient[:, {at + 1}:].abs().max().item()",
            ]
            words = f"logits at {at} have a gradient with respect to later tokens"
            return fail(d, words, tokens, lines, gradient[:, at + 1 :].abs().max().item(), 0.0)
    return None


@fact(FACTS, "context-ignored")
def context_ignored(d: DecoderUnderTest) -> Failure | None:
    """The prediction of the next token depends on earlier tokens.

    The last logits change with the token before the last.

    Usual causes: attention that is never added to the residual stream, a mask that hides everything but the
    diagonal
    """
    if bool(dependence(d)[-1, -2]):
        return None
    lines = [
        *_change_code(d, ":, -2"),
        f"before, after = {logits_code(d)}[:, -1], {logits_code(d, 'other')}[:, -1]",
        "changes = bool((after - before).abs().max() > before.abs().max() * 1e-6)",
    ]
    return fail(d, "the last logits do not change with the token before", d.random_tokens(9, 1), lines, False, True)


@fact(FACTS, "batch-mixed")
def batch_mixed(d: DecoderUnderTest) -> Failure | None:
    """Sequences of a batch do not affect each other.

    Changing one sequence of a batch does not change the logits of others.

    Usual causes: a norm or mean over axis 0, reshape in the wrong order, position ids shared by accident
    """
    tokens = d.random_tokens(7, 3)
    other = tokens.clone()
    other[2] = (other[2] + 1) % d.vocab
    got, expected = d(other)[:2], d(tokens)[:2]
    if difference(got, expected) <= 1:
        return None
    words = "changing the last sequence changes the logits of others"
    x, y = f"{logits_code(d, 'other')}[:2]", f"{logits_code(d)}[:2]"
    return fail_difference(d, words, tokens, _change_code(d, "2"), got, expected, x, y)


@fact(FACTS, "batch-size", explained_by=("batch-mixed",))
def batch_size(d: DecoderUnderTest) -> Failure | None:
    """Logits do not depend on the size of the batch.

    Five sequences in one batch and one at a time agree up to rounding.

    Usual causes: another code path for batches, padding to a common size without a mask (transformers#26869)
    """
    tokens = d.random_tokens(7, 5)
    together, alone = d(tokens), torch.cat([d(row[None]) for row in tokens])
    if difference(together, alone) <= 1:
        return None
    lines = [f"alone = torch.cat([{logits_code(d, 'row[None]')} for row in tokens])"]
    words = "five sequences in one batch differ from one at a time"
    return fail_difference(d, words, tokens, lines, together, alone, logits_code(d), "alone")


def _require_cache(d: DecoderUnderTest) -> DecoderCache:
    if d.cache is None:
        raise NotApplicableError(
            f"it has no known KV cache: one of {', '.join(CACHE_NAMES)} that a call returns, cache= with a cache() "
            f"method, or {START}"
        )
    return d.cache


@fact(FACTS, "static-cache-unmasked", explained_by=("causality", "targets-leaked"))
def static_cache_unmasked(d: DecoderUnderTest) -> Failure | None:
    """Empty slots of a cache are not attended to.

    A cache with more slots than tokens gives the logits of one pass; the contents of later slots change nothing.

    Usual causes: unused slots take part in the softmax with scores of zero, as if a step of one token needed no
    mask (transformers#30417)
    """
    cache = _require_cache(d)
    if cache == DecoderCache(START):
        return _later_slots_seen(d)
    if cache != DecoderCache("cache"):
        raise NotApplicableError("it has no cache() method that takes a capacity, and keeps none inside")
    tokens, sizes = d.random_tokens(7, 2), [3, 1, 3]
    try:
        stepped = d.in_steps(tokens, sizes, capacity=13)
    except TypeError as error:
        raise NotApplicableError("its cache() takes no capacity") from error
    whole = d(tokens)
    if difference(stepped, whole) <= 1 or difference(d.in_steps(tokens, sizes), whole) > 1:
        return None  # steps that differ without empty slots too break the fact `cache`
    words = "with 13 slots for 7 tokens logits differ by {} from one pass"
    lines = steps_code(d, sizes, capacity=13)
    return fail_difference(d, words, tokens, lines, stepped, whole, "steps", logits_code(d))


def _later_slots_seen(d: DecoderUnderTest) -> Failure | None:
    """The failure of a cache inside the decoder if later slots change the logits of a step."""
    tokens = d.random_tokens(7, 1)
    if difference(d.in_steps(tokens, [3, 1, 1, 2]), d(tokens)) <= 1:
        return None

    def run(filled: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of token 3 after tokens 0 to 2, with slots 5 and 6 filled: two equal calls."""
        for start, stop in ((0, 3), (5, 7)):
            d(filled[:, start:stop], **{START: start})
        first, again = (d(filled[:, 3:4], **{START: 3}) for _ in range(2))
        return first, again

    try:
        (before, again), (after, _) = run(tokens), run(_change_token(d, tokens, slice(5, None)))
    except Exception as error:  # a foreign function may raise anything
        raise NotApplicableError(f"it accepts no steps out of order: {str(error)[:80]}") from error
    if not torch.equal(before, again):
        raise NotApplicableError("its cache has no slots: a step that is repeated is stored twice")
    if difference(after, before) <= 1:
        return None
    calls = [logits_code(d, f"each[:, {at}]", f"{START}={at[0]}") for at in ("0:3", "5:7", "3:4")]
    lines = [
        *_change_code(d, ":, 5:"),
        "steps = []",
        "for each in (tokens, other):",
        *(f"    {line}" for line in calls[:2]),
        f"    steps.append({calls[2]})",
    ]
    words = "logits of token 3 change with the contents of slots 5 and 6 of the cache, which are later"
    return fail_difference(d, words, tokens, lines, after, before, "steps[1]", "steps[0]")


@fact(FACTS, "longer-input-changes-prefix", explained_by=("causality", "targets-leaked", "static-cache-unmasked"))
def longer_input_changes_prefix(d: DecoderUnderTest) -> Failure | None:
    """Adding a token does not change the logits of earlier ones.

    The logits of a prefix are those of the whole sequence, for every prefix.

    Usual causes: a norm, scale or bias that depends on the length; positions counted from the end
    """
    _require_causal(d)

    def compare(tokens: Tensor, n: int) -> Failure | None:
        alone, whole = d(tokens[:, :n]), d(tokens)[:, :n]
        if difference(alone, whole) <= 1:
            return None
        words = f"the first {n} tokens alone give other logits than within {tokens.shape[1]}"
        x, y = logits_code(d, f"tokens[:, :{n}]"), f"{logits_code(d)}[:, :{n}]"
        return fail_difference(d, words, tokens, [], alone, whole, x, y)

    tokens = d.random_tokens(9, 1)
    for n in range(1, 9):
        if (found := compare(tokens, n)) is not None:
            shorter = (compare(tokens[:, :m], n) for m in range(n + 1, 9))
            return next((each for each in shorter if each is not None), found)
    tokens = d.random_tokens(LONG, 1)
    return None if d.logits_or_none(tokens) is None else compare(tokens, LONG // 2)


SMALL_PADDING = ((1, 2), (2, 3), (1, 4), (3, 5), (5, 7))  # real tokens, and tokens with padding


def _smallest_padding(test: Callable[[int, int, int], Failure | None]) -> Failure | None:
    """The failure of 5 real tokens of 9 in a batch of 2, with the smallest sizes that show it."""
    found = test(5, 9, 2)
    if found is None:
        return None
    smaller = (test(real, n, b) for real, n in SMALL_PADDING for b in (1, 2))
    return next((each for each in smaller if each is not None), found)


def _padding_differs(d: DecoderUnderTest, side: str, real: int, n: int, b: int) -> Failure | None:
    """The failure if `real` tokens, padded to n in a batch of b, give other logits than alone."""
    tokens = d.random_tokens(n, b)
    alone, lengths = d(tokens[:1, :real]), [real, n][:b]
    given = d.padding_keywords(lengths, n, side)
    rows = slice(0, real) if side == "right" else slice(n - real, n)
    for filler in (0, d.vocab - 1):
        filled = tokens.clone()
        filled[0] = filler
        filled[0, rows] = tokens[0, :real]
        padded = d(filled, **given)[:1, rows]
        if difference(padded, alone) > 1:
            count = f"{real} token{'s' * (real != 1)}"
            words = f"{count} padded on the {side} to {n} give logits that differ by {{}} from {real} alone"
            at = f"[:1, {rows.start}:{rows.stop}]"
            x, y = f"{_keyword_logits(d, 'tokens', given)}{at}", logits_code(d, f"tokens{at}")
            lines = _keyword_lines(given, _padding_code(lengths, n, side))
            return fail_difference(d, words, filled, lines, padded, alone, x, y)
    return None


def _padding_seen(d: DecoderUnderTest, real: int, n: int, b: int) -> Failure | None:
    """The failure if logits of real tokens change with the contents of padding on their left."""
    tokens, lengths = d.random_tokens(n, b), [real, n][:b]
    given = d.padding_keywords(lengths, n, "left")
    other = tokens.clone()
    other[0, : n - real] = (other[0, : n - real] + 1) % d.vocab
    before, after = (d(x, **given)[:1, n - real :] for x in (tokens, other))
    if not bool((before - after).isfinite().all()) or difference(after, before) <= 1:
        return None  # NaN in padded rows is allowed
    lines = _keyword_lines(given, _padding_code(lengths, n, "left")) + _change_code(d, f"0, :{n - real}")
    x, y = (f"{_keyword_logits(d, each, given)}[:1, {n - real}:]" for each in ("other", "tokens"))
    words = f"logits of real tokens change with the contents of the padding before them, {n - real} of {n} tokens"
    return fail_difference(d, words, tokens, lines, after, before, x, y)


def _keyword_logits(d: DecoderUnderTest, tokens: str, given: Mapping[str, object]) -> str:
    return logits_code(d, tokens, *(f"{name}={name}" for name in given))


def _padding_code(lengths: list[int], n: int, side: str) -> str:
    left = "" if side == "right" else f", side={side!r}, width={n}"
    return f"padding(torch.tensor({lengths}){left})"


def _keyword_lines(given: Mapping[str, object], mask: str) -> list[str]:
    """The lines that make the arguments: tensors, and a mask of regard by the call that makes it."""
    lines = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            lines.append(f"{name} = torch.tensor({value.tolist()})")
        else:
            lines += [f"from regard.core.masks import {mask.partition('(')[0]}", f"{name} = {mask}"]
    return lines


def _require_padding(d: DecoderUnderTest) -> None:
    if d.padding_argument is None:
        raise NotApplicableError("it has no padding argument")


@fact(
    FACTS, "padding-leaks", explained_by=("causality", "targets-leaked", "batch-mixed", "longer-input-changes-prefix")
)
def padding_leaks(d: DecoderUnderTest) -> Failure | None:
    """Padding does not change the logits of real tokens.

    Tokens padded on the right, with a padding mask, give the logits that they give alone; the contents of padding
    on the left change no logits of real tokens.

    Usual causes: the padding mask is not passed on, which causality hides on the right; or it replaces the causal
    mask
    """
    _require_padding(d)
    right = _smallest_padding(lambda real, n, b: _padding_differs(d, "right", real, n, b))
    return right or _smallest_padding(lambda real, n, b: _padding_seen(d, real, n, b))


@fact(FACTS, "left-padding", explained_by=("padding-leaks", "causality", "targets-leaked"))
def left_padding(d: DecoderUnderTest) -> Failure | None:
    """A sequence that is padded on the left starts with its first token all the same.

    Tokens padded on the left, with positions that count real tokens, give the logits that they give alone.

    Usual causes: positions counted from the padding on, position ids ignored or not passed on (transformers#18388,
    #22161, trl#6800)
    """
    _require_padding(d)
    return _smallest_padding(lambda real, n, b: _padding_differs(d, "left", real, n, b))


@fact(FACTS, "packed-documents-leak", explained_by=("causality", "targets-leaked", "left-padding"))
def packed_documents_leak(d: DecoderUnderTest) -> Failure | None:
    """Documents that are packed into one row do not see each other.

    Packed documents, with document ids, give the logits that each gives alone.

    Usual causes: document ids not passed on, positions not restarted (transformers#46634, pytorch#177378)
    """
    tokens, ids = d.random_tokens(9, 1), torch.tensor([[0] * 4 + [1] * 5])
    name = d.find_parameter(DOCUMENT_NAMES)
    given: dict[str, object] = {name: ids} if name is not None else {}
    if name is None and d.padding_argument == "padding":
        given = {"padding": documents(ids)}
    has_ids = bool(given)
    if d.positions_argument is not None:
        given[d.positions_argument] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    if not given:
        raise NotApplicableError("it has no argument for document ids")
    together = d(tokens, **given)
    for start, stop in ((0, 4), (4, 9)):
        packed, alone = together[:, start:stop], d(tokens[:, start:stop])
        if difference(packed, alone) > 1:
            if not has_ids:
                raise NotApplicableError("positions that restart do not separate documents")
            at = f"[:, {start}:{stop}]"
            lines = _keyword_lines(given, f"documents(torch.tensor({ids.tolist()}))")
            words = f"the document at {start} gives other logits packed than alone"
            x, y = f"{_keyword_logits(d, 'tokens', given)}{at}", logits_code(d, f"tokens{at}")
            return fail_difference(d, words, tokens, lines, packed, alone, x, y)
    return None


STEPS = ((1,) * 9, (4, 5), (5, 1, 3))


def _differs_in_steps(d: DecoderUnderTest, wrong: Callable[[Tensor, Tensor], Tensor], changes: bool) -> Failure | None:
    """The failure of logits that, through the cache, depend on other tokens than in one pass."""
    _require_cache(d)
    whole = dependence(d)
    for sizes in STEPS:
        pairs = wrong(whole, dependence(d, sizes))
        if not bool(pairs.any()):
            continue
        row, token = pairs.nonzero()[0].tolist()
        lines = [
            *_change_code(d, f":, {token}"),
            *steps_code(d, list(sizes)),
            "before = steps",
            *steps_code(d, list(sizes), "other"),
            f"moved = (steps - before).abs().amax(-1)[0, {row}]",
            "changes = bool(moved > before.abs().max() * 1e-6)",
        ]
        words = f"in steps of {list(sizes)} logits at {row} {'see' if changes else 'do not see'} token {token}"
        return fail(d, words, d.random_tokens(9, 1), lines, changes, not changes)
    return None


@fact(FACTS, "cache-mask-off-by-one", explained_by=("static-cache-unmasked", "causality", "targets-leaked"))
def cache_mask_off_by_one(d: DecoderUnderTest) -> Failure | None:
    """With a KV cache, new tokens see all cached tokens and themselves.

    Through a cache, logits at t change with every token that they change with in one pass.

    Usual causes: the newest or oldest slot of the cache is masked (transformers#30417)
    """
    return _differs_in_steps(d, lambda whole, steps: whole & ~steps, False)


@fact(FACTS, "window-in-decode", explained_by=("static-cache-unmasked", "causality", "targets-leaked"))
def window_in_decode(d: DecoderUnderTest) -> Failure | None:
    """The window is as wide in decoding as in one pass.

    Through a cache, logits at t change with no token that they do not change with in one pass.

    Usual causes: a decode path without the window or without the causal mask (nanochat#452)
    """
    return _differs_in_steps(d, lambda whole, steps: steps & ~whole, True)


@fact(
    FACTS,
    "cache",
    explained_by=("static-cache-unmasked", "cache-mask-off-by-one", "window-in-decode", "causality", "targets-leaked"),
)
def cache(d: DecoderUnderTest) -> Failure | None:
    """A KV cache gives the logits of one pass.

    Every split of the tokens through the cache gives the logits of one pass.

    Usual causes: positions that start at 0 in every step, keys stored before they are rotated, the newest key
    masked, a cache shared by layers
    """
    _require_cache(d)
    long = [LONG // 2, 1, LONG - LONG // 2 - 1]
    for sizes in ([1] * 9, *([n, 9 - n] for n in range(1, 9)), [2, 3, 4], long):
        tokens = d.random_tokens(sum(sizes), 1 if sizes == long else 2)
        whole = d.logits_or_none(tokens)
        if whole is None:
            break  # longer than it accepts
        steps = d.in_steps(tokens, sizes)
        if difference(steps, whole) > 1:
            words = f"in steps of {sizes} logits differ by {{}} from one pass"
            return fail_difference(d, words, tokens, steps_code(d, sizes), steps, whole, "steps", logits_code(d))
    return None
