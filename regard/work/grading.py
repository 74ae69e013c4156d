"""What a student wrote, graded: a function at hand, or a whole file in a process of its own."""

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
from regard.work.exercises import SETS
from regard.work.exercises.exercise import CheckResult, Exercise, Exercises
from regard.work.notebook import sources

SUFFIXES = (".py", ".ipynb")
STARTING = 120.0  # seconds that Python and torch may take before a student's code is reached


@dataclass(frozen=True)
class Grade:
    """Whether one exercise is right; if not, the slip it looks like, where one is known, and what to say."""

    exercises: str
    task: str
    right: bool
    slip: str | None = None
    words: str = ""

    def __str__(self) -> str:
        start = f"{self.exercises}, {self.task}: "
        if self.right:
            return f"{start}right."
        said = f"{self.slip}: {self.words}" if self.slip else self.words
        return f"{start}not yet. {said[0].upper()}{said[1:]}"


@dataclass(frozen=True)
class Graded:
    """A file graded, exercise by exercise."""

    file: str
    grades: tuple[Grade, ...]

    @property
    def ok(self) -> bool:
        return all(grade.right for grade in self.grades)

    def __str__(self) -> str:
        right = sum(grade.right for grade in self.grades)
        return "\n".join([*map(str, self.grades), f"{right} of {len(self.grades)} right."])

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "ok": self.ok, "grades": [asdict(grade) for grade in self.grades]}


def grade(exercises: str, task: str, written: Any) -> Grade:
    """Grade what was written for one exercise: `grade("two-heads", "head", attend_head)`."""
    exercise = SETS[exercises][task]
    return graded(SETS[exercises], exercise, exercise.find(written))


def graded(exercises: Exercises, exercise: Exercise, found: CheckResult | None) -> Grade:
    """A finding, or none, as a grade."""
    if found is None:
        return Grade(exercises.name, exercise.name, True)
    return Grade(exercises.name, exercise.name, False, found.slip, found.words)


def grade_file(exercises: str, path: Path, seconds: float = 60.0) -> Graded:
    """Grade a .py or .ipynb file in a process of its own, with so many seconds for the file and for each exercise.

    Where an exercise never ends, the others are graded by another process, without it.
    """
    tasks = [task.name for task in SETS[exercises].tasks]
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} is neither a .py nor an .ipynb file")
    sources(path)  # a file that cannot be read is no wrong answer
    if seconds <= 0:
        raise ConfigError(f"the code needs time to run: seconds={seconds:g}")
    found: dict[str, Grade] = {}
    while left := [task for task in tasks if task not in found]:
        told, ended = _told(exercises, path, left, seconds)
        found |= {each["task"]: Grade(**each) for each in told if "right" in each}
        unfinished = [task for task in left if task not in found]
        if not unfinished:
            break
        begun = [each["begins"] for each in told if "begins" in each and each["begins"] not in found]
        # nothing begun: it is the file itself that does not come to its end
        stuck = begun or unfinished
        words = "" if begun else "the file, before any exercise was reached, "
        found |= {task: Grade(exercises, task, False, "error", f"{words or 'it '}{ended}") for task in stuck}
    return Graded(str(path), tuple(found[task] for task in tasks))


def _told(exercises: str, path: Path, tasks: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What the process wrote down, line by line, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        notes, printed = Path(folder) / "grades.jsonl", Path(folder) / "printed.txt"
        notes.touch()
        words = [sys.executable, "-m", "regard.work.exercises.running", exercises, str(path), str(notes), *tasks]
        here = str(Path(regard.__file__).parent.parent)
        places = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": places, "MPLBACKEND": "agg"}
        # what is printed goes to a file: a pipe would be waited for as long as any process of theirs holds it
        with printed.open("wb") as out:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            ended = _watched(process, notes, seconds)
        lines = notes.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], ended


def _watched(process: "subprocess.Popen[bytes]", notes: Path, seconds: float) -> str:
    """How a process ended. Whenever it writes a note the clock starts anew."""
    size, deadline = 0, time.monotonic() + STARTING
    try:
        while process.poll() is None:
            if notes.stat().st_size > size:
                size, deadline = notes.stat().st_size, time.monotonic() + seconds
            if time.monotonic() > deadline:
                return f"took longer than {seconds if size else STARTING:g} seconds"
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it may have started
            process.wait()
    return f"ended the process with exit code {process.returncode}"
