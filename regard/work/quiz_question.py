"""Question templates of the quiz: each question is a prediction about an experiment of the lab.

A template draws the settings of the experiment. It does not contain the answer: a number is measured in the run, and
each choice is a statement that the numbers of the run make true or false.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from regard.base.registry import Registry
from regard.lab.claim import claims
from regard.lab.verdict import SUPPORTED, Numbers


@dataclass(frozen=True)
class AnswerChoice:
    """A statement, and a function that decides from the numbers of a run whether it is true."""

    text: str
    is_true: Callable[[Numbers], bool]


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of an answer: absolute, or relative to the correct one. Both 0 means exact."""

    absolute: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        if self.relative:
            return f"within {self.relative:.0%}"
        return f"within {self.absolute:g}" if self.absolute else "exactly"

    def allows(self, answer: float, correct: float) -> bool:
        error = max(self.absolute, self.relative * abs(correct))
        return math.isfinite(answer) and abs(answer - correct) <= error * (1 + 1e-9)


@dataclass(frozen=True)
class GeneratedQuestion:
    """A question with drawn numbers: its text, the settings of the run, and how the run answers it.

    number   the answer, measured in the run; None for a question with choices
    explain  how to calculate the number, if the text of the run does not say it
    """

    text: str
    settings: Mapping[str, Any]
    number: Callable[[Numbers], float] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    choices: tuple[AnswerChoice, ...] = ()
    explain: Callable[[Numbers], str] | None = None


Generate = Callable[[Random], GeneratedQuestion]


@dataclass(frozen=True)
class QuestionTemplate:
    """A template of questions about a claim of the lab."""

    name: str
    claim: str
    generate: Generate

    @property
    def chapter(self) -> str:
        return claims()[self.claim].chapter


QUESTION_TEMPLATES: Registry[QuestionTemplate] = Registry("question template")


def question(name: str, claim: str) -> Callable[[Generate], Generate]:
    """Register the decorated function as a question template."""

    def register(generate: Generate) -> Generate:
        QUESTION_TEMPLATES.add(name)(QuestionTemplate(name, claim, generate))
        return generate

    return register


def sheet_choice(claim: str, index: int = 0) -> AnswerChoice:
    """A wrong answer of a source sheet as a distractor. It would be true if the run did not refute it."""
    sheet = claims()[claim].wrong_answers[index]
    return AnswerChoice(sheet.says, lambda numbers: sheet.verdict(numbers).word == SUPPORTED)


def format_list(values: Any) -> str:
    """Numbers in a sentence: 1, 2 and 3."""
    *most, last = [f"{value:g}" for value in values]
    return f"{', '.join(most)} and {last}" if most else last
