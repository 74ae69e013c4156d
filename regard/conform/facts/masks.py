"""Facts about masks that are handed over: that they are obeyed, wholly, and that nothing hidden gets through."""

from dataclasses import replace

import torch

from regard.base.registry import Registry
from regard.conform.callable_under_test import DOCUMENTS, Subject, polarity
from regard.conform.conventions import LONG, Findings, InferredPadding, centred, half_hidden
from regard.conform.example import Ask, example
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import refusal
from regard.conform.facts.numbers import far, gradient_lines, gradients, with_gradients
from regard.conform.inputs import Inputs, exact
from regard.conform.shrink import Complaint, failure
from regard.conform.tolerance import error

FACTS: Registry[Fact] = Registry("fact")

PER_SEQUENCE = ("b h i j", "b 1 i j", "(b h) i j", "b i j", "b 1 1 j", "b j")
PER_HEAD = ("b h i j", "(b h) i j")


def takes_mask(f: Findings) -> None:
    if f.subject.mask is None and f.padding is not None:
        name = f.padding.name
        raise NotApplicableError(
            f"it has no argument for a mask but {name}; declare mask_argument={name!r} to ask by it"
        )
    if f.subject.mask is None:
        raise NotApplicableError("it has no argument for a mask; declare mask_argument if it has one by another name")


def obeys_mask(f: Findings) -> None:
    takes_mask(f)
    if f.subject.mask is not None and not f.subject.mask.obeyed:
        raise NotApplicableError("its mask is not obeyed, which is another fact")


def masked(f: Findings, inputs: Inputs, apart: bool = False) -> Inputs:
    """The call under a random mask that leaves every row its first visible key, or the first of all."""
    b, h, _, i, j, _, _ = inputs.sizes
    source = torch.Generator().manual_seed(f.subject.seed + 5)
    assert f.subject.mask is not None
    rows = i if f.subject.mask.per_row else 1
    sizes = (b, h, rows, j) if apart else (1, 1, rows, j)
    visible = torch.rand(sizes, generator=source) < 0.6
    visible = visible | torch.eye(rows, j, dtype=torch.bool)
    return replace(inputs, visible=visible.expand(b, h, i, j).clone(), causal=False)


@fact(
    FACTS,
    "mask-ignored",
    student="What is covered is not seen.",
    engineer="A key that the mask hides weighs exactly zero.",
    cause="the mask is not handed on, one of 1 and 0 is multiplied with the scores or added to them, or it is joined "
    "to another mask by OR in place of AND",
)
def mask_ignored(f: Findings) -> Failure | None:
    takes_mask(f)
    argument = f.subject.mask
    assert argument is not None
    if argument.polarity is not None:
        return None
    plain = f.subject.draw(5, 5, b=1, causal=False)
    whole = torch.ones(*plain.q.shape[:3], 5, dtype=torch.bool)
    moves = error(f.subject(half_hidden(plain)).detach(), f.subject(replace(plain, visible=whole)).detach()) > 1e-6
    told = "changes the weights, but hides no key" if moves else "is accepted, but hides no key"
    unmasked, under = (f.flat_weights(5, 5, False, masked=masked) > 0 for masked in (False, True))
    more = ": it shows keys that are hidden without it" if bool((under & ~unmasked).any()) else ""
    return _covered(f, f"{argument.name} {told}{more}")


def _covered(f: Findings, words: str, subject: Subject | None = None, declare: str = "") -> Failure:
    """The failure of a mask that hides key 1: the weights at q = 0, and those that it should leave."""
    subject = subject or f.subject
    inputs = f.subject.draw(3, 3, b=1, h=1, causal=False, dtype=torch.float32)
    visible = torch.ones(*inputs.q.shape[:3], 3, dtype=torch.bool)
    visible[..., 1] = False
    inputs = replace(inputs, q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    plain = f.subject.weights(inputs)
    inputs = replace(inputs, visible=visible)
    left = plain * visible
    expected = left / left.sum(-1, keepdim=True).clamp(min=1e-30)

    def show(ask: Ask) -> list[str]:
        return [f"weights = {ask.weights()}"]

    return Failure(words, example(subject, inputs, subject.weights(inputs), expected, show, {}), declare)


@fact(
    FACTS,
    "mask-transposed",
    student="The mask says which keys a row sees, not which rows a key is seen by.",
    engineer="mask[i, j] is about query i and key j: hiding column 1 hides key 1, not row 1.",
    cause="mask.transpose(-2, -1), masked_fill on axis -2, (b j) expanded to [:, :, None]",
)
def mask_transposed(f: Findings) -> Failure | None:
    takes_mask(f)
    assert f.subject.mask is not None
    if f.subject.mask.polarity != "transposed":
        return None
    return _covered(f, f"{f.subject.mask.name}[i, j] hides row j, not key j")


@fact(
    FACTS,
    "boolean-mask-added",
    student="True and False are not one and zero.",
    engineer="A boolean mask is obeyed or refused, not added to the scores as 1 and 0.",
    cause="scores + mask with a boolean mask, which torch takes for numbers; declare mask_values='additive' if no "
    "boolean one is ever handed over",
)
def boolean_mask_added(f: Findings) -> Failure | None:
    obeys_mask(f)
    assert f.subject.mask is not None
    if f.declared.mask_values == "additive":
        raise NotApplicableError("declared to take additive masks only")
    if not f.subject.mask.boolean_added:
        return None
    words = f"a boolean {f.subject.mask.name} is accepted, but hides nothing: only a mask of 0 and -inf does"
    boolean = replace(f.subject, mask=replace(f.subject.mask, values="boolean", polarity="keep"))
    return _covered(f, words, boolean, "mask_values='additive'")


@fact(
    FACTS,
    "mask-polarity",
    student="Whether a cross means look here or do not look here has to be agreed.",
    engineer="True means keep (SDPA, flex) or drop (nn.MultiheadAttention), as declared.",
    cause="a mask made for the other convention; ~mask missing or too much (pytorch#170400)",
)
def mask_polarity(f: Findings) -> Failure | None:
    wanted = f.declared.mask_polarity
    if wanted is None:
        raise NotApplicableError("no polarity was declared")
    padding = f.padding
    if padding is not None and padding.polarity is not None:
        if padding.polarity != wanted:
            return _padded_otherwise(f, padding, wanted)
        if f.subject.mask is None:
            return None
    obeys_mask(f)
    assert f.subject.mask is not None
    if f.subject.mask.values == "additive":
        raise NotApplicableError("its mask is added to the scores, so it has no True")
    have = f.subject.mask.polarity
    if have == wanted:
        return None
    words = f"True means {have} in {f.subject.mask.name}, not {wanted}"
    other = replace(f.subject, mask=replace(f.subject.mask, polarity=wanted))

    def judge(inputs: Inputs) -> Complaint | None:
        truth, got = f.view(inputs).truth(inputs), other(inputs).detach()
        return None if error(got, truth) < 1e-3 else Complaint(words, got, truth.to(got.dtype))

    return failure(
        other, masked(f, f.subject.draw(5, 5, b=1, dtype=torch.float32)), judge, words, f"mask_polarity={have!r}"
    )


def _padded_otherwise(f: Findings, padding: InferredPadding, wanted: str) -> Failure:
    """The failure of an argument for padded keys in which True means the other thing."""
    inputs, real = f.padded()
    given = real if wanted == "keep" else ~real
    seen = (f.subject.weights(inputs, **{padding.name: given})[1, 0, -1] > 0).tolist()

    def show(ask: Ask) -> list[str]:
        name = padding.name
        return [
            f"{name} = torch.tensor({given.tolist()})",
            f"weights = {ask.weights(f'{name}={name}')}",
            "seen = (weights[1, 0, -1] > 0).tolist()",
        ]

    words = f"True means {padding.polarity} in {padding.name}, not {wanted}"
    code = example(f.subject, inputs, seen, real[1].tolist(), show, {})
    return Failure(words, code, f"mask_polarity={padding.polarity!r}")


@fact(
    FACTS,
    "mask-per-row",
    student="Every word has its own list of words that it may look at.",
    engineer="A mask is read row by row: mask[..., i, :] is about query i, not the mask of one row for all.",
    cause="mask[..., :1, :], mask[..., 0, :] or a mask of (b j) broadcast over queries where (b i j) was handed over",
)
def mask_per_row(f: Findings) -> Failure | None:
    obeys_mask(f)
    assert f.subject.mask is not None
    if not f.subject.mask.per_row:
        raise NotApplicableError(f"its mask has the axes ({f.subject.mask.axes})")

    def judge(inputs: Inputs) -> Complaint | None:
        _, h, _, i, j, c, _ = inputs.sizes
        assert inputs.visible is not None
        view = f.view(inputs)
        seen = f.subject.weights(replace(inputs, q=torch.zeros_like(inputs.q))) > 0
        unmasked = (f.flat_weights(i, j, inputs.causal, h, masked=True, c=c) > 0)[None]
        for row in range(i):
            used = unmasked & inputs.visible[:, :, row : row + 1]
            if torch.equal(seen, used) and not torch.equal(seen, view.visible.expand_as(seen)):
                got, truth = f.subject(inputs).detach(), view.truth(inputs)
                if error(got, truth) > 1e-3:
                    return Complaint(f"the mask of row {row} is used for all rows", got, truth.to(got.dtype))
        return None

    return failure(f.subject, masked(f, f.subject.draw(5, 5, b=1, causal=False, dtype=torch.float32)), judge)


@fact(
    FACTS,
    "masked-outputs",
    student="Under a mask the answer is the weighted mean of what is visible.",
    engineer="Outputs under a random mask are at most 2x as far from float64 as the naive method, plus one ulp.",
    cause="a mask applied after the softmax, transposed, or only where i = j",
    explained_by=("outputs", "mask-per-row"),
)
def masked_outputs(f: Findings) -> Failure | None:
    obeys_mask(f)
    # several blocks of a fast kernel are asked with few queries, where that is free
    for i, j in ((5, 5), (3, 7), (LONG, LONG) if not f.subject.free_lengths else (7, LONG)):
        if i == j or (f.subject.free_lengths and f.band is not None and f.band.after is None):
            inputs = masked(f, f.subject.draw(i, j, b=1 if j == LONG else 2, causal=False, dtype=torch.float32))
            if j == LONG and refusal(f, inputs) is not None:
                continue  # longer than it takes
            if (found := failure(f.subject, inputs, lambda inputs: far(f, inputs))) is not None:
                return found
    return None


@fact(
    FACTS,
    "additive-mask-scaled",
    student="What is added to the scores is added as it is.",
    engineer="An additive mask of finite numbers is added to scale q . k: it is not scaled with it, nor clamped.",
    cause="(q . k + mask) / sqrt(c) where q . k / sqrt(c) + mask was meant, so that biases come out too small",
    explained_by=("masked-outputs", "mask-per-row", "boolean-mask-added"),
)
def additive_mask_scaled(f: Findings) -> Failure | None:
    obeys_mask(f)
    assert f.subject.mask is not None
    argument = replace(f.subject.mask, values="additive")
    inputs = f.subject.draw(5, 5, b=1, h=1, causal=False)
    inputs = inputs.having(q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    covered = half_hidden(inputs).visible
    assert covered is not None
    if polarity(replace(f.subject, mask=argument), inputs, covered) != "keep":
        raise NotApplicableError("its mask is not added to the scores")
    added = torch.linspace(-1, 1, 5, dtype=inputs.dtype).sin().expand(*inputs.q.shape[:3], 5)
    mask = argument.shaped(added).contiguous()
    nothing = torch.zeros_like(mask)
    plain, weights = (f.subject.weights(inputs, **{argument.name: given}).double() for given in (nothing, mask))
    seen = (plain > 0) & (weights > 0)
    logs = centred(torch.where(seen, weights, 1.0).log() - torch.where(seen, plain, 1.0).log(), seen)
    want = centred(added.double(), seen)
    share = ((logs * want).sum() / want.square().sum().clamp(min=1e-30)).item()
    if abs(share) < 1e-3:
        raise NotApplicableError("its mask only hides: finite numbers in it change nothing")
    if (logs - want).abs().max().item() <= max(f.precise, 1e-4):
        return None
    expected = torch.where(seen, plain * added.double().exp(), 0.0)

    def show(ask: Ask) -> list[str]:
        name = argument.name
        return [f"{name} = {exact(mask)}", f"weights = {ask.weights(f'{name}={name}')}"]

    shared = (logs - share * want).abs().max().item() <= max(f.precise, 1e-4)
    words = (
        f"numbers in {argument.name} are {f'multiplied by {share:.4g}' if shared else 'changed'} before they are added"
    )
    expected = (expected / expected.sum(-1, keepdim=True)).to(weights)
    return Failure(words, example(f.subject, inputs, weights.to(inputs.dtype), expected.to(inputs.dtype), show, {}))


@fact(
    FACTS,
    "mask-per-sequence",
    student="Every sentence has its own mask.",
    engineer="A mask with a batch axis is read for each batch entry, not only for the first.",
    cause="mask[0], or a mask expanded over the wrong axis",
    explained_by=("masked-outputs", "mask-per-row"),
)
def mask_per_sequence(f: Findings) -> Failure | None:
    obeys_mask(f)
    assert f.subject.mask is not None
    if f.subject.mask.axes not in PER_SEQUENCE:
        raise NotApplicableError(f"its mask has the axes ({f.subject.mask.axes})")
    inputs = masked(f, f.subject.draw(5, 5, b=3, causal=False, dtype=torch.float32), apart=True)
    visible = inputs.visible
    assert visible is not None
    inputs = replace(inputs, visible=visible[:, :1].expand_as(visible).clone())
    return failure(f.subject, inputs, lambda inputs: _apart(f, inputs))


@fact(
    FACTS,
    "mask-per-head",
    student="Every head may have a mask of its own.",
    engineer="A mask with an axis for heads is read for each head, not only for the first.",
    cause="mask[:, 0], or heads and batch entries flattened in the other order",
    explained_by=("masked-outputs", "mask-per-sequence", "mask-per-row"),
)
def mask_per_head(f: Findings) -> Failure | None:
    obeys_mask(f)
    assert f.subject.mask is not None
    if f.subject.mask.axes not in PER_HEAD:
        raise NotApplicableError(f"its mask has the axes ({f.subject.mask.axes})")
    inputs = masked(f, f.subject.draw(5, 5, b=2, causal=False, dtype=torch.float32), apart=True)
    return failure(f.subject, inputs, lambda inputs: _apart(f, inputs))


def _apart(f: Findings, inputs: Inputs) -> Complaint | None:
    truth, got = f.view(inputs).truth(inputs), f.subject(inputs).detach()
    if error(got, truth) < 1e-3:
        return None
    return Complaint("the mask of another sequence or head is used", got, truth.to(got.dtype))


@fact(
    FACTS,
    "blind-row-nan",
    student="Who may look at nothing brings back nothing, not an error that spreads.",
    engineer="A row whose mask hides every key gives zeros, not NaN, unless blind_rows='nan' is declared.",
    cause="softmax over a row of -inf is 0 / 0 (pytorch#41508, #103749)",
    explained_by=("mask-per-row",),
)
def blind_row_nan(f: Findings) -> Failure | None:
    return _blind(f, "nan", "a row that sees nothing is NaN")


@fact(
    FACTS,
    "blind-row-mean",
    student="Who may look at nothing does not bring back the mean of everything.",
    engineer="A row whose mask hides every key gives zeros, not the mean of hidden values, unless blind_rows='mean'.",
    cause="masked_fill(finfo.min): where all scores are equally small, softmax shares evenly (pytorch#160064)",
    explained_by=("mask-per-row",),
)
def blind_row_mean(f: Findings) -> Failure | None:
    return _blind(f, "mean", "a row that sees nothing is the mean of what is hidden from it")


@fact(
    FACTS,
    "blind-row-unmasked",
    student="Who may look at nothing does not look at everything.",
    engineer="A row whose mask hides every key gives zeros, not what it gives unmasked, unless blind_rows='unmasked'.",
    cause="scores + (1 - mask) * -1e4: where the same number is added to all scores, softmax takes it off again",
    explained_by=("mask-per-row",),
)
def blind_row_unmasked(f: Findings) -> Failure | None:
    return _blind(f, "unmasked", "a row that sees nothing is answered as if nothing were hidden from it")


def _blind(f: Findings, kind: str, words: str) -> Failure | None:
    obeys_mask(f)
    wanted = f.declared.blind_rows or "zero"
    have = f.blind_rows
    if have == "refused":
        raise NotApplicableError("it refuses a row that sees nothing")
    broken = have != wanted and (have == kind or (kind == "unmasked" and have == "other"))
    if not broken:
        return None

    def judge(inputs: Inputs) -> Complaint | None:
        truth, got = f.view(inputs).truth(inputs), f.subject(inputs).detach()
        return None if error(got, truth) < 1e-4 else Complaint(words, got, truth.to(got.dtype))

    declare = f"blind_rows={have!r}" if have in ("nan", "mean", "unmasked") else ""
    inputs = f.blinded(f.subject.draw(5, 5, b=1, causal=False, dtype=torch.float32))
    words = words if have == kind else "a row that sees nothing is neither zero, NaN, a mean nor what it is unmasked"
    return failure(f.subject, inputs, judge, words, declare) or Failure(words, declare=declare)


@fact(
    FACTS,
    "blind-row-gradient",
    student="A row that sees nothing teaches nothing, and above all no nonsense.",
    engineer="A blind row sends zero gradients back, not NaN: nan_to_num on the output hides the NaN only forward.",
    cause="softmax(-inf, ...) followed by nan_to_num or where (pytorch#103749)",
    explained_by=("blind-row-nan", "mask-per-row"),
)
def blind_row_gradient(f: Findings) -> Failure | None:
    obeys_mask(f)
    if (f.declared.blind_rows or f.blind_rows) == "nan" or f.blind_rows == "refused":
        raise NotApplicableError("a blind row is NaN or refused, as declared or found")

    def judge(inputs: Inputs) -> Complaint | None:
        for name, gradient in gradients(f, inputs).items():
            if bool(gradient.isnan().any()):
                words = f"a row that sees nothing makes the gradient of {name} NaN"
                return Complaint(words, gradient, gradient.nan_to_num(0.0), gradient_lines(name))
        return None

    inputs = f.blinded(f.subject.draw(5, 5, b=1, causal=False, dtype=torch.float32))
    if not f.subject(with_gradients(inputs)).requires_grad:
        raise NotApplicableError("its output carries no gradient")
    return failure(f.subject, inputs, judge)


@fact(
    FACTS,
    "masked-gradient",
    student="What was not seen cannot have been at fault.",
    engineer="A key that no query may see gets gradients of exactly zero in k and v.",
    cause="a backward pass that forgets the mask; a finite mask value",
    explained_by=(
        "mask-per-row",
        "masked-outputs",
        "mask-ignored",
        "blind-row-nan",
        "blind-row-mean",
        "blind-row-unmasked",
        "gradient-of-k",
        "gradient-of-v",
    ),
)
def masked_gradient(f: Findings) -> Failure | None:
    obeys_mask(f)
    inputs = half_hidden(f.subject.draw(5, 5, b=1, causal=False, dtype=torch.float32))
    if not f.subject(with_gradients(inputs)).requires_grad:
        raise NotApplicableError("its output carries no gradient")

    def judge(inputs: Inputs) -> Complaint | None:
        assert inputs.visible is not None
        unseen = ~inputs.visible.any(2)[:, :1, :, None]
        got = gradients(f, inputs)
        for name in ("k", "v"):
            if bool((got[name] * unseen).any()):
                words = f"a key that nobody may see gets a gradient of {name}"
                return Complaint(words, got[name], got[name].masked_fill(unseen, 0.0), gradient_lines(name))
        return None

    return failure(f.subject, inputs, judge)


def _poisoned(f: Findings, name: str) -> Failure | None:
    obeys_mask(f)
    if f.declared.poison == "reaches":
        raise NotApplicableError("declared to let NaN behind a mask through")

    what = "key" if name == "k" else "value"

    def judge(inputs: Inputs) -> Complaint | None:
        assert inputs.visible is not None
        if not bool(inputs.visible.any(-1).all()):
            return None  # a row that sees nothing is another fact
        clean = f.subject(inputs.having(**{name: getattr(inputs, name).nan_to_num(0.0)})).detach()
        got = f.subject(inputs).detach()
        if not bool(got.isnan().any()):
            return None
        return Complaint(f"NaN in a {what} that the mask hides from everybody reaches the output", got, clean)

    inputs = half_hidden(f.subject.draw(5, 5, b=1, causal=False, dtype=torch.float32))
    assert inputs.visible is not None
    unseen = ~inputs.visible.any(2)[:, :1, :, None]
    poisoned = inputs.having(**{name: getattr(inputs, name).masked_fill(unseen, torch.nan)})
    return failure(f.subject, poisoned, judge, declare="poison='reaches'")


@fact(
    FACTS,
    "nan-in-masked-value",
    student="What is hidden may be anything, even garbage: nobody looks at it.",
    engineer="NaN or infinity in a value that the mask hides from all rows reaches no output.",
    cause="weight 0 times NaN is NaN (pytorch#101967); padding and unused cache slots hold anything",
    explained_by=("mask-per-row",),
)
def nan_in_masked_value(f: Findings) -> Failure | None:
    return _poisoned(f, "v")


@fact(
    FACTS,
    "nan-in-masked-key",
    student="A key that is hidden may be garbage too.",
    engineer="NaN in a key that the mask hides from all rows reaches no output.",
    cause="the mask is added to the scores (NaN - inf is NaN) instead of replacing them",
    explained_by=("mask-per-row",),
)
def nan_in_masked_key(f: Findings) -> Failure | None:
    return _poisoned(f, "k")


@fact(
    FACTS,
    "causal-beside-mask",
    student="Two rules hold together: neither later words nor what is covered.",
    engineer="The causal argument still hides later keys when a mask is given too, or the call is refused.",
    cause="if mask is not None: ... else: causal (pytorch#118972, x-transformers)",
    explained_by=("causality",),
)
def causal_beside_mask(f: Findings) -> Failure | None:
    obeys_mask(f)
    if not f.subject.asks_causal and not f.declared.causal:
        raise NotApplicableError("it is not declared to be causal, and has no argument for it that works alone")
    inputs = f.subject.draw(6, 6, b=1, dtype=torch.float32)
    b, h, _, i, j, _, _ = inputs.sizes
    visible = torch.ones(b, h, i, j, dtype=torch.bool)
    inputs = replace(inputs, visible=visible, q=torch.zeros_like(inputs.q))
    try:
        weights = f.subject.weights(inputs)
    except Exception as refused:
        raise NotApplicableError("it refuses a mask beside its causal argument") from refused
    later = weights.triu(1)
    if not bool((later != 0).any()):
        return None
    _, _, row, key = later.nonzero()[0].tolist()
    assert f.subject.mask is not None
    words = f"where {f.subject.mask.name} is given and hides nothing, row {row} sees key {key}"

    def judge(inputs: Inputs) -> Complaint | None:
        weights = f.subject.weights(inputs)
        if not bool(weights.triu(1).any()):
            return None
        early = weights.tril()
        show = "weights = {}".format
        return Complaint(words, weights, early / early.sum(-1, keepdim=True), lambda ask: [show(ask.weights())])

    return failure(f.subject, inputs, judge, words, square=True)


@fact(
    FACTS,
    "padding-leaks",
    student="Filling words are no words.",
    engineer="What stands in padded keys and values changes no output row of a real token.",
    cause="the padding mask reaches only the first sequence or layer, is inverted, or is dropped beside a causal one",
)
def padding_leaks(f: Findings) -> Failure | None:
    padding = f.padding
    if padding is None:
        raise NotApplicableError("it has no argument for padded keys")
    if padding.refused:
        raise NotApplicableError(f"{padding.name} of (b j) booleans is refused: {padding.refused}")
    if padding.polarity is not None:
        return None
    (inputs, real), name = f.padded(), padding.name

    def show(ask: Ask) -> list[str]:
        return [
            f"real = torch.tensor({real.tolist()})",
            "obeyed = []",
            "for keep in (real, ~real):",
            f"    weights = {ask.weights(f'{name}=keep')}",
            "    obeyed.append(bool((weights[1, :, :3, 3:] == 0).all() and (weights[0, :, -1] > 0).all()))",
            "obeyed = any(obeyed)",
        ]

    return Failure(
        f"{name} of (b j) booleans, in neither polarity, hides the padded keys of the second sequence",
        example(f.subject, inputs, False, True, show, {}),
    )


@fact(
    FACTS,
    "packed-documents-leak",
    student="Two texts in one row stay two texts.",
    engineer="With document ids, no row sees a key of another document.",
    cause="ids not handed on, compared along one axis only, or only the borders reset (transformers#46634)",
)
def packed_documents_leak(f: Findings) -> Failure | None:
    name = next((name for name in DOCUMENTS if name in f.subject.probe.parameters), None)
    if name is None:
        raise NotApplicableError("it has no argument for document ids")
    inputs = f.subject.draw(6, 6, b=2, dtype=torch.float32)
    ids = torch.tensor([[4, 4, 1, 1, 1, 3], [0, 0, 0, 2, 2, 2]])
    try:
        flat = f.subject.weights(replace(inputs, q=torch.zeros_like(inputs.q)), **{name: ids})
    except Exception as refused:
        raise NotApplicableError(f"{name} of (b j) numbers is refused: {str(refused)[:80]}") from refused
    other = (ids[:, None, :, None] != ids[:, None, None, :]).expand_as(flat)
    if not bool(flat[other].any()):
        return None
    b, h, row, key = ((flat != 0) & other).nonzero()[0].tolist()
    simple = replace(inputs, q=torch.zeros_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    weight = f.subject.weights(simple, **{name: ids})[b, h, row, key].item()

    def show(ask: Ask) -> list[str]:
        return [
            f"{name} = torch.tensor({ids.tolist()})",
            f"weight = {ask.weights(f'{name}={name}')}[{b}, {h}, {row}, {key}].item()",
        ]

    return Failure(
        f"row {row} of document {ids[b, row]} sees key {key} of document {ids[b, key]}",
        example(f.subject, simple, weight, 0.0, show, {}),
    )
