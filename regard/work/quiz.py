"""The quiz: predict what an experiment of the lab gives, then see it run.

Questions are a function of the student's name and a seed. The answer to one is known only after its run.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from string import ascii_lowercase
from typing import Any

from regard.base import formulas
from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.lab.claim import Claim, Outcome, claims
from regard.lab.results import make_result
from regard.work import quiz_attention, quiz_heads, quiz_transformers
from regard.work.quiz_question import KINDS, Kind, Posed

SOURCES = (quiz_attention, quiz_heads, quiz_transformers)  # importing them fills KINDS
Answer = str | float


@dataclass(frozen=True)
class QuizQuestion:
    """One question of a quiz, with its choices in the order this student sees."""

    number: int
    kind: Kind
    posed: Posed
    seed: int

    @property
    def claim(self) -> Claim:
        return claims()[self.kind.claim]

    @property
    def letters(self) -> dict[str, str]:
        """The choices by letter."""
        return dict(zip(ascii_lowercase, (choice.text for choice in self.posed.choices), strict=False))

    def __str__(self) -> str:
        lines = [f"{self.number}. {self.posed.text}"]
        lines += [f"   {letter}) {text}" for letter, text in self.letters.items()]
        return "\n".join(lines if self.letters else [*lines, f"   (a number, {self.posed.tolerance})"])

    def to_dict(self) -> dict[str, Any]:
        """The question without its answer."""
        form: dict[str, Any] = {"choices": self.letters} if self.letters else {"answer": str(self.posed.tolerance)}
        about = {"number": self.number, "kind": self.kind.name, "claim": self.claim.id, "chapter": self.claim.chapter}
        return {**about, "question": self.posed.text, **form}

    def read(self, given: object) -> Answer:
        """An answer in the form this question has: a letter, or a number."""
        if self.letters:
            letter = given.strip(" ).").lower() if isinstance(given, str) else ""
            if letter not in self.letters:
                raise ConfigError(f"question {self.number} takes one of {', '.join(self.letters)}, not {given!r}")
            return letter
        number = as_number(given)
        if number is None:
            raise ConfigError(f"question {self.number} takes a number, such as 0.25 or 1,024, not {given!r}")
        return number

    @cached_property
    def outcome(self) -> Outcome:
        """The run that answers the question."""
        return self.claim.run(self.claim.setup(self.posed.settings, seed=self.seed, smoke=True))

    @property
    def right(self) -> Answer:
        """The answer that the run gives."""
        numbers = self.outcome.numbers
        if self.posed.number is not None:
            return float(self.posed.number(numbers))
        true = [
            letter for letter, choice in zip(self.letters, self.posed.choices, strict=True) if choice.holds(numbers)
        ]
        if len(true) != 1:
            raise ConfigError(f"{self.kind.name} was drawn so that {len(true)} choices hold; try another seed")
        return true[0]

    def reveal(self, given: object = None) -> "Revealed":
        """Run the experiment and judge an answer; None is no answer."""
        return Revealed(self, None if given is None else self.read(given), self.right)


@dataclass(frozen=True)
class Revealed:
    """What the run said, beside what was predicted."""

    question: QuizQuestion
    given: Answer | None
    right: Answer

    @property
    def ok(self) -> bool:
        if isinstance(self.given, float) and isinstance(self.right, float):
            return self.question.posed.tolerance.allows(self.given, self.right)
        return self.given is not None and self.given == self.right

    @property
    def answer(self) -> str:
        """The right answer in words."""
        if isinstance(self.right, str):
            return f"{self.right}) {self.question.letters[self.right]}"
        return shown(self.right)

    @property
    def explanation(self) -> list[str]:
        """What the run measured, the claim it belongs to, wrong answers that are about, and the command."""
        question, outcome = self.question, self.question.outcome
        how = question.posed.how
        lines = [] if how is None else [f"How to get it: {how(outcome.numbers)}"]
        lines += [f"The run: {outcome.verdict.sentence}", f"The claim: {question.claim.claim}"]
        lines.append(f"The maths: {formulas.text(question.claim.formula)}")
        for sheet, verdict in outcome.wrong_answers:
            lines.append(f'A wrong answer that is about: "{sheet.says}" ({verdict.word}) Right is: {sheet.right}')
        return [*lines, f"Run it again: {make_result(outcome).command}"]

    def __str__(self) -> str:
        said = "Not answered" if self.given is None else "Right" if self.ok else "Not so"
        return "\n".join([f"{said}: it is {self.answer}", *(f"  {line}" for line in self.explanation)])

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.question.to_dict(),
            "given": self.given,
            "right": self.right,
            "ok": self.ok,
            "explanation": self.explanation,
        }


@dataclass(frozen=True)
class Quiz:
    """The questions of one student."""

    student: str
    seed: int
    questions: tuple[QuizQuestion, ...]

    @classmethod
    def of(cls, student: str = "student", *, count: int = 5, seed: int = 0) -> "Quiz":
        """The questions that belong to a student's name and a seed: always the same ones."""
        check_integer("count", count, 1, "questions")
        kinds = dealt(Random(f"{student}\n{seed}"))
        return cls(student, seed, tuple(_drawn(number, next(kinds), student, seed) for number in range(1, count + 1)))

    def __getitem__(self, number: int) -> QuizQuestion:
        if not 1 <= number <= len(self.questions):
            raise ConfigError(f"there are questions 1 to {len(self.questions)}, not {number}")
        return self.questions[number - 1]

    def answer(self, number: int, given: object) -> Revealed:
        """Answer a question and see what its run says."""
        if given is ...:
            raise ConfigError(f"question {number} has no answer yet; predict first, then run")
        return self[number].reveal(given)

    def grade(
        self, answers: Mapping[str, object], progress: Callable[[QuizQuestion], None] | None = None
    ) -> tuple[Revealed, ...]:
        """Every question judged, by its number; one that is not among the answers counts as not answered."""
        unknown = [name for name in answers if name not in {str(each.number) for each in self.questions}]
        if unknown:
            raise ConfigError(
                f"answers are named by the numbers of questions, 1 to {len(self.questions)}, not {unknown[0]!r}"
            )
        for question in self.questions:  # before anything runs: a wrong form is no wrong answer
            if answers.get(str(question.number)) is not None:
                question.read(answers[str(question.number)])
        marks = []
        for question in self.questions:
            if progress is not None:
                progress(question)
            marks.append(question.reveal(answers.get(str(question.number))))
        return tuple(marks)

    def to_dict(self) -> dict[str, Any]:
        """The quiz without answers."""
        about = {"student": self.student, "seed": self.seed, "count": len(self.questions)}
        return {**about, "questions": [question.to_dict() for question in self.questions]}


def dealt(draw: Random) -> Iterator[Kind]:
    """Kinds of questions without end: chapters take turns, and no kind comes again before all of its chapter have."""
    chapters: dict[str, list[Kind]] = {}
    for name in KINDS:
        chapters.setdefault(KINDS[name].chapter, []).append(KINDS[name])
    left: dict[str, list[Kind]] = {chapter: [] for chapter in chapters}
    while True:
        for chapter, kinds in chapters.items():
            if not left[chapter]:
                left[chapter] = draw.sample(kinds, len(kinds))
            yield left[chapter].pop()


def _drawn(number: int, kind: Kind, student: str, seed: int) -> QuizQuestion:
    draw = Random(f"{student}\n{seed}\n{number}\n{kind.name}")
    posed = kind.pose(draw)
    mixed = replace(posed, choices=tuple(draw.sample(posed.choices, len(posed.choices))))
    return QuizQuestion(number, kind, mixed, draw.randrange(1000))


def as_number(given: object) -> float | None:
    """A finite number, typed or as it is, or None. Commas stand between thousands only: 0,5 is nothing for sure."""
    if isinstance(given, str):
        text = given.strip()
        if "," in text:
            text = text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", text) else ""
        try:
            number = float(text)
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        return None
    return float(given)


def shown(number: float) -> str:
    """A number as one would write it down."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.4g}"
