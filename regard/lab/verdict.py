"""Verdicts of the lab: supported, refuted or unclear, decided by the numbers of a run."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.base.errors import ConfigError
from regard.lab.seeds_interval import Estimate

Numbers = dict[str, Any]  # values that JSON can hold: numbers, text, lists and dictionaries
Attention = Callable[..., Tensor]
SUPPORTED, REFUTED, UNCLEAR = "supported", "refuted", "unclear"


@dataclass(frozen=True)
class Verdict:
    """A verdict on a statement, such as a lab claim.

    word      "supported", "refuted" or "unclear"
    sentence  a sentence with the numbers that decide
    """

    word: str  # "supported", "refuted" or "unclear"
    sentence: str

    def __post_init__(self) -> None:
        if self.word not in (SUPPORTED, REFUTED, UNCLEAR):
            raise ConfigError(f"a verdict is {SUPPORTED}, {REFUTED} or {UNCLEAR}, not {self.word!r}")


@dataclass(frozen=True)
class Decision:
    """The decision on a lab claim, from which the sentence of the verdict is written later.

    word     "supported", "refuted" or "unclear"
    shown    values for the claim's `Finding:` template, besides the measured numbers
    missing  what the setup lacks for a decision; empty if nothing is missing
    """

    word: str
    shown: Numbers
    missing: str = ""


def decide(holds: bool, margins: Iterable[Estimate] = (), *, missing: str = "", **shown: Any) -> Decision:
    """Decide whether a lab claim is "supported", "refuted" or "unclear".

    The rules apply in this order. The claim is unclear if `missing` is not empty. It is refuted if `holds` is
    false or the whole confidence interval of a margin is at or below 0. It is supported if the whole interval
    of every margin is above 0, or if there are no margins. Otherwise, if an interval contains 0, it is unclear.

    holds    whether all conditions without statistical uncertainty are met, such as exact numbers and counts
    margins  the differences that the claim predicts to be above 0, as means over seeds with confidence
             intervals
    missing  what the setup lacks for a decision; empty if nothing is missing
    shown    values for the claim's `Finding:` template, besides the measured numbers
    """
    estimates = list(margins)
    if missing:
        return Decision(UNCLEAR, shown, missing)
    if not holds or any(margin.below for margin in estimates):
        return Decision(REFUTED, shown)
    return Decision(SUPPORTED if all(margin.above for margin in estimates) else UNCLEAR, shown)


def judge_finite(verdict: Callable[[Numbers], Verdict], numbers: Numbers) -> Verdict:
    """Return verdict(numbers), or a "refuted" verdict if any of the measured numbers is inf or NaN."""
    found = next(_not_finite(numbers), None)
    if found is None:
        return verdict(numbers)
    where, value = found
    return Verdict(REFUTED, f"The number {where} is {value}, but every number of a run must be finite.")


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Yield the location and the value of each inf and NaN in nested dictionaries and lists of numbers.

    where  location of `value`, which is put before the locations inside it
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite(item, f"{where}, {name}" if where else f'"{name}"')
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{at}]")


def join_numbers(values: Iterable[float]) -> str:
    """Format numbers as words of a sentence: "1, 12 and 4,096", or a single number if all are equal."""
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
