"""The process that runs a student's file: python -m regard.work.exercises.run_student_file SET FILE LOG EXERCISE...

It writes a line to LOG when an exercise begins and when it is graded, so that the parent process sees the progress.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.checks import RaisedError, describe_error
from regard.work.exercises.exercise import CheckResult
from regard.work.grading import make_grade
from regard.work.notebook import read_sources


def main(set_name: str, file: str, log: str, *names: str) -> None:
    """Run a file and grade these exercises of a set."""
    exercise_set = EXERCISE_SETS[set_name]
    with Path(log).open("a", encoding="utf-8") as out:

        def write_line(entry: dict[str, Any]) -> None:
            out.write(json.dumps(entry) + "\n")
            out.flush()

        write_line({"starts": file})
        module, errors = execute_file(Path(file))
        for name in names:
            exercise = exercise_set[name]
            write_line({"begins": name})
            if hasattr(module, exercise.function_name):
                result = exercise.find_mistake(getattr(module, exercise.function_name))
            else:
                result = _report_missing(exercise.function_name, errors)
            write_line(asdict(make_grade(exercise_set, exercise, result)))


def _report_missing(name: str, errors: list[RaisedError]) -> CheckResult:
    if errors:
        return CheckResult("error", f"{name} is not defined, and the file fails with {errors[0]}")
    return CheckResult("not written", f"{name} is not defined in the file")


def execute_file(path: Path) -> tuple[ModuleType, list[RaisedError]]:
    """Return the names that a file defines and the errors it raised. All cells of a notebook run, even after errors."""
    module = ModuleType("student")
    sys.modules["student"] = module  # dataclasses and pickle look their module up there
    sys.path.insert(0, str(path.parent))
    errors: list[RaisedError] = []
    for file, source in read_sources(path):
        try:
            exec(compile(source, file, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            errors.append(describe_error(error, file))
    return module, errors


if __name__ == "__main__":
    main(*sys.argv[1:])
