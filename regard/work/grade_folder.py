"""Grade a folder of submissions of a class: exercises in separate processes, and quizzes, as rows of a CSV file.

The submission of a student is a file such as `ann.ipynb`, or a folder `ann/` with any files. The student's name is the
name of the file or folder, and the variants of the tasks depend only on this name and the seed of the class.
"""

import ast
import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from io import StringIO
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.files import read_json
from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.answer_process import Limits, Sources
from regard.work.exercises.exercise import student_seed
from regard.work.grading import SUFFIXES, escape_surrogates, grade_sources
from regard.work.notebook import read_sources
from regard.work.quiz import Quiz


@dataclass(frozen=True)
class ClassRow:
    """One row of the CSV file: the points of a student for one question."""

    student: str
    exercise: str  # an exercise set, or "quiz"
    question: str
    points: int
    max_points: int
    status: str  # correct, wrong, error, or missing
    message: str

    def __post_init__(self) -> None:
        for name in ("student", "message"):
            object.__setattr__(self, name, escape_surrogates(getattr(self, name)))


@dataclass(frozen=True)
class ClassOptions:
    """Options for grading a class.

    exercise_sets  names of the exercise sets to grade; if empty, all sets of which a submission defines a
                   function
    quiz           number of questions of the quiz; 0 if there is none
    class_seed     secret seed of the variants; None if all students have the same tasks
    limits         time and memory limits for a submission
    """

    exercise_sets: tuple[str, ...] = ()
    quiz: int = 0
    class_seed: str | None = None
    limits: Limits = field(default_factory=Limits)


def grade_folder(
    folder: Path, options: ClassOptions, progress: Callable[[str], None] = lambda text: None
) -> Iterator[ClassRow]:
    """Grade all submissions in a folder and yield the points of each student for each question.

    progress  function that is called with a message before each student, such as `print`
    """
    for name in options.exercise_sets:
        EXERCISE_SETS[name]  # an unknown name is an error before anything runs
    for student, files in find_submissions(folder).items():
        progress(f"grading {student}: {', '.join(file.name for file in files)}")
        try:
            check_links(folder, files)
            sources = [pair for file in files if file.suffix != ".json" for pair in read_sources(file)]
            answers = read_predictions(sources, [file for file in files if file.suffix == ".json"])
        except ConfigError as error:
            asked = [(name, each.name) for name in options.exercise_sets for each in EXERCISE_SETS[name].exercises]
            asked += [("quiz", str(number)) for number in range(1, options.quiz + 1)]
            for exercise, question in asked or [("", "")]:
                yield ClassRow(student, exercise, question, 0, int(bool(asked)), "error", str(error))
            continue
        readable = [folder / student] if (folder / student).is_dir() else []
        yield from _grade_exercises(student, sources, options, [folder], readable)
        if options.quiz:
            yield from _grade_quiz(student, answers, options)


def find_submissions(folder: Path) -> dict[str, list[Path]]:
    """Return the submitted files by student: the name of a subfolder, or the file name without suffix."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of the submissions")
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in (*SUFFIXES, ".json") and not any(part.startswith(".") for part in path.parts):
            inside = path.relative_to(folder)
            found.setdefault(inside.parts[0] if len(inside.parts) > 1 else path.stem, []).append(path)
    if not found:
        raise ConfigError(f"{folder} has no submissions: no .py, .ipynb or .json files")
    return found


def check_links(folder: Path, files: Sequence[Path]) -> None:
    """Raise ConfigError if a student's file is a link to a file that is not the student's own.

    A student's own files are the submitted file itself, or the files in the student's subfolder.

    folder  the folder of all submissions
    files   the files of one student
    """
    for file in files:
        own, target = folder.resolve() / file.relative_to(folder).parts[0], file.resolve()
        if own != target and own not in target.parents:
            raise ConfigError(f"{file.name} is a link to {target}, a file of somebody else; grade a copy of the file")


def _grade_exercises(
    student: str, sources: Sources, options: ClassOptions, hidden: Sequence[Path], readable: Sequence[Path]
) -> Iterator[ClassRow]:
    text = "\n".join(source for _, source in sources)
    defined = set(re.findall(r"(?m)^(?:def|class)\s+(\w+)", text))
    names = options.exercise_sets or [
        name for name in EXERCISE_SETS if defined & {each.function_name for each in EXERCISE_SETS[name].exercises}
    ]
    if not names and not options.quiz:
        yield ClassRow(student, "", "", 0, 0, "missing", "no function of any exercise is defined")
    for name in names:
        exercise_set = EXERCISE_SETS[name]
        if options.class_seed is not None:
            exercise_set = exercise_set.for_student(student, options.class_seed)
        for question, grade in grade_sources(exercise_set, sources, options.limits, hidden, readable).items():
            status = {"error": "error", "not written": "missing", "to do": "missing"}.get(grade.mistake or "", "wrong")
            message = f"{grade.mistake}: {grade.feedback}" if grade.mistake else grade.feedback
            row = (int(grade.correct), 1, "correct" if grade.correct else status, message)
            yield ClassRow(student, name, question, *row)


def read_predictions(sources: Sources, json_files: Sequence[Path] = ()) -> dict[str, Any]:
    """Read a student's quiz answers by question number, without running code.

    An answer is a line such as `prediction_1 = "b"` in the sources, or an entry of a .json file of answers.
    """
    found: dict[str, Any] = {}
    for file in json_files:
        answers = read_json(file, ConfigError)
        try:
            found |= answers["answers"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'{file.name} should hold an object like {{"answers": {{"1": "b", "2": 0.3}}}}') from None
    for _, source in sources:
        for number, value in re.findall(r"(?m)^prediction_(\d+)\s*=\s*([^#\n]+)", source):
            try:
                found[number] = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
                found[number] = value.strip()
    return {number: value for number, value in found.items() if value is not ...}


def _grade_quiz(student: str, answers: dict[str, Any], options: ClassOptions) -> Iterator[ClassRow]:
    seed = 0 if options.class_seed is None else student_seed(student, options.class_seed)
    for question in Quiz.for_student(student, count=options.quiz, seed=seed).questions:
        given = answers.get(str(question.number))
        try:
            result = question.grade(given)
            points = int(result.ok)
            status = "correct" if result.ok else "missing" if given is None else "wrong"
            message = str(result).splitlines()[0]
        except ConfigError as error:
            points, status, message = 0, "wrong", str(error)
        yield ClassRow(student, "quiz", str(question.number), points, 1, status, message)


def to_csv(rows: Sequence[ClassRow]) -> str:
    """Convert rows to CSV text; a cell that a spreadsheet would read as a formula gets a leading apostrophe."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(each.name for each in fields(ClassRow))
    for row in rows:
        writer.writerow(f"'{each}" if str(each)[:1] in set("=+-@\t") else each for each in astuple(row))
    return out.getvalue()
