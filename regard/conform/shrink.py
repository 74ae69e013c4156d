"""From an input that breaks a rule to the smallest one found that still does, written as Python."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from regard.conform.callable_under_test import Subject
from regard.conform.example import Shows, drawn_like, example
from regard.conform.fact import Failure
from regard.conform.inputs import LONGEST, Inputs, exact

TRIES = 160
SEEDS = 16  # that are tried, where a fault shows in some numbers only
TOO_MANY = 200  # numbers that nobody reads: a seed stands for them


@dataclass(frozen=True)
class Complaint:
    """What is wrong: in words, what came and should have come, and how that is made where it is not the output."""

    words: str
    got: object = None
    expected: object = None
    shows: Shows | None = None


Judge = Callable[[Inputs], Complaint | None]


def failure(
    subject: Subject, inputs: Inputs, judge: Judge, found: str = "", declare: str = "", square: bool = False
) -> Failure | None:
    """The failure that a judge finds, with the smallest inputs that show it; None where it finds none.

    square  keep as many queries as keys, where fewer of one would be about something else
    """
    complaint = judge(inputs)
    if complaint is None:
        return None
    judge = _like(judge, complaint)
    whole = inputs
    inputs, complaint = shrunk(subject, inputs, judge, complaint, square)
    inputs, complaint, drawn = _drawn(inputs, judge, complaint)
    if not drawn and _many(inputs):
        inputs, complaint = _redrawn(subject, inputs, judge, complaint, square)
    if not drawn and _many(inputs):  # more numbers that come from a seed are less to read
        other, complained, seeds = _drawn(whole, judge, complaint)
        inputs, complaint, drawn = (other, complained, seeds) if seeds else (inputs, complaint, drawn)
    text = example(subject, inputs, complaint.got, complaint.expected, complaint.shows, drawn)
    return Failure(found or complaint.words, text, declare)


def _like(judge: Judge, first: Complaint) -> Judge:
    """The judge, deaf to NaN where there was none at first: a smaller input may have a row that sees nothing."""

    def poisoned(complaint: Complaint) -> bool:
        return isinstance(complaint.got, Tensor) and bool(complaint.got.isnan().any())

    def deaf(inputs: Inputs) -> Complaint | None:
        complaint = judge(inputs)
        return None if complaint is None or (poisoned(complaint) and not poisoned(first)) else complaint

    return deaf


def _drawn(inputs: Inputs, judge: Judge, complaint: Complaint) -> tuple[Inputs, Complaint, dict[str, int]]:
    """Numbers that are too many to be written, drawn again from a seed that shows the fault too."""
    many = _many(inputs)
    for first in range(0, 4 * SEEDS, 4) if many else ():
        seeds = {name: first + place for place, name in enumerate(many)}
        other = inputs.having(**{name: drawn_like(getattr(inputs, name), seed) for name, seed in seeds.items()})
        found = _asked(judge, other)
        if found is not None:
            return other, found, seeds
    return inputs, complaint, {}


def _many(inputs: Inputs) -> list[str]:
    """Those of q, k and v that have more numbers than anybody reads."""
    return [name for name in ("q", "k", "v") if _unreadable(getattr(inputs, name))]


def _unreadable(x: Tensor) -> bool:
    plain = _plainness(x) > 2 or not bool(x.isfinite().all())
    return not plain and (x.numel() > TOO_MANY or len(exact(x)) > LONGEST)


def _redrawn(
    subject: Subject, inputs: Inputs, judge: Judge, complaint: Complaint, square: bool
) -> tuple[Inputs, Complaint]:
    """Fewer and other numbers, where a fault of rounding shows in some of them only, and cutting loses it."""
    _, _, _, _, j, c, _ = inputs.sizes
    widths = [c] if subject.probe.width is not None or not subject.free_widths else [n for n in (1, 2, 4, 8) if n < c]
    for keys, width, seed in product((n for n in (2, 3, 5, 8) if n < j), widths, range(0, 24, 3)):
        smaller = inputs.cut("j", torch.arange(keys), square or not subject.free_lengths)
        smaller = smaller.cut("c", torch.arange(width))
        names = ("q", "k", "v")
        smaller = smaller.having(**{x: drawn_like(getattr(smaller, x), seed + n) for n, x in enumerate(names)})
        if not _many(smaller) and (found := _asked(judge, smaller)) is not None:
            return smaller, found
    return inputs, complaint


def shrunk(
    subject: Subject, inputs: Inputs, judge: Judge, complaint: Complaint, square: bool = False
) -> tuple[Inputs, Complaint]:
    """Fewer sequences, heads, rows, keys and columns, then simpler numbers, as long as the judge complains."""
    tries = 0
    progress = True
    while progress and tries < TRIES:
        progress = False
        for smaller in [*_cuts(subject, inputs, square), *_simpler(inputs)]:
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
        complaint = judge(inputs)
    except Exception:
        return None
    if complaint is not None and isinstance(complaint.got, Tensor) and isinstance(complaint.expected, Tensor):
        got, expected = complaint.got, complaint.expected
        if torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num()):
            return None  # NaN that should be NaN shows nothing
    return complaint


def _cuts(subject: Subject, inputs: Inputs, square: bool) -> Iterator[Inputs]:
    b, h, g, i, j, c, e = inputs.sizes
    square = square or not subject.free_lengths
    sizes = {"b": b, "h": h if g == h else 1, "j": j, "i": 1 if square else i, "e": e, "c": c}
    if subject.probe.heads is not None:
        sizes["h"] = 1
    if subject.probe.width is not None or not subject.free_widths:
        sizes["c"] = sizes["e"] = 1
    for axis, size in sizes.items():
        for smaller in sorted({1, 2, 3, size // 2, size - 1}):
            if axis == "j" and not square and smaller < i <= j:
                continue  # with more queries than keys the first rows of a causal attention see nothing
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
            simple = torch.where(x.isfinite(), simple, x)  # poison stays
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
