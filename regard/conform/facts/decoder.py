"""Facts about whole decoders: what a token may know, alone, in a batch, padded, packed and through a cache."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.registry import Registry
from regard.conform.callable_under_test import DOCUMENTS
from regard.conform.decoder import CACHES, START, DecoderCache, DecoderUnderTest, unwrapped
from regard.conform.decoder_example import distance, far, in_steps, logits, shown
from regard.conform.example import Raised
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import equal, seeded
from regard.core.masks import documents

FACTS: Registry[Fact] = Registry("fact")

LONG = 67  # tokens: several blocks of a fast kernel, and a rest
NEAR = 2e-4  # of the largest logit: what float32 leaves between two ways through a few layers


def apart(x: Tensor, y: Tensor) -> float:
    """How far two logits are from each other, in units of what is allowed; infinity where there is a NaN."""
    if x.shape != y.shape:
        return float("inf")
    scale = max(y.abs().max().item(), 1e-3) * NEAR
    return ((x - y).abs().nan_to_num(torch.inf).max() / scale).item()


def smallest(tokens: Tensor, broken: Callable[[Tensor], bool]) -> Tensor:
    """Fewer sequences, fewer tokens and smaller numbers, as long as the rule stays broken."""
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


@fact(
    FACTS,
    "runs",
    student="Given tokens, a decoder has an answer.",
    engineer="tokens (2, 9) do not raise.",
    cause="an argument that is required, a vocabulary or context that is smaller",
    fatal=True,
)
def runs(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw()
    try:
        d(tokens)
    except Exception as error:
        raised = Raised.of(error)
        words = f"an ordinary call raises {raised.kind}: {raised.words}"
        words += _though_fewer_do_not(d)
        return Failure(words, shown(d, tokens, [f"logits = {logits(d)}"], raised))
    return None


def _though_fewer_do_not(d: DecoderUnderTest) -> str:
    """What to do about a context that is too short to be examined, where it is that."""
    try:
        d(d.draw(3))
    except Exception:
        return ""
    return "; 3 tokens do not raise, so where its context is shorter than 9 tokens, check one with room for 9"


@fact(
    FACTS,
    "output-shape",
    student="Every token gets a score for each token that could be next.",
    engineer="tokens (b n) -> logits (b n w).",
    cause="only the last position is returned, or (b w n) as a loss function wants it",
    fatal=True,
)
def output_shape(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw(7, 3)
    out = d(tokens)
    if out.ndim == 3 and out.shape[:2] == tokens.shape:
        return None
    words = f"tokens (3, 7) give {tuple(out.shape)}, not (3, 7, w)"
    if "targets" in d.parameters and "targets" not in d.extra:
        words += "; where all logits come with targets only, hand over extra={'targets': lambda tokens: tokens}"
    if out.ndim != 3:
        return Failure(words, shown(d, tokens, [f"axes = {logits(d)}.ndim"], out.ndim, 3))
    lines = [f"sizes = tuple({logits(d)}.shape[:2])"]
    return Failure(words, shown(d, tokens, lines, tuple(out.shape[:2]), (3, 7)))


@fact(
    FACTS,
    "dropout-in-eval",
    student="Dropping at random is for training. In use every answer is exact.",
    engineer="In eval() two calls with different seeds are equal bit for bit.",
    cause="F.dropout(x, p) without training=self.training; eval() that does not reach a part (pytorch#124464)",
    fatal=True,
)
def dropout_in_eval(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw()
    outs = []
    for seed in (0, 0, 1, 2):
        seeded(seed)
        outs.append(d(tokens))
    if not equal(outs[0], outs[1]) or all(equal(outs[0], out) for out in outs[2:]):
        return None
    other = next(seed for seed, out in ((1, outs[2]), (2, outs[3])) if not equal(outs[0], out))
    lines = [
        "torch.manual_seed(0)",
        f"first = {logits(d)}",
        f"torch.manual_seed({other})",
        f"second = {logits(d)}",
        "same = torch.equal(first, second)",
    ]
    words = f"two seeds give logits that are {(outs[0] - outs[other + 1]).abs().max():.1e} apart"
    return Failure(words, shown(d, tokens, lines, False, True))


@fact(
    FACTS,
    "state-between-calls",
    student="An answer depends on the question, not on what was asked before.",
    engineer="f(x), f(y), f(x): the first and the last are equal bit for bit.",
    cause="a cache that is not emptied, a mask kept from another length",
    fatal=True,
)
def state_between_calls(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw()
    first = d(tokens)
    for other in (d.draw(9, seed=1), d.draw(5, 1, seed=2)):
        d(other)
        again = d(tokens)
        if not equal(first, again):
            lines = [
                f"first = {logits(d)}",
                f"other = {logits(d, f'torch.tensor({other.tolist()})')}",
                f"again = {logits(d)}",
                "same = torch.equal(first, again)",
            ]
            words = "the same tokens give other logits after a call with other tokens"
            return Failure(words, shown(d, tokens, lines, False, True))
    return None


@fact(
    FACTS,
    "inputs-changed",
    student="Reading tokens does not change them.",
    engineer="tokens hold the same numbers after the call as before.",
    cause="an in-place shift or fill of the argument",
)
def inputs_changed(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw()
    given = tokens.clone()
    d.asked(given)
    if torch.equal(given, tokens):
        return None
    return Failure("the call changes its tokens", shown(d, tokens, [logits(d), "after = tokens"], given, tokens))


def reach(d: DecoderUnderTest, sizes: tuple[int, ...] = (9,)) -> Tensor:
    """Which output position changes when which token changes: (positions, tokens) of booleans; in steps if several."""
    if sizes not in d.memo:
        d.memo[sizes] = _reach(d if len(sizes) == 1 else lambda tokens: d.in_steps(tokens, list(sizes)), d)
    return d.memo[sizes]


def _reach(run: Callable[[Tensor], Tensor], d: DecoderUnderTest, n: int = 9) -> Tensor:
    tokens = d.draw(n, 1)
    before = run(tokens)
    rows = []
    for place in range(n):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1 + torch.arange(1)) % d.vocab
        changed = (run(other) - before).abs().amax(-1)[0] > before.abs().max() * 1e-6
        rows.append(changed)
    return torch.stack(rows, 1)


@fact(
    FACTS,
    "targets-leaked",
    student="A decoder that sees the next word does not predict it, it copies it.",
    engineer="Logits at t do not change with token t + 1, the one they are to predict; nor, a step a layer, with the "
    "next few.",
    cause="the diagonal of the causal mask, triu(diagonal=2) or tril(diagonal=1), which shows one more token in every "
    "layer; inputs and targets not shifted against each other (attention-is-all-you-need-pytorch#19)",
)
def targets_leaked(d: DecoderUnderTest) -> Failure | None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not to be causal")
    steps = _steps_ahead(d)
    if steps is None:
        return None
    tokens = smallest(d.draw(9, 1), lambda tokens: _sees_later(d, tokens))
    words = "logits at t change with token t + 1, and with none after it"
    if steps > 1:
        words = f"logits at t change with the next {steps} tokens, as far as that shows: one a layer, and not with all"
    return Failure(words, _later_shown(d, tokens))


def _steps_ahead(d: DecoderUnderTest) -> int | None:
    """How many later tokens every row sees, the next ones, where that has an end; None where it sees none or all."""
    seen = reach(d)
    later = seen.triu(1)
    if not bool(later.diagonal(1).all()):
        return None
    rows, tokens = later.nonzero().unbind(1)
    steps = int((tokens - rows).max())
    # at the end of a long reach little is left, which may be lost to rounding: what is seen is still the next ones
    nearest = all(bool(row[n + 1 : n + 1 + int(row.sum())].all()) for n, row in enumerate(later))
    if steps < len(seen) - 1:
        return steps if nearest else None
    for n in (LONG, 33, 17):
        tokens = d.draw(n, 1)
        if (before := _taken(d, tokens)) is None:
            continue  # longer than it takes
        moved = (d(changed(d, tokens, -1)) != before).any(-1)[0]
        first = int(moved.int().argmax())
        return n - 1 - first if first and bool(moved[first:].all()) else None
    return None


def _sees_later(d: DecoderUnderTest, tokens: Tensor) -> bool:
    return apart(d(changed(d, tokens, -1))[:, :-1], d(tokens)[:, :-1]) > 1


def changed(d: DecoderUnderTest, tokens: Tensor, place: int) -> Tensor:
    """The same tokens with another one at that place."""
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % d.vocab
    return other


def changing(d: DecoderUnderTest, place: int) -> list[str]:
    """The same, as written."""
    return ["other = tokens.clone()", f"other[:, {place}] = (other[:, {place}] + 1) % {d.vocab}"]


def _later_shown(d: DecoderUnderTest, tokens: Tensor) -> str:
    """How far the logits before the last move with the last token."""
    off, most = far(d(changed(d, tokens, -1))[:, :-1], d(tokens)[:, :-1], NEAR)
    lines = [*changing(d, -1), distance(f"{logits(d, 'other')}[:, :-1]", f"{logits(d)}[:, :-1]")]
    return shown(d, tokens, lines, off, most if off > most.most else 0.0)


@fact(
    FACTS,
    "causality",
    student="A word does not see the words after it.",
    engineer="Logits at t do not change with any token after t.",
    cause="no causal mask in some layer, a norm or mean over the sequence, a mask dropped on a fused path "
    "(transformers#45811)",
    explained_by=("targets-leaked",),
)
def causality(d: DecoderUnderTest) -> Failure | None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not to be causal")
    seen = reach(d).triu(1)
    if not bool(seen.any()):
        return _long_leak(d)
    row, token = seen.nonzero()[0].tolist()
    tokens = smallest(d.draw(9, 1), lambda tokens: _sees_later(d, tokens))
    return Failure(f"logits at position {row} change with token {token}", _later_shown(d, tokens))


def _long_leak(d: DecoderUnderTest) -> Failure | None:
    """The failure of a mask that is dropped on a long path, at the smallest of some lengths that shows it."""
    for n in (13, 17, 33, 48, LONG):
        tokens, cut = d.draw(n, 1), n // 2
        other = tokens.clone()
        other[:, cut:] = (other[:, cut:] + 1) % d.vocab
        if (before := _taken(d, tokens)) is None:
            return None
        after = d(other)
        if apart(after[:, :cut], before[:, :cut]) > 1:
            off, most = far(after[:, :cut], before[:, :cut], NEAR)
            lines = ["other = tokens.clone()", f"other[:, {cut}:] = (other[:, {cut}:] + 1) % {d.vocab}"]
            lines.append(distance(f"{logits(d, 'other')}[:, :{cut}]", f"{logits(d)}[:, :{cut}]"))
            words = f"of {n} tokens, logits before {cut} change with tokens from {cut} on"
            return Failure(words, shown(d, tokens, lines, off, most))
    return None


def _taken(d: DecoderUnderTest, tokens: Tensor) -> Tensor | None:
    """The logits, or None where there are more tokens than it takes."""
    try:
        return d(tokens)
    except Exception:
        return None


@fact(
    FACTS,
    "causality-by-gradient",
    student="What comes later cannot be blamed for what was said before.",
    engineer="The gradient of logits at t with respect to embeddings after t is exactly zero.",
    cause="a leak that is too small to see in the logits, or through a backward pass of one's own",
    explained_by=("targets-leaked", "causality"),
)
def causality_by_gradient(d: DecoderUnderTest) -> Failure | None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not to be causal")
    if d.module is None:
        raise NotApplicableError("it is a function")
    embedded: list[Tensor] = []
    embedder: list[nn.Module] = []
    tokens = d.draw(7, 1)

    def keep(module: nn.Module, given: tuple[Any, ...], out: Any) -> Tensor | None:
        read = bool(given) and isinstance(given[0], Tensor) and given[0].shape == tokens.shape
        if embedded or not read or not isinstance(out, Tensor) or out.shape[:-1] != tokens.shape:
            return None
        embedded.append(out.detach().requires_grad_())
        embedder.append(module)
        return embedded[0]

    hooks = [part.register_forward_hook(keep) for part in d.module.modules() if part is not d.module]
    try:
        out = d.asked(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    if not embedded:
        raise NotApplicableError("no part of it turns its tokens into vectors")
    rows = unwrapped(out)
    if not rows.requires_grad:
        raise NotApplicableError("its logits carry no gradient")
    for place in range(6):
        (gradient,) = torch.autograd.grad(rows[:, place].square().sum(), embedded, retain_graph=True)
        if bool(gradient[:, place + 1 :].any()):
            largest = gradient[:, place + 1 :].abs().max().item()
            path = next(path for path, part in d.module.named_modules() if part is embedder[0])
            lines = [
                "embedded = []",
                "keep = lambda part, given, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]",
                f"hook = model.get_submodule({path!r}).register_forward_hook(keep)",
                f"logits = {logits(d)}",
                "hook.remove()",
                f"gradient = torch.autograd.grad(logits[:, {place}].square().sum(), embedded[0])[0]",
                f"later = gradient[:, {place + 1}:].abs().max().item()",
            ]
            words = f"logits at {place} send a gradient to tokens after it"
            return Failure(words, shown(d, tokens, lines, largest, 0.0))
    return None


@fact(
    FACTS,
    "context-ignored",
    student="To predict the next word one has to have read the earlier ones.",
    engineer="The last logits change with the token before the last.",
    cause="attention that never reaches the residual stream, a mask that hides everything but the diagonal",
)
def context_ignored(d: DecoderUnderTest) -> Failure | None:
    seen = reach(d)
    if bool(seen[-1, -2]):
        return None
    lines = [
        *changing(d, -2),
        f"before, after = {logits(d)}[:, -1], {logits(d, 'other')}[:, -1]",
        "changes = bool((after - before).abs().max() > before.abs().max() * 1e-6)",
    ]
    words = "the last logits do not change with the token before"
    return Failure(words, shown(d, d.draw(9, 1), lines, False, True))


@fact(
    FACTS,
    "batch-mixed",
    student="Sentences of one batch know nothing of each other.",
    engineer="Changing one sequence of a batch leaves the logits of the others as they were.",
    cause="a norm or mean over axis 0, reshape in the wrong order, position ids shared by accident",
)
def batch_mixed(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw(7, 3)
    other = tokens.clone()
    other[2] = (other[2] + 1) % d.vocab
    if apart(d(other)[:2], d(tokens)[:2]) <= 1:
        return None
    off, most = far(d(other)[:2], d(tokens)[:2], NEAR)
    lines = ["other = tokens.clone()", f"other[2] = (other[2] + 1) % {d.vocab}"]
    lines.append(distance(f"{logits(d, 'other')}[:2]", f"{logits(d)}[:2]"))
    return Failure("changing the last sequence changes the logits of others", shown(d, tokens, lines, off, most))


@fact(
    FACTS,
    "batch-size",
    student="An answer does not depend on how many others are asked for.",
    engineer="Five sequences in one batch and one at a time agree to rounding.",
    cause="another path for batches, padding to a common size without a mask (transformers#26869)",
    explained_by=("batch-mixed",),
)
def batch_size(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw(7, 5)
    together, alone = d(tokens), torch.cat([d(row[None]) for row in tokens])
    if apart(together, alone) <= 1:
        return None
    off, most = far(together, alone, NEAR)
    lines = [f"alone = torch.cat([{logits(d, 'row[None]')} for row in tokens])", distance(logits(d), "alone")]
    return Failure("five sequences in one batch differ from one at a time", shown(d, tokens, lines, off, most))


def _has_cache(d: DecoderUnderTest) -> None:
    if d.cache is None:
        raise NotApplicableError(
            f"it has no cache that is known: one of {', '.join(CACHES)} that comes back from a call, cache= with a "
            f"cache() method, or {START}"
        )


@fact(
    FACTS,
    "static-cache-unmasked",
    student="Empty places in memory are not memories.",
    engineer="A cache with room for more than was stored gives the logits of one pass; what lies in slots that come "
    "later changes nothing.",
    cause="unused slots take part in the softmax, with scores of zero, as where a step of one token has no mask "
    "(transformers#30417)",
    explained_by=("causality", "targets-leaked"),
)
def static_cache(d: DecoderUnderTest) -> Failure | None:
    _has_cache(d)
    assert d.cache is not None
    if d.cache == DecoderCache(START):
        return _unused_slots(d)
    if d.cache != DecoderCache("cache"):
        raise NotApplicableError("it has no cache() method that takes a capacity, and keeps none inside")
    tokens, sizes = d.draw(7, 2), [3, 1, 3]
    try:
        stepped = d.in_steps(tokens, sizes, capacity=13)
    except TypeError as refused:
        raise NotApplicableError("its cache() takes no capacity") from refused
    whole = d(tokens)
    if apart(stepped, whole) <= 1 or apart(d.in_steps(tokens, sizes), whole) > 1:
        return None  # where steps differ without room for more too, that is another fact
    off, most = far(stepped, whole, NEAR)
    lines = [*in_steps(d, sizes, capacity=13), distance("steps", logits(d))]
    words = f"with 13 places for 7 tokens logits are {off:.1e} away from one pass"
    return Failure(words, shown(d, tokens, lines, off, most))


def _unused_slots(d: DecoderUnderTest) -> Failure | None:
    """The failure of a cache inside whose later slots, which a step does not reach, change its logits."""
    tokens = d.draw(7, 1)
    if apart(d.in_steps(tokens, [3, 1, 1, 2]), d(tokens)) <= 1:
        return None
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % d.vocab

    def beside(later: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of token 3 after tokens 0 to 2, with others at 5 and 6 already: asked twice."""
        for start, stop in ((0, 3), (5, 7)):
            d(later[:, start:stop], **{START: start})
        first, again = (d(later[:, 3:4], **{START: 3}) for _ in range(2))
        return first, again

    try:
        (before, again), (after, _) = beside(tokens), beside(other)
    except Exception as refused:
        raise NotApplicableError(f"it takes no step out of order: {str(refused)[:80]}") from refused
    if not torch.equal(before, again):
        raise NotApplicableError("what it keeps inside has no slots: a step that is asked twice is kept twice")
    if apart(after, before) <= 1:
        return None
    off, most = far(after, before, NEAR)
    one = [logits(d, f"each[:, {at}]", f"{START}={at[0]}") for at in ("0:3", "5:7", "3:4")]
    lines = [
        "other = tokens.clone()",
        f"other[:, 5:] = (other[:, 5:] + 1) % {d.vocab}",
        "steps = []",
        "for each in (tokens, other):",
        *(f"    {line}" for line in one[:2]),
        f"    steps.append({one[2]})",
        distance("steps[1]", "steps[0]"),
    ]
    words = "logits of token 3 change with what lies in slots 5 and 6 of the cache, which come later"
    return Failure(words, shown(d, tokens, lines, off, most))


@fact(
    FACTS,
    "length-changes-earlier",
    student="Adding a word does not change what was said before it.",
    engineer="Logits of a prefix are those of the whole, for every prefix.",
    cause="a norm, scale or bias that depends on the length; positions counted from the end",
    explained_by=("causality", "targets-leaked", "static-cache-unmasked"),
)
def length_changes_earlier(d: DecoderUnderTest) -> Failure | None:
    if d.declared.causal is False:
        raise NotApplicableError("declared not to be causal")
    tokens = d.draw(9, 1)
    whole = d(tokens)
    for n in range(1, 9):
        if apart(d(tokens[:, :n]), whole[:, :n]) > 1:
            longer = next(m for m in range(n + 1, 10) if m == 9 or apart(d(tokens[:, :n]), d(tokens[:, :m])[:, :n]) > 1)
            off, most = far(d(tokens[:, :n]), d(tokens[:, :longer])[:, :n], NEAR)
            lines = [distance(logits(d, f"tokens[:, :{n}]"), f"{logits(d)}[:, :{n}]")]
            words = f"the first {n} tokens alone give other logits than within {longer}"
            return Failure(words, shown(d, tokens[:, :longer], lines, off, most))
    tokens, n = d.draw(LONG, 1), LONG // 2
    if (long := _taken(d, tokens)) is None or apart(d(tokens[:, :n]), long[:, :n]) <= 1:
        return None
    off, most = far(d(tokens[:, :n]), long[:, :n], NEAR)
    lines = [distance(logits(d, f"tokens[:, :{n}]"), f"{logits(d)}[:, :{n}]")]
    return Failure(
        f"the first {n} tokens alone give other logits than within {LONG}", shown(d, tokens, lines, off, most)
    )


SMALL = ((1, 2), (2, 3), (1, 4), (3, 5), (5, 7))  # real tokens, and tokens with the padding


def _padded(d: DecoderUnderTest, side: str) -> Failure | None:
    if d.padding_argument is None:
        raise NotApplicableError("it has no argument for padding")
    found = _apart_from_alone(d, side, 5, 9, 2)
    if found is None:
        return None
    smaller = (_apart_from_alone(d, side, real, n, b) for real, n in SMALL for b in (1, 2))
    return next((each for each in smaller if each is not None), found)


def _apart_from_alone(d: DecoderUnderTest, side: str, real: int, n: int, b: int) -> Failure | None:
    """The failure of the first of b sequences, of so many real tokens of n, to give what it gives alone."""
    tokens = d.draw(n, b)
    alone = d(tokens[:1, :real])
    lengths = [real, n][:b]
    given = d.padded(lengths, n, side)
    rows = slice(0, real) if side == "right" else slice(n - real, n)
    for filler in (0, d.vocab - 1):
        filled = tokens.clone()
        filled[0] = filler
        filled[0, rows] = tokens[0, :real]
        padded = d(filled, **given)[:1, rows]
        if apart(padded, alone) > 1:
            off, most = far(padded, alone, NEAR)
            words = f"{_count(real)} padded on the {side} to {n} give logits {off:.1e} away from {real} alone"
            at = f"{rows.start}:{rows.stop}"
            lines = [
                *_told(given, _padding_written(lengths, n, side)),
                distance(f"{_logits_told(d, 'tokens', given)}[:1, {at}]", logits(d, f"tokens[:1, {at}]")),
            ]
            return Failure(words, shown(d, filled, lines, off, most))
    return None


def _count(real: int) -> str:
    return f"{real} token{'s' * (real != 1)}"


def _logits_told(d: DecoderUnderTest, tokens: str, given: Mapping[str, object]) -> str:
    return logits(d, tokens, *(f"{name}={name}" for name in given))


def _padding_written(lengths: list[int], n: int, side: str) -> str:
    left = "" if side == "right" else f", side={side!r}, width={n}"
    return f"padding(torch.tensor({lengths}){left})"


def _read_padding(d: DecoderUnderTest, real: int, n: int, b: int) -> Failure | None:
    """The failure of logits of real tokens that change with what the padding on their left is filled with."""
    tokens = d.draw(n, b)
    lengths = [real, n][:b]
    given = d.padded(lengths, n, "left")
    other = tokens.clone()
    other[0, : n - real] = (other[0, : n - real] + 1) % d.vocab
    before, after = (d(x, **given)[:1, n - real :] for x in (tokens, other))
    if not bool((before - after).isfinite().all()) or apart(after, before) <= 1:
        return None  # rows of NaN are another fact
    off, most = far(after, before, NEAR)
    places = f"[0, :{n - real}]"
    lines = [
        *_told(given, _padding_written(lengths, n, "left")),
        "other = tokens.clone()",
        f"other{places} = (other{places} + 1) % {d.vocab}",
        distance(*(f"{_logits_told(d, x, given)}[:1, {n - real}:]" for x in ("other", "tokens"))),
    ]
    words = f"logits of real tokens change with what stands in the padding before them, {n - real} of {n} tokens"
    return Failure(words, shown(d, tokens, lines, off, most))


def _told(given: Mapping[str, object], mask: str) -> list[str]:
    """The lines that make the arguments: tensors as they are, and a mask of this project by the call that makes it."""
    lines = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            lines.append(f"{name} = torch.tensor({value.tolist()})")
        else:
            lines += [f"from regard.core.masks import {mask.partition('(')[0]}", f"{name} = {mask}"]
    return lines


@fact(
    FACTS,
    "padding-leaks",
    student="Filling words are no words.",
    engineer="Tokens padded on the right, and told so, give the logits that they give alone; what padding on the left "
    "is filled with changes no logits of real tokens.",
    cause="the padding mask is not handed on, which causality hides on the right; or it replaces the causal one",
    explained_by=("causality", "targets-leaked", "batch-mixed", "length-changes-earlier"),
)
def padding_leaks(d: DecoderUnderTest) -> Failure | None:
    if (found := _padded(d, "right")) is not None or _read_padding(d, 5, 9, 2) is None:
        return found
    sizes = ((real, n, b) for real, n in (*SMALL, (5, 9)) for b in (1, 2))
    return next(found for size in sizes if (found := _read_padding(d, *size)) is not None)


@fact(
    FACTS,
    "left-padding",
    student="A sentence that starts late on the line starts with its first word all the same.",
    engineer="Tokens padded on the left, with positions that count real tokens, give the logits they give alone.",
    cause="positions counted from the padding on, position ids not taken or not handed over "
    "(transformers#18388, #22161, trl#6800)",
    explained_by=("padding-leaks", "causality", "targets-leaked"),
)
def left_padding(d: DecoderUnderTest) -> Failure | None:
    return _padded(d, "left")


@fact(
    FACTS,
    "packed-documents-leak",
    student="Two texts in one row stay two texts.",
    engineer="Packed documents, told so, give the logits that each gives alone.",
    cause="document ids not handed on, positions not restarted (transformers#46634, pytorch#177378)",
    explained_by=("causality", "targets-leaked", "left-padding"),
)
def packed_documents_leak(d: DecoderUnderTest) -> Failure | None:
    tokens = d.draw(9, 1)
    ids = torch.tensor([[0] * 4 + [1] * 5])
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    name = next((name for name in DOCUMENTS if name in d.parameters), None)
    given: dict[str, object] = {name: ids} if name is not None else {}
    if name is None and d.padding_argument == "padding":
        given = {"padding": documents(ids)}
    told = bool(given)
    if d.positions_argument is not None:
        given[d.positions_argument] = restarting
    if not given:
        raise NotApplicableError("it has no argument for document ids")
    together = d(tokens, **given)
    for rows in (slice(0, 4), slice(4, 9)):
        if apart(together[:, rows], d(tokens[:, rows])) > 1:
            if not told:
                raise NotApplicableError(
                    "positions that start anew do not tell documents apart, and were not promised to"
                )
            words = f"the document at {rows.start} gives other logits packed than alone"
            off, most = far(together[:, rows], d(tokens[:, rows]), NEAR)
            at = f"{rows.start}:{rows.stop}"
            packed = f"{logits(d, 'tokens', *(f'{each}={each}' for each in given))}[:, {at}]"
            lines = [
                *_told(given, f"documents(torch.tensor({ids.tolist()}))"),
                distance(packed, logits(d, f"tokens[:, {at}]")),
            ]
            return Failure(words, shown(d, tokens, lines, off, most))
    return None


STEPS = ((1,) * 9, (4, 5), (5, 1, 3))


def _changes_in_steps(d: DecoderUnderTest, sizes: list[int], row: int, token: int, changes: bool) -> str:
    """Whether logits of one row change with one token, through a cache."""
    lines = [
        *changing(d, token),
        *in_steps(d, sizes),
        "before = steps",
        *in_steps(d, sizes, "other"),
        f"moved = (steps - before).abs().amax(-1)[0, {row}]",
        "changes = bool(moved > before.abs().max() * 1e-6)",
    ]
    return shown(d, d.draw(9, 1), lines, changes, not changes)


@fact(
    FACTS,
    "cache-mask-off-by-one",
    student="When old words are remembered, new ones still see all of them and themselves.",
    engineer="Through a cache, logits at t change with every token that they change with in one pass.",
    cause="the newest or oldest slot of the cache left out of the mask (transformers#30417)",
    explained_by=("static-cache-unmasked", "causality", "targets-leaked"),
)
def cache_off_by_one(d: DecoderUnderTest) -> Failure | None:
    _has_cache(d)
    whole = reach(d)
    for sizes in STEPS:
        lost = whole & ~reach(d, sizes)
        if bool(lost.any()):
            row, token = lost.nonzero()[0].tolist()
            words = f"in steps of {list(sizes)} logits at {row} do not see token {token}"
            return Failure(words, _changes_in_steps(d, list(sizes), row, token, False))
    return None


@fact(
    FACTS,
    "window-in-decode",
    student="What was out of sight stays out of sight, remembered or not.",
    engineer="Through a cache, logits at t change with no token that they do not change with in one pass.",
    cause="a decode path without the window or without the causal mask (nanochat#452)",
    explained_by=("static-cache-unmasked", "causality", "targets-leaked"),
)
def window_in_decode(d: DecoderUnderTest) -> Failure | None:
    _has_cache(d)
    whole = reach(d)
    for sizes in STEPS:
        more = reach(d, sizes) & ~whole
        if bool(more.any()):
            row, token = more.nonzero()[0].tolist()
            words = f"in steps of {list(sizes)} logits at {row} see token {token}"
            return Failure(words, _changes_in_steps(d, list(sizes), row, token, True))
    return None


@fact(
    FACTS,
    "cache",
    student="Remembering what was computed gives what computing it again gives.",
    engineer="Every split of the tokens through the cache gives the logits of one pass.",
    cause="positions that start at 0 in every step, keys stored before they are rotated, the newest key masked, "
    "a cache shared by layers",
    explained_by=("static-cache-unmasked", "cache-mask-off-by-one", "window-in-decode", "causality", "targets-leaked"),
)
def cache(d: DecoderUnderTest) -> Failure | None:
    _has_cache(d)
    tokens = d.draw(9, 2)
    whole = d(tokens)
    for sizes in ([1] * 9, *([n, 9 - n] for n in range(1, 9)), [2, 3, 4], [LONG // 2, 1, LONG - LONG // 2 - 1]):
        if sum(sizes) == LONG:
            tokens = d.draw(LONG, 1)
            if (taken := _taken(d, tokens)) is None:
                break
            whole = taken
        steps = d.in_steps(tokens, list(sizes))
        if apart(steps, whole) > 1:
            off, most = far(steps, whole, NEAR)
            words = f"in steps of {sizes} logits are {off:.1e} away from one pass"
            lines = [*in_steps(d, list(sizes)), distance("steps", logits(d))]
            return Failure(words, shown(d, tokens, lines, off, most))
    return None
