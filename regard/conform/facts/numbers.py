"""Facts about numbers: outputs, gradients, precision and extreme scores, compared with the definition in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import TRAINING_NAMES
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, WriteLines, run_lines, write_example
from regard.conform.expected import ExpectedAttention
from regard.conform.fact import INEXACT, Fact, Failure, NotApplicableError, fact, first_failure
from regard.conform.facts.behaviour import raised_by, seed_all
from regard.conform.inputs import QKV, AttentionInputs, hide_later_half
from regard.conform.shrink import Violation, detect_lines, smallest_failure
from regard.conform.tolerance import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    allowed_error,
    max_error,
    same_up_to_rounding,
)
from regard.see.measure.read_weights import first_line, training_mode

FACTS: Registry[Fact] = Registry("fact")

FLOAT32_ERROR = 1e-6  # relative; some attentions compute in float32 for float64 inputs too, which is no fault
SMALL_ERROR = 0.02  # relative; an error of this size is taken for rounding
SHAPES: tuple[dict[str, Any], ...] = (
    {"i": 7, "j": 7},
    {"i": 13, "j": 13, "b": 1, "c": 12},
    {"i": 3, "j": 11, "h": 6, "g": 2},
    {"i": 37, "j": 37},
)
# sizes by which code paths are chosen: one query, one head, many heads, one shared key head, values as wide as keys,
# great length
KERNEL_SHAPES: tuple[dict[str, Any], ...] = (
    {"i": 1, "j": 11},
    {"i": 5, "j": 5, "h": 1, "c": 64, "e": 64},
    {"i": 5, "j": 5, "h": 12, "c": 128, "e": 128},
    {"i": 5, "j": 5, "b": 3, "h": 6, "g": 1},
    {"i": 3, "j": LONG, "b": 1, "h": 2},
    {"i": LONG, "j": LONG, "b": 1, "h": 1},
)
EARLY = ": q . k exceeds 65504 before it is scaled"
DROPOUT = 0.25  # not 0.5, where dropped and kept weights could not be distinguished


def accepted_shapes(a: MeasuredAttention) -> list[dict[str, Any]]:
    """Return the input sizes at which outputs are compared, as keyword arguments of `random_inputs`.

    Only sizes that the attention accepts are returned.
    """

    def find() -> list[dict[str, Any]]:
        plain = [sizes for sizes in SHAPES if a.free_lengths or sizes["i"] == sizes["j"]]
        # many queries only if fewer queries than keys are not possible
        others = [x for x in KERNEL_SHAPES if (x["i"] != LONG if a.free_lengths else x["i"] == x["j"])]
        return plain + [x for x in others if raised_by(a, a.random_inputs(dtype=torch.float32, **x)) is None]

    found: list[dict[str, Any]] = a.once("shapes", find)
    return found


def detect_error(a: MeasuredAttention, inputs: AttentionInputs) -> Violation | None:
    """Return a violation if the error of the output, compared with float64, exceeds the tolerance, else None."""
    expected = a.expected(inputs)
    reference = expected.reference(inputs)
    got = a(inputs).detach()
    largest = reference.abs().max().item()
    most = allowed_error(expected.naive(inputs), reference, OUTPUT_FACTOR)
    if inputs.dtype == torch.float64:
        most = max(most, FLOAT32_ERROR * largest)
    if expected.norm is not None:
        most += 3e-5 * largest  # the epsilon of the norm is known approximately
    if expected.rotation is not None:
        most += 4e-6 * largest  # phases are float32, and projects round them in different orders
    if (
        expected.bias is not None and inputs.dtype.itemsize > 2
    ):  # a bias is known up to a constant per row, and rounds the scores it is added to
        most += torch.finfo(inputs.dtype).eps * (expected.bias.max() - expected.bias.min()).item() * largest
    error = max_error(got, reference)
    if error <= most:
        return None
    grade = INEXACT if error <= SMALL_ERROR * largest else ""
    words = f"{_rounded_frequencies(expected, inputs, got, most)}in {inputs.dtype} {off_by(error, most)}"
    return Violation(words, got, reference.to(got.dtype), grade=grade)


def _rounded_frequencies(expected: ExpectedAttention, inputs: AttentionInputs, got: Tensor, most: float) -> str:
    """Return a description of the error if it comes from rotary frequencies in half precision, else "".

    got   the outputs of the attention
    most  the largest allowed error of the outputs
    """
    if expected.rotation is None:
        return ""
    for dtype in (torch.bfloat16, torch.float16):
        frequencies = torch.tensor(expected.rotation.frequencies, dtype=torch.float64).to(dtype)
        rotation = replace(expected.rotation, frequencies=tuple(frequencies.tolist()))
        if max_error(got, replace(expected, rotation=rotation).reference(inputs)) <= 2 * most:
            return f"rotary frequencies are rounded to {dtype}: "
    return ""


def off_by(error: float, most: float) -> str:
    """Describe an error and the largest allowed error in words, with enough digits to distinguish them."""
    pairs = ((f"{error:.{digits}e}", f"{most:.{digits}e}") for digits in range(1, 17))
    first, second = next((pair for pair in pairs if pair[0] != pair[1]), (repr(error), repr(most)))
    return f"off by {first}, {second} is allowed"


@fact(FACTS, "one-key", explained_by="causality one-query")
def one_key(a: MeasuredAttention) -> Failure | None:
    """With a single key the output is the value of this key.

    A call with one query and one key works, and the key has weight 1.

    Usual causes: squeeze() without an axis, a loop that starts at 1, a variance over one number
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        inputs = replace(inputs, v=torch.ones_like(inputs.v))
        if (raised := raised_by(a, inputs)) is not None:
            return Violation(f"one key raises {raised}", raised)
        weights = a(inputs).detach()
        if bool((weights - 1).abs().max() <= 1e-5) or a.declared.sink:
            return None
        words = f"a single key has weight {weights.flatten()[0].item():.4g}, not 1"
        ones = "torch.ones_like(v)"
        return Violation(words, weights, torch.ones_like(weights), lambda call: [f"out = {call('q', 'k', ones)}"])

    return smallest_failure(a, a.random_inputs(1, 1, dtype=torch.float32), detect)


@fact(FACTS, "outputs", explained_by="mask-ignored grouping causality last-queries-alone")
def outputs(a: MeasuredAttention) -> Failure | None:
    """The output is the weighted mean of the values.

    The error of the output compared with float64 is at most twice the error of the naive method (attention by its
    definition, in the dtype of the inputs), plus one unit in the last place.

    Usual causes: an approximation, sums accumulated in lower precision, or a mistake that no other fact tests
    """
    calls = [(a.dtype, sizes) for sizes in accepted_shapes(a) if sizes not in KERNEL_SHAPES]
    calls += [(torch.float32, sizes) for sizes in accepted_shapes(a)]
    return first_failure(
        smallest_failure(a, a.random_inputs(dtype=dtype, **sizes), partial(detect_error, a)) for dtype, sizes in calls
    )


@fact(FACTS, "gradient-mode", explained_by="outputs")
def gradient_mode(a: MeasuredAttention) -> Failure | None:
    """The output is the same with and without autograd.

    The output is the same under torch.no_grad(), with inputs that require gradients, and with inputs that do not.

    Usual causes: a fused kernel that is used only without gradients and computes something else (pytorch#97111)
    """

    def without(call: CallWriter) -> list[str]:
        return [f"expected = {call()}", f"out = torch.no_grad()({call.name}){call().removeprefix(call.name)}"]

    def with_gradients(call: CallWriter) -> list[str]:
        return [f"expected = {call()}", f"out = {call.each('{}.clone().requires_grad_()')}.detach()"]

    inputs = a.random_inputs(7, 7, dtype=torch.float32)
    return first_failure(
        smallest_failure(a, inputs, detect_lines(a, f"{how} the output differs by {{}}", lines, same_up_to_rounding))
        for how, lines in (("under torch.no_grad()", without), ("with gradients", with_gradients))
    )


@fact(FACTS, "rotary-precision", grade=INEXACT, explained_by="outputs output-dtype")
def rotary_precision(a: MeasuredAttention) -> Failure | None:
    """Rotary angles need enough digits, because otherwise positions far from the start have the same angles.

    Rotary angles are computed in float32 or float64, whatever the dtype of q. For example, positions 200 and 201 have
    different angles also if q is bfloat16.

    Usual causes: positions or frequencies cast to the dtype of the model (transformers#25681)
    """
    if a.rotary is None:
        raise NotApplicableError("it has no rotary positions")
    inputs = a.random_inputs(LONG, LONG, b=1, h=2, dtype=torch.bfloat16)
    if raised_by(a, inputs) is not None:
        raise NotApplicableError("it does not accept bfloat16")

    def detect(inputs: AttentionInputs) -> Violation | None:
        found = detect_error(a, inputs)
        return found and replace(found, words=f"{inputs.q.shape[2]} positions in bfloat16: {found.words}")

    return smallest_failure(a, inputs, detect, square=True)


@fact(FACTS, "half-precision", grade=INEXACT, explained_by="outputs output-dtype rotary-precision")
def half_precision(a: MeasuredAttention) -> Failure | None:
    """With half-precision inputs, sums are still computed in higher precision.

    In bfloat16 and float16, the error compared with float64 is at most twice the error of the naive method (attention
    by its definition, in the same dtype), plus one unit in the last place.

    Usual causes: sums of products or of weights accumulated in half precision; scores rounded several times
    """
    sizes: tuple[dict[str, Any], ...] = ({"i": 7, "c": 12}, {"i": 61, "b": 1, "c": 64})
    calls = [a.random_inputs(dtype=dtype, **each) for dtype in (torch.bfloat16, torch.float16) for each in sizes]
    calls = [inputs for inputs in calls if raised_by(a, inputs) is None]
    if not calls:
        raise NotApplicableError("it accepts neither bfloat16 nor float16")
    return first_failure(smallest_failure(a, inputs, partial(detect_error, a)) for inputs in calls)


@fact(FACTS, "finite-mask-value")
def finite_mask_value(a: MeasuredAttention) -> Failure | None:
    """A hidden key has no weight at all, not a very small one.

    A hidden key with score 0 has a weight of exactly zero even if every visible score is -3e5 or -1e10.

    Usual causes: masked_fill with -1e9 or -1e4 in place of -inf, or adding (1 - mask) * -1e4, so that a hidden key gets
    more weight than visible keys with lower scores (TransformerLens#385)
    """
    hides = a.band is not None and (a.band.before is not None or a.band.after is not None)
    mask = a.mask if a.mask is not None and a.mask.works else None
    if not hides and mask is None:
        raise NotApplicableError("no key is hidden, and it takes no mask")
    if a.rotary is not None:
        raise NotApplicableError("rotary positions make scores differ, so they cannot all be set to one value")

    def detect(inputs: AttentionInputs) -> Violation | None:
        # v is one in the marked keys and zero elsewhere, so the output is the weight of the marked keys. It has to be
        # zero in rows that see some key but no marked one; other rows are not compared.
        visible = a.expected(inputs).visible.expand(inputs.pair_shape)
        marked = (inputs.v != 0).any(-1).any(1)[:, None, None, :]
        rows = (visible.any(-1) & ~(visible & marked).any(-1))[..., None]
        got = a(inputs).detach()
        if not bool((rows & (got.abs() > 1e-3)).any()):
            return None
        words = "hidden keys get weight if visible scores are very negative"
        return Violation(words, got, got.masked_fill(rows, 0.0))

    calls = []
    if hides:
        plain = a.random_inputs(11, 11, b=1, dtype=torch.float32)
        calls += [_mark_keys(plain, slice(at, at + 1)) for at in (10, 0)]
    if mask is not None:
        hidden = hide_later_half(a.random_inputs(5, 5, b=1, dtype=torch.float32, causal=False))
        assert hidden.visible is not None
        if mask.per_row:
            hidden.visible[:, :, -1] = True  # keys that no row sees may be zeroed before the softmax
        calls += [_mark_keys(hidden, slice(3, None))]

    def scaled(inputs: AttentionInputs, size: float) -> AttentionInputs:
        """Return the inputs with constant q and k.

        Scores are 0 for keys with a nonzero value, and about -size for the other keys.
        """
        root = (size / (inputs.q.shape[-1] * max(a.scale(inputs), 1e-9))) ** 0.5
        marked = (inputs.v != 0).any(-1, keepdim=True)
        k = torch.full_like(inputs.k, root).masked_fill(marked, 0.0)
        return inputs.with_tensors(q=torch.full_like(inputs.q, -root), k=k)

    return first_failure(smallest_failure(a, scaled(x, size), detect) for size in (1e10, 3e5) for x in calls)


def _mark_keys(inputs: AttentionInputs, keys: slice) -> AttentionInputs:
    """Return the inputs with values that are 1 at the given keys and 0 elsewhere.

    The output is then the sum of the weights of these keys.
    """
    v = torch.zeros_like(inputs.v)
    v[:, :, keys] = 1.0
    return replace(inputs, v=v)


def _scale_scores(a: MeasuredAttention, dtype: torch.dtype, size: float) -> AttentionInputs:
    """Return random inputs whose largest score has about the absolute value `size`."""
    inputs = a.random_inputs(7, 7, dtype=dtype)
    k = inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
    factor = size / max((inputs.q.double() @ k.mT).abs().max().item() * a.scale(inputs), 1e-9)
    return inputs.with_tensors(q=inputs.q * factor**0.5, k=inputs.k * factor**0.5)


def _detect_extreme(a: MeasuredAttention, words: str, inputs: AttentionInputs) -> Violation | None:
    """Return a violation if outputs for large scores are not finite or differ from the float64 result, else None.

    A row is compared with float64 only if rounding errors of the keys do not change the float64 result of the row.

    words  describes the violation
    """
    expected, got = a.reference(inputs), a(inputs).detach()
    signs = 1 - 2 * (torch.arange(inputs.k.numel()) % 2).reshape(inputs.k.shape)
    rounded = inputs.k.double() * (1 + 4 * torch.finfo(inputs.dtype).eps * signs)
    near = a.reference(inputs.to(torch.float64).with_tensors(k=rounded))
    stable = (near - expected).abs().amax(-1, keepdim=True) <= 1e-3
    off = (got.double() - expected).abs() > 1e-2 * expected.abs().max()
    wrong = ~got.isfinite() | (off & stable)
    return Violation(words, got, expected.to(got.dtype)) if bool(wrong.any()) else None


@fact(FACTS, "extreme-scores", explained_by="outputs finite-mask-value")
def extreme_scores(a: MeasuredAttention) -> Failure | None:
    """If one score is far larger than the others, the output is the value of that key.

    Scores of 1e4 and of 1e7 in float32 give the output that float64 gives, up to the rounding of the scores.

    Usual causes: scores clamped or capped, a temperature or epsilon added to the sum
    """
    words = "scores of thousands or millions do not give what float64 gives"
    if a.score_span is not None and a.declared.softcap is None:
        words += f": they are clamped, since scores of a row differ by {a.score_span:.4g} at most"

    def detect(inputs: AttentionInputs) -> Violation | None:
        found = _detect_extreme(a, words, inputs)
        # NaN is reported by the fact `overflow`
        return found if found is not None and bool(a(inputs).isfinite().all()) else None

    return first_failure(smallest_failure(a, _scale_scores(a, torch.float32, size), detect) for size in (1e4, 1e7))


@fact(FACTS, "overflow", explained_by="outputs extreme-scores half-precision")
def overflow(a: MeasuredAttention) -> Failure | None:
    """Large scores do not overflow: weights stay between 0 and 1.

    Scores of 1e4 in float32, scores of about -1e3 for all keys in float32, and scores of 40 and of 4e4 in float16 give
    the output that float64 gives. With scores of 4e4, q . k exceeds the largest float16 number before it is scaled.

    Usual causes: exp(scores) without subtracting the maximum of the row; a running maximum that starts at 0 in place of
    -inf; (q @ k.mT) * scale in float16, in place of (q * scale) @ k.mT
    """
    low = _scale_scores(a, torch.float32, 1e3)
    low = low.with_tensors(q=low.q.abs(), k=-low.k.abs())
    calls = [
        (_scale_scores(a, torch.float32, 1e4), "scores of 10000 in torch.float32 overflow", ""),
        (low, "scores of -1000 in torch.float32, for all keys of a row, underflow", ""),
        (_scale_scores(a, torch.float16, 40.0), "scores of 40 in torch.float16 overflow", ""),
        (_scale_scores(a, torch.float16, 4e4), f"scores of 40000 in torch.float16 overflow{EARLY}", INEXACT),
    ]
    return first_failure(
        smallest_failure(a, inputs, partial(_detect_extreme, a, words), grade=grade)
        for inputs, words, grade in calls
        if raised_by(a, inputs) is None
    )


def with_gradients(inputs: AttentionInputs) -> AttentionInputs:
    """Return copies of the inputs as leaf tensors that require gradients."""
    return inputs.map(lambda x: x.clone().requires_grad_())


def gradients(run: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> dict[str, Tensor]:
    """Return the gradients of q, k and v by name, for a fixed gradient of the output.

    run  function that computes the output, such as the attention or its float64 reference
    """
    leaves = with_gradients(inputs)
    out = run(leaves)
    above = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).sin().to(out.dtype)
    tensors = leaves.q, leaves.k, leaves.v
    try:
        # unlike backward(), this adds nothing to the gradients of parameters that a function may use
        grads = torch.autograd.grad(out, tensors, above, materialize_grads=True)
    except RuntimeError:  # reentrant checkpointing allows backward() only
        run(leaves).backward(above)
        grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in tensors)
    return dict(zip(QKV, grads, strict=True))


def gradient_lines(name: str) -> WriteLines:
    """Return a function that writes Python code, which computes the gradient of the output with respect to q, k or v.

    name  "q", "k" or "v"
    """
    return lambda call: [
        "for x in (q, k, v):",
        "    x.requires_grad_()",
        f"out = {call()}",
        "above = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).sin().to(out.dtype)",
        "out.backward(above)",
        f"gradient = torch.zeros_like({name}) if {name}.grad is None else {name}.grad",
    ]


def _detect_gradients(a: MeasuredAttention, inputs: AttentionInputs) -> Violation | None:
    """Return a violation if the error of a gradient exceeds the tolerance, else None."""
    expected = a.expected(inputs)
    got, naive = gradients(a, inputs), gradients(expected.naive, inputs)
    for name, reference in gradients(expected.reference, inputs.to(torch.float64)).items():
        largest = reference.abs().max().item()
        most = allowed_error(naive[name], reference, GRADIENT_FACTOR)
        if inputs.dtype == torch.float64:
            most = max(most, 4 * FLOAT32_ERROR * max(1.0, largest))
        most += 1e-4 * largest if expected.norm is not None else 0.0
        most += 1e-5 * largest if expected.rotation is not None else 0.0
        error = max_error(got[name], reference)
        if not error <= most:
            words = f"the gradient of {name} is {off_by(error, most)}"
            grade = INEXACT if error <= SMALL_ERROR * largest else ""
            return Violation(words, got[name], reference.to(got[name].dtype), gradient_lines(name), grade)
    return None


@fact(FACTS, "gradients", explained_by="outputs inputs-changed gradient-mode")
def gradients_of_inputs(a: MeasuredAttention) -> Failure | None:
    """The gradients of q, k and v are the derivatives of the output.

    The error of the gradients of q, k and v compared with float64 is at most three times the error of the naive method
    (attention by its definition, in the dtype of the inputs), plus one unit in the last place.

    Usual causes: q, k or v detached or cast; a hand-written backward pass (pytorch#158212, #146377); gradients of
    a shared key head that are not summed over all its query heads; weights dropped or masked in the forward pass only
    """
    if not a.has_gradients:
        raise NotApplicableError("its output has no gradient")
    return first_failure(
        smallest_failure(
            a,
            a.random_inputs(dtype=a.dtype if sizes == SHAPES[1] else torch.float32, **sizes),
            partial(_detect_gradients, a),
        )
        for sizes in accepted_shapes(a)
        if sizes not in (SHAPES[3], *KERNEL_SHAPES[:3])
    )


@fact(FACTS, "dropout")
def dropout(a: MeasuredAttention) -> Failure | None:
    """Dropout scales the weights that it keeps, so that the mean output stays the same.

    With dropout probability p, a fraction p of the weights is zero and the others are divided by 1 - p. In a module
    with dropout this holds after train().

    Usual causes: weights dropped without scaling the others; dropout of scores, values, outputs or whole keys
    """
    name = a.dropout_argument
    if name is None:
        return _training_dropout(a)
    inputs = a.random_inputs(31, 31, b=3, c=8)
    training = a.find_parameter(TRAINING_NAMES)
    keywords: dict[str, object] = {name: DROPOUT, **({} if training is None else {training: True})}
    flat, given = inputs.neutral(), ", ".join(f"{key}={value}" for key, value in keywords.items())
    try:
        changes = _dropout_changes(a, inputs, keywords)
        with training_mode(a.probe.module, training=True):
            in_training = a.probe.module is not None and _dropout_changes(a, inputs, keywords)
    except Exception as error:  # the function of the user may raise any exception
        raise NotApplicableError(f"{given} raises {first_line(error)}") from error
    if in_training and not changes:
        raise NotApplicableError(f"{given} acts in training mode only, where it has not been tested")

    def output(call: CallWriter) -> list[str]:
        return [f"out = {call('q', 'k', 'v', given)}.double()", "sums = out[..., 0]"]

    def gone(call: CallWriter) -> list[str]:
        return [f"gone = {call.weights(given)}[..., -5:, :16] == 0"]  # visible under a causal mask too

    effect = "acts on scores, not on weights" if changes else "changes nothing"
    shown = not bool((a.weights(flat)[..., -5:, :16] == 0).any())
    differ = "differ = bool((out - sums[..., None]).abs().max() > 1e-3)"
    whole = "whole = bool(gone.any() and (gone.all({0}) == gone.any({0})).all())"
    place = f"{given} acts on values or on the output, not on weights: columns of equal values differ"
    # each fault: lines, the last line, what it should give, and how far from it the last line may be
    faults: dict[str, tuple[WriteLines, str, float, float]] = {place: (output, differ, False, 0.0)}
    if shown and a.free_widths:  # with a fixed width of v, weights are read in several calls, each with its own dropout
        faults[f"{given} drops whole rows, not single weights"] = gone, whole.format(3), False, 0.0
        faults[f"{given} drops whole keys, not single weights"] = gone, whole.format(2), False, 0.0
    if not a.declared.sink:
        words = f"with {given} the weights of a row sum to {{:.2f}} on average, not to 1"
        faults[words] = output, "mean = sums.mean().item()", 1.0, 0.1
    faults[f"{given} {effect}"] = output, "changes = bool((sums - 1).abs().max() > 0.05)", True, 0.0
    if shown:
        words = f"{given} makes {{:.0%}} of the weights zero"
        faults[words] = gone, "share = gone.double().mean().item()", DROPOUT, 0.12
    for words, (lines, last, expected, near) in faults.items():

        def write(call: CallWriter, lines: WriteLines = lines, last: str = last) -> list[str]:
            return ["torch.manual_seed(0)", *lines(call), last]

        got = run_lines(a, flat, write)[1]
        if abs(got - expected) > near:
            return Failure(words.format(got), write_example(a, flat, got, expected, write))
    return None


def _dropout_changes(a: MeasuredAttention, inputs: AttentionInputs, keywords: dict[str, object]) -> bool:
    seed_all(0)
    return max_error(a(inputs, **keywords).detach(), a(inputs).detach()) > 1e-3


def _training_dropout(a: MeasuredAttention) -> Failure | None:
    """Test the dropout of a module in training mode if its dropout probability is unknown.

    Returns None if one probability p explains both the fraction of dropped weights, which is p, and the scale of the
    kept weights, which is 1 / (1 - p). Otherwise returns a failure.
    """
    found = a.measurement().dropout
    if found is None:
        raise NotApplicableError("it has no dropout argument")
    if not found.share:
        raise NotApplicableError("it has no dropout argument, and drops no weight in training")
    if found.on_output:
        raise NotApplicableError("in training dropout acts on its output too, so that weights cannot be measured")
    if found.consistent:
        return None
    flat = a.random_inputs(15, 15, b=3).neutral()
    with training_mode(a.probe.module, training=True):
        seed_all(0)
        mean = a(flat).detach().double().mean().item()

    def lines(call: CallWriter) -> list[str]:
        train = [line.replace(".eval()", ".train()") for line in call.before if line.startswith("attend = ")]
        train = train or ["probe.module.train()"]
        return [*train, "torch.manual_seed(0)", f"mean = {call()}.double().mean().item()"]

    words = (
        f"in training about {found.share:.0%} of the weights are zero and the others {found.factor:.4g} times as large,"
        f" not {1 / (1 - found.share):.3g} times, so that rows do not sum to 1 on average"
    )
    return Failure(words, write_example(a, flat, mean, a(flat).detach().double().mean().item(), lines))


@fact(FACTS, "train-and-eval-differ")
def train_and_eval(a: MeasuredAttention) -> Failure | None:
    """Without dropout, training mode and eval mode give the same output.

    A module with dropout 0 gives the same numbers after train() and after eval().

    Usual causes: a fast path that is used in eval mode only and computes something else (pytorch#97111)
    """
    module = a.probe.module
    if module is None:
        raise NotApplicableError("it is a function")
    inputs = a.random_inputs(7, 7)

    def run(inputs: AttentionInputs, training: bool, seed: int = 0) -> Tensor:
        with training_mode(module, training=training):
            seed_all(seed)
            return a(inputs).detach()

    if not torch.equal(run(inputs, True), run(inputs, True, 1)):
        raise NotApplicableError("it is random in training, as with dropout")

    def detect(inputs: AttentionInputs) -> Violation | None:
        training, evaluated = run(inputs, True), run(inputs, False)
        error = max_error(training, evaluated)
        words = f"train() and eval() differ by {error:.1e}"
        return None if error <= 1e-5 else Violation(words, evaluated, training, _train_lines)

    return smallest_failure(a, inputs, detect)


def _train_lines(call: CallWriter) -> list[str]:
    """Return Python code that calls the module in training mode, then in eval mode."""
    made = [line for line in call.before if line.startswith("attend = ")]
    return [
        *(line.replace("attend = ", "training = ").replace(".eval()", ".train()") for line in made),
        f"expected = {call().replace('attend(', 'training(', 1)}",
        *made,
        f"out = {call()}",
    ]


@fact(FACTS, "compile", slow=True)
def compiled(a: MeasuredAttention) -> Failure | None:
    """torch.compile does not change the output.

    After torch.compile with backend="aot_eager" a call gives the same output as without torch.compile.

    Usual causes: a branch on torch.compiler.is_compiling(), Python state read while tracing
    """
    inputs = a.random_inputs(7, 7)

    def lines(call: CallWriter) -> list[str]:
        fast = f'torch.compile({call.name}, backend="aot_eager")'
        return [f"expected = {call()}", f"out = {fast}{call().removeprefix(call.name)}"]

    words = "the compiled call differs by {} from the plain one"
    detect = detect_lines(a, words, lines, same_up_to_rounding, raises="torch.compile raises")
    torch._dynamo.reset()
    found = detect(inputs)
    torch._dynamo.reset()
    if found is None:
        return None
    # one seed, from which q, k and v are drawn in turn
    seeds = {"q": (1000 * a.declared.seed, 1.0), "k": (-1, 1.0), "v": (-1, 1.0)}
    return Failure(found.words, write_example(a, inputs, found.got, found.expected, lines, seeds))
