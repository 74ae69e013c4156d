"""Grade exercises: one function directly, or a whole file in a separate process with limits on time and memory."""

import functools
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.base.errors import ConfigError
from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.answer_process import AnswerProcess, Limits, ProcessEndedError, Sources, run_submission
from regard.work.exercises.exercise import CheckResult, Exercise, ExerciseSet
from regard.work.notebook import read_sources

SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True)
class Grade:
    """The grade of one exercise.

    mistake   name of the known mistake that the answer looks like; None if none is recognised
    feedback  text for the student, if the answer is not correct
    """

    exercise_set: str
    exercise: str
    correct: bool
    mistake: str | None = None
    feedback: str = ""

    def __str__(self) -> str:
        start = f"{self.exercise_set}, {self.exercise}: "
        if self.correct:
            return f"{start}correct."
        message = f"{self.mistake}: {self.feedback}" if self.mistake else self.feedback
        return f"{start}not yet. {message[0].upper()}{message[1:]}"


@dataclass(frozen=True)
class FileGrade:
    """The grades of all exercises in a file."""

    file: str
    grades: tuple[Grade, ...]

    @property
    def ok(self) -> bool:
        return all(grade.correct for grade in self.grades)

    def __str__(self) -> str:
        correct = sum(grade.correct for grade in self.grades)
        return "\n".join([*map(str, self.grades), f"{correct} of {len(self.grades)} correct."])

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "ok": self.ok, "grades": [asdict(grade) for grade in self.grades]}


def grade(exercise_set: str, exercise: str, answer: Any, variant: str = "") -> Grade:
    """Grade a student's answer to one exercise.

    exercise_set  the name of the set, such as "two-heads"
    exercise      the name of the exercise in the set, such as "head"
    answer        the function or class that the student wrote
    variant       the variant of the tasks, such as "0201", copied from the notebook; empty for the original tasks

    >>> from regard.work.exercises.solutions.self_attention import softmax_columns
    >>> print(grade("self-attention", "softmax", softmax_columns))
    self-attention, softmax: correct.
    """
    found = EXERCISE_SETS[exercise_set]
    found = found.with_variant(variant) if variant else found
    return make_grade(found, found[exercise], found[exercise].find_mistake(answer))


def make_grade(exercise_set: ExerciseSet, exercise: Exercise, result: CheckResult | None) -> Grade:
    """Convert the result of a check to a grade; None as the result means that the answer is correct."""
    if result is None:
        return Grade(exercise_set.name, exercise.name, True)
    return Grade(exercise_set.name, exercise.name, False, result.mistake, escape_surrogates(result.feedback))


def escape_surrogates(text: str) -> str:
    """Replace lone surrogates, which a message of a submission may have but no file can, by their escapes."""
    return text.encode(errors="backslashreplace").decode()


def grade_file(exercise_set: ExerciseSet, path: Path, seconds: float = 60.0) -> FileGrade:
    """Grade a .py or .ipynb file in a separate process, on random inputs that are sampled after the file has run.

    seconds  time limit for the file and for each call
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} is neither a .py nor an .ipynb file")
    sources = read_sources(path)
    found = grade_sources(exercise_set, sources, Limits(seconds), readable=[path.parent])
    return FileGrade(str(path), tuple(found.values()))


def grade_sources(
    exercise_set: ExerciseSet,
    sources: Sources,
    limits: Limits,
    hidden: Sequence[Path] = (),
    readable: Sequence[Path] = (),
) -> dict[str, Grade]:
    """Grade a submission in a separate process and return the grades by name of the exercise.

    If an exercise ends the process, a new process grades the remaining ones.

    sources   pairs of file name and source code
    hidden    folders that the submission is forbidden to read
    readable  folders inside hidden ones that the submission can read
    """
    grades: dict[str, Grade] = {}
    while remaining := [each for each in exercise_set.exercises if each.name not in grades]:
        try:
            with run_submission(sources, limits, hidden, readable) as process:
                for exercise in remaining:
                    result, ended = _check_answer(exercise, process)
                    grades[exercise.name] = make_grade(exercise_set, exercise, result)
                    if ended:
                        break
        except ProcessEndedError as error:  # the file itself ended the process
            result = CheckResult("error", f"the file, before any exercise was reached, {error}")
            grades |= {each.name: make_grade(exercise_set, each, result) for each in remaining}
    return grades


def _check_answer(exercise: Exercise, process: AnswerProcess) -> tuple[CheckResult | None, bool]:
    """Check one exercise; return what is wrong (None if nothing), and whether the code ended the process."""
    name = exercise.function_name
    if name not in process.names:
        # a file may import `regard.work`, which fails here and is not why a name is missing
        errors = [each for each in process.errors if each.kind != "ImportError"] or process.errors
        if errors:
            return CheckResult("error", f"{name} is not defined, and the file fails with {errors[0]}"), False
        return CheckResult("not written", f"{name} is not defined in the file"), False
    generator = np.random.default_rng(secrets.randbits(64))  # drawn now: the submission cannot know the inputs
    try:
        return exercise.check(exercise, functools.partial(process.ask, name), generator), False
    except ProcessEndedError as error:
        return CheckResult("error", f"it {error}"), True
