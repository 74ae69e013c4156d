"""Facts about masks that are passed: they hide what they should, and nothing hidden reaches the output."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import DOCUMENT_NAMES, AttentionUnderTest
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, write_example, write_weights
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import raised_by
from regard.conform.facts.numbers import detect_error, gradient_lines, gradients, with_gradients
from regard.conform.inputs import AttentionInputs, hide_later_half, tensor_code
from regard.conform.shrink import Violation, failure_of, smallest_failure
from regard.conform.tolerance import max_error
from regard.see.measure.mask_argument import MaskArgument, hide_one_row, mask_polarity
from regard.see.measure.stats import centre_rows

FACTS: Registry[Fact] = Registry("fact")


def require_mask_argument(a: MeasuredAttention) -> MaskArgument:
    """The fact applies to attentions with a mask argument only."""
    if a.mask is None and a.padding is not None:
        name = a.padding.name
        raise NotApplicableError(
            f"its only mask argument is {name}; declare mask_argument={name!r} to test all facts of masks with it"
        )
    if a.mask is None:
        raise NotApplicableError("it has no mask argument; declare mask_argument if it has one with another name")
    return a.mask


def require_working_mask(a: MeasuredAttention) -> MaskArgument:
    """The fact applies to attentions whose mask hides keys only."""
    mask = require_mask_argument(a)
    if not mask.works:
        raise NotApplicableError("its mask does not hide keys: the fact `mask-ignored`")
    return mask


def random_mask(a: MeasuredAttention, inputs: AttentionInputs, shared: bool = True) -> AttentionInputs:
    """The call with a random mask that shows every row a key. `shared` uses one mask for all sequences and heads."""
    b, h, i, j = inputs.pair_shape
    source = torch.Generator().manual_seed(a.declared.seed + 5)
    rows = i if require_mask_argument(a).per_row else 1
    sizes = (1, 1, rows, j) if shared else (b, h, rows, j)
    visible = torch.rand(sizes, generator=source) < 0.6
    visible = visible | torch.eye(rows, j, dtype=torch.bool)
    return replace(inputs, visible=visible.expand(b, h, i, j).clone(), causal=False)


def detect_wrong_output(
    a: MeasuredAttention,
    words: str,
    inputs: AttentionInputs,
    most: float = 1e-3,
    tested: AttentionUnderTest | None = None,
) -> Violation | None:
    """Detects an output that differs from the expected one by more than `most`."""
    expected, got = a.reference(inputs), (tested or a)(inputs).detach()
    return None if max_error(got, expected) < most else Violation(words, got, expected.to(got.dtype))


@fact(FACTS, "mask-ignored")
def mask_ignored(a: MeasuredAttention) -> Failure | None:
    """A hidden key is not seen.

    A key that the mask hides has a weight of exactly zero.

    Usual causes: the mask is not passed on, a mask of 1 and 0 is multiplied with the scores or added to them, or it
    is combined with another mask by OR in place of AND
    """
    argument = require_mask_argument(a)
    if argument.polarity is not None:
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
    """The failure of a mask that hides key 1: the weights at q = 0, and the expected ones."""
    tested = a if argument is None else replace(a, mask=argument)
    inputs = a.random_inputs(3, 3, b=1, h=1, causal=False, dtype=torch.float32).neutral()
    visible = torch.ones(inputs.pair_shape, dtype=torch.bool)
    visible[..., 1] = False
    left = a.weights(inputs) * visible
    expected = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
    inputs = replace(inputs, visible=visible)
    return Failure(words, write_example(tested, inputs, tested.weights(inputs), expected, write_weights), declare)


@fact(FACTS, "mask-transposed")
def mask_transposed(a: MeasuredAttention) -> Failure | None:
    """The mask says which keys a query sees, not which queries see a key.

    mask[i, j] belongs to query i and key j: hiding column 1 hides key 1, not row 1.

    Usual causes: mask.transpose(-2, -1), masked_fill on axis -2, (b j) expanded to [:, :, None]
    """
    argument = require_mask_argument(a)
    if argument.polarity != "transposed":
        return None
    return _hides_key_one(a, f"{argument.name}[i, j] hides row j, not key j")


@fact(FACTS, "boolean-mask-added")
def boolean_mask_added(a: MeasuredAttention) -> Failure | None:
    """True and False are not the numbers one and zero.

    A boolean mask is obeyed or raises; it is not added to the scores as 1 and 0.

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


@fact(FACTS, "mask-polarity")
def mask_polarity_fact(a: MeasuredAttention) -> Failure | None:
    """Whether True means visible or hidden is a convention.

    True means keep (SDPA, flex) or drop (nn.MultiheadAttention), as declared.

    Usual causes: a mask made for the other convention; a missing or extra ~mask (pytorch#170400)
    """
    wanted, padding = a.declared.mask_polarity, a.padding
    if wanted is None:
        raise NotApplicableError("no polarity was declared")
    if padding is not None and padding.polarity is not None:
        if padding.polarity != wanted:
            return _wrong_padding_polarity(a, padding.name, padding.polarity, wanted)
        if a.mask is None:
            return None
    argument = require_working_mask(a)
    if argument.values == "additive":
        raise NotApplicableError("its mask is added to the scores, so it has no True")
    have = argument.polarity
    if have == wanted:
        return None
    words = f"True means {have} in {argument.name}, not {wanted}"
    other = replace(a, mask=replace(argument, polarity=wanted))
    inputs = random_mask(a, a.random_inputs(5, 5, b=1, dtype=torch.float32))
    detect = partial(detect_wrong_output, a, words, tested=other)
    return smallest_failure(other, inputs, detect, words, f"mask_polarity={have!r}")


def _wrong_padding_polarity(a: MeasuredAttention, name: str, have: str, wanted: str) -> Failure:
    """The failure of an argument for padded keys in which True means the opposite."""
    inputs, real = a.padded_inputs()
    given = real if wanted == "keep" else ~real
    seen = (a.weights(inputs, **{name: given})[1, 0, -1] > 0).tolist()

    def lines(call: CallWriter) -> list[str]:
        return [
            f"{name} = torch.tensor({given.tolist()})",
            f"weights = {call.weights(f'{name}={name}')}",
            "seen = (weights[1, 0, -1] > 0).tolist()",
        ]

    code = write_example(a, inputs, seen, real[1].tolist(), lines)
    return Failure(f"True means {have} in {name}, not {wanted}", code, f"mask_polarity={have!r}")


@fact(FACTS, "mask-per-row")
def mask_per_row(a: MeasuredAttention) -> Failure | None:
    """Every query has its own mask.

    mask[..., i, :] belongs to query i: the mask of one row is not used for all.

    Usual causes: mask[..., :1, :], mask[..., 0, :], or a mask of (b j) broadcast over queries although (b i j) was
    passed
    """
    argument = require_working_mask(a)
    if not argument.per_row:
        raise NotApplicableError(f"its mask has the axes ({argument.axes})")

    def detect(inputs: AttentionInputs) -> Violation | None:
        _, h, _, i, j, c, _ = inputs.sizes
        assert inputs.visible is not None
        expected = a.expected(inputs)
        seen = a.weights(inputs.with_zero_queries()) > 0
        unmasked = (a.flat_weights(i, j, inputs.causal, h, masked=True, c=c) > 0)[None]
        for row in range(i):
            used = unmasked & inputs.visible[:, :, row : row + 1]
            if torch.equal(seen, used) and not torch.equal(seen, expected.visible.expand_as(seen)):
                found = detect_wrong_output(a, f"the mask of row {row} is used for all rows", inputs)
                if found is not None:
                    return found
        return None

    return smallest_failure(a, random_mask(a, a.random_inputs(5, 5, b=1, causal=False, dtype=torch.float32)), detect)


@fact(FACTS, "masked-outputs", explained_by=("outputs", "mask-per-row"))
def masked_outputs(a: MeasuredAttention) -> Failure | None:
    """With a mask the output is the weighted mean of the visible values.

    Outputs under a random mask are at most 2x as far from float64 as the naive method, plus one ulp.

    Usual causes: a mask applied after the softmax, transposed, or used only if i = j
    """
    require_working_mask(a)
    # several blocks of a fast kernel are tested with few queries, if that is possible
    for i, j in ((5, 5), (3, 7), (7, LONG) if a.free_lengths else (LONG, LONG)):
        if i == j or (a.free_lengths and a.band is not None and a.band.after is None):
            inputs = random_mask(a, a.random_inputs(i, j, b=1 if j == LONG else 2, causal=False, dtype=torch.float32))
            if j == LONG and raised_by(a, inputs) is not None:
                continue  # longer than it accepts
            if (found := smallest_failure(a, inputs, partial(detect_error, a))) is not None:
                return found
    return None


@fact(FACTS, "additive-mask-scaled", explained_by=("masked-outputs", "mask-per-row", "boolean-mask-added"))
def additive_mask_scaled(a: MeasuredAttention) -> Failure | None:
    """An additive mask is added to the scores unchanged.

    An additive mask of finite numbers is added to scale q . k: it is neither scaled nor clamped.

    Usual causes: (q . k + mask) / sqrt(c) in place of q . k / sqrt(c) + mask, so that biases are too small
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


@fact(FACTS, "mask-per-sequence", explained_by=("masked-outputs", "mask-per-row"))
def mask_per_sequence(a: MeasuredAttention) -> Failure | None:
    """Every sequence of a batch has its own mask.

    A mask with a batch axis is used for each batch entry, not only the first.

    Usual causes: mask[0], or a mask expanded over the wrong axis
    """
    inputs = _separate_masks(a, "b", 3)
    assert inputs.visible is not None
    visible = inputs.visible[:, :1].expand_as(inputs.visible).clone()
    detect = partial(detect_wrong_output, a, "the mask of another sequence is used")
    return smallest_failure(a, replace(inputs, visible=visible), detect)


@fact(FACTS, "mask-per-head", explained_by=("masked-outputs", "mask-per-sequence", "mask-per-row"))
def mask_per_head(a: MeasuredAttention) -> Failure | None:
    """Every head may have its own mask.

    A mask with a head axis is used for each head, not only the first.

    Usual causes: mask[:, 0], or heads and batch entries flattened in the other order
    """
    detect = partial(detect_wrong_output, a, "the mask of another head is used")
    return smallest_failure(a, _separate_masks(a, "h", 2), detect)


def _separate_masks(a: MeasuredAttention, axis: str, b: int) -> AttentionInputs:
    """A call with a different mask for each sequence and head, if the mask has this axis."""
    argument = require_working_mask(a)
    if axis not in argument.axes:
        raise NotApplicableError(f"its mask has the axes ({argument.axes})")
    return random_mask(a, a.random_inputs(5, 5, b=b, causal=False, dtype=torch.float32), shared=False)


@fact(FACTS, "fully-masked-row-nan", explained_by=("mask-per-row",))
def fully_masked_row_nan(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key gets zeros, not NaN.

    A row whose mask hides every key gives zeros, not NaN, unless fully_masked_rows='nan' is declared.

    Usual causes: softmax over a row of -inf is 0 / 0 (pytorch#41508, #103749)
    """
    return _test_fully_masked_row(a, "nan", "a fully masked row is NaN")


@fact(FACTS, "fully-masked-row-mean", explained_by=("mask-per-row",))
def fully_masked_row_mean(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key does not get the mean of all values.

    A row whose mask hides every key gives zeros, not the mean of the values, unless fully_masked_rows='mean' is
    declared.

    Usual causes: masked_fill(finfo.min): softmax over equal scores is uniform (pytorch#160064)
    """
    return _test_fully_masked_row(a, "mean", "a fully masked row is the mean of the hidden values")


@fact(FACTS, "fully-masked-row-unmasked", explained_by=("mask-per-row",))
def fully_masked_row_unmasked(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key does not see every key.

    A row whose mask hides every key gives zeros, not its unmasked output, unless fully_masked_rows='unmasked' is
    declared.

    Usual causes: scores + (1 - mask) * -1e4: a constant that is added to all scores does not change the softmax
    """
    return _test_fully_masked_row(a, "unmasked", "a fully masked row gives its unmasked output")


def _test_fully_masked_row(a: MeasuredAttention, kind: str, words: str) -> Failure | None:
    argument = require_working_mask(a)
    have = a.fully_masked_rows
    if have == "refused":
        raise NotApplicableError("it raises for a row that sees no key")
    if have == (a.declared.fully_masked_rows or "zeros") or not (have == kind or (kind, have) == ("unmasked", "other")):
        return None
    words = words if have == kind else "a fully masked row is neither zero, NaN, a mean nor its unmasked output"
    declare = f"fully_masked_rows={have!r}" if have in ("nan", "mean", "unmasked") else ""
    detect = partial(detect_wrong_output, a, words, most=1e-4)
    return failure_of(a, _inputs_with_masked_row(a, argument), detect, words, declare)


def _inputs_with_masked_row(a: MeasuredAttention, argument: MaskArgument) -> AttentionInputs:
    inputs = a.random_inputs(5, 5, b=1, causal=False, dtype=torch.float32)
    return replace(inputs, visible=hide_one_row(argument, inputs.pair_shape))


def _require_gradients(a: MeasuredAttention, inputs: AttentionInputs) -> None:
    if not a(with_gradients(inputs)).requires_grad:
        raise NotApplicableError("its output has no gradient")


@fact(FACTS, "fully-masked-row-gradient", explained_by=("fully-masked-row-nan", "mask-per-row"))
def fully_masked_row_gradient(a: MeasuredAttention) -> Failure | None:
    """A query that sees no key has zero gradients, not NaN.

    A fully masked row has zero gradients, not NaN: nan_to_num on the output removes the NaN only forward.

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
    """The keys that no query sees, as a mask of k and v."""
    assert inputs.visible is not None
    return ~inputs.visible.any(2)[:, :1, :, None]


@fact(
    FACTS,
    "masked-gradient",
    explained_by=(
        "mask-per-row",
        "masked-outputs",
        "mask-ignored",
        "fully-masked-row-nan",
        "fully-masked-row-mean",
        "fully-masked-row-unmasked",
        "gradient-of-k",
        "gradient-of-v",
    ),
)
def masked_gradient(a: MeasuredAttention) -> Failure | None:
    """A key that is not seen gets no gradient.

    A key that no query sees gets gradients of exactly zero in k and v.

    Usual causes: a backward pass without the mask; a finite mask value
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


def _masked_nan(a: MeasuredAttention, name: str, what: str) -> Failure | None:
    require_working_mask(a)
    if a.declared.masked_nan == "propagates":
        raise NotApplicableError("masked_nan='propagates' was declared")

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
    return smallest_failure(a, inputs.with_tensors(**{name: with_nan}), detect, declare="masked_nan='propagates'")


@fact(FACTS, "nan-in-masked-value", explained_by=("mask-per-row",))
def nan_in_masked_value(a: MeasuredAttention) -> Failure | None:
    """A hidden value may hold anything, even NaN.

    NaN or infinity in a value that the mask hides from all queries reaches no output.

    Usual causes: weight 0 times NaN is NaN (pytorch#101967); padding and unused cache slots hold anything
    """
    return _masked_nan(a, "v", "value")


@fact(FACTS, "nan-in-masked-key", explained_by=("mask-per-row",))
def nan_in_masked_key(a: MeasuredAttention) -> Failure | None:
    """A hidden key may hold anything, even NaN.

    NaN in a key that the mask hides from all queries reaches no output.

    Usual causes: the mask is added to the scores (NaN - inf is NaN) in place of replacing them
    """
    return _masked_nan(a, "k", "key")


@fact(FACTS, "causal-with-mask", explained_by=("causality",))
def causal_with_mask(a: MeasuredAttention) -> Failure | None:
    """With a causal mask and another mask, both hold.

    The causal argument still hides later keys if a mask is passed too, or the call raises.

    Usual causes: if mask is not None: ... else: causal (pytorch#118972, x-transformers)
    """
    argument = require_working_mask(a)
    if not a.uses_causal_argument and not a.declared.causal:
        raise NotApplicableError("it is not declared causal, and has no causal argument that works alone")
    inputs = a.random_inputs(6, 6, b=1, dtype=torch.float32).with_zero_queries()
    inputs = replace(inputs, visible=torch.ones(inputs.pair_shape, dtype=torch.bool))
    try:
        later = a.weights(inputs).triu(1)
    except Exception as error:  # a foreign function may raise anything
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

    Padded keys and values change no output row of a real token.

    Usual causes: the padding mask is used for the first sequence or layer only, is inverted, or is dropped if a
    causal mask is there
    """
    padding = a.padding
    if padding is None:
        raise NotApplicableError("it has no argument for padded keys")
    if padding.refused:
        raise NotApplicableError(f"{padding.name} of (b j) booleans raises {padding.refused}")
    if padding.polarity is not None:
        return None
    (inputs, real), name = a.padded_inputs(), padding.name

    def lines(call: CallWriter) -> list[str]:
        return [
            f"real = torch.tensor({real.tolist()})",
            "hides = []",
            "for keep in (real, ~real):",
            f"    weights = {call.weights(f'{name}=keep')}",
            "    hides.append(bool((weights[1, :, :3, 3:] == 0).all() and (weights[0, :, -1] > 0).all()))",
            "hides = any(hides)",
        ]

    words = f"{name} of (b j) booleans does not hide the padded keys of the second sequence, in either polarity"
    return Failure(words, write_example(a, inputs, False, True, lines))


@fact(FACTS, "packed-documents-leak")
def packed_documents_leak(a: MeasuredAttention) -> Failure | None:
    """Documents that are packed into one row do not see each other.

    With document ids, no row sees a key of another document.

    Usual causes: ids not passed on, compared along one axis only, or only the boundaries reset (transformers#46634)
    """
    name = a.find_parameter(DOCUMENT_NAMES)
    if name is None:
        raise NotApplicableError("it has no argument for document ids")
    inputs = a.random_inputs(6, 6, b=2, dtype=torch.float32)
    ids = torch.tensor([[4, 4, 1, 1, 1, 3], [0, 0, 0, 2, 2, 2]])
    try:
        flat = a.weights(inputs.with_zero_queries(), **{name: ids})
    except Exception as error:  # a foreign function may raise anything
        raise NotApplicableError(f"{name} of (b j) numbers raises {str(error)[:80]}") from error
    leaks = (flat != 0) & (ids[:, None, :, None] != ids[:, None, None, :])
    if not bool(leaks.any()):
        return None
    b, h, row, key = leaks.nonzero()[0].tolist()
    weight = a.weights(inputs.neutral(), **{name: ids})[b, h, row, key].item()

    def lines(call: CallWriter) -> list[str]:
        return [
            f"{name} = torch.tensor({ids.tolist()})",
            f"weight = {call.weights(f'{name}={name}')}[{b}, {h}, {row}, {key}].item()",
        ]

    words = f"row {row} of document {ids[b, row]} sees key {key} of document {ids[b, key]}"
    return Failure(words, write_example(a, inputs.neutral(), weight, 0.0, lines))
