"""Grade exercises: one function directly, or a whole file in a separate process with a time limit."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import regard
from regard.base.errors import ConfigError
from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.exercise import CheckResult, Exercise, ExerciseSet
from regard.work.notebook import read_sources

SUFFIXES = (".py", ".ipynb")
STARTUP_SECONDS = 120.0  # time to start Python and import torch, before the student's code runs


@dataclass(frozen=True)
class Grade:
    """Whether one exercise is correct; if not, the mistake it looks like, where one is known, and the feedback."""

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


def grade(exercise_set: str, exercise: str, answer: Any) -> Grade:
    """Grade a student's answer to one exercise.

    exercise_set  the name of the set, such as "two-heads"
    exercise      the name of the exercise in the set, such as "head"
    answer        the function or class that the student wrote

    >>> from regard.work.exercises.solutions.self_attention import softmax_columns
    >>> print(grade("self-attention", "softmax", softmax_columns))
    self-attention, softmax: correct.
    """
    found = EXERCISE_SETS[exercise_set]
    return make_grade(found, found[exercise], found[exercise].find_mistake(answer))


def make_grade(exercise_set: ExerciseSet, exercise: Exercise, result: CheckResult | None) -> Grade:
    """Turn the result of a check into a grade."""
    if result is None:
        return Grade(exercise_set.name, exercise.name, True)
    return Grade(exercise_set.name, exercise.name, False, result.mistake, result.feedback)


def grade_file(exercise_set: str, path: Path, seconds: float = 60.0) -> FileGrade:
    """Grade a .py or .ipynb file in a separate process.

    seconds  time limit for the file and for each exercise

    If an exercise never ends, another process grades the remaining ones.
    """
    names = [exercise.name for exercise in EXERCISE_SETS[exercise_set].exercises]
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} is neither a .py nor an .ipynb file")
    read_sources(path)  # a file that cannot be read is an error, not a wrong answer
    if seconds <= 0:
        raise ConfigError(f"seconds must be positive, not {seconds:g}")
    grades: dict[str, Grade] = {}
    while remaining := [name for name in names if name not in grades]:
        log, ended = _run_grader(exercise_set, path, remaining, seconds)
        grades |= {entry["exercise"]: Grade(**entry) for entry in log if "correct" in entry}
        unfinished = [name for name in remaining if name not in grades]
        if not unfinished:
            break
        begun = [entry["begins"] for entry in log if "begins" in entry and entry["begins"] not in grades]
        # if no exercise has begun, the file itself did not finish
        what = "it" if begun else "the file, before any exercise was reached,"
        grades |= {name: Grade(exercise_set, name, False, "error", f"{what} {ended}") for name in begun or unfinished}
    return FileGrade(str(path), tuple(grades[name] for name in names))


def _run_grader(
    exercise_set: str, path: Path, names: Sequence[str], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the grading process; return its log entries and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        log, printed = Path(folder) / "grades.jsonl", Path(folder) / "printed.txt"
        log.touch()
        module = "regard.work.exercises.run_student_file"
        command = [sys.executable, "-m", module, exercise_set, str(path), str(log), *names]
        root = str(Path(regard.__file__).parent.parent)
        python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": python_path, "MPLBACKEND": "agg"}
        # output goes to a file: a pipe would stay open as long as any process that the student's code started
        with printed.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            ended = _wait_with_timeout(process, log, seconds)
        lines = log.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], ended


def _wait_with_timeout(process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> str:
    """Wait for a process and describe how it ended. Every new log line restarts the timeout."""
    size, deadline = 0, time.monotonic() + STARTUP_SECONDS
    try:
        while process.poll() is None:
            if log.stat().st_size > size:
                size, deadline = log.stat().st_size, time.monotonic() + seconds
            if time.monotonic() > deadline:
                return f"took longer than {seconds if size else STARTUP_SECONDS:g} seconds"
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
            process.wait()
    return f"ended the process with exit code {process.returncode}"
