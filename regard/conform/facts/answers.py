"""Facts about answering at all: that there is an answer, always the same one, and nothing else happens."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard.base.registry import Registry
from regard.conform.fact import Fact, Failure, fact
from regard.conform.findings import Findings
from regard.conform.inputs import Inputs
from regard.conform.shrink import Complaint, failure

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
    student="Given queries, keys and values of fitting shapes, attention has an answer.",
    engineer="An ordinary call (b=2, h=4, i=j=6, c=e=4) does not raise.",
    cause="a shape hard-coded for one model, an argument that is required, another layout than (b h n c)",
    fatal=True,
)
def runs(f: Findings) -> Failure | None:
    inputs = f.subject.draw(6, 6, h=4, e=4, causal=False, dtype=torch.float32)
    try:
        f.subject(inputs)
    except Exception as error:
        return Failure(f"an ordinary call raises {type(error).__name__}: {first_line(error)}", call(inputs))
    return None


@fact(
    FACTS,
    "output-shape",
    student="Each query gets one answer, as wide as the values are.",
    engineer="(b h i c), (b g j c), (b g j e) -> (b h i e).",
    cause="a transpose or reshape too many or too few at the end, or an axis lost by squeeze()",
    fatal=True,
)
def output_shape(f: Findings) -> Failure | None:
    for inputs in (f.subject.draw(5, 5, causal=False), f.subject.draw(5, 7, b=3), f.subject.draw(5, 5, b=1)):
        b, h, _, i, _, _, e = inputs.sizes
        out = f.subject(inputs)
        if out.shape != (b, h, i, e):
            return Failure(f"the answer has shape {tuple(out.shape)}, not (b h i e) = {(b, h, i, e)}", call(inputs))
    return None


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
    return Failure(f"about {share:.0%} of the visible weights are zero, others at each call", call(inputs))


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
            return Failure(f"two calls differ by up to {_apart(first, other):.1e}", call(inputs))
    return None


@fact(
    FACTS,
    "state-between-calls",
    student="An answer depends on the question, not on what was asked before.",
    engineer="f(x), f(y), f(x): the first and the last are equal bit for bit, whatever the shape of y is.",
    cause="a mask or cache kept from an earlier call, a buffer that is updated in forward()",
    fatal=True,
)
def state_between_calls(f: Findings) -> Failure | None:
    inputs = f.subject.draw(6, 6)
    others = [f.subject.draw(6, 6, seed=1), f.subject.draw(9, 9, b=1, seed=2), f.subject.draw(4, 4, b=3, seed=3)]
    seeded(0)
    first = f.subject(inputs).detach()
    for other in others:
        f.subject(other)
        seeded(0)
        again = f.subject(inputs).detach()
        if not equal(first, again):
            words = f"after a call with another input the same one gives numbers {_apart(first, again):.1e} away"
            return Failure(words, call(inputs))
    return None


@fact(
    FACTS,
    "inputs-changed",
    student="Looking at something does not change it.",
    engineer="q, k and v hold the same numbers after the call as before.",
    cause="an in-place operation on an argument: q *= scale, k.masked_fill_(...)",
)
def inputs_changed(f: Findings) -> Failure | None:
    inputs = f.subject.draw(5, 5)
    for name in ("q", "k", "v"):

        def judge(inputs: Inputs, name: str = name) -> Complaint | None:
            given = {x: getattr(inputs, x).clone() for x in ("q", "k", "v")}
            f.subject.asked(given["q"], given["k"], given["v"], inputs)
            if equal(given[name], getattr(inputs, name)):
                return None
            return Complaint(f"the call changes {name}", given[name], getattr(inputs, name))

        if (found := failure(f.subject, inputs, judge)) is not None:
            return found
    return None


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
        try:
            out = f.subject(inputs)
        except Exception:
            continue  # it says that it cannot, which is no silent change
        if out.dtype != dtype:
            return Failure(f"{dtype} comes back as {out.dtype}", call(inputs))
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
    expected = f.subject(inputs).detach()
    odd: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second column": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
        "columns first": lambda x: x.mT.contiguous().mT,
    }
    for name, change in odd.items():
        q, k, v = (change(x) for x in (inputs.q, inputs.k, inputs.v))
        try:
            out = f.subject.asked(q, k, v, inputs).detach()
        except Exception as error:
            words = f"inputs that lie {name} in memory raise {type(error).__name__}: {first_line(error)}"
            return Failure(words, call(inputs, "q.transpose(1, 2).contiguous().transpose(1, 2)"))
        if (out - expected).abs().max().nan_to_num().item() > 1e-5:
            return Failure(
                f"inputs that lie {name} in memory give numbers {_apart(out, expected):.1e} away from contiguous ones",
                call(inputs, "q.transpose(1, 2).contiguous().transpose(1, 2)"),
            )
    return None


def _lengths(f: Findings, pairs: list[tuple[int, int]], what: str) -> Failure | None:
    for i, j in pairs:
        if i != j and not f.subject.free_lengths:
            continue
        inputs = f.subject.draw(i, j, dtype=torch.float32)
        try:
            out = f.subject(inputs)
        except Exception as error:
            return Failure(f"{what} (i={i}, j={j}) raises {type(error).__name__}: {first_line(error)}", call(inputs))
        b, h, _, i, _, _, e = inputs.sizes
        if out.shape != (b, h, i, e):
            return Failure(f"{what} (i={i}, j={j}) gives shape {tuple(out.shape)}, not {(b, h, i, e)}", call(inputs))
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


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def call(inputs: Inputs, q: str = "q") -> str:
    sizes = [f"torch.randn{tuple(x.shape)}{_cast(x)}" for x in (inputs.q, inputs.k, inputs.v)]
    return f"q, k, v = {', '.join(sizes)}\nout = f({q}, k, v)"


def _cast(x: Tensor) -> str:
    return "" if x.dtype == torch.float32 else f".to({x.dtype})"
