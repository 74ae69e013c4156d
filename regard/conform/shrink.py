"""From an input that breaks a rule to the smallest one found that still does, written as Python."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.conform.fact import Failure
from regard.conform.inputs import Inputs, written
from regard.conform.subject import Subject

TRIES = 160


@dataclass(frozen=True)
class Complaint:
    """What is wrong with an answer: in words, and what came and should have come."""

    words: str
    got: Tensor | None = None
    expected: Tensor | None = None


Judge = Callable[[Inputs], Complaint | None]


def failure(subject: Subject, inputs: Inputs, judge: Judge, found: str = "", declare: str = "") -> Failure | None:
    """The failure that a judge finds, with the smallest inputs that show it; None where it finds none."""
    complaint = judge(inputs)
    if complaint is None:
        return None
    inputs, complaint = shrunk(subject, inputs, judge, complaint)
    return Failure(found or complaint.words, example(subject, inputs, complaint), declare)


def shrunk(subject: Subject, inputs: Inputs, judge: Judge, complaint: Complaint) -> tuple[Inputs, Complaint]:
    """Fewer sequences, heads, rows, keys and columns, then simpler numbers, as long as the judge complains."""
    tries = 0
    progress = True
    while progress and tries < TRIES:
        progress = False
        for smaller in [*_cuts(subject, inputs), *_simpler(inputs)]:
            tries += 1
            if tries > TRIES:
                break
            found = _asked(judge, smaller)
            if found is not None:
                inputs, complaint, progress = smaller, found, True
                break
    return inputs, complaint


def _asked(judge: Judge, inputs: Inputs) -> Complaint | None:
    """The complaint about smaller inputs; one that cannot even be asked is no example."""
    try:
        return judge(inputs)
    except Exception:
        return None


def _cuts(subject: Subject, inputs: Inputs) -> Iterator[Inputs]:
    b, h, g, i, j, c, e = inputs.sizes
    square = not subject.free_lengths
    sizes = {"b": b, "h": h if g == h else 1, "j": j, "i": 1 if square else i, "e": e, "c": c}
    if subject.probe.heads is not None:
        sizes["h"] = 1
    if subject.probe.width is not None or not subject.free_widths:
        sizes["c"] = sizes["e"] = 1
    for axis, size in sizes.items():
        for smaller in sorted({1, 2, 3, size // 2, size - 1}):
            if 0 < smaller < size:
                for start in sorted({0, size - smaller}):
                    yield inputs.cut(axis, torch.arange(start, start + smaller), square)


def _simpler(inputs: Inputs) -> Iterator[Inputs]:
    if inputs.dtype == torch.float64:
        yield inputs.to(torch.float32)
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        for simple in (
            torch.zeros_like(x),
            torch.ones_like(x),
            x.round() + 0.0,
            (x * 10).round() / 10 + 0.0,
        ):  # no -0.0
            # an example that is as simple already is not tried again, or this would never end
            if not torch.equal(simple, x) and _plainness(simple) > _plainness(x):
                yield inputs.having(**{name: simple})


def _plainness(x: Tensor) -> int:
    x = x.nan_to_num()  # poison is no reason against simple numbers beside it
    if bool((x == 0).all()):
        return 4
    if bool((x == 1).all()):
        return 3
    if torch.equal(x, x.round()):
        return 2
    return int(torch.equal(x, (x * 10).round() / 10))


def example(subject: Subject, inputs: Inputs, complaint: Complaint) -> str:
    """Python to paste."""
    given = [f"{subject.causal_argument}=True"] if inputs.causal and subject.causal_argument else []
    lines = [f"{name} = {written(getattr(inputs, name))}" for name in ("q", "k", "v")]
    if inputs.visible is not None and subject.mask is not None:
        lines.append(f"{subject.mask.name} = {written(subject.mask.filled(inputs.visible, inputs.dtype))}")
        given.append(f"{subject.mask.name}={subject.mask.name}")
    name = subject.probe.name.rpartition(".")[2]
    lines.append(f"out = {name}({', '.join(['q', 'k', 'v', *given])})")
    if complaint.got is not None:
        lines.append(f"# gives     {written(complaint.got.detach())}")
    if complaint.expected is not None:
        lines.append(f"# should be {written(complaint.expected.detach())}")
    return "\n".join(lines)
