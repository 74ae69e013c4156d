"""The quiz: predict the result of an experiment of the lab, then run it.

The questions depend only on the student's name and a seed. The correct answer is known only after the run.
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
from regard.work.quiz_question import QUESTION_TEMPLATES, GeneratedQuestion, QuestionTemplate

SOURCES = (quiz_attention, quiz_heads, quiz_transformers)  # importing them fills QUESTION_TEMPLATES
QuizAnswer = str | float  # the letter of a choice, or a number


@dataclass(frozen=True)
class QuizQuestion:
    """One question of a student's quiz; the answer is found by running the experiment of a lab claim.

    number    number of the question in the quiz
    template  the template that the question was generated from
    content   text, settings of the experiment, and choices
    seed      random seed of the experiment
    """

    number: int
    template: QuestionTemplate
    content: GeneratedQuestion
    seed: int

    @property
    def claim(self) -> Claim:
        return claims()[self.template.claim]

    @property
    def choices(self) -> dict[str, str]:
        """The texts of the choices by letter (a, b, ...); empty if the answer is a number."""
        return dict(zip(ascii_lowercase, (choice.text for choice in self.content.choices), strict=False))

    def __str__(self) -> str:
        lines = [f"{self.number}. {self.content.text}"]
        lines += [f"   {letter}) {text}" for letter, text in self.choices.items()]
        return "\n".join(lines if self.choices else [*lines, f"   (a number, {self.content.tolerance})"])

    def to_dict(self) -> dict[str, Any]:
        """Return the question as values that JSON can represent, without the correct answer."""
        return {
            "number": self.number,
            "template": self.template.name,
            "claim": self.claim.id,
            "chapter": self.claim.chapter,
            "question": self.content.text,
            **({"choices": self.choices} if self.choices else {"answer": str(self.content.tolerance)}),
        }

    def parse_answer(self, answer: object) -> QuizAnswer:
        """Convert an answer to the letter or number that this question takes; raise ConfigError for any other kind."""
        if self.choices:
            letter = answer.strip(" ).").lower() if isinstance(answer, str) else ""
            if letter not in self.choices:
                raise ConfigError(f"question {self.number} needs one of {', '.join(self.choices)}, not {answer!r}")
            return letter
        number = parse_number(answer)
        if number is None:
            raise ConfigError(f"question {self.number} needs a number, such as 0.25 or 1,024, not {answer!r}")
        return number

    @cached_property
    def outcome(self) -> Outcome:
        """The outcome of the lab experiment that answers the question."""
        return self.claim.run(self.claim.setup(self.content.settings, seed=self.seed, smoke=True))

    @property
    def correct_answer(self) -> QuizAnswer:
        """The correct answer, computed from the outcome of the experiment."""
        numbers = self.outcome.numbers
        if self.content.number is not None:
            return float(self.content.number(numbers))
        true = [
            letter for letter, choice in zip(self.choices, self.content.choices, strict=True) if choice.is_true(numbers)
        ]
        if len(true) != 1:
            raise ConfigError(f"{self.template.name} has {len(true)} true choices with this seed; try another seed")
        return true[0]

    def grade(self, answer: object = None) -> "QuestionResult":
        """Run the experiment and grade an answer; None means that the question was not answered."""
        return QuestionResult(self, None if answer is None else self.parse_answer(answer), self.correct_answer)


@dataclass(frozen=True)
class QuestionResult:
    """The graded answer to a quiz question, with an explanation from the experiment."""

    question: QuizQuestion
    answer: QuizAnswer | None
    correct_answer: QuizAnswer

    @property
    def ok(self) -> bool:
        if isinstance(self.answer, float) and isinstance(self.correct_answer, float):
            return self.question.content.tolerance.allows(self.answer, self.correct_answer)
        return self.answer is not None and self.answer == self.correct_answer

    @property
    def explanation(self) -> list[str]:
        """The lines of the explanation.

        The lines state what the experiment measured, the lab claim and its formula, known wrong answers, and the
        command that repeats the experiment.
        """
        question, outcome = self.question, self.question.outcome
        explain = question.content.explain
        lines = [] if explain is None else [f"How to calculate it: {explain(outcome.numbers)}"]
        lines += [f"The run: {outcome.verdict.sentence}", f"The claim: {question.claim.claim}"]
        lines.append(f"The maths: {formulas.text(question.claim.formula)}")
        for sheet, verdict in outcome.wrong_answers:
            lines.append(f'A common wrong answer: "{sheet.says}" ({verdict.word}) Correct is: {sheet.right}')
        return [*lines, f"Run it again: {make_result(outcome).command}"]

    def __str__(self) -> str:
        verdict = "Not answered" if self.answer is None else "Correct" if self.ok else "Wrong"
        if isinstance(self.correct_answer, str):
            correct = f"{self.correct_answer}) {self.question.choices[self.correct_answer]}"
        else:
            correct = format_number(self.correct_answer)
        return "\n".join([f"{verdict}: the answer is {correct}", *(f"  {line}" for line in self.explanation)])

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.question.to_dict(),
            "given_answer": self.answer,
            "correct_answer": self.correct_answer,
            "ok": self.ok,
            "explanation": self.explanation,
        }


@dataclass(frozen=True)
class Quiz:
    """A quiz: the questions of one student."""

    student: str
    seed: int
    questions: tuple[QuizQuestion, ...]

    @classmethod
    def for_student(cls, student: str = "student", *, count: int = 5, seed: int = 0) -> "Quiz":
        """Generate the quiz of a student; the same name, count and seed always give the same questions.

        student  name of the student
        count    number of questions
        seed     random seed
        """
        check_integer("count", count, 1, "questions")
        templates = deal_templates(Random(f"{student}\n{seed}"))
        questions = (_generate_question(number, next(templates), student, seed) for number in range(1, count + 1))
        return cls(student, seed, tuple(questions))

    def __getitem__(self, number: int) -> QuizQuestion:
        if not 1 <= number <= len(self.questions):
            raise ConfigError(f"there is no question {number}; the questions are 1 to {len(self.questions)}")
        return self.questions[number - 1]

    def answer(self, number: int, answer: object) -> QuestionResult:
        """Grade an answer to the question with this number by running its experiment.

        Raises ConfigError if the answer is `...`, the placeholder in the notebook.
        """
        if answer is ...:
            raise ConfigError(f"question {number} has no answer yet; predict first, then run")
        return self[number].grade(answer)

    def grade(
        self, answers: Mapping[str, object], progress: Callable[[QuizQuestion], None] | None = None
    ) -> tuple[QuestionResult, ...]:
        """Run the experiments of all questions and grade the answers.

        answers   answers by question number as a string, such as {"1": "b"}; a missing one counts as not answered
        progress  called with each question before its experiment runs
        """
        unknown = [name for name in answers if name not in {str(each.number) for each in self.questions}]
        if unknown:
            raise ConfigError(f"answers are named by question numbers, 1 to {len(self.questions)}, not {unknown[0]!r}")
        for question in self.questions:  # parse all answers before an experiment runs: a malformed answer raises
            if answers.get(str(question.number)) is not None:
                question.parse_answer(answers[str(question.number)])
        results = []
        for question in self.questions:
            if progress is not None:
                progress(question)
            results.append(question.grade(answers.get(str(question.number))))
        return tuple(results)

    def to_dict(self) -> dict[str, Any]:
        """Return the quiz as values that JSON can represent, without the correct answers."""
        about = {"student": self.student, "seed": self.seed, "count": len(self.questions)}
        return {**about, "questions": [question.to_dict() for question in self.questions]}


def deal_templates(random: Random) -> Iterator[QuestionTemplate]:
    """Yield question templates without end, in random order.

    Templates of the lab's chapters alternate. A template repeats only after all others of its chapter were used.
    """
    chapters: dict[str, list[QuestionTemplate]] = {}
    for name in QUESTION_TEMPLATES:
        chapters.setdefault(QUESTION_TEMPLATES[name].chapter, []).append(QUESTION_TEMPLATES[name])
    remaining: dict[str, list[QuestionTemplate]] = {chapter: [] for chapter in chapters}
    while True:
        for chapter, templates in chapters.items():
            if not remaining[chapter]:
                remaining[chapter] = random.sample(templates, len(templates))
            yield remaining[chapter].pop()


def _generate_question(number: int, template: QuestionTemplate, student: str, seed: int) -> QuizQuestion:
    random = Random(f"{student}\n{seed}\n{number}\n{template.name}")
    content = template.generate(random)
    shuffled = replace(content, choices=tuple(random.sample(content.choices, len(content.choices))))
    return QuizQuestion(number, template, shuffled, random.randrange(1000))


def parse_number(answer: object) -> float | None:
    """Parse a finite number; return None if the answer is not one.

    A comma is a thousands separator in 1,024 and a decimal comma in 0,25.
    """
    if isinstance(answer, str):
        text = answer.strip()
        if re.fullmatch(r"-?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
            text = text.replace(",", "")
        elif re.fullmatch(r"-?\d+,\d+", text):
            text = text.replace(",", ".")
        try:
            number = float(text)
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
        return None
    return float(answer)


def format_number(number: float) -> str:
    """Format a number with thousands separators, rounded to four significant digits unless it is an integer."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.4g}"
