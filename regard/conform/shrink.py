"""Shrink inputs that break a rule, so that a failure is shown with the smallest inputs that were found."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.conform.attention_under_test import AttentionUnderTest
from regard.conform.example import Raised, Seeds, WriteLines, randn_like, run_lines, write_example
from regard.conform.fact import Failure
from regard.conform.inputs import MAX_LINE, QKV, AttentionInputs, tensor_code
from regard.conform.tolerance import distance

MAX_TRIES = 160
SEEDS_TRIED = 16
MAX_NUMBERS = 64  # larger tensors are written as random tensors with a seed


@dataclass(frozen=True)
class Violation:
    """What is wrong for some inputs of the attention.

    words     describes what is wrong
    got       the value that was found, such as the output of the call
    expected  the value that should have been found
    lines     function that writes the code of an example; None if the example is a plain call, whose output is
              wrong
    grade     grade of the failure; "" for the grade of the fact
    """

    words: str
    got: object = None
    expected: object = None
    lines: WriteLines | None = None
    grade: str = ""


Detect = Callable[[AttentionInputs], Violation | None]  # tests a rule on some inputs


def detect_lines(
    a: AttentionUnderTest,
    words: str,
    write: WriteLines,
    same: Callable[[Any, Any], bool] = operator.eq,
    expected: object = None,
    raises: str = "",
) -> Detect:
    """Return a function of inputs that runs Python code and returns a violation if the last value is wrong, else None.

    The last value is the one that the last line of the code assigns.

    words     describes what is wrong; {} in this text is replaced by the largest difference
    write     function that returns the lines of code, given a `CallWriter`
    same      function that compares the last value with the expected value
    expected  the expected value; None if the code assigns it to the variable `expected`
    raises    description of the violation if the code raises an exception; "" does not catch exceptions
    """

    def detect(inputs: AttentionInputs) -> Violation | None:
        try:
            space, got = run_lines(a, inputs, write)
        except Exception as error:  # the function of the user may raise any exception
            if not raises:
                raise
            raised = Raised.from_error(error)
            return Violation(f"{raises} {raised}", raised, lines=write)
        want: Any = space["expected"] if expected is None else expected
        got, want = (x.detach() if isinstance(x, Tensor) else x for x in (got, want))
        if same(got, want):
            return None
        off = f"{distance(got, want):.1e}" if isinstance(got, Tensor) else ""
        return Violation(words.format(off), got, want, write)

    return detect


def smallest_failure(
    a: AttentionUnderTest,
    inputs: AttentionInputs,
    detect: Detect,
    found: str = "",
    declare: str = "",
    square: bool = False,
    grade: str = "",
) -> Failure | None:
    """Shrink inputs that break a rule, and return a failure whose example has the smallest inputs found.

    Returns None if `inputs` do not break the rule.

    inputs   inputs that may break the rule, from which the search starts
    detect   function that returns a violation for inputs that break the rule, else None
    found    description of the failure; "" uses the description of the violation
    declare  options of `check` that declare this behaviour as intended
    square   whether to keep the numbers of queries and keys equal
    grade    grade of the failure, if it differs from the grade of the fact
    """
    violation = detect(inputs)
    if violation is None:
        return None
    detect = _same_kind(detect, violation)
    whole = inputs
    inputs, violation = _shrink(a, inputs, detect, violation, square)
    inputs, violation, seeds = _use_seeds(inputs, detect, violation)
    if not seeds and _unreadable(inputs):  # larger inputs from a seed are shorter to read
        seeded, other, seeds = _use_seeds(whole, detect, violation)
        if not seeds:
            return Failure(f"{found or violation.words}; no input of few numbers shows it", "", declare, grade)
        inputs, violation = seeded, other
    text = write_example(a, inputs, violation.got, violation.expected, violation.lines, seeds)
    return Failure(found or violation.words, text, declare, grade or violation.grade)


def failure_of(
    a: AttentionUnderTest, inputs: AttentionInputs, detect: Detect, found: str, declare: str = "", **options: Any
) -> Failure:
    """Return the failure of a rule that is known to be broken, with an example made as by `smallest_failure`.

    If `inputs` do not break the rule, the failure has no example. The arguments are those of `smallest_failure`.
    """
    return smallest_failure(a, inputs, detect, found, declare, **options) or Failure(
        found, declare=declare, grade=options.get("grade", "")
    )


def _same_kind(detect: Detect, first: Violation) -> Detect:
    """Wrap a detect function so that it returns only violations of the same kind as the first one.

    Smaller inputs can break the attention in a different way, which must not replace the failure that was found. If the
    first violation had no NaN, violations by NaN are ignored. Violations by an exception are ignored unless the first
    violation was an exception of the same type.
    """

    def kind(violation: Violation) -> object:
        if isinstance(violation.got, Raised):
            return violation.got.kind
        return isinstance(violation.got, Tensor) and bool(violation.got.isnan().any())

    allowed = (kind(first),) if isinstance(first.got, Raised) else (kind(first), False)

    def detect_same(inputs: AttentionInputs) -> Violation | None:
        violation = detect(inputs)
        return violation if violation is not None and kind(violation) in allowed else None

    return detect_same


def _use_seeds(
    inputs: AttentionInputs, detect: Detect, violation: Violation
) -> tuple[AttentionInputs, Violation, Seeds]:
    """Replace large tensors by random tensors from a seed, if the random tensors break the rule too.

    An example can then contain the seed in place of many numbers. Returns the inputs, the violation that they cause,
    and the seed and factor of each replaced tensor by its name.
    """
    large = {name: getattr(inputs, name) for name in _unreadable(inputs)}
    for first in range(0, 4 * SEEDS_TRIED, 4) if large else ():
        seeds = {name: (first + n, _magnitude(x)) for n, (name, x) in enumerate(large.items())}
        other = inputs.with_tensors(**{name: randn_like(x, *seeds[name]) for name, x in large.items()})
        found = _try(detect, other)
        if found is not None:
            return other, found, seeds
    return inputs, violation, {}


def _magnitude(x: Tensor) -> float:
    """Return the standard deviation of a tensor, rounded to one digit, or 1 if it is between 0.3 and 3.

    Random numbers are multiplied by it to be about as large as the numbers of the tensor.
    """
    size = x.double().std().item()
    return 1.0 if 0.3 < size < 3 else float(f"{size:.1g}")


def _unreadable(inputs: AttentionInputs) -> list[str]:
    """Return the names among "q", "k" and "v" whose tensors are too long to write out in an example."""

    def unreadable(x: Tensor) -> bool:
        simple = _simplicity(x) > 2 or not bool(x.isfinite().all())
        return not simple and (x.numel() > MAX_NUMBERS or len(tensor_code(x)) > MAX_LINE)

    return [name for name in QKV if unreadable(getattr(inputs, name))]


def _shrink(
    a: AttentionUnderTest, inputs: AttentionInputs, detect: Detect, violation: Violation, square: bool
) -> tuple[AttentionInputs, Violation]:
    """Shrink inputs that break a rule: fewer entries and simpler numbers, as long as they still break the rule.

    Returns the smallest inputs found, and the violation for them.
    """
    tries, progress = 0, True
    while progress and tries < MAX_TRIES:
        progress = False
        for smaller in [*_smaller_sizes(a, inputs, square), *_simpler_numbers(inputs)]:
            tries += 1
            if tries > MAX_TRIES:
                break
            found = _try(detect, smaller)
            if found is not None:
                inputs, violation, progress = smaller, found, True
                break
    return inputs, violation


def _try(detect: Detect, inputs: AttentionInputs) -> Violation | None:
    """Return the `Violation` that a detect function finds for smaller inputs, or None if they do not break the rule.

    Also returns None if the call raises an exception, or if the value equals the expected value, with NaN equal
    to NaN.
    """
    try:
        violation = detect(inputs)
    except Exception:  # sizes that it does not accept
        return None
    if violation is not None and isinstance(violation.got, Tensor) and isinstance(violation.expected, Tensor):
        got, expected = violation.got, violation.expected
        if torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num()):
            return None
    return violation


def _smaller_sizes(a: AttentionUnderTest, inputs: AttentionInputs, square: bool) -> Iterator[AttentionInputs]:
    b, h, g, i, j, c, e = inputs.sizes
    square = square or not a.free_lengths
    sizes = {"b": b, "h": h if g == h else 1, "j": j, "i": 1 if square else i, "e": e, "c": c}
    if a.probe.heads is not None:
        sizes["h"] = 1
    if a.probe.width is not None or not a.free_widths:
        sizes["c"] = sizes["e"] = 1
    for axis, size in sizes.items():
        for smaller in sorted({1, 2, 3, size // 2, size - 1}):
            if axis == "j" and not square and smaller < i <= j:
                continue  # with more queries than keys the first rows of a causal attention see no key
            if axis == "c" and smaller % 2 and a.even_widths:
                continue
            if 0 < smaller < size:
                for start in sorted({0, size - smaller}):
                    yield inputs.select(axis, torch.arange(start, start + smaller), square)


def _simpler_numbers(inputs: AttentionInputs) -> Iterator[AttentionInputs]:
    if inputs.dtype == torch.float64:
        yield inputs.to(torch.float32)
    for name in QKV:
        x = getattr(inputs, name)
        # + 0.0 turns -0.0 into 0.0
        for simple in (torch.zeros_like(x), torch.ones_like(x), x.round() + 0.0, (x * 10).round() / 10 + 0.0):
            simple = torch.where(x.isfinite(), simple, x)  # NaN stays
            if not torch.equal(simple, x) and _simplicity(simple) > _simplicity(x):
                yield inputs.with_tensors(**{name: simple})


def _simplicity(x: Tensor) -> int:
    """Return a number that is higher the simpler the entries of a tensor are.

    The number is 4 if all entries are zero, 3 for ones, 2 for integers, 1 for multiples of 0.1, else 0. NaN counts as
    zero.
    """
    x = x.nan_to_num()
    if bool((x == 0).all()):
        return 4
    if bool((x == 1).all()):
        return 3
    if torch.equal(x, x.round()):
        return 2
    return int(torch.equal(x, (x * 10).round() / 10))
