"""Facts about conventions: who sees whom, the scale, heads and positions, as declared or as expected."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, Findings, InferredWindow
from regard.conform.example import Ask, example
from regard.conform.expected import View, band
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.dependence import sums_to_one
from regard.conform.inputs import Inputs
from regard.conform.shrink import Complaint, Judge, failure
from regard.conform.tolerance import error
from regard.core.scores import alibi_slopes

FACTS: Registry[Fact] = Registry("fact")

LENGTHS = (11, 67)  # one block of a fast kernel, and several with a rest
STEPS = ((1, 9), (3, 9), (1, 67), (3, 67))  # queries, and keys with those in a cache
SEEN = ("diagonal-hidden", "causal-off-by-one", "causality", "window-off-by-one", "window", "full-view")


def expects_causal(f: Findings) -> None:
    if f.declared.causal is False:
        raise NotApplicableError("declared not to be causal")
    if f.declared.causal is None and not f.subject.asks_causal and not f.causal:
        raise NotApplicableError("not declared to be causal, has no argument for it that works alone, and is not")


def differs(f: Findings, view_of: Callable[[Inputs], View], words: str, most: float = 1e-3) -> Judge:
    """A judge that complains where the answer is far from the one that was expected."""

    def judge(inputs: Inputs) -> Complaint | None:
        truth = view_of(inputs).truth(inputs)
        got = f.subject(inputs).detach()
        if error(got, truth) <= most * max(1.0, truth.abs().max().item()):
            return None
        return Complaint(words, got, truth.to(got.dtype))

    return judge


def seen_instead(
    f: Findings, n: int, expected: Tensor, words: str, declare: str = "", causally: bool = False
) -> Failure:
    """The failure of a view, with an example whose output shows it. `causally` expects no later key in any case."""

    def view(inputs: Inputs) -> View:
        _, _, _, i, j, _, _ = inputs.sizes
        return replace(f.view(inputs), visible=band(i, j, before, after))

    before = f.declared.window_before
    causal = f.declared.causal is not False and (f.declared.causal or f.subject.asks_causal or f.causal)
    after = 0 if causal or causally else f.declared.window_after
    found = failure(f.subject, f.subject.draw(n, n, b=1), differs(f, view, words), words, declare, square=True)
    return found or Failure(words, declare=declare)


@fact(
    FACTS,
    "diagonal-hidden",
    student="A word may look at itself.",
    engineer="Under a causal mask row i sees key i: the mask is j <= i, not j < i.",
    cause="triu(diagonal=0) filled with -inf where diagonal=1 was meant; tril(diagonal=-1)",
    fatal=True,
)
def diagonal_hidden(f: Findings) -> Failure | None:
    expects_causal(f)
    seen = f.visible(11, 11)[0]
    if bool(seen.triu(1).any()):
        return None  # it sees later keys, which is another fact
    if not bool(seen.diagonal(dim1=-2, dim2=-1)[:, 1:].any()) and bool(seen[:, 1:].any()):
        return seen_instead(f, 11, seen, "row i sees only keys before i, so the first row sees nothing")
    return None


@fact(
    FACTS,
    "causal-off-by-one",
    student="Looking one word ahead is looking at the answer.",
    engineer="Under a causal mask row i does not see key i + 1: the mask is j <= i, not j <= i + 1. All earlier keys "
    "and one later one are taken for that, unless causal=False or window_after=1 is declared.",
    cause="the diagonal of the mask: triu(diagonal=2), tril(diagonal=1); or targets not shifted by one",
)
def causal_off_by_one(f: Findings) -> Failure | None:
    undeclared = f.declared.causal is None and not f.declared.windowed
    if not (undeclared and f.band == InferredWindow(None, 1)):  # nobody means that without saying so
        expects_causal(f)
    if f.band is not None and f.band.after == 1:
        declare = "causal=False, window_after=1" if f.declared.causal or f.subject.asks_causal else "window_after=1"
        return seen_instead(f, 11, f.visible(11, 11), "row i sees key i + 1", declare, causally=True)
    return None


@fact(
    FACTS,
    "causality",
    student="A word does not see the words after it.",
    engineer="Under a causal mask no output row depends on later keys or values, at any length, bit for bit.",
    cause="is_causal dropped on a fast path, a mask that is never applied, or one built for another length "
    "(transformers#45811, pytorch#99282); tril where triu was meant",
    explained_by=("causal-off-by-one",),
)
def causality(f: Findings) -> Failure | None:
    expects_causal(f)
    for n in LENGTHS:
        seen = f.visible(n, n)
        later = seen & ~band(n, n, None, 0)
        if bool(later.any()):
            _, head, row, key = later.nonzero()[0].tolist()
            words = f"of {n} keys, row {row} of head {head} sees key {key}"
            inverted = not bool((seen & band(n, n, None, 0)).any())
            words = f"row i sees only keys after i, so the last row sees nothing: {words}" if inverted else words
            return seen_instead(f, n, seen, words, "" if inverted else "causal=False")
        if (found := _reached_by_later(f, n)) is not None:
            return found
    if f.leaking is not None:
        found = _reached_by_later(f, 11, b=3)
        sequence, head, row, key = f.leaking
        words = f"in a batch, row {row} of head {head} of sequence {sequence} sees key {key}"
        return Failure(words) if found is None else replace(found, found=words)
    return None


def _reached_by_later(f: Findings, n: int, b: int = 1) -> Failure | None:
    def judge(inputs: Inputs) -> Complaint | None:
        n = inputs.q.shape[2]
        cut = n // 2
        if cut < 1 or inputs.k.shape[2] != n:
            return None
        other = replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
        other.k[:, :, cut:] = other.k[:, :, cut:].flip(-1) * 3 + 1
        other.v[:, :, cut:] = other.v[:, :, cut:].flip(-1) * 3 + 1
        before, after = (f.subject(x).detach()[:, :, :cut] for x in (inputs, other))
        if error(after, before) <= 1e-9 * max(1.0, before.abs().max().item()):
            return None
        later = []
        for x in ("k", "v"):
            later += [f"later_{x} = {x}.clone()", f"later_{x}[:, :, {cut}:] = {x}[:, :, {cut}:].flip(-1) * 3 + 1"]
        return Complaint(
            f"rows before {cut} of {n} change with keys and values from {cut} on",
            after,
            before,
            lambda ask: [
                *later,
                f"expected = {ask()}[:, :, :{cut}]",
                f"out = {ask('q', 'later_k', 'later_v')}[:, :, :{cut}]",
            ],
        )

    return failure(f.subject, f.subject.draw(n, n, b=b), judge, square=True)


@fact(
    FACTS,
    "window-off-by-one",
    student="Four neighbours are four neighbours, and yourself.",
    engineer="window_before=W shows W earlier keys and the own one: W + 1 in all.",
    cause="W taken for the number of keys in sight (W), or twice (2 W + 1) (transformers#39408, vllm#3385)",
)
def window_off_by_one(f: Findings) -> Failure | None:
    if not f.declared.windowed:
        raise NotApplicableError("no window was declared")
    found = _window(f)
    for name, want, have in (
        ("earlier", f.declared.window_before, found.before),
        ("later", f.declared.after, found.after),
    ):
        if want is not None and have is not None and abs(have - want) == 1:
            words = f"a row sees {have} {name} keys besides itself, not {want}"
            declare = f"window_{'before' if name == 'earlier' else 'after'}={have}"
            return seen_instead(f, want + 7, f.visible(11, 11), words, declare)
    return None


def _window(f: Findings) -> InferredWindow:
    """The band at a length that shows the declared window, its ends as far as they were seen."""
    n = max(f.declared.window_before or 0, f.declared.window_after or 0) + 7
    found = f.band_at(n)
    if found is None:
        raise NotApplicableError("what is visible is no window, which is another fact")
    return found


@fact(
    FACTS,
    "window",
    student="Everybody sees as far as was agreed, and no farther.",
    engineer="The visible band is the declared one; without a declared window, every earlier key is visible.",
    cause="the window dropped when another mask is there, counted in blocks, or applied to one side only",
    explained_by=("window-off-by-one", "causality", "causal-off-by-one"),
)
def window(f: Findings) -> Failure | None:
    if not f.declared.windowed and not f.declared.causal:
        raise NotApplicableError("neither a window nor causal was declared")
    for n in ((max(f.declared.window_before or 0, f.declared.window_after or 0) + 7), *LENGTHS[1:]):
        expected = band(n, n, f.declared.window_before, f.declared.after)
        seen = f.visible(n, n)
        if bool((seen != expected).any()):
            _, head, row, key = (seen != expected).nonzero()[0].tolist()
            verb = "sees" if bool(seen[0, head, row, key]) else "does not see"
            words = f"of {n} keys, row {row} of head {head} {verb} key {key}"
            return seen_instead(f, n, seen, words, _declaring(f.band))
    return None


@fact(
    FACTS,
    "full-view",
    student="Where nothing is hidden, everybody sees everything.",
    engineer="Declared neither causal nor windowed, every weight at q = 0 is positive.",
    cause="a causal mask left on in an encoder, top-k or a threshold on weights",
)
def full_view(f: Findings) -> Failure | None:
    if f.declared.causal is not False or f.declared.windowed:
        raise NotApplicableError("not declared to see everything (causal=False)")
    for n in LENGTHS:
        seen = f.visible(n, n)
        if not bool(seen.all()):
            _, head, row, key = (~seen).nonzero()[0].tolist()
            return seen_instead(
                f, n, seen, f"of {n} keys, row {row} of head {head} does not see key {key}", "causal=True"
            )
    return None


def _declaring(found: InferredWindow | None) -> str:
    """The declarations that make a band the expected one."""
    if found is None:
        return ""
    ends = {"window_before": found.before, "window_after": None if found.after == 0 else found.after}
    said = [f"{name}={end}" for name, end in ends.items() if end is not None]
    return ", ".join([f"causal={found.after == 0}", *said])


def _expects_a_band(f: Findings) -> None:
    if f.declared.view == "any":
        raise NotApplicableError("declared to see other keys in some heads, rows or lengths (view='any')")


def _seen_beside(f: Findings, n: int, expected: Callable[[Inputs], Tensor], words: str) -> Failure:
    """The failure of a view that is not the one that the rest of it promises."""
    judge = differs(f, lambda inputs: replace(f.view(inputs), visible=expected(inputs)), words)
    shown = failure(f.subject, f.subject.draw(n, n, b=1), judge, words, "view='any'", square=True)
    return shown or Failure(words, declare="view='any'")


@fact(
    FACTS,
    "heads-differ",
    student="Heads may think differently, but they all look at the same words.",
    engineer="At q = 0 the same keys are visible in every head, unless view='any' is declared.",
    cause="a mask that reaches one head only, or one of (b i j) that meets the axis of heads",
    explained_by=SEEN,
)
def heads_differ(f: Findings) -> Failure | None:
    _expects_a_band(f)
    for n in LENGTHS:
        seen = f.visible(n, n)
        other = seen != seen[:, :1]
        if bool(other.any()):
            _, head, row, key = other.nonzero()[0].tolist()
            verb = "sees" if bool(seen[0, head, row, key]) else "does not see"
            words = f"of {n} keys, row {row} of head {head} {verb} key {key}, unlike head 0"
            return _seen_beside(f, n, lambda inputs: f.view(inputs).visible[:, :1], words)
    return None


@fact(
    FACTS,
    "rows-differ",
    student="Every word sees as far as the others do.",
    engineer="What is visible is a band around the diagonal, the same in every row, unless view='any' is declared.",
    cause="an index that is off in some rows or blocks, a mask kept from another call, a block that is never visited",
    explained_by=(*SEEN, "heads-differ"),
)
def rows_differ(f: Findings) -> Failure | None:
    _expects_a_band(f)
    if f.band is not None:
        return None
    hull = f.reach(11)
    if hull is None:
        raise NotApplicableError("nothing is visible at all")
    missing = band(11, 11, hull.before, hull.after) & ~f.visible(11, 11)
    _, head, row, key = missing.nonzero()[0].tolist()
    words = f"of 11 keys, row {row} of head {head} does not see key {key}, though other rows see as far"
    return _seen_beside(f, 11, lambda x: band(x.q.shape[2], x.k.shape[2], hull.before, hull.after), words)


@fact(
    FACTS,
    "lengths-differ",
    student="What is agreed for a short text holds for a long one.",
    engineer="The band that is visible at 11 keys is visible at 7, 13, 37, 67, 131 and 301, unless view='any' is said.",
    cause="keys cut off at a block or at a context, a mask built for another length, a last block that is left out",
    explained_by=(*SEEN, "heads-differ", "rows-differ"),
)
def lengths_differ(f: Findings) -> Failure | None:
    _expects_a_band(f)
    found = f.band
    if found is None:
        raise NotApplicableError("what is visible is no band, which is another fact")
    for n in (7, 13, 37, 67, 131, LONG):
        try:
            seen = f.visible(n, n)
        except Exception:
            continue  # that it does not answer is another fact
        other = seen != band(n, n, found.before, found.after)
        if bool(other.any()):
            _, head, row, key = other.nonzero()[0].tolist()
            verb = "sees" if bool(seen[0, head, row, key]) else "does not see"
            words = f"of {n} keys, row {row} of head {head} {verb} key {key}, though of 11 it sees: {found}"
            return _seen_beside(f, n, lambda x: band(x.q.shape[2], x.k.shape[2], found.before, found.after), words)
    return None


def _steps(f: Findings, i: int, j: int) -> tuple[Tensor, Tensor]:
    """What is visible to the last i of j rows when only they are asked, and when all are."""
    if not f.subject.free_lengths:
        raise NotApplicableError("queries and keys have one number, so there are no steps through a cache here")
    if f.band is None or f.band == InferredWindow(None, None):
        raise NotApplicableError("every key is visible, or what is visible is no band")
    return f.visible(i, j), f.visible(j, j)[..., j - i :, :]


@fact(
    FACTS,
    "cache-mask-off-by-one",
    student="When old words are remembered, new ones still see all of them and themselves.",
    engineer="With j - i cached keys, row r sees the band around j - i + r, not around one place beside it.",
    cause="the position of the first query taken as the cache's length plus or minus one (transformers#30417)",
)
def cache_off_by_one(f: Findings) -> Failure | None:
    for i, j in STEPS:
        seen, _ = _steps(f, i, j)
        for shift in (-1, 1):
            assert f.band is not None
            moved = band(
                i, j, f.band.before and f.band.before - shift, None if f.band.after is None else f.band.after + shift
            )
            if (
                f.alignment != "top-left"
                and bool((seen == moved).all())
                and not bool((seen == _steps(f, i, j)[1]).all())
            ):
                side = "late" if shift > 0 else "early"
                words = f"{i} queries after {j - i} cached keys stand one place too {side}"
                return _seen_in_steps(f, i, j, words, _steps(f, i, j)[1])
    return None


@fact(
    FACTS,
    "window-in-decode",
    student="The window is as wide for the newest word as for all others.",
    engineer="One query against j cached keys sees the window that the last row of the whole sequence sees.",
    cause="a decode path for i = 1 without any mask (nanochat#452)",
    explained_by=("cache-mask-off-by-one",),
)
def window_in_decode(f: Findings) -> Failure | None:
    if f.band is None or f.band.before is None:
        raise NotApplicableError("there is no window")
    for i, j in STEPS:
        seen, whole = _steps(f, i, j)
        if f.alignment != "top-left" and bool((seen & ~whole).any()):
            _, _, row, key = (seen & ~whole).nonzero()[0].tolist()
            words = f"{i} of {j} rows: row {row} sees key {key}, which it does not when all {j} rows are asked"
            return _seen_in_steps(f, i, j, words, whole)
    return None


@fact(
    FACTS,
    "causality-in-decode",
    student="New words that come together do not see each other's future.",
    engineer="With cached keys, i > 1 queries are still causal among each other.",
    cause="causal only where i = j, or switched off as soon as a cache is there",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality", "causal-off-by-one"),
)
def causality_in_decode(f: Findings) -> Failure | None:
    expects_causal(f)
    for i, j in STEPS:
        seen, whole = _steps(f, i, j)
        if f.alignment != "top-left" and bool((seen & ~whole).any()):
            _, _, row, key = (seen & ~whole).nonzero()[0].tolist()
            return _seen_in_steps(f, i, j, f"{i} of {j} rows: row {row} sees key {key}, a later one", whole)
    return None


@fact(
    FACTS,
    "causal-alignment",
    student="With more keys than queries, the queries are the newest words, unless it was agreed otherwise.",
    engineer="Where i < j, queries stand at the end (bottom-right) or at the beginning (top-left), as declared.",
    cause="torch's is_causal is top-left, flash-attention's is bottom-right (pytorch#108108, flash-attention#581)",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality-in-decode", "causality"),
)
def causal_alignment(f: Findings) -> Failure | None:
    if f.declared.alignment is None:
        raise NotApplicableError("no alignment was declared")
    _steps(f, 3, 9)
    if f.alignment != f.declared.alignment:
        words = f"3 queries against 9 keys are aligned {f.alignment}, not {f.declared.alignment}"
        assert f.band is not None
        wanted = band(3, 9, f.band.before, f.band.after, f.declared.alignment)
        return _seen_in_steps(f, 3, 9, words, wanted, f"alignment={f.alignment!r}")
    return None


def _seen_in_steps(f: Findings, i: int, j: int, words: str, expected: Tensor, declare: str = "") -> Failure:
    """The failure of a view where there are fewer queries than keys; its example shows who sees whom in head 0."""
    inputs = f.subject.draw(i, j, b=1, h=1, dtype=torch.float32)
    inputs = inputs.having(q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    seen = f.subject.weights(inputs)[0, 0] > 0

    def show(ask: Ask) -> list[str]:
        return [f"weights = {ask.weights()}", "visible = weights[0, 0] > 0"]

    return Failure(words, example(f.subject, inputs, seen, expected[0, 0], show, {}), declare)


@fact(
    FACTS,
    "grouping",
    student="When several query heads share a key head, neighbours share.",
    engineer="Query head h uses key head h // (h_count / g_count): repeat (0 0 1 1), unless tile is declared.",
    cause="k.repeat(1, n, 1, 1) where repeat_interleave(n, 1) was meant (onnx#7274), for both or for one of k and v",
)
def grouping(f: Findings) -> Failure | None:
    if f.grouping is None:
        raise NotApplicableError("it has as many key heads as query heads")
    wanted = f.declared.grouping or "repeat"
    if f.grouping == wanted:
        return None
    words = f"query heads use key heads by {f.grouping}, not by {wanted}"
    if f.grouping.startswith("keys by"):
        words = f"query heads use {f.grouping}, so that weights go to the values of another head"
    inputs = f.subject.draw(2, 2, b=1, h=4, g=2)
    judge = differs(f, lambda inputs: replace(f.view(inputs), grouping=wanted), words)
    declare = f"grouping={f.grouping!r}" if f.grouping == "tile" else ""
    return failure(f.subject, inputs, judge, words, declare) or Failure(words, declare=declare)


@fact(
    FACTS,
    "key-order",
    student="Attention sees a set of keys. Their order says nothing, unless positions are put in on purpose.",
    engineer="At q = 0 all visible keys weigh alike, unless bias='alibi' or 'any' is declared: then by that at any c.",
    cause="a bias by index, a decay, or keys that are paired with values of other rows; a bias that is added before "
    "the scores are divided by sqrt(c)",
)
def key_order(f: Findings) -> Failure | None:
    wanted = f.declared.bias or "none"
    name = f.bias_name
    usual = name in ("none", "alibi, -m|i - j|", "alibi, +m j")  # other slopes may as well be a mistake
    if (found := _bias_by_width(f)) is not None:
        return found
    if wanted == "any" or name == wanted or (usual and f.declared.bias is None):
        return None
    if wanted == "alibi" and name.startswith("alibi"):
        return None
    declare = "bias='alibi'" if name.startswith("alibi") else "bias='any'"
    words = f"visible keys weigh differently at q = 0, by where they stand: {_row(f)}"
    if name == "none" or f.declared.bias is not None:
        words = f"scores carry {'no bias' if name == 'none' else name}, but {wanted} was declared"
    elif name != "other":
        words += f", by {name}"
    demanded = _alibi if wanted == "alibi" else lambda inputs: None
    judge = differs(f, lambda inputs: replace(f.view(inputs), bias=demanded(inputs)), words)
    found = failure(f.subject, f.subject.draw(7, 7, b=1), judge, words, declare, square=True)
    return found or Failure(words, declare=declare)


def _bias_by_width(f: Findings) -> Failure | None:
    """The failure of a bias that is another at another width of heads, as where it is scaled with q . k."""
    c, inputs = f.subject.draw(c=4).sizes[5], f.subject.draw(5, 5, b=1, c=12)
    h, other = inputs.sizes[1], inputs.sizes[5]
    narrow, wide = (f.bias(5, 5, inputs.causal, h, width) for width in (c, other))
    if narrow is None or wide is None or error(wide, narrow) <= max(10 * f.precise, 1e-4):
        return None
    share = ((narrow * wide).sum() / narrow.square().sum()).item()
    words = f"the bias by position depends on the width of heads: at c={other} it is {share:.4g} times that at c={c}"
    inputs = inputs.having(q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    got, expected = (f.flat_weights(5, 5, inputs.causal, h, c=width)[None] for width in (other, c))
    return Failure(words, example(f.subject, inputs, got, expected, lambda ask: [f"weights = {ask.weights()}"], {}))


def _alibi(inputs: Inputs) -> Tensor:
    _, h, _, i, j, _, _ = inputs.sizes
    apart = (torch.arange(j - i, j)[:, None] - torch.arange(j)[None, :]).abs()
    return -(alibi_slopes(h).double()[:, None, None] * apart)[None]


def _row(f: Findings) -> str:
    return ", ".join(f"{value:.4f}" for value in f.flat_weights(5, 5, f.subject.asks_causal)[0, -1].tolist())


@fact(
    FACTS,
    "scores",
    student="How much a key counts is decided by its product with the query, and by nothing else.",
    engineer="log(weight[j] / weight[j']) = scale q . (k[j] - k[j']) for all pairs, with one scale.",
    cause="q or k normalised, projected or rounded on the way, top-k, another function than exp, an undeclared cap, "
    "values permuted against keys",
    fatal=True,
    explained_by=("causality", "causal-off-by-one", "window", "grouping"),
)
def scores(f: Findings) -> Failure | None:
    if f.scores_fit:
        return None
    found = (
        f"weights do not follow exp(scale q . k): the best scale, {f.scores.scale:.4g}, leaves {f.scores.residual:.2g}"
    )
    declare = ", ".join(_shown(f))

    def demanded(inputs: Inputs) -> View:
        # where nothing fits, the rotary pairing that fits best says nothing
        return replace(f.view(inputs), scale=f.expected_scale(inputs), rotary=f.declared.rotary)

    for most in (1e-3, 1e-5):
        judge = differs(f, demanded, found, most)
        shown = failure(f.subject, f.subject.draw(7, 7, b=1), judge, found, declare)
        if shown is not None:
            return shown
    return Failure(found, declare=declare)


def _shown(f: Findings) -> Iterator[str]:
    """What an x-ray of the scores suggests to declare."""
    if f.shown is None:
        return
    if f.shown.softcap is not None and f.declared.softcap is None:
        yield f"softcap={f.shown.softcap:.4g}"
    both = any(note.startswith("q and k are normalised") for note in f.shown.notes)
    if both and f.shown.qk_norm in ("rms", "layer") and f.declared.qk_norm is None:
        scaled = f.shown.scale_named == "c ** -0.5" or f.shown.qk_norm == "layer"
        yield f"qk_norm={f.shown.qk_norm if scaled else 'l2'!r}"


@fact(
    FACTS,
    "scale",
    student="The longer the vectors, the larger their products: so they are divided by the square root of the length.",
    engineer="The factor of q . k is 1/sqrt(c), c being the width per head of q and k, unless a scale is declared; an "
    "argument for it changes it.",
    cause="scaled twice (in q and in the kernel), inverted, dropped, or from the width of the model, of v or of all "
    "heads (transformers#44380, x-transformers#190); an argument that is not handed on",
)
def scale(f: Findings) -> Failure | None:
    inputs = f.subject.draw(7, 7, b=1)
    have, want = f.scores.scale, f.expected_scale(f.subject.draw(7, 7, b=1, c=4))
    near = abs(have - want) <= 10 * f.precise * want
    # a declared number has to hold at every width and length
    if near and (f.scale_name == "1/sqrt(c)" if f.declared.scale is None else not f.scale_varies):
        return _scale_ignored(f)
    if not f.declared.sink and not all(_whole(f, c, n) for c, n in ((4, 7), (12, 7), (4, 9))):
        raise NotApplicableError("weights of a row do not sum to one, which is another fact, so no scale can be read")
    words = f"q . k is multiplied by {f.scale_name}, not by {'1/sqrt(c)' if f.declared.scale is None else want}"
    judge = differs(f, lambda inputs: replace(f.view(inputs), scale=f.expected_scale(inputs)), words)
    declare = f"scale={have:.6g}" + (f", width={inputs.sizes[5]}" if f.scale_varies else "")
    declare = declare if 0 < have < float("inf") else ""
    for asked in (inputs, f.subject.draw(7, 7, b=1, c=12), f.subject.draw(9, 9, b=1)):
        if (found := failure(f.subject, asked, judge, words, declare)) is not None:
            return found
    return Failure(words, declare=declare)


def _scale_ignored(f: Findings) -> Failure | None:
    """The failure of an argument for the scale that changes nothing. Zero is asked too: it may be a switch."""
    name = f.subject.scale_argument
    if name is None:
        return None

    def judge(inputs: Inputs) -> Complaint | None:
        plain = f.subject(inputs).detach()
        others = [f.subject(inputs, **{name: size}).detach() for size in (0.0, 0.37, 1.7)]
        truth = replace(f.view(inputs), scale=1.7).truth(inputs)
        if any(not torch.equal(plain, other) for other in others) or error(plain, truth) <= 1e-3:
            return None
        words = f"{name}=1.7 gives what is given without it"
        return Complaint(
            words, plain, truth.to(plain.dtype), lambda ask: [f"out = {ask('q', 'k', 'v', f'{name}=1.7')}"]
        )

    try:
        return failure(f.subject, f.subject.draw(7, 7, b=1), judge)
    except Exception:
        return None  # it takes no number, which is told among what was not asked


def _whole(f: Findings, c: int, n: int) -> bool:
    """Whether weights sum to one in every row that sees a key, at a width of heads and a number of keys."""
    inputs = f.subject.draw(n, n, b=1, c=c)
    return sums_to_one(f.subject(replace(inputs, v=torch.ones_like(inputs.v))).detach())


@fact(
    FACTS,
    "rotary-pairing",
    student="Rotary positions turn pairs of numbers: which two make a pair has to be agreed.",
    engineer="Pairs are (k, k + c/2) for half and (2k, 2k + 1) for interleaved, as declared.",
    cause="weights or code from a project with the other pairing (transformers#25199)",
)
def rotary_pairing(f: Findings) -> Failure | None:
    if f.declared.rotary is None:
        raise NotApplicableError("no rotary pairing was declared")
    if f.scores.rotary == f.declared.rotary:
        return None
    words = f"positions turn pairs by {f.scores.rotary or 'nothing'}, not by {f.declared.rotary}"
    judge = differs(f, lambda inputs: replace(f.view(inputs), rotary=f.declared.rotary), words)
    declare = "" if f.scores.rotary is None else f"rotary={f.scores.rotary!r}"
    return failure(f.subject, f.subject.draw(3, 3, b=1), judge, words, declare) or Failure(words, declare=declare)


@fact(
    FACTS,
    "last-rows-alone",
    student="A word stands where it stands, whether it is asked alone or together with those before it.",
    engineer="The last i of j rows, asked alone against all j keys, give what they give when all j rows are asked, "
    "unless alignment='top-left' is declared.",
    cause="positions of queries counted from 0: a bias or rotary phase that forgets how many keys the cache holds, as "
    "rotary(q) and rotary(k) that both start at 0 in a step of decoding",
    explained_by=("cache-mask-off-by-one", "window-in-decode", "causality-in-decode", "causality", "diagonal-hidden"),
)
def last_rows_alone(f: Findings) -> Failure | None:
    if not f.subject.free_lengths:
        raise NotApplicableError("queries and keys have one number, so there are no steps through a cache here")
    if f.declared.alignment == "top-left":
        raise NotApplicableError("declared to have queries at the beginning where there are fewer of them than keys")
    turned = f.alignment is None and f.scores.rotary is not None  # every key is seen, and positions still count
    if f.alignment != "bottom-right" and not turned:
        raise NotApplicableError("queries are not the newest words where there are fewer of them than keys")
    from_zero = f.rotary_alignment == "top-left"

    def judge(inputs: Inputs) -> Complaint | None:
        _, _, _, i, j, _, _ = inputs.sizes
        together = f.subject(inputs).detach()
        for rows in (1, j // 2):
            if i != j or not 0 < rows < j:
                continue
            whole, alone = together[:, :, -rows:], f.subject(replace(inputs, q=inputs.q[:, :, -rows:])).detach()
            if alone.shape == whole.shape and error(alone, whole) > 1e-4 * max(1.0, whole.abs().max().item()):
                words = f"the last {rows} of {j} rows give another answer alone than among all"
                words += ": rotary positions of queries are counted from 0" if from_zero else ""
                return Complaint(words, alone, whole, partial(_last_rows, f"[:, :, -{rows}:]"))
        return None

    for n in LENGTHS:
        inputs = f.subject.draw(n, n, b=1, dtype=torch.float32)
        found = failure(f.subject, inputs, judge, declare="alignment='top-left'" if turned else "", square=True)
        if found is not None:
            return found
    return None


def _last_rows(rows: str, ask: Ask) -> list[str]:
    """How the last rows are asked among all and alone."""
    return [f"expected = {ask()}{rows}", f"out = {ask(f'q{rows}')}"]
