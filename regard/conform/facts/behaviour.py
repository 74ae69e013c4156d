"""Facts about the call itself: it returns, is deterministic, keeps no state and changes no input."""

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import AttentionUnderTest
from regard.conform.conventions import MeasuredAttention
from regard.conform.example import CallWriter, Raised, WriteLines, run_lines
from regard.conform.fact import Fact, Failure, fact, first_failure
from regard.conform.inputs import QKV, AttentionInputs, hide_later_half
from regard.conform.reset_state import fresh_dtype
from regard.conform.shrink import Detect, Violation, detect_lines, failure_of, smallest_failure
from regard.conform.tolerance import distance, equal, same_up_to_rounding
from regard.see.measure.probes.probe import missing_argument_hint
from regard.see.measure.read_weights import training_mode

FACTS: Registry[Fact] = Registry("fact")


def seed_all(seed: int) -> None:
    """Seed the random number generators of torch, random and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def raised_by(a: AttentionUnderTest, inputs: AttentionInputs) -> Raised | None:
    """Call the attention and return the exception that it raises, or None."""
    try:
        a(inputs)
    except Exception as error:  # the function of the user may raise any exception
        return Raised.from_error(error)
    return None


@fact(FACTS, "runs", fatal=True)
def runs(a: MeasuredAttention) -> Failure | None:
    """Attention returns numbers for queries, keys and values of matching shapes.

    A call with batch size 2, 4 heads, 6 queries, 6 keys and head width 4 does not raise, and its output is not NaN
    everywhere.

    Usual causes: a shape hard-coded for one model, a required argument, inputs whose axes are not (batch, head,
    position, width); for NaN, a softmax over scores that are all -inf, or uninitialised memory (torch.empty)
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        raised = raised_by(a, inputs)
        if raised is not None:
            lacking = missing_argument_hint(a.probe.name, a.probe.filled_in).strip()
            return Violation(f"an ordinary call raises {raised}{'; ' * bool(lacking)}{lacking}", raised)
        if not bool(a(inputs).isnan().all()):
            return None
        words = "an ordinary call gives NaN everywhere"
        return Violation(words, True, False, lambda call: [f"all_nan = bool({call()}.isnan().all())"])

    return smallest_failure(a, a.random_inputs(6, 6, h=4, e=4, causal=False, dtype=torch.float32), detect)


@fact(FACTS, "output-shape", fatal=True)
def output_shape(a: MeasuredAttention) -> Failure | None:
    """Each query gets one output, as wide as the values.

    With q (b h i c), k (b g j c) and v (b g j e), the output has the shape (b h i e).

    Usual causes: a missing or extra transpose or reshape at the end, or an axis lost by squeeze()
    """
    calls = [a.random_inputs(5, 5, causal=False), a.random_inputs(5, 7, b=3), a.random_inputs(5, 5, b=1)]
    single = a.random_inputs(5, 5, b=1, h=1)
    detect = partial(_wrong_shape, a, "the output")
    return first_failure(
        smallest_failure(a, inputs, detect) for inputs in [*calls, *([single] if raised_by(a, single) is None else [])]
    )


def _wrong_shape(a: MeasuredAttention, what: str, inputs: AttentionInputs) -> Violation | None:
    b, h, _, i, _, _, e = inputs.sizes
    shape = tuple(a(inputs).shape)
    if shape == (b, h, i, e):
        return None
    words = f"{what} has shape {shape}, not (b h i e) = {(b, h, i, e)}"
    return Violation(words, shape, (b, h, i, e), lambda call: [f"shape = tuple({call()}.shape)"])


@fact(FACTS, "dropout-in-eval", fatal=True)
def dropout_in_eval(a: MeasuredAttention) -> Failure | None:
    """Dropout is for training. In eval mode every output is exact.

    Without a dropout argument, or after eval(), no visible key has weight zero, and two random seeds give the same
    output.

    Usual causes: F.dropout(p) without training=self.training, a default of dropout_p that is not 0 (pytorch#124464)
    """
    inputs, outs = outputs_by_seed(a)
    if all(equal(outs[0], out) for out in outs[2:]):
        return None
    kept = []
    for seed in range(4):
        seed_all(seed)
        kept.append(a.weights(inputs.with_zero_queries()) != 0)
    if all(torch.equal(kept[0], other) for other in kept[1:]):
        return None  # random, but not by dropout: the fact `determinism`
    share = 1 - torch.stack(kept).float().mean().item() / torch.stack(kept).any(0).float().mean().item()
    words = f"about {share:.0%} of the visible weights are zero, different ones at each call"
    return failure_of(a, inputs, _detect_seed(a, words), words)


def _seed_lines(*lines: str) -> list[str]:
    """Return Python code that runs the given lines with two random seeds.

    Each result is appended to the list `found`.
    """
    seeded = "    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)"
    return ["import random", "import numpy", "found = []", "for seed in (0, 1):", seeded, *lines]


def _detect_seed(a: MeasuredAttention, words: str) -> Detect:
    """Return a function of inputs that returns a violation if outputs differ between two random seeds, else None.

    words  describes the failure
    """

    def lines(call: CallWriter) -> list[str]:
        return [*_seed_lines(f"    found.append({call()})"), "same = torch.equal(*found)"]

    return detect_lines(a, words, lines, expected=True)


@fact(FACTS, "determinism", fatal=True)
def determinism(a: MeasuredAttention) -> Failure | None:
    """The same inputs give the same output.

    Two calls with equal inputs are equal bit for bit, whatever the seeds of torch, numpy and random are.

    Usual causes: noise left over from an experiment, uninitialised memory (torch.empty), random features that are
    sampled again in every call
    """
    inputs, (first, again, *others) = outputs_by_seed(a)
    for other in others:
        if not equal(first, other) and equal(first, again):
            words = f"two calls differ by up to {distance(first, other):.1e}"
            return failure_of(a, inputs, _detect_seed(a, words), words)
    return None


@fact(FACTS, "random-state")
def random_state(a: MeasuredAttention) -> Failure | None:
    """A call does not reset the random numbers of the rest of the program.

    Random numbers that are drawn after a call depend on the seed that was set before the call. This holds for torch,
    numpy and random, also with dropout and in training mode.

    Usual causes: torch.manual_seed() inside the attention, so that dropout and shuffling repeat at every step
    """
    inputs, dropout = a.random_inputs(5, 5), a.dropout_argument
    more = [[]] if dropout is None else [[], [f"{dropout}=0.25"]]

    def lines(given: list[str], call: CallWriter) -> list[str]:
        draw = "    found.append((torch.rand(()).item(), random.random(), numpy.random.rand()))"
        reset = "reset = any(one == other for one, other in zip(*found))"
        return [*_seed_lines(f"    {call(*QKV, *given)}", draw), reset]

    words = "random numbers after the call are the same for every seed before it: the call sets the seed"
    for training, given in product((False, True) if a.probe.module is not None else (False,), more):
        with suppress(Exception), training_mode(a.probe.module, training=training):  # an argument that it refuses
            detect = detect_lines(a, words, partial(lines, given), expected=False)
            if (found := smallest_failure(a, inputs, detect)) is not None:
                return found
    return None


def outputs_by_seed(a: MeasuredAttention) -> tuple[AttentionInputs, list[Tensor]]:
    """Return random inputs, and the outputs of the attention for these inputs under the seeds 0, 0, 1, 2 and 3."""

    def run() -> tuple[AttentionInputs, list[Tensor]]:
        inputs = a.random_inputs(9, 9, b=3)
        return inputs, [_output(a, inputs, seed) for seed in (0, 0, 1, 2, 3)]

    found: tuple[AttentionInputs, list[Tensor]] = a.once("outputs by seed", run)
    return found


def _output(a: AttentionUnderTest, inputs: AttentionInputs, seed: int = 0) -> Tensor:
    seed_all(seed)
    return a(inputs).detach()


@fact(FACTS, "state-between-calls", fatal=True)
def state_between_calls(a: MeasuredAttention) -> Failure | None:
    """An output depends on the inputs, not on earlier calls.

    A call gives the same output, bit for bit, as the first call and after a call with other inputs, whatever the
    lengths and widths of those inputs are.

    Usual causes: a mask or cache kept from an earlier call, such as a larger one, and cut to size; a scale kept
    from the first width; a buffer that is updated in forward()
    """
    try:
        return _differs_from_first_call(a)
    finally:
        if a.reset is not None:
            a.reset.restore()


def _differs_from_first_call(a: MeasuredAttention) -> Failure | None:
    """Return a failure if the output of a call is different after earlier calls than as the first call, else None."""
    # lengths that were not used before: state that depends on them is created now
    sizes = ((2, 6, 2, 4), (6, 6, 2, 4), (11, 11, 1, 4), (4, 4, 3, 4), (6, 6, 2, 12), (3, 13, 2, 4), (17, 17, 1, 4))
    dtype = a.dtype if a.reset is None else fresh_dtype(a.probe)
    calls = [a.random_inputs(i, j, b=b, c=c, dtype=dtype, seed=n) for n, (i, j, b, c) in enumerate(sizes)]
    calls = [each for each in calls if raised_by(a, each) is None]
    alone = [_output(_fresh(a), each) for each in calls]
    for order in (range(len(calls)), reversed(range(len(calls)))):
        fresh = _fresh(a)
        for number in order:
            after = _output(fresh, calls[number])
            if not equal(after, alone[number]):
                _, _, _, i, j, c, _ = calls[number].sizes
                off = f"differs by {distance(after, alone[number]):.1e}"
                return _failure_after_another(
                    a,
                    calls[number],
                    f"the output for i={i}, j={j}, c={c} as the first call and after other calls {off}",
                )
    return None


def _fresh(a: MeasuredAttention) -> MeasuredAttention:
    """Return the attention in its state before the first call; if this is not possible, return it unchanged."""
    return a if a.reset is None else replace(a, probe=a.reset.fresh_probe())


TWICE_AS_LONG, TWICE_AS_WIDE = "torch.cat([{0}, {0}], 2)", "torch.cat([{0}, {0}], 3)"
EARLIER_CALLS = (  # how q, k and v are written in a call before the one that changes
    ("k", "k", "v"),
    ("{}[:, :, -1:]", "k", "v"),
    (TWICE_AS_LONG,) * 3,
    (TWICE_AS_WIDE, TWICE_AS_WIDE, "v"),
    (TWICE_AS_WIDE,) * 3,
    ("2 * {}.flip(2) + 1",) * 3,
    ("{}[:, :, :-1]",) * 3,
)


def _failure_after_another(a: MeasuredAttention, inputs: AttentionInputs, words: str) -> Failure:
    """Return a failure whose example makes two calls; the output of the second differs from the output it has alone.

    The changed inputs of EARLIER_CALLS are tried for the first call. The failure has no example if none of them changes
    the output.

    inputs  the inputs of the second call, which are made as small as possible
    words   describes the failure
    """
    if a.probe.module is None and a.code.name == "attend":
        return Failure(words)  # as_probe calls a function before the example does, so its state is not fresh there
    for forms in EARLIER_CALLS:

        def lines(call: CallWriter, forms: tuple[str, str, str] = forms) -> list[str]:
            return [f"other = {call(*(form.format(x) for form, x in zip(forms, QKV, strict=True)))}", f"out = {call()}"]

        def detect(inputs: AttentionInputs, lines: WriteLines = lines) -> Violation | None:
            first = _output(_fresh(a), inputs)
            after = run_lines(_fresh(a), inputs, lines)[1].detach()
            return None if equal(first, after) else Violation(words, after, first, lines)

        with suppress(Exception):  # a width or length that it does not accept
            if (found := smallest_failure(a, inputs, detect, words)) is not None:
                return found
    return Failure(words)


@fact(FACTS, "inputs-changed")
def inputs_changed(a: MeasuredAttention) -> Failure | None:
    """A call does not change its inputs.

    q, k, v and the mask, if one is passed, have the same entries after the call as before.

    Usual causes: an in-place operation on an argument: q *= scale, k.masked_fill_(...), mask.logical_not_()
    """
    mask, inputs = a.mask, a.random_inputs(5, 5)

    def detect(name: str, inputs: AttentionInputs) -> Violation | None:
        given = {x: getattr(inputs, x).clone() for x in QKV}
        keywords: dict[str, Tensor] = {}
        if mask is not None and inputs.visible is not None:
            keywords = {mask.name: mask.convert(inputs.visible, inputs.dtype)}
        before = (given | keywords)[name].clone()
        a.call(given["q"], given["k"], given["v"], replace(inputs, visible=None), **keywords)
        after = (given | keywords)[name]
        if equal(after, before):
            return None
        return Violation(f"the call changes {name}", after, before, lambda call: [call(), f"after = {name}"])

    masked = hide_later_half(a.random_inputs(5, 5, causal=False))
    calls = [(name, inputs) for name in QKV] + ([] if mask is None else [(mask.name, masked)])
    return first_failure(smallest_failure(a, each, partial(detect, name)) for name, each in calls)


@fact(FACTS, "output-dtype")
def output_dtype(a: MeasuredAttention) -> Failure | None:
    """Outputs have the precision of the inputs.

    The output has the dtype of q, for float64, float32, bfloat16 and float16.

    Usual causes: softmax(dtype=torch.float32) or .float() without .to(q.dtype) afterwards
    """
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        inputs = a.random_inputs(5, 5, dtype=dtype)
        if raised_by(a, inputs) is not None or (have := a(inputs).dtype) == dtype:
            continue  # an exception is not a silent change
        words = f"for {dtype} the output is {have}"
        detect = detect_lines(a, words, lambda call: ["expected = q.dtype", f"dtype = {call()}.dtype"])
        return smallest_failure(a, inputs, detect)
    return None


STRIDES = {
    "transposed": "{}.transpose(1, 2).contiguous().transpose(1, 2)",
    "sliced": "torch.stack([{0}, {0} + 1], -1).flatten(-2)[..., ::2]",
    "column-major": "{}.mT.contiguous().mT",
}


@fact(FACTS, "memory-layout")
def memory_layout(a: MeasuredAttention) -> Failure | None:
    """The output depends on the numbers, not on their order in memory.

    Transposed, sliced and column-major views give the same outputs as contiguous copies.

    Usual causes: view() or as_strided() on a tensor that is not contiguous, a kernel that assumes contiguous strides
    """

    def lines(form: str, call: CallWriter) -> list[str]:
        return [f"expected = {call()}", f"out = {call.each(form)}"]

    def detect(name: str, form: str) -> Detect:
        words = f"{name} inputs give outputs that differ by {{}} from contiguous ones"
        return detect_lines(a, words, partial(lines, form), same_up_to_rounding, raises=f"{name} inputs raise")

    return first_failure(smallest_failure(a, a.random_inputs(5, 5), detect(*each)) for each in STRIDES.items())


def _test_lengths(a: MeasuredAttention, lengths: list[tuple[int, int]], what: str) -> Failure | None:
    for i, j in lengths:
        if i != j and not a.free_lengths:
            continue

        def detect(inputs: AttentionInputs) -> Violation | None:
            _, _, _, i, j, _, _ = inputs.sizes
            if (j % 2 == 0 and i == j) or j < 2:
                return None  # this fact does not test this length
            if (raised := raised_by(a, inputs)) is not None:
                return Violation(f"{what} (i={i}, j={j}) raises {raised}", raised)
            return _wrong_shape(a, f"the output for {what} (i={i}, j={j})", inputs)

        inputs = a.random_inputs(i, j, dtype=torch.float32)
        if (found := smallest_failure(a, inputs, detect, square=i == j)) is not None:
            return found
    return None


@fact(FACTS, "one-query")
def one_query(a: MeasuredAttention) -> Failure | None:
    """One query may attend to many keys.

    A call with one query (i = 1) and several keys (j > 1) works, as in every step of decoding.

    Usual causes: squeeze() without an axis; the number of queries taken from k.shape
    """
    return _test_lengths(a, [(1, 6)], "one query and several keys")


@fact(FACTS, "odd-lengths")
def odd_lengths(a: MeasuredAttention) -> Failure | None:
    """Any length works, not only even numbers or powers of two.

    Sequences of 3, 5, 7, 13, 17, 33 and 65 positions work, not only multiples of a block size.

    Usual causes: a block size that has to divide the length, a reshape into pairs
    """
    return _test_lengths(a, [(n, n) for n in (3, 5, 7, 13, 17, 33, 65)], "an odd length")
