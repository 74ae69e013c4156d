"""Facts about masks passed to a call: they hide the right keys, and nothing hidden reaches the output."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import DOCUMENT_NAMES, PADDING_NAMES, AttentionUnderTest
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, write_example, write_weights
from regard.conform.fact import BROKEN, POLICY, Fact, Failure, NotApplicableError, fact, first_failure
from regard.conform.facts.behaviour import raised_by
from regard.conform.facts.numbers import detect_error, gradient_lines, gradients, with_gradients
from regard.conform.inputs import AttentionInputs, hide_later_half, tensor_code
from regard.conform.shrink import Violation, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.see.measure.mask_argument import MaskArgument, hide_one_row, mask_polarity
from regard.see.measure.stats import centre_rows

FACTS: Registry[Fact] = Registry("fact")


def require_mask_argument(a: MeasuredAttention) -> MaskArgument:
    """Return the mask argument of the attention; raise NotApplicableError if it has none."""
    if a.mask is None and a.padding is not None:
        name = a.padding.name
        raise NotApplicableError(
            f"its only mask argument is {name}; declare mask_argument={name!r} to test all facts of masks with it"
        )
    if a.mask is None:
        raise NotApplicableError("it has no mask argument; declare mask_argument if it has one with another name")
    return a.mask


def require_working_mask(a: MeasuredAttention) -> MaskArgument:
    """Return the mask argument of the attention; raise NotApplicableError if it has none or the mask hides no key."""
    mask = require_mask_argument(a)
    if not mask.works:
        raise NotApplicableError("its mask does not hide keys: the fact `mask-ignored`")
    return mask


def random_mask(a: MeasuredAttention, inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a random mask under which every row sees a key.

    The mask differs between batch entries, heads and queries, as far as the mask argument has these axes.
    """
    b, h, i, j = inputs.pair_shape
    source, axes = torch.Generator().manual_seed(a.declared.seed + 5), require_mask_argument(a).axes
    sizes = [size if axis in axes else 1 for axis, size in zip("bhi", (b, h, i), strict=True)]
    visible = torch.rand(*sizes, j, generator=source) < 0.6
    visible = visible | torch.eye(sizes[2], j, dtype=torch.bool)
    return replace(inputs, visible=visible.expand(b, h, i, j).clone(), causal=False)


def detect_wrong_output(
    a: MeasuredAttention,
    words: str,
    inputs: AttentionInputs,
    most: float = 1e-3,
    tested: AttentionUnderTest | None = None,
) -> Violation | None:
    """Return a violation if the output differs from the expected output, else None.

    words   describes the violation
    most    smallest absolute difference that is a violation
    tested  the attention to call; None is `a`
    """
    expected, got = a.reference(inputs), (tested or a)(inputs).detach()
    return None if max_error(got, expected) < most else Violation(words, got, expected.to(got.dtype))


@fact(FACTS, "mask-ignored")
def mask_ignored(a: MeasuredAttention) -> Failure | None:
    """A hidden key is not seen.

    A key that the mask hides has a weight of exactly zero. Column 1 of the mask hides key 1, not query 1.

    Usual causes: the mask is not passed on; a mask of 1 and 0 is multiplied with the scores or added to them; the mask
    is combined with another mask by OR in place of AND; the axes of queries and keys are exchanged, as in
    mask.transpose(-2, -1), or in mask[:, :, None] for a mask of shape (b, j)
    """
    argument = require_mask_argument(a)
    if argument.polarity == "transposed":
        return _hides_key_one(a, f"{argument.name}[i, j] hides row j, not key j")
    if argument.works:
        return None
    plain = a.random_inputs(5, 5, b=1, causal=False)
    whole = replace(plain, visible=torch.ones(plain.pair_shape, dtype=torch.bool))
    changes = max_error(a(hide_later_half(plain)).detach(), a(whole).detach()) > 1e-6
    words = f"{argument.name} {'changes the weights' if changes else 'is accepted'}, but hides no key"
    if a.mask_shows_more:
        words += ": it shows keys that are hidden without it"
    return _hides_key_one(a, words)


def _hides_key_one(
    a: MeasuredAttention, words: str, argument: MaskArgument | None = None, declare: str = ""
) -> Failure:
    """Return a `Failure` for an attention whose weights are wrong under a mask that hides key 1.

    Its example computes the attention weights with q = 0, so that they depend only on mask and bias. The expected
    weights are 0 at key 1.

    words     describes the failure
    argument  the mask argument to use; None uses the mask argument of the attention
    declare   options of `check` that declare this behaviour as intended
    """
    tested = a if argument is None else replace(a, mask=argument)
    inputs = a.random_inputs(3, 3, b=1, h=1, causal=False, dtype=torch.float32).neutral()
    visible = torch.ones(inputs.pair_shape, dtype=torch.bool)
    visible[..., 1] = False
    left = a.weights(inputs) * visible
    expected = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
    inputs = replace(inputs, visible=visible)
    return Failure(words, write_example(tested, inputs, tested.weights(inputs), expected, write_weights), declare)


@fact(FACTS, "boolean-mask-added", grade=POLICY)
def boolean_mask_added(a: MeasuredAttention) -> Failure | None:
    """A Boolean mask hides keys; it is not a matrix of the numbers 1 and 0.

    A boolean mask hides keys, or the call raises an error; the mask is not added to the scores as 1 and 0.

    Usual causes: scores + mask with a boolean mask, which torch converts to numbers; declare mask_values='additive'
    if a boolean mask is never passed
    """
    argument = require_working_mask(a)
    if a.declared.mask_values == "additive":
        raise NotApplicableError("mask_values='additive' was declared")
    if not argument.boolean_added:
        return None
    words = f"a boolean {argument.name} is accepted, but hides nothing: only a mask of 0 and -inf does"
    return _hides_key_one(a, words, replace(argument, values="boolean", polarity="keep"), "mask_values='additive'")


@fact(FACTS, "mask-polarity", grade=POLICY)
def mask_polarity_fact(a: MeasuredAttention) -> Failure | None:
    """Whether True means visible or hidden is a convention.

    True means that a key is visible (keep, as in SDPA and FlexAttention) or hidden (drop, as in nn.MultiheadAttention),
    as the options declare. Without a declaration, keep is expected.

    Usual causes: a mask made for the other convention; a missing or extra ~mask (pytorch#170400)
    """
    declared = a.declared.mask_polarity
    # what True means in an argument for padded keys differs too much between projects to be expected
    argument = a.padding if declared and a.padding is not None and a.padding.works else require_working_mask(a)
    if argument.values == "additive":
        raise NotApplicableError("its mask is added to the scores, so it has no True")
    have, wanted = argument.polarity, declared or "keep"
    if have == wanted and a.mask is not None and a.mask.works:
        argument, have = a.mask, a.mask.polarity
    if have == wanted:
        return None
    words = f"True means {have} in {argument.name}, not {wanted}"
    tested, other = replace(a, mask=argument), replace(a, mask=replace(argument, polarity=wanted))
    inputs = random_mask(tested, a.random_inputs(5, 5, b=1, dtype=torch.float32))
    detect = partial(detect_wrong_output, tested, words, tested=other)
    grade = POLICY if declared is None else BROKEN
    return smallest_failure(other, inputs, detect, words, f"mask_polarity={have!r}", grade=grade)


@fact(FACTS, "masked-outputs", explained_by="outputs")
def masked_outputs(a: MeasuredAttention) -> Failure | None:
    """With a mask the output is the weighted mean of the visible values, for every query and sequence.

    Under a random mask, which differs along all axes of the mask, the error of the output compared with float64 is at
    most twice the error of the naive method (attention by its definition, in the dtype of the inputs), plus one unit in
    the last place.

    Usual causes: the mask of one query, sequence or head used for all, as in mask[..., :1, :], mask[0] or mask[:, 0];
    heads and batch entries flattened in the other order; a mask applied after the softmax, transposed, or used only if
    there are as many queries as keys
    """
    require_working_mask(a)
    # several blocks of a fast kernel are tested with few queries, if that is possible
    for i, j in ((5, 5), (3, 7), (7, LONG) if a.free_lengths else (LONG, LONG)):
        if i == j or (a.free_lengths and a.band is not None and a.band.after is None):
            inputs = random_mask(a, a.random_inputs(i, j, b=1 if j == LONG else 3, causal=False, dtype=torch.float32))
            if j == LONG and raised_by(a, inputs) is not None:
                continue  # the attention does not accept this length
            if (found := smallest_failure(a, inputs, partial(_detect_masked, a))) is not None:
                return found
    return None


def _detect_masked(a: MeasuredAttention, inputs: AttentionInputs) -> Violation | None:
    """Return a violation if the output under a mask is wrong, else None.

    If the mask of one row, sequence or head is used for all rows, sequences or heads, `words` says so.
    """
    found = detect_error(a, inputs)
    if found is None or inputs.visible is None:
        return found
    for axis, name in ((2, "row"), (0, "sequence"), (1, "head")):
        for index in range(min(inputs.visible.shape[axis], 7)):
            other = inputs.visible.narrow(axis, index, 1).expand_as(inputs.visible)
            same = max_error(a(inputs).detach(), a.reference(replace(inputs, visible=other))) < 1e-4
            if same and not torch.equal(other, inputs.visible):
                return replace(found, words=f"the mask of {name} {index} is used for all {name}s: {found.words}")
    return found


@fact(FACTS, "additive-mask-scaled", explained_by="masked-outputs boolean-mask-added")
def additive_mask_scaled(a: MeasuredAttention) -> Failure | None:
    """An additive mask is added to the scores unchanged.

    An additive mask of finite numbers is added to scale * q . k. The mask itself is neither scaled nor clamped.

    Usual causes: (q . k + mask) / sqrt(c) in place of q . k / sqrt(c) + mask, so that the added numbers are too small
    """
    argument = replace(require_working_mask(a), values="additive")
    inputs = a.random_inputs(5, 5, b=1, h=1, causal=False).neutral()
    half = hide_later_half(inputs).visible
    assert half is not None
    if mask_polarity(lambda **mask: a.weights(inputs, **mask), argument, half, inputs.dtype) != "keep":
        raise NotApplicableError("its mask is not added to the scores")
    added = torch.linspace(-1, 1, 5, dtype=inputs.dtype).sin().expand(inputs.pair_shape)
    mask = argument.reshape(added).contiguous()
    plain, weights = (a.weights(inputs, **{argument.name: x}).double() for x in (torch.zeros_like(mask), mask))
    visible = (plain > 0) & (weights > 0)
    logs = centre_rows(torch.where(visible, weights, 1.0).log() - torch.where(visible, plain, 1.0).log(), visible)
    want = centre_rows(added.double(), visible)
    factor = ((logs * want).sum() / want.square().sum().clamp(min=1e-30)).item()
    near = max(a.precision, 1e-4)
    if abs(factor) < 1e-3:
        raise NotApplicableError("its mask only hides: finite numbers in it change nothing")
    if (logs - want).abs().max().item() <= near:
        return None
    expected = torch.where(visible, plain * added.double().exp(), 0.0)
    expected = (expected / expected.sum(-1, keepdim=True)).to(inputs.dtype)

    def lines(call: CallWriter) -> list[str]:
        name = argument.name
        return [f"{name} = {tensor_code(mask)}", f"weights = {call.weights(f'{name}={name}')}"]

    scaled = (logs - factor * want).abs().max().item() <= near
    change = f"multiplied by {factor:.4g}" if scaled else "changed"
    code = write_example(a, inputs, weights.to(inputs.dtype), expected, lines)
    return Failure(f"numbers in {argument.name} are {change} before they are added", code)


@fact(FACTS, "fully-masked-row", grade=POLICY, explained_by="masked-outputs")
def fully_masked_row(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key gets zeros.

    A row whose mask hides every key gives zeros. NaN, the mean of the values or the unmasked output are failures,
    unless the option fully_masked_rows declares this output.

    Usual causes: softmax over a row of -inf is 0 / 0 (pytorch#41508, #103749); masked_fill(finfo.min) makes all scores
    equal (pytorch#160064); a constant added to all scores, as (1 - mask) * -1e4, does not change the softmax
    """
    argument = require_working_mask(a)
    have, declared = a.fully_masked_rows, a.declared.fully_masked_rows
    if have == "refused":
        raise NotApplicableError("it raises for a row that sees no key")
    if have == (declared or "zeros"):
        return None
    outputs = {
        "zeros": "is zero",
        "nan": "is NaN",
        "mean": "is the mean of the hidden values",
        "unmasked": "gives its unmasked output",
        "other": "is neither zero, NaN, a mean nor its unmasked output",
    }
    words = f"a fully masked row {outputs[str(have)]}"
    declare = "" if have == "other" else f"fully_masked_rows={have!r}"
    grade = POLICY if declare and declared is None else BROKEN
    detect = partial(detect_wrong_output, a, words, most=1e-4)
    return failure_of(a, _inputs_with_masked_row(a, argument), detect, words, declare, grade=grade)


def _inputs_with_masked_row(a: MeasuredAttention, argument: MaskArgument) -> AttentionInputs:
    inputs = a.random_inputs(5, 5, b=1, causal=False, dtype=torch.float32)
    return replace(inputs, visible=hide_one_row(argument, inputs.pair_shape))


def _require_gradients(a: MeasuredAttention, inputs: AttentionInputs) -> None:
    if not a(with_gradients(inputs)).requires_grad:
        raise NotApplicableError("its output has no gradient")


@fact(FACTS, "fully-masked-row-gradient", grade=POLICY, explained_by="fully-masked-row masked-outputs")
def fully_masked_row_gradient(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key does not make gradients NaN.

    If a row is fully masked, the gradients of q, k and v contain no NaN. (nan_to_num on the output removes NaN from the
    forward pass only.)

    Usual causes: softmax(-inf, ...) followed by nan_to_num or where (pytorch#103749)
    """
    argument = require_working_mask(a)
    if (a.declared.fully_masked_rows or a.fully_masked_rows) == "nan" or a.fully_masked_rows == "refused":
        raise NotApplicableError("a fully masked row is NaN or raises, as declared or measured")
    inputs = _inputs_with_masked_row(a, argument)
    _require_gradients(a, inputs)

    def detect(inputs: AttentionInputs) -> Violation | None:
        for name, gradient in gradients(a, inputs).items():
            if bool(gradient.isnan().any()):
                words = f"a fully masked row makes the gradient of {name} NaN"
                return Violation(words, gradient, gradient.nan_to_num(0.0), gradient_lines(name))
        return None

    return smallest_failure(a, inputs, detect)


def _hidden_from_all(inputs: AttentionInputs) -> Tensor:
    """Return a Boolean mask of the keys that no query sees, to be applied to k and v.

    The mask has the shape (b, 1, j, 1).
    """
    assert inputs.visible is not None
    return ~inputs.visible.any(2)[:, :1, :, None]


@fact(
    FACTS,
    "masked-gradient",
    explained_by="masked-outputs mask-ignored fully-masked-row gradients",
)
def masked_gradient(a: MeasuredAttention) -> Failure | None:
    """A key that no query sees gets no gradient.

    If a mask hides a key from all queries, the gradients of k and v are exactly zero at this key.

    Usual causes: a backward pass without the mask; a finite mask value in place of -inf
    """
    require_working_mask(a)
    inputs = hide_later_half(a.random_inputs(5, 5, b=1, causal=False, dtype=torch.float32))
    _require_gradients(a, inputs)

    def detect(inputs: AttentionInputs) -> Violation | None:
        hidden, got = _hidden_from_all(inputs), gradients(a, inputs)
        for name in ("k", "v"):
            if bool((got[name] * hidden).any()):
                words = f"a key that no query sees gets a gradient of {name}"
                return Violation(words, got[name], got[name].masked_fill(hidden, 0.0), gradient_lines(name))
        return None

    return smallest_failure(a, inputs, detect)


@fact(FACTS, "nan-in-masked-input", grade=POLICY, explained_by="masked-outputs")
def nan_in_masked_input(a: MeasuredAttention) -> Failure | None:
    """A hidden key or value may contain anything, even NaN.

    If a mask hides a key from all queries, NaN in this key or its value reaches no output, unless
    masked_nan='propagates' is declared.

    Usual causes: weight 0 times NaN is NaN (pytorch#101967); the mask is added to the scores (NaN - inf is NaN) in
    place of replacing them; padding and unused cache slots, which may hold any number
    """
    require_working_mask(a)
    if a.declared.masked_nan == "propagates":
        raise NotApplicableError("masked_nan='propagates' was declared")
    grade = POLICY if a.declared.masked_nan is None else BROKEN
    return first_failure(_masked_nan(a, name, what, grade) for name, what in (("v", "value"), ("k", "key")))


def _masked_nan(a: MeasuredAttention, name: str, what: str, grade: str) -> Failure | None:
    def detect(inputs: AttentionInputs) -> Violation | None:
        assert inputs.visible is not None
        if not bool(inputs.visible.any(-1).all()):
            return None  # a fully masked row may be NaN
        clean = a(inputs.with_tensors(**{name: getattr(inputs, name).nan_to_num(0.0)})).detach()
        got = a(inputs).detach()
        if not bool(got.isnan().any()):
            return None
        return Violation(f"NaN in a {what} that the mask hides from every query reaches the output", got, clean)

    inputs = hide_later_half(a.random_inputs(5, 5, b=1, causal=False, dtype=torch.float32))
    with_nan = getattr(inputs, name).masked_fill(_hidden_from_all(inputs), torch.nan)
    declare = "masked_nan='propagates'"
    return smallest_failure(a, inputs.with_tensors(**{name: with_nan}), detect, declare=declare, grade=grade)


@fact(FACTS, "causal-with-mask", explained_by="causality")
def causal_with_mask(a: MeasuredAttention) -> Failure | None:
    """With a causal mask and another mask, a key that either of them hides is hidden.

    If a mask is passed together with the causal argument, later keys are still hidden, or the call raises an error.

    Usual causes: a causal mask that is applied only if no mask is passed (pytorch#118972, x-transformers)
    """
    argument = require_working_mask(a)
    if not a.uses_causal_argument and not a.declared.causal:
        raise NotApplicableError("it is not declared causal, and has no causal argument that works alone")
    inputs = a.random_inputs(6, 6, b=1, dtype=torch.float32).with_zero_queries()
    inputs = replace(inputs, visible=torch.ones(inputs.pair_shape, dtype=torch.bool))
    try:
        later = a.weights(inputs).triu(1)
    except Exception as error:  # the function of the user may raise any exception
        raise NotApplicableError("it raises if a mask is passed with its causal argument") from error
    if not bool((later != 0).any()):
        return None
    _, _, row, key = later.nonzero()[0].tolist()
    words = f"if {argument.name} is passed and hides nothing, row {row} sees key {key}"

    def detect(inputs: AttentionInputs) -> Violation | None:
        weights = a.weights(inputs)
        if not bool(weights.triu(1).any()):
            return None
        earlier = weights.tril()
        return Violation(words, weights, earlier / earlier.sum(-1, keepdim=True), write_weights)

    return smallest_failure(a, inputs, detect, words, square=True)


@fact(FACTS, "padding-leaks")
def padding_leaks(a: MeasuredAttention) -> Failure | None:
    """Padding does not change the output of real tokens.

    Keys and values at padded positions do not change the output rows of real tokens.

    Usual causes: the padding mask is used for the first sequence or layer only, is inverted, or is dropped if a
    causal mask is there
    """
    name = a.find_parameter(PADDING_NAMES)
    if name is None:
        raise NotApplicableError("it has no argument for padded keys")
    if a.padding is None:
        raise NotApplicableError(f"{name} of (b j) booleans raises")
    padded = replace(a, mask=a.padding)
    if not a.padding.works:
        return _hides_key_one(padded, f"{name} of (b j) booleans does not hide padded keys, in either polarity")
    inputs = random_mask(padded, a.random_inputs(5, 5, b=3, dtype=torch.float32))
    words = f"{name} does not hide the padded keys of every sequence"
    return smallest_failure(padded, inputs, partial(detect_wrong_output, padded, words))


@fact(FACTS, "packed-documents-leak")
def packed_documents_leak(a: MeasuredAttention) -> Failure | None:
    """Documents that are packed into one row do not see each other.

    If document ids are passed, no query sees a key of another document.

    Usual causes: ids not passed on, ids compared along one axis only, or a reset only at the boundaries of documents
    (transformers#46634)
    """
    name = a.find_parameter(DOCUMENT_NAMES)
    if name is None:
        raise NotApplicableError("it has no argument for document ids")
    inputs = a.random_inputs(6, 6, b=2, dtype=torch.float32).neutral()
    ids = torch.tensor([[4, 4, 1, 1, 1, 3], [0, 0, 0, 2, 2, 2]])
    try:
        flat = a.weights(inputs, **{name: ids})
    except Exception as error:  # the function of the user may raise any exception
        raise NotApplicableError(f"{name} of (b j) numbers raises {str(error)[:80]}") from error
    leaks = (flat != 0) & (ids[:, None, :, None] != ids[:, None, None, :])
    if not bool(leaks.any()):
        return None
    b, h, row, key = leaks.nonzero()[0].tolist()

    def lines(call: CallWriter) -> list[str]:
        weight = f"weight = {call.weights(f'{name}={name}')}[{b}, {h}, {row}, {key}].item()"
        return [f"{name} = torch.tensor({ids.tolist()})", weight]

    words = f"row {row} of document {ids[b, row]} sees key {key} of document {ids[b, key]}"
    return Failure(words, write_example(a, inputs, flat[b, h, row, key].item(), 0.0, lines))
