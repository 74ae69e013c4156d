"""Question templates of the quiz: each question is a prediction about an experiment of the lab.

A template draws random settings for the experiment. The answer is known only after the experiment has run: a numerical
answer is measured, and each choice is a statement that the measured numbers make true or false.
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
    """A choice of a quiz question: a statement that is true or false according to an experiment.

    text     the statement
    is_true  function that returns whether the statement is true, given a dictionary of the measured numbers
    """

    text: str
    is_true: Callable[[Numbers], bool]


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of a numerical answer: absolute, or relative to the correct answer; both 0 means exact."""

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
    """A quiz question with random numbers filled in.

    settings   settings of the experiment that answers the question
    number     function that computes the answer from the measured numbers; None for a question with choices
    tolerance  allowed error of a numerical answer
    choices    statements to choose from; empty if the answer is a number
    explain    function that returns how the number is calculated, as text, from the measured numbers; None for no text
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
    """A template that generates quiz questions about a lab claim.

    claim     id of the claim
    generate  generates a question with random numbers
    """

    name: str
    claim: str
    generate: Generate

    @property
    def chapter(self) -> str:
        return claims()[self.claim].chapter


QUESTION_TEMPLATES: Registry[QuestionTemplate] = Registry("question template")


def question(name: str, claim: str) -> Callable[[Generate], Generate]:
    """Register the decorated function as a quiz question template.

    name   name of the template
    claim  id of the lab claim that the question is about
    """

    def register(generate: Generate) -> Generate:
        QUESTION_TEMPLATES.add(name)(QuestionTemplate(name, claim, generate))
        return generate

    return register


def sheet_choice(claim: str, index: int = 0) -> AnswerChoice:
    """Return a known wrong answer of the exercise sheets as an answer choice.

    The experiment decides whether the answer is false.

    claim  id of the lab claim
    index  position of the answer among the claim's wrong answers, counted from 0
    """
    sheet = claims()[claim].wrong_answers[index]
    return AnswerChoice(sheet.says, lambda numbers: sheet.verdict(numbers).word == SUPPORTED)


def format_list(values: Any) -> str:
    """Format a list of numbers as English text: "1, 2 and 3"."""
    *most, last = [f"{value:g}" for value in values]
    return f"{', '.join(most)} and {last}" if most else last
