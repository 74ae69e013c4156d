"""Facts about answering at all: that there is an answer, always the same one, and nothing else happens."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.callable_under_test import Subject
from regard.conform.conventions import Findings, half_hidden
from regard.conform.example import Ask, Raised
from regard.conform.fact import Fact, Failure, fact
from regard.conform.inputs import Inputs
from regard.conform.reset_state import fresh_dtype
from regard.conform.shrink import Complaint, Judge, failure

FACTS: Registry[Fact] = Registry("fact")


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def equal(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


@fact(
    FACTS,
    "runs",
    student="Given queries, keys and values of fitting shapes, attention has an answer, and it is made of numbers.",
    engineer="An ordinary call (b=2, h=4, i=j=6, c=e=4) does not raise, and does not give NaN alone.",
    cause="a shape hard-coded for one model, an argument that is required, another layout than (b h n c); for NaN, a "
    "softmax over scores that are all -inf, memory that was never written (torch.empty)",
    fatal=True,
)
def runs(f: Findings) -> Failure | None:
    inputs = f.subject.draw(6, 6, h=4, e=4, causal=False, dtype=torch.float32)

    def judge(inputs: Inputs) -> Complaint | None:
        raised = refusal(f, inputs)
        if raised is not None:
            return Complaint(f"an ordinary call raises {raised.kind}: {raised.words}", raised)
        if not bool(f.subject(inputs).isnan().all()):
            return None
        return Complaint("an ordinary call gives nothing but NaN", True, False, _alone)

    return failure(f.subject, inputs, kept_in_kind(judge))


def _alone(ask: Ask) -> list[str]:
    return [f"nothing = bool({ask()}.isnan().all())"]


def refusal(f: Findings, inputs: Inputs) -> Raised | None:
    """What the call raises, if it does."""
    try:
        f.subject(inputs)
    except Exception as error:
        return Raised.of(error)
    return None


def kept_in_kind(judge: Judge) -> Judge:
    """The judge, deaf to any other error than the first: a smaller input may be wrong in its own way."""
    kinds: list[object] = []

    def deaf(inputs: Inputs) -> Complaint | None:
        complaint = judge(inputs)
        if complaint is None:
            return None
        kind = complaint.got.kind if isinstance(complaint.got, Raised) else ""
        kinds.append(kind)
        return complaint if kind == kinds[0] else None

    return deaf


@fact(
    FACTS,
    "output-shape",
    student="Each query gets one answer, as wide as the values are.",
    engineer="(b h i c), (b g j c), (b g j e) -> (b h i e).",
    cause="a transpose or reshape too many or too few at the end, or an axis lost by squeeze()",
    fatal=True,
)
def output_shape(f: Findings) -> Failure | None:
    asked = [f.subject.draw(5, 5, causal=False), f.subject.draw(5, 7, b=3), f.subject.draw(5, 5, b=1)]
    alone = f.subject.draw(5, 5, b=1, h=1)
    for inputs in [*asked, *([alone] if refusal(f, alone) is None else [])]:
        found = failure(f.subject, inputs, lambda inputs: _misshapen(f, inputs, "the answer"))
        if found is not None:
            return found
    return None


def _misshapen(f: Findings, inputs: Inputs, what: str) -> Complaint | None:
    b, h, _, i, _, _, e = inputs.sizes
    shape = tuple(f.subject(inputs).shape)
    if shape == (b, h, i, e):
        return None
    words = f"{what} has shape {shape}, not (b h i e) = {(b, h, i, e)}"
    return Complaint(words, shape, (b, h, i, e), lambda ask: [f"shape = tuple({ask()}.shape)"])


@fact(
    FACTS,
    "dropout-in-eval",
    student="Dropping weights at random is for training. Outside of it every answer is exact.",
    engineer="Without a dropout argument, or in eval(), no visible weight is zero and two seeds give the same numbers.",
    cause="F.dropout(p) without training=self.training, a default of dropout_p that is not 0 (pytorch#124464)",
    fatal=True,
)
def dropout_in_eval(f: Findings) -> Failure | None:
    inputs, outs = answers(f)
    if all(equal(outs[0], out) for out in outs[2:]):
        return None
    flat = replace(inputs, q=torch.zeros_like(inputs.q))
    seen = []
    for seed in range(4):
        seeded(seed)
        seen.append(f.subject.weights(flat) != 0)
    share = 1 - torch.stack(seen).float().mean().item() / torch.stack(seen).any(0).float().mean().item()
    if all(torch.equal(seen[0], other) for other in seen[1:]):
        return None  # random in another way, which is another fact
    words = f"about {share:.0%} of the visible weights are zero, others at each call"
    return failure(f.subject, inputs, lambda inputs: _random(f, inputs), words) or Failure(words)


def _random(f: Findings, inputs: Inputs) -> Complaint | None:
    """The complaint that two seeds give two answers."""
    outs = []
    for seed in (0, 1):
        seeded(seed)
        outs.append(f.subject(inputs).detach())
    if equal(*outs):
        return None
    return Complaint(
        f"two calls differ by up to {_apart(*outs):.1e}",
        False,
        True,
        lambda ask: [
            "import random",
            "import numpy",
            "outs = []",
            "for seed in (0, 1):",
            "    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)",
            f"    outs.append({ask()})",
            "same = torch.equal(*outs)",
        ],
    )


@fact(
    FACTS,
    "determinism",
    student="The same question gets the same answer.",
    engineer="Whatever the seeds of torch, numpy and random are, two calls with equal inputs are equal bit for bit.",
    cause="noise left over from an experiment, uninitialised memory (torch.empty), random features drawn anew",
    fatal=True,
)
def determinism(f: Findings) -> Failure | None:
    inputs, (first, again, *others) = answers(f)
    for other in others:
        if not equal(first, other) and equal(first, again):
            words = f"two calls differ by up to {_apart(first, other):.1e}"
            return failure(f.subject, inputs, lambda inputs: _random(f, inputs), words) or Failure(words)
    return None


@fact(
    FACTS,
    "state-between-calls",
    student="An answer depends on the question, not on what was asked before.",
    engineer="f(y) is the same bit for bit first of all and after f(x), whatever the lengths and widths of x are.",
    cause="a mask or cache kept from an earlier call, as of a larger one, and cut to size; a scale kept from the first "
    "width; a buffer that is updated in forward()",
    fatal=True,
)
def state_between_calls(f: Findings) -> Failure | None:
    if f.subject.anew is not None:
        try:
            found = _unlike_fresh(f)
        finally:
            f.subject.anew.leave()
        if found is not None:
            return found
    # lengths that were not asked before: what is kept of them is kept now
    questions = {
        (6, 6): [f.subject.draw(6, 6, seed=1), f.subject.draw(9, 9, b=1, seed=2), f.subject.draw(4, 4, b=3, seed=3)],
        (3, 13): [f.subject.draw(17, 17, b=1, seed=4), f.subject.draw(13, 13, c=12, seed=5)],
    }
    for (i, j), others in questions.items():
        inputs = f.subject.draw(i, j)
        if refusal(f, inputs) is not None:
            continue  # longer than it takes
        first = _answer(f.subject, inputs)
        for other in others:
            if refusal(f, other) is not None:
                continue
            again = _answer(f.subject, inputs)
            if not equal(first, again):
                words = f"after a call with another input the same one gives numbers {_apart(first, again):.1e} away"
                return failure(f.subject, inputs, lambda inputs: _remembering(f, inputs), words) or Failure(words)
    return None


def _answer(subject: Subject, inputs: Inputs) -> Tensor:
    seeded(0)
    return subject(inputs).detach()


def _unlike_fresh(f: Findings) -> Failure | None:
    """The failure of an answer after others to be the one that is given first of all."""
    dtype = fresh_dtype(f.subject.probe)
    sizes: tuple[dict[str, Any], ...] = (
        {"i": 2, "j": 6},
        {"i": 6, "j": 6},
        {"i": 11, "j": 11, "b": 1},
        {"i": 4, "j": 4, "b": 3},
        {"i": 6, "j": 6, "c": 12},
    )
    questions = [f.subject.draw(dtype=dtype, seed=seed, **each) for seed, each in enumerate(sizes)]
    questions = [each for each in questions if refusal(f, each) is None]
    alone = [_answer(_fresh(f), each) for each in questions]
    for order in (range(len(questions)), reversed(range(len(questions)))):
        subject = _fresh(f)
        for place in order:
            after = _answer(subject, questions[place])
            if not equal(after, alone[place]):
                _, _, _, i, j, c, _ = questions[place].sizes
                words = f"the answer for i={i}, j={j}, c={c} is {_apart(after, alone[place]):.1e} away from itself, "
                return _shown_fresh(f, questions[place], f"{words}first of all and after other calls")
    return None


def _fresh(f: Findings) -> Subject:
    assert f.subject.anew is not None
    return replace(f.subject, probe=f.subject.anew.probe())


# calls that come before: how each of q, k and v is written, and made
BEFORE: dict[tuple[str, str, str], Callable[[Inputs], Inputs]] = {
    ("k", "k", "v"): lambda x: x.having(q=x.k),
    ("{}[:, :, -1:]", "k", "v"): lambda x: x.having(q=x.q[:, :, -1:]),
    ("torch.cat([{0}, {0}], 2)",) * 3: lambda x: x.having(**{n: _twice(getattr(x, n), 2) for n in ("q", "k", "v")}),
    ("torch.cat([{0}, {0}], 3)", "torch.cat([{0}, {0}], 3)", "v"): lambda x: x.having(
        q=_twice(x.q, 3), k=_twice(x.k, 3)
    ),
    ("torch.cat([{0}, {0}], 3)",) * 3: lambda x: x.having(**{n: _twice(getattr(x, n), 3) for n in ("q", "k", "v")}),
    ("2 * {}.flip(2) + 1",) * 3: lambda x: x.having(**{n: 2 * getattr(x, n).flip(2) + 1 for n in ("q", "k", "v")}),
}


def _twice(x: Tensor, axis: int) -> Tensor:
    return torch.cat([x, x], axis)


def _shown_fresh(f: Findings, inputs: Inputs, words: str) -> Failure:
    """The failure with the smallest call that another one before it changes, where one of a few does."""

    def judge_of(written: tuple[str, str, str], make: Callable[[Inputs], Inputs]) -> Judge:
        def show(ask: Ask) -> list[str]:
            other = ask(*(form.format(name) for form, name in zip(written, ("q", "k", "v"), strict=True)))
            if not copied:
                return [f"other = {other}", f"out = {ask()}"]
            made = [line for line in ask.before if line.startswith("attend = ")]
            lines = [f"alone = {ask()}", *made, f"other = {other}", f"after = {ask()}"]
            return [*lines, "same = torch.equal(alone, after)"]

        def judge(inputs: Inputs) -> Complaint | None:
            alone, subject = _answer(_fresh(f), inputs), _fresh(f)
            _answer(subject, make(inputs))
            after = _answer(subject, inputs)
            if equal(alone, after):
                return None
            return Complaint(words, False, True, show) if copied else Complaint(words, after, alone, show)

        return judge

    copied = f.subject.probe.module is not None
    if copied or (f.subject.way is not None and f.subject.way.call != "attend"):  # else it is asked before it is shown
        for written, make in BEFORE.items():
            judge = judge_of(written, make)
            with suppress(Exception):  # a width or length that it does not take
                if (found := failure(f.subject, inputs, judge, words)) is not None:
                    return found
    return failure(f.subject, inputs, lambda inputs: _remembering(f, inputs), words) or Failure(words)


ANOTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "2 * {}.flip(2) + 1": lambda x: 2 * x.flip(2) + 1,
    "torch.cat([{0}, {0}], 2)": lambda x: torch.cat([x, x], 2),
    "{}[:, :, :-1]": lambda x: x[:, :, :-1],
}


def _remembering(f: Findings, inputs: Inputs) -> Complaint | None:
    """The complaint that a call after another one is answered differently."""
    for written, make in ANOTHER.items():
        if inputs.q.shape[2] < 2:
            return None

        def show(ask: Ask, written: str = written) -> list[str]:
            other = ask(*(written.format(name) for name in ("q", "k", "v")))
            return [f"first = {ask()}", f"other = {other}", f"again = {ask()}", "same = torch.equal(first, again)"]

        other = inputs.having(**{name: make(getattr(inputs, name)) for name in ("q", "k", "v")})
        first, _, again = (f.subject(x).detach() for x in (inputs, other, inputs))
        if not equal(first, again):
            return Complaint("the same call is answered differently after another", False, True, show)
    return None


@fact(
    FACTS,
    "inputs-changed",
    student="Looking at something does not change it.",
    engineer="q, k and v, and a mask where one is handed over, hold the same numbers after the call as before.",
    cause="an in-place operation on an argument: q *= scale, k.masked_fill_(...), mask.logical_not_()",
)
def inputs_changed(f: Findings) -> Failure | None:
    inputs = f.subject.draw(5, 5)
    for name in ("q", "k", "v"):

        def judge(inputs: Inputs, name: str = name) -> Complaint | None:
            given = {x: getattr(inputs, x).clone() for x in ("q", "k", "v")}
            f.subject.asked(given["q"], given["k"], given["v"], inputs)
            if equal(given[name], getattr(inputs, name)):
                return None
            return Complaint(
                f"the call changes {name}",
                given[name],
                getattr(inputs, name),
                lambda ask: [ask(), f"after = {name}"],
            )

        if (found := failure(f.subject, inputs, judge)) is not None:
            return found
    mask = f.subject.mask
    return (
        None if mask is None else failure(f.subject, half_hidden(f.subject.draw(5, 5, causal=False)), _mask_changed(f))
    )


def _mask_changed(f: Findings) -> Judge:
    def judge(inputs: Inputs) -> Complaint | None:
        assert f.subject.mask is not None
        assert inputs.visible is not None
        name, before = f.subject.mask.name, f.subject.mask.filled(inputs.visible, inputs.dtype)
        given = before.clone()
        f.subject(replace(inputs, visible=None), **{name: given})
        if equal(given, before):
            return None
        return Complaint(f"the call changes {name}", given, before, lambda ask: [ask(), f"after = {name}"])

    return judge


@fact(
    FACTS,
    "output-dtype",
    student="Numbers come back in the precision in which they were handed in.",
    engineer="The output has the dtype of q, for float64, float32, bfloat16 and float16.",
    cause="softmax(dtype=torch.float32) or .float() without .to(q.dtype) afterwards",
)
def output_dtype(f: Findings) -> Failure | None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        inputs = f.subject.draw(5, 5, dtype=dtype)
        if refusal(f, inputs) is not None:
            continue  # it says that it cannot, which is no silent change

        def judge(inputs: Inputs, dtype: torch.dtype = dtype) -> Complaint | None:
            have = f.subject(inputs).dtype
            if inputs.dtype != dtype or have == dtype:
                return None
            return Complaint(f"{dtype} comes back as {have}", have, dtype, lambda ask: [f"dtype = {ask()}.dtype"])

        if (found := failure(f.subject, inputs, judge)) is not None:
            return found
    return None


@fact(
    FACTS,
    "memory-layout",
    student="It does not matter how numbers lie in memory, only which they are.",
    engineer="Transposed and sliced views, and expanded ones, give what contiguous copies give.",
    cause="view() or as_strided() on something not contiguous, a kernel that assumes strides",
)
def memory_layout(f: Findings) -> Failure | None:
    inputs = f.subject.draw(5, 5)
    for name, (written, change) in LYING.items():

        def judge(
            inputs: Inputs, name: str = name, written: str = written, change: Callable[[Tensor], Tensor] = change
        ) -> Complaint | None:
            expected = f.subject(inputs).detach()
            q, k, v = (change(x) for x in (inputs.q, inputs.k, inputs.v))

            def show(ask: Ask) -> list[str]:
                return [f"out = {ask(*(written.format(x) for x in ('q', 'k', 'v')))}"]

            try:
                out = f.subject.asked(q, k, v, inputs).detach()
            except Exception as error:
                raised = Raised.of(error)
                words = f"inputs that lie {name} in memory raise {raised.kind}: {raised.words}"
                return Complaint(words, raised, shows=show)
            if (out - expected).abs().max().nan_to_num().item() <= 1e-5:
                return None
            apart = _apart(out, expected)
            words = f"inputs that lie {name} in memory give numbers {apart:.1e} away from contiguous ones"
            return Complaint(words, out, expected, show)

        if (found := failure(f.subject, inputs, kept_in_kind(judge))) is not None:
            return found
    return None


LYING: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "transposed": (
        "{}.transpose(1, 2).contiguous().transpose(1, 2)",
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ),
    "every second column": (
        "torch.stack([{0}, {0} + 1], -1).flatten(-2)[..., ::2]",
        lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    ),
    "columns first": ("{}.mT.contiguous().mT", lambda x: x.mT.contiguous().mT),
}


def _lengths(f: Findings, pairs: list[tuple[int, int]], what: str) -> Failure | None:
    for i, j in pairs:
        if i != j and not f.subject.free_lengths:
            continue
        inputs = f.subject.draw(i, j, dtype=torch.float32)

        def judge(inputs: Inputs) -> Complaint | None:
            _, _, _, i, j, _, _ = inputs.sizes
            if (j % 2 == 0 and i == j) or j < 2:
                return None  # another length than the one in question
            if (raised := refusal(f, inputs)) is not None:
                return Complaint(f"{what} (i={i}, j={j}) raises {raised.kind}: {raised.words}", raised)
            return _misshapen(f, inputs, f"{what} (i={i}, j={j})")

        if (found := failure(f.subject, inputs, kept_in_kind(judge), square=i == j)) is not None:
            return found
    return None


@fact(
    FACTS,
    "one-query",
    student="One may ask a single question about many keys.",
    engineer="i = 1 works with j > 1, as in every step of decoding.",
    cause="squeeze() without an axis; i taken from k.shape",
)
def one_query(f: Findings) -> Failure | None:
    return _lengths(f, [(1, 6)], "one query against several keys")


@fact(
    FACTS,
    "odd-lengths",
    student="Any number of words will do, not only even ones or powers of two.",
    engineer="n = 3, 5, 7, 13, 17, 33 and 65 work, not only multiples of a block.",
    cause="a block size that has to divide the length, a reshape in pairs",
)
def odd_lengths(f: Findings) -> Failure | None:
    return _lengths(f, [(n, n) for n in (3, 5, 7, 13, 17, 33, 65)], "an odd length")


def answers(f: Findings) -> tuple[Inputs, list[Tensor]]:
    """The answers to one call under the seeds 0, 0, 1, 2 and 3."""
    if "seeds" not in f.memo:
        inputs = f.subject.draw(9, 9, b=3)
        outs = []
        for seed in (0, 0, 1, 2, 3):
            seeded(seed)
            outs.append(f.subject(inputs).detach())
        f.memo["seeds"] = inputs, outs
    kept: tuple[Inputs, list[Tensor]] = f.memo["seeds"]
    return kept


def _apart(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).abs().nan_to_num(torch.inf).max().item() if x.shape == y.shape else float("inf")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
