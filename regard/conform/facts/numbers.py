"""Facts about numbers: outputs, gradients, precision and extreme scores, compared with the definition in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.conventions import LONG, MeasuredAttention
from regard.conform.example import CallWriter, Raised, WriteLines, write_example
from regard.conform.fact import Fact, Failure, NotApplicableError, fact
from regard.conform.facts.behaviour import raised_by, seed_all
from regard.conform.inputs import QKV, AttentionInputs, hide_later_half
from regard.conform.shrink import Violation, failure_of, smallest_failure
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
SHAPES: tuple[dict[str, Any], ...] = (
    {"i": 7, "j": 7},
    {"i": 13, "j": 13, "b": 1, "c": 12},
    {"i": 3, "j": 11, "h": 6, "g": 2},
    {"i": 37, "j": 37},
)
# sizes by which kernels are chosen: one head, many heads, one shared key head, values as wide as keys, great length
KERNEL_SHAPES: tuple[dict[str, Any], ...] = (
    {"i": 5, "j": 5, "h": 1, "c": 64, "e": 64},
    {"i": 5, "j": 5, "h": 12, "c": 128, "e": 128},
    {"i": 5, "j": 5, "b": 3, "h": 6, "g": 1},
    {"i": 3, "j": LONG, "b": 1, "h": 2},
    {"i": LONG, "j": LONG, "b": 1, "h": 1},
)
DROPOUT = 0.25  # not one half: then as many weights are dropped as kept


def accepted_shapes(a: MeasuredAttention) -> list[dict[str, Any]]:
    """The sizes at which numbers are compared, without those that raise."""

    def find() -> list[dict[str, Any]]:
        plain = [sizes for sizes in SHAPES if a.free_lengths or sizes["i"] == sizes["j"]]
        # as many queries as keys only if fewer queries are not possible
        others = [x for x in KERNEL_SHAPES if x["j"] != LONG or (x["i"] != LONG) == a.free_lengths]
        return plain + [x for x in others if raised_by(a, a.random_inputs(dtype=torch.float32, **x)) is None]

    found: list[dict[str, Any]] = a.once("shapes", find)
    return found


def detect_error(a: MeasuredAttention, inputs: AttentionInputs) -> Violation | None:
    """Detects an output whose error is more than the tolerance allows."""
    expected = a.expected(inputs)
    reference = expected.reference(inputs)
    got = a(inputs).detach()
    largest = reference.abs().max().item()
    most = allowed_error(expected.naive(inputs), reference, OUTPUT_FACTOR)
    if inputs.dtype == torch.float64:
        most = max(most, FLOAT32_ERROR * largest)
    if expected.norm is not None:
        most += 3e-5 * largest  # the epsilon of the norm is known approximately
    if expected.rotary is not None:
        most += 4e-6 * largest  # phases are float32, and projects round them in different orders
    error = max_error(got, reference)
    if error <= most:
        return None
    return Violation(f"in {inputs.dtype} {off_by(error, most)}", got, reference.to(got.dtype))


def off_by(error: float, most: float) -> str:
    """An error and the largest allowed one in words, with enough digits to distinguish them."""
    pairs = ((f"{error:.{digits}e}", f"{most:.{digits}e}") for digits in range(1, 17))
    first, second = next((pair for pair in pairs if pair[0] != pair[1]), (repr(error), repr(most)))
    return f"off by {first}, {second} is allowed"


@fact(FACTS, "one-key", explained_by=("causality", "one-query"))
def one_key(a: MeasuredAttention) -> Failure | None:
    """With one key the output is its value.

    i = j = 1 works, and a single key has weight 1.

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


@fact(FACTS, "outputs", explained_by=("mask-ignored", "grouping", "causality", "last-queries-alone"))
def outputs(a: MeasuredAttention) -> Failure | None:
    """The output is the weighted mean of the values.

    Outputs are at most 2x as far from float64 as the naive method in the same dtype, plus one ulp.

    Usual causes: an approximation, accumulation in lower precision, or a fault that has no name of its own here
    """
    for dtype in (a.dtype, torch.float32):
        for sizes in accepted_shapes(a):
            if sizes in KERNEL_SHAPES and dtype != torch.float32:
                continue
            inputs = a.random_inputs(dtype=dtype, **sizes)
            if (found := smallest_failure(a, inputs, partial(detect_error, a))) is not None:
                return found
    return None


@fact(FACTS, "gradient-mode", explained_by=("outputs",))
def gradient_mode(a: MeasuredAttention) -> Failure | None:
    """The output is the same with and without autograd.

    Under torch.no_grad(), and if q, k and v require gradients, outputs are those of an ordinary call.

    Usual causes: a fused path that is taken only without gradients and computes something else (pytorch#97111)
    """
    inputs = a.random_inputs(7, 7, dtype=torch.float32)

    def detect_without(inputs: AttentionInputs) -> Violation | None:
        with torch.no_grad():
            got = a(inputs)
        return _differs_from_ordinary(
            a,
            inputs,
            got,
            "under torch.no_grad()",
            lambda call: f"torch.no_grad()({call.name}){call().removeprefix(call.name)}",
        )

    def detect_with(inputs: AttentionInputs) -> Violation | None:
        got = a(with_gradients(inputs)).detach()
        form = "{}.clone().requires_grad_()"
        return _differs_from_ordinary(a, inputs, got, "with gradients", lambda call: f"{call.each(form)}.detach()")

    return smallest_failure(a, inputs, detect_without) or smallest_failure(a, inputs, detect_with)


def _differs_from_ordinary(
    a: MeasuredAttention, inputs: AttentionInputs, got: Tensor, how: str, code: Callable[[CallWriter], str]
) -> Violation | None:
    expected = a(inputs).detach()
    if same_up_to_rounding(got, expected):
        return None
    words = f"{how} the output differs by {max_error(got, expected):.1e} from an ordinary call"
    return Violation(words, got, expected, lambda call: [f"expected = {call()}", f"out = {code(call)}"])


@fact(FACTS, "rotary-precision", explained_by=("outputs", "output-dtype"))
def rotary_precision(a: MeasuredAttention) -> Failure | None:
    """Rotary angles need enough digits, or late positions look alike.

    Rotary phases are float32 at least, whatever the dtype of q: positions 200 and 201 differ in bfloat16 too.

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


@fact(FACTS, "half-precision", explained_by=("outputs", "output-dtype", "rotary-precision"))
def half_precision(a: MeasuredAttention) -> Failure | None:
    """With half-precision inputs, sums are still computed in higher precision.

    bfloat16 and float16 outputs are at most 2x as far from float64 as the naive method in that dtype.

    Usual causes: sums of products or of weights accumulated in half precision; scores rounded several times
    """
    ran = False
    for dtype in (torch.bfloat16, torch.float16):
        for inputs in (a.random_inputs(7, 7, c=12, dtype=dtype), a.random_inputs(61, 61, b=1, c=64, dtype=dtype)):
            if raised_by(a, inputs) is not None:
                continue
            ran = True
            if (found := smallest_failure(a, inputs, partial(detect_error, a))) is not None:
                return found
    if not ran:
        raise NotApplicableError("it accepts neither bfloat16 nor float16")
    return None


@fact(FACTS, "finite-mask-value")
def finite_mask_value(a: MeasuredAttention) -> Failure | None:
    """A hidden key has no weight at all, not a very small one.

    A hidden key has no weight even if every visible score is -3e5 or -1e10.

    Usual causes: masked_fill(-1e9) or -1e4 in place of -inf: a hidden key beats visible scores below that
    (TransformerLens#385)
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
    for size in (1e10, 3e5):
        for inputs in calls:
            # q . k is about -size for every pair
            root = (size / (inputs.q.shape[-1] * max(a.scale(inputs), 1e-9))) ** 0.5
            inputs = replace(inputs, q=torch.full_like(inputs.q, -root), k=torch.full_like(inputs.k, root))
            if (found := smallest_failure(a, inputs, detect)) is not None:
                return found
    return None


def _mark_keys(inputs: AttentionInputs, keys: slice) -> AttentionInputs:
    """The call with values that are one in these keys and zero elsewhere."""
    v = torch.zeros_like(inputs.v)
    v[:, :, keys] = 1.0
    return replace(inputs, v=v)


@fact(FACTS, "overflow", explained_by=("outputs",))
def overflow(a: MeasuredAttention) -> Failure | None:
    """Weights are between 0 and 1 however large the scores are.

    Scores of 1e4 in float32, and of 40 in float16, give finite outputs.

    Usual causes: exp(scores) without subtracting the maximum of the row
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        got = a(inputs).detach()
        if bool(got.isfinite().all()):
            return None
        return Violation("large scores give NaN or infinity", got, a.reference(inputs).to(got.dtype))

    for dtype, size in ((torch.float32, 1e4), (torch.float16, 40.0)):
        inputs = a.random_inputs(7, 7, dtype=dtype)
        k = inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1)
        # the largest score is `size`
        factor = size / max((inputs.q.double() @ k.mT).abs().max().item() * a.scale(inputs), 1e-9)
        inputs = replace(inputs, q=inputs.q * factor**0.5, k=inputs.k * factor**0.5)
        if raised_by(a, inputs) is None and (found := smallest_failure(a, inputs, detect)) is not None:
            return found
    return None


@fact(FACTS, "extreme-scores", explained_by=("outputs", "overflow", "finite-mask-value"))
def extreme_scores(a: MeasuredAttention) -> Failure | None:
    """If one score is far larger than the others, the output is the value of that key.

    Scores of +-1e4 give what float64 gives, up to the rounding of float32 scores.

    Usual causes: scores clamped or capped, a temperature or epsilon added to the sum
    """
    inputs = a.random_inputs(7, 7)

    def detect(inputs: AttentionInputs) -> Violation | None:
        expected, got = a.reference(inputs), a(inputs).detach()
        if max_error(got, expected) <= 1e-2 * expected.abs().max().item():
            return None
        return Violation("scores of thousands do not give what float64 gives", got, expected.to(got.dtype))

    return smallest_failure(a, replace(inputs, q=100 * inputs.q, k=100 * inputs.k), detect)


def with_gradients(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers, as leaves that require gradients."""
    return inputs.map(lambda x: x.clone().requires_grad_())


def gradients(run: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> dict[str, Tensor]:
    """The gradients of q, k and v for a fixed output gradient, with a different number in every entry."""
    leaves = with_gradients(inputs)
    out = run(leaves)
    above = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).sin().to(out.dtype)
    grads = torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), above, materialize_grads=True)
    return dict(zip(QKV, grads, strict=True))


def gradient_lines(name: str) -> WriteLines:
    """The lines that compute the gradient of q, k or v."""
    return lambda call: [
        "for x in (q, k, v):",
        "    x.requires_grad_()",
        f"out = {call()}",
        "above = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).sin().to(out.dtype)",
        f"gradient = torch.autograd.grad(out, {name}, above, materialize_grads=True)[0]",
    ]


def _detect_gradients(a: MeasuredAttention, inputs: AttentionInputs) -> dict[str, Violation | None]:
    """The violation of each gradient, if there is one."""
    expected = a.expected(inputs)
    got, naive = gradients(a, inputs), gradients(expected.naive, inputs)
    found: dict[str, Violation | None] = {}
    for name, reference in gradients(expected.reference, inputs.to(torch.float64)).items():
        largest = reference.abs().max().item()
        most = allowed_error(naive[name], reference, GRADIENT_FACTOR)
        if inputs.dtype == torch.float64:
            most = max(most, 4 * FLOAT32_ERROR * max(1.0, largest))
        most += 1e-4 * largest if expected.norm is not None else 0.0
        most += 1e-5 * largest if expected.rotary is not None else 0.0
        error = max_error(got[name], reference)
        words = f"the gradient of {name} is {off_by(error, most)}"
        wrong = Violation(words, got[name], reference.to(got[name].dtype), gradient_lines(name))
        found[name] = None if error <= most else wrong
    return found


def _test_gradient(a: MeasuredAttention, name: str) -> Failure | None:
    for sizes in accepted_shapes(a):
        if sizes in (SHAPES[3], *KERNEL_SHAPES[:3]):
            continue
        inputs = a.random_inputs(dtype=a.dtype if sizes == SHAPES[1] else torch.float32, **sizes)
        if not a.has_gradients:
            raise NotApplicableError("its output has no gradient")
        # the gradients of q, k and v come from one backward pass
        if a.once(("gradients", inputs.sizes), partial(_detect_gradients, a, inputs))[name] is None:
            continue
        found = smallest_failure(a, inputs, lambda inputs: _detect_gradients(a, inputs)[name])
        if found is not None:
            return found
    return None


GRADIENTS_EXPLAINED_BY = ("outputs", "inputs-changed", "gradient-mode")


@fact(FACTS, "gradient-of-q", explained_by=GRADIENTS_EXPLAINED_BY)
def gradient_of_q(a: MeasuredAttention) -> Failure | None:
    """The gradient of q belongs to the output that was computed.

    The gradient of q is at most 3x as far from float64 as the naive method's, plus one ulp.

    Usual causes: q detached or cast, or a hand-written backward pass (pytorch#158212, #146377)
    """
    return _test_gradient(a, "q")


@fact(FACTS, "gradient-of-k", explained_by=GRADIENTS_EXPLAINED_BY)
def gradient_of_k(a: MeasuredAttention) -> Failure | None:
    """The gradient of k belongs to the output that was computed.

    The gradient of k is at most 3x as far from float64 as the naive method's, plus one ulp.

    Usual causes: shared key heads whose query heads are not all summed; k detached (pytorch#158212, #146377)
    """
    return _test_gradient(a, "k")


@fact(FACTS, "gradient-of-v", explained_by=GRADIENTS_EXPLAINED_BY)
def gradient_of_v(a: MeasuredAttention) -> Failure | None:
    """The gradient of v belongs to the output that was computed.

    The gradient of v is at most 3x as far from float64 as the naive method's, plus one ulp.

    Usual causes: weights dropped or masked forward and not backward; v detached (pytorch#158212, #146377)
    """
    return _test_gradient(a, "v")


@fact(FACTS, "dropout")
def dropout(a: MeasuredAttention) -> Failure | None:
    """Weights that dropout keeps are enlarged, so that the mean output stays the same.

    With dropout p, or in train(), a share p of weights is zero and the others are divided by 1 - p.

    Usual causes: weights dropped without scaling, dropout on scores, values or the output, or on whole keys
    """
    name = a.dropout_argument
    if name is None:
        return _training_dropout(a)
    inputs = a.random_inputs(31, 31, b=3, c=8)
    flat = inputs.neutral()
    seed_all(0)
    try:
        columns = a(flat, **{name: DROPOUT}).detach().double()
    except Exception as error:  # a foreign function may raise anything
        raise NotApplicableError(f"{name}={DROPOUT} raises {first_line(error)}") from error
    sums = columns[..., 0]
    mean = sums.mean().item()

    def fails(words: str, got: object, expected: object, last: str) -> Failure:
        def lines(call: CallWriter) -> list[str]:
            out = f"out = {call('q', 'k', 'v', f'{name}={DROPOUT}')}.double()"
            return ["torch.manual_seed(0)", out, "sums = out[..., 0]", last]

        return Failure(words, write_example(a, flat, got, expected, lines))

    if bool((columns - sums[..., None]).abs().max() > 1e-3):
        words = f"{name}={DROPOUT} acts on values or on the output, not on weights: columns of equal values differ"
        return fails(words, True, False, "differ = bool((out - sums[..., None]).abs().max() > 1e-3)")
    if abs(mean - 1) > 0.1 and (whole := _dropped_together(a, flat, name)) is not None:
        return whole  # with few draws the mean is random
    if abs(mean - 1) > 0.1 and not a.declared.sink:
        words = f"with {name}={DROPOUT} the weights of a row sum to {mean:.2f} on average, not to 1"
        return fails(words, mean, 1.0, "mean = sums.mean().item()")
    if not bool((sums - 1).abs().max() > 0.05):
        seed_all(0)
        changes = max_error(a(inputs, **{name: DROPOUT}).detach(), a(inputs).detach()) > 1e-3
        words = f"{name}={DROPOUT} {'acts on scores, not on weights' if changes else 'changes nothing'}"
        return fails(words, False, True, "changes = bool((sums - 1).abs().max() > 0.05)")
    return _dropped_together(a, flat, name)


def _dropped_together(a: MeasuredAttention, flat: AttentionInputs, name: str) -> Failure | None:
    """The failure of weights that are dropped together, or not with the right probability."""
    part = "[..., -5:, :16]"  # visible under a causal mask too
    if bool((a.weights(flat)[..., -5:, :16] == 0).any()):
        return None
    seed_all(0)
    gone = a.weights(flat, **{name: DROPOUT})[..., -5:, :16] == 0

    def fails(words: str, got: object, expected: object, last: str) -> Failure:
        def lines(call: CallWriter) -> list[str]:
            return ["torch.manual_seed(0)", f"gone = {call.weights(f'{name}={DROPOUT}')}{part} == 0", last]

        return Failure(words, write_example(a, flat, got, expected, lines))

    # if v has a fixed width, weights are read in several calls, and each drops others
    for axis, what in ((3, "rows"), (2, "keys")) if a.free_widths else ():
        if bool((gone.all(axis) == gone.any(axis)).all()):
            last = f"whole = bool((gone.all({axis}) == gone.any({axis})).all())"
            return fails(f"{name}={DROPOUT} drops whole {what}, not single weights", True, False, last)
    share = gone.double().mean().item()
    if abs(share - DROPOUT) <= 0.12:
        return None
    words = f"{name}={DROPOUT} makes {share:.0%} of the weights zero"
    return fails(words, share, DROPOUT, "share = gone.double().mean().item()")


def _training_dropout(a: MeasuredAttention) -> Failure | None:
    """The failure of a module in training mode, whose dropout probability is not known."""
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

    Usual causes: a fast path that is taken in eval() only and computes something else (pytorch#97111)
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
    error = max_error(run(inputs, True), run(inputs, False))
    words = f"train() and eval() differ by {error:.1e}"

    def detect(inputs: AttentionInputs) -> Violation | None:
        training, evaluated = run(inputs, True), run(inputs, False)
        return None if max_error(training, evaluated) <= 1e-5 else Violation(words, evaluated, training, _train_lines)

    return None if error <= 1e-5 else failure_of(a, inputs, detect, words)


def _train_lines(call: CallWriter) -> list[str]:
    """The lines that call the module in training mode and in eval mode."""
    made = [line for line in call.before if line.startswith("attend = ")]
    return [
        *(line.replace("attend = ", "training = ").replace(".eval()", ".train()") for line in made),
        f"expected = {call().replace('attend(', 'training(', 1)}",
        *made,
        f"out = {call()}",
    ]


@fact(FACTS, "compile", slow=True)
def compiled(a: MeasuredAttention) -> Failure | None:
    """Compiled code computes the same thing.

    torch.compile with backend="aot_eager" gives the numbers of the plain call.

    Usual causes: a branch on torch.compiler.is_compiling(), Python state read while tracing
    """
    inputs = a.random_inputs(7, 7)
    plain = a(inputs).detach()
    keywords = {**a.causal_keywords(inputs.causal), **a.grouped_keywords(inputs.q, inputs.k)}

    def lines(call: CallWriter) -> list[str]:
        fast = f'torch.compile({call.name}, backend="aot_eager")'
        return [f"expected = {call()}", f"out = {fast}{call().removeprefix(call.name)}"]

    def fails(words: str, got: object, expected: object) -> Failure:
        # one seed, from which q, k and v are drawn in turn
        seeds = {"q": 1000 * a.declared.seed, "k": -1, "v": -1}
        return Failure(words, write_example(a, inputs, got, expected, lines, seeds))

    torch._dynamo.reset()
    try:
        fast = torch.compile(a.probe.call, backend="aot_eager")(inputs.q, inputs.k, inputs.v, **keywords).detach()
    except Exception as error:  # a foreign function may raise anything
        raised = Raised.from_error(error)
        return fails(f"torch.compile raises {raised}", raised, None)
    finally:
        torch._dynamo.reset()
    off = max_error(fast, plain)
    return None if off <= 1e-5 else fails(f"the compiled call differs by {off:.1e} from the plain one", fast, plain)
