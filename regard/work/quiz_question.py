"""What a question of the quiz is: a prediction about a run of the lab, which is then run.

A kind of question draws the settings of a claim's experiment. Nothing in it knows the answer: a number is read off the
run, and each choice is a statement that the numbers of the run make true or false.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from regard.base.registry import Registry
from regard.lab.claim import SUPPORTED, Numbers, claims


@dataclass(frozen=True)
class Choice:
    """A statement, and what the numbers of a run have to say for it to hold."""

    text: str
    holds: Callable[[Numbers], bool]


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may be off: by so much, or by such a share of the right one. Both 0: not at all."""

    by: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        if self.share:
            return f"within {self.share:.0%}"
        return f"within {self.by:g}" if self.by else "exactly"

    def allows(self, given: float, right: float) -> bool:
        slack = max(self.by, self.share * abs(right))
        return math.isfinite(given) and abs(given - right) <= slack * (1 + 1e-9)


@dataclass(frozen=True)
class Posed:
    """A question as it was drawn: its words, the settings of the run, and how the run answers it."""

    text: str
    settings: Mapping[str, Any]
    number: Callable[[Numbers], float] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    choices: tuple[Choice, ...] = ()
    how: Callable[[Numbers], str] | None = None  # how one comes to that number, where the run's sentence does not tell


@dataclass(frozen=True)
class Kind:
    """A kind of question about a claim."""

    name: str
    claim: str
    pose: Callable[[Random], Posed]

    @property
    def chapter(self) -> str:
        return claims()[self.claim].chapter


KINDS: Registry[Kind] = Registry("kind of question")


def kind(name: str, claim: str) -> Callable[[Callable[[Random], Posed]], Callable[[Random], Posed]]:
    """Add a kind of question, which is drawn by the function that follows."""

    def keep(pose: Callable[[Random], Posed]) -> Callable[[Random], Posed]:
        KINDS.add(name)(Kind(name, claim, pose))
        return pose

    return keep


def said(claim: str, at: int = 0) -> Choice:
    """A wrong answer of a source sheet as a choice. It would hold if the run did not refute it."""
    sheet = claims()[claim].wrong_answers[at]
    return Choice(sheet.says, lambda numbers: sheet.verdict(numbers).word == SUPPORTED)


def listed(values: Any) -> str:
    """Numbers in a sentence: 1, 2 and 3."""
    *most, last = [f"{value:g}" for value in values]
    return f"{', '.join(most)} and {last}" if most else last
