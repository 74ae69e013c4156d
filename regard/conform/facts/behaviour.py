"""Facts about the call itself: it returns, it is deterministic, it keeps no state and changes no input."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.attention_under_test import AttentionUnderTest
from regard.conform.conventions import MeasuredAttention
from regard.conform.example import CallWriter, Raised
from regard.conform.fact import Fact, Failure, fact
from regard.conform.inputs import QKV, AttentionInputs, hide_later_half
from regard.conform.reset_state import fresh_dtype
from regard.conform.shrink import Detect, Violation, failure_of, smallest_failure
from regard.conform.tolerance import distance, equal

FACTS: Registry[Fact] = Registry("fact")


def seed_all(seed: int) -> None:
    """Seed torch, random and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def raised_by(a: AttentionUnderTest, inputs: AttentionInputs) -> Raised | None:
    """The exception of the call, if it raises."""
    try:
        a(inputs)
    except Exception as error:  # a foreign function may raise anything
        return Raised.from_error(error)
    return None


@fact(FACTS, "runs", fatal=True)
def runs(a: MeasuredAttention) -> Failure | None:
    """Attention returns numbers for queries, keys and values of matching shapes.

    An ordinary call (b=2, h=4, i=j=6, c=e=4) does not raise, and its output is not NaN everywhere.

    Usual causes: a shape hard-coded for one model, a required argument, another layout than (b h n c); for NaN, a
    softmax over scores that are all -inf, or uninitialised memory (torch.empty)
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        raised = raised_by(a, inputs)
        if raised is not None:
            return Violation(f"an ordinary call raises {raised}", raised)
        if not bool(a(inputs).isnan().all()):
            return None
        words = "an ordinary call gives NaN everywhere"
        return Violation(words, True, False, lambda call: [f"all_nan = bool({call()}.isnan().all())"])

    return smallest_failure(a, a.random_inputs(6, 6, h=4, e=4, causal=False, dtype=torch.float32), detect)


@fact(FACTS, "output-shape", fatal=True)
def output_shape(a: MeasuredAttention) -> Failure | None:
    """Each query gets one output, as wide as the values.

    (b h i c), (b g j c), (b g j e) -> (b h i e).

    Usual causes: a missing or extra transpose or reshape at the end, or an axis lost by squeeze()
    """
    calls = [a.random_inputs(5, 5, causal=False), a.random_inputs(5, 7, b=3), a.random_inputs(5, 5, b=1)]
    single = a.random_inputs(5, 5, b=1, h=1)
    for inputs in [*calls, *([single] if raised_by(a, single) is None else [])]:
        found = smallest_failure(a, inputs, lambda inputs: _wrong_shape(a, inputs, "the output"))
        if found is not None:
            return found
    return None


def _wrong_shape(a: MeasuredAttention, inputs: AttentionInputs, what: str) -> Violation | None:
    b, h, _, i, _, _, e = inputs.sizes
    shape = tuple(a(inputs).shape)
    if shape == (b, h, i, e):
        return None
    words = f"{what} has shape {shape}, not (b h i e) = {(b, h, i, e)}"
    return Violation(words, shape, (b, h, i, e), lambda call: [f"shape = tuple({call()}.shape)"])


@fact(FACTS, "dropout-in-eval", fatal=True)
def dropout_in_eval(a: MeasuredAttention) -> Failure | None:
    """Dropout is for training. In eval mode every output is exact.

    Without a dropout argument, or in eval(), no visible weight is zero and two seeds give the same numbers.

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
    return failure_of(a, inputs, lambda inputs: _differs_by_seed(a, inputs), words)


def _differs_by_seed(a: MeasuredAttention, inputs: AttentionInputs) -> Violation | None:
    outs = []
    for seed in (0, 1):
        seed_all(seed)
        outs.append(a(inputs).detach())
    if equal(*outs):
        return None
    lines = [
        "import random",
        "import numpy",
        "outs = []",
        "for seed in (0, 1):",
        "    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)",
    ]
    return Violation(
        f"two calls differ by up to {distance(*outs):.1e}",
        False,
        True,
        lambda call: [*lines, f"    outs.append({call()})", "same = torch.equal(*outs)"],
    )


@fact(FACTS, "determinism", fatal=True)
def determinism(a: MeasuredAttention) -> Failure | None:
    """The same inputs give the same output.

    Two calls with equal inputs are equal bit for bit, whatever the seeds of torch, numpy and random are.

    Usual causes: noise left over from an experiment, uninitialised memory (torch.empty), random features that are
    redrawn
    """
    inputs, (first, again, *others) = outputs_by_seed(a)
    for other in others:
        if not equal(first, other) and equal(first, again):
            words = f"two calls differ by up to {distance(first, other):.1e}"
            return failure_of(a, inputs, lambda inputs: _differs_by_seed(a, inputs), words)
    return None


def outputs_by_seed(a: MeasuredAttention) -> tuple[AttentionInputs, list[Tensor]]:
    """The outputs of one call under the seeds 0, 0, 1, 2 and 3."""

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

    f(y) is equal bit for bit as the first call and after f(x), whatever the lengths and widths of x are.

    Usual causes: a mask or cache kept from an earlier call, such as a larger one, and cut to size; a scale kept
    from the first width; a buffer that is updated in forward()
    """
    if a.reset is not None:
        try:
            found = _differs_from_first_call(a)
        finally:
            a.reset.restore()
        if found is not None:
            return found
    # lengths that were not used before: state that depends on them is created now
    calls = {
        (6, 6): [a.random_inputs(6, 6, seed=1), a.random_inputs(9, 9, b=1, seed=2), a.random_inputs(4, 4, b=3, seed=3)],
        (3, 13): [a.random_inputs(17, 17, b=1, seed=4), a.random_inputs(13, 13, c=12, seed=5)],
    }
    for (i, j), others in calls.items():
        inputs = a.random_inputs(i, j)
        if raised_by(a, inputs) is not None:
            continue  # longer than it accepts
        first = _output(a, inputs)
        for other in others:
            if raised_by(a, other) is not None:
                continue
            again = _output(a, inputs)
            if not equal(first, again):
                words = f"after a call with other inputs the same call differs by {distance(first, again):.1e}"
                return _failure_after_another(a, inputs, words, fresh=False)
    return None


def _differs_from_first_call(a: MeasuredAttention) -> Failure | None:
    """Failure: the same call gives another result after other calls."""
    dtype = fresh_dtype(a.probe)
    sizes: tuple[dict[str, Any], ...] = (
        {"i": 2, "j": 6},
        {"i": 6, "j": 6},
        {"i": 11, "j": 11, "b": 1},
        {"i": 4, "j": 4, "b": 3},
        {"i": 6, "j": 6, "c": 12},
    )
    calls = [a.random_inputs(dtype=dtype, seed=seed, **each) for seed, each in enumerate(sizes)]
    calls = [each for each in calls if raised_by(a, each) is None]
    alone = [_output(_fresh(a), each) for each in calls]
    for order in (range(len(calls)), reversed(range(len(calls)))):
        fresh = _fresh(a)
        for number in order:
            after = _output(fresh, calls[number])
            if not equal(after, alone[number]):
                _, _, _, i, j, c, _ = calls[number].sizes
                off = distance(after, alone[number])
                words = (
                    f"the output for i={i}, j={j}, c={c} as the first call and after other calls differs by {off:.1e}"
                )
                return _failure_after_another(a, calls[number], words, fresh=True)
    return None


def _fresh(a: MeasuredAttention) -> MeasuredAttention:
    assert a.reset is not None
    return replace(a, probe=a.reset.fresh_probe())


def _repeat(x: Tensor, axis: int) -> Tensor:
    return torch.cat([x, x], axis)


# earlier calls: how each of q, k and v is written, and how it is made
EARLIER_CALLS: dict[tuple[str, str, str], Callable[[AttentionInputs], AttentionInputs]] = {
    ("k", "k", "v"): lambda x: x.with_tensors(q=x.k),
    ("{}[:, :, -1:]", "k", "v"): lambda x: x.with_tensors(q=x.q[:, :, -1:]),
    ("torch.cat([{0}, {0}], 2)",) * 3: lambda x: x.map(lambda y: _repeat(y, 2)),
    ("torch.cat([{0}, {0}], 3)", "torch.cat([{0}, {0}], 3)", "v"): lambda x: x.with_tensors(
        q=_repeat(x.q, 3), k=_repeat(x.k, 3)
    ),
    ("torch.cat([{0}, {0}], 3)",) * 3: lambda x: x.map(lambda y: _repeat(y, 3)),
    ("2 * {}.flip(2) + 1",) * 3: lambda x: x.map(lambda y: 2 * y.flip(2) + 1),
    ("{}[:, :, :-1]",) * 3: lambda x: x.map(lambda y: y[:, :, :-1]),
}


def _failure_after_another(a: MeasuredAttention, inputs: AttentionInputs, words: str, fresh: bool) -> Failure:
    """The failure with the smallest call that one of EARLIER_CALLS changes.

    fresh  compare with the output in a fresh state; else with the same call just before
    """
    copied = a.probe.module is not None
    # as_probe calls a function before the example does, so that its state is not fresh there
    fresh = fresh and (copied or (a.code is not None and a.code.name != "attend"))

    def detect_after(written: tuple[str, str, str], make: Callable[[AttentionInputs], AttentionInputs]) -> Detect:
        def lines(call: CallWriter) -> list[str]:
            other = call(*(form.format(name) for form, name in zip(written, QKV, strict=True)))
            if fresh and not copied:
                return [f"other = {other}", f"out = {call()}"]
            renew = [line for line in call.before if line.startswith("attend = ")] if fresh else []
            calls = [f"first = {call()}", *renew, f"other = {other}", f"after = {call()}"]
            return [*calls, "same = torch.equal(first, after)"]

        def detect(inputs: AttentionInputs) -> Violation | None:
            first = _output(_fresh(a) if fresh else a, inputs)
            tested = _fresh(a) if fresh else a
            _output(tested, make(inputs))
            after = _output(tested, inputs)
            if equal(first, after):
                return None
            by_value = fresh and not copied
            return Violation(words, after, first, lines) if by_value else Violation(words, False, True, lines)

        return detect

    for written, make in EARLIER_CALLS.items():
        with suppress(Exception):  # a width or length that it does not accept
            if (found := smallest_failure(a, inputs, detect_after(written, make), words)) is not None:
                return found
    return _failure_after_another(a, inputs, words, fresh=False) if fresh else Failure(words)


@fact(FACTS, "inputs-changed")
def inputs_changed(a: MeasuredAttention) -> Failure | None:
    """A call does not change its inputs.

    q, k and v, and a mask if one is passed, hold the same numbers after the call as before.

    Usual causes: an in-place operation on an argument: q *= scale, k.masked_fill_(...), mask.logical_not_()
    """
    inputs = a.random_inputs(5, 5)
    for name in QKV:

        def detect(inputs: AttentionInputs, name: str = name) -> Violation | None:
            given = {x: getattr(inputs, x).clone() for x in QKV}
            a.call(given["q"], given["k"], given["v"], inputs)
            return _input_change(name, given[name], getattr(inputs, name))

        if (found := smallest_failure(a, inputs, detect)) is not None:
            return found
    mask = a.mask
    if mask is None:
        return None

    def detect_mask(inputs: AttentionInputs) -> Violation | None:
        assert inputs.visible is not None
        before = mask.convert(inputs.visible, inputs.dtype)
        given = before.clone()
        a(replace(inputs, visible=None), **{mask.name: given})
        return _input_change(mask.name, given, before)

    return smallest_failure(a, hide_later_half(a.random_inputs(5, 5, causal=False)), detect_mask)


def _input_change(name: str, after: Tensor, before: Tensor) -> Violation | None:
    if equal(after, before):
        return None
    return Violation(f"the call changes {name}", after, before, lambda call: [call(), f"after = {name}"])


@fact(FACTS, "output-dtype")
def output_dtype(a: MeasuredAttention) -> Failure | None:
    """Outputs have the precision of the inputs.

    The output has the dtype of q, for float64, float32, bfloat16 and float16.

    Usual causes: softmax(dtype=torch.float32) or .float() without .to(q.dtype) afterwards
    """
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        inputs = a.random_inputs(5, 5, dtype=dtype)
        if raised_by(a, inputs) is not None:
            continue  # an exception is not a silent change

        def detect(inputs: AttentionInputs, dtype: torch.dtype = dtype) -> Violation | None:
            have = a(inputs).dtype
            if inputs.dtype != dtype or have == dtype:
                return None
            words = f"for {dtype} the output is {have}"
            return Violation(words, have, dtype, lambda call: [f"dtype = {call()}.dtype"])

        if (found := smallest_failure(a, inputs, detect)) is not None:
            return found
    return None


STRIDES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "transposed": (
        "{}.transpose(1, 2).contiguous().transpose(1, 2)",
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ),
    "sliced": (
        "torch.stack([{0}, {0} + 1], -1).flatten(-2)[..., ::2]",
        lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    ),
    "column-major": ("{}.mT.contiguous().mT", lambda x: x.mT.contiguous().mT),
}


@fact(FACTS, "memory-layout")
def memory_layout(a: MeasuredAttention) -> Failure | None:
    """The output depends on the numbers, not on their order in memory.

    Transposed, sliced and column-major views give the outputs of contiguous copies.

    Usual causes: view() or as_strided() on a tensor that is not contiguous, a kernel that assumes strides
    """
    for name, (form, change) in STRIDES.items():

        def detect(
            inputs: AttentionInputs, name: str = name, form: str = form, change: Callable[[Tensor], Tensor] = change
        ) -> Violation | None:
            expected = a(inputs).detach()
            q, k, v = (change(x) for x in (inputs.q, inputs.k, inputs.v))

            def lines(call: CallWriter) -> list[str]:
                return [f"out = {call.each(form)}"]

            try:
                out = a.call(q, k, v, inputs).detach()
            except Exception as error:  # a foreign function may raise anything
                raised = Raised.from_error(error)
                return Violation(f"{name} inputs raise {raised}", raised, lines=lines)
            if (out - expected).abs().max().nan_to_num().item() <= 1e-5:
                return None
            words = f"{name} inputs give outputs that differ by {distance(out, expected):.1e} from contiguous ones"
            return Violation(words, out, expected, lines)

        if (found := smallest_failure(a, a.random_inputs(5, 5), detect)) is not None:
            return found
    return None


def _test_lengths(a: MeasuredAttention, lengths: list[tuple[int, int]], what: str) -> Failure | None:
    for i, j in lengths:
        if i != j and not a.free_lengths:
            continue

        def detect(inputs: AttentionInputs) -> Violation | None:
            _, _, _, i, j, _, _ = inputs.sizes
            if (j % 2 == 0 and i == j) or j < 2:
                return None  # not a length of this fact
            if (raised := raised_by(a, inputs)) is not None:
                return Violation(f"{what} (i={i}, j={j}) raises {raised}", raised)
            return _wrong_shape(a, inputs, f"the output for {what} (i={i}, j={j})")

        inputs = a.random_inputs(i, j, dtype=torch.float32)
        if (found := smallest_failure(a, inputs, detect, square=i == j)) is not None:
            return found
    return None


@fact(FACTS, "one-query")
def one_query(a: MeasuredAttention) -> Failure | None:
    """One query may attend to many keys.

    i = 1 works with j > 1, as in every step of decoding.

    Usual causes: squeeze() without an axis; i taken from k.shape
    """
    return _test_lengths(a, [(1, 6)], "one query and several keys")


@fact(FACTS, "odd-lengths")
def odd_lengths(a: MeasuredAttention) -> Failure | None:
    """Any length works, not only even numbers or powers of two.

    n = 3, 5, 7, 13, 17, 33 and 65 work, not only multiples of a block.

    Usual causes: a block size that has to divide the length, a reshape into pairs
    """
    return _test_lengths(a, [(n, n) for n in (3, 5, 7, 13, 17, 33, 65)], "an odd length")
