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
    """A verdict on a statement, and a sentence with the numbers that decide it."""

    word: str  # "supported", "refuted" or "unclear"
    sentence: str

    def __post_init__(self) -> None:
        if self.word not in (SUPPORTED, REFUTED, UNCLEAR):
            raise ConfigError(f"a verdict is {SUPPORTED}, {REFUTED} or {UNCLEAR}, not {self.word!r}")


@dataclass(frozen=True)
class Decision:
    """A verdict without its sentence: the word, and the values that the claim's finding shows besides the numbers."""

    word: str
    shown: Numbers
    missing: str = ""


def decide(holds: bool, margins: Iterable[Estimate] = (), *, missing: str = "", **shown: Any) -> Decision:
    """Return the verdict: supported, refuted, or unclear where an interval over seeds includes zero.

    holds    what is exact or counted, or the worst case over seeds
    margins  by how much each mean over seeds is on the side the claim predicts
    missing  what the setup would need for a decision; if it is not empty, a claim that holds is unclear
    shown    values for the template `Finding:`, which also has the numbers as n
    """
    estimates = list(margins)
    if not holds or any(margin.below for margin in estimates):
        return Decision(REFUTED, shown)
    clear = all(margin.above for margin in estimates) and not missing
    return Decision(SUPPORTED if clear else UNCLEAR, shown, missing)


def judge_finite(verdict: Callable[[Numbers], Verdict], numbers: Numbers) -> Verdict:
    """Apply a verdict function; refute without calling it if any number is inf or NaN."""
    found = next(_not_finite(numbers), None)
    if found is None:
        return verdict(numbers)
    where, value = found
    return Verdict(REFUTED, f"The number {where} is {value}, but every number of a run must be finite.")


def _not_finite(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Find values that are inf or NaN, with their positions."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite(item, f"{where}, {name}" if where else f'"{name}"')
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{at}]")


def join_numbers(values: Iterable[float]) -> str:
    """Write numbers as in a sentence: "1, 12 and 4,096", or one number if all are equal."""
    shown = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
