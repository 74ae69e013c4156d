"""The process that runs a student's file: python -m regard.work.exercises.running SET FILE NOTES TASK...

It writes down each exercise when it begins and when it is graded, so that whoever waits knows how far it came.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.work.exercises import SETS
from regard.work.exercises.checks import Failed, failed
from regard.work.exercises.exercise import CheckResult
from regard.work.grading import graded
from regard.work.notebook import sources


def main(name: str, file: str, notes: str, *tasks: str) -> None:
    """Run a file and grade these exercises of a set."""
    exercises = SETS[name]
    with Path(notes).open("a", encoding="utf-8") as out:

        def note(words: dict[str, Any]) -> None:
            out.write(json.dumps(words) + "\n")
            out.flush()

        note({"starts": file})
        module, troubles = executed(Path(file))
        for task in tasks:
            exercise = exercises[task]
            note({"begins": task})
            if hasattr(module, exercise.writes):
                finding = exercise.find(getattr(module, exercise.writes))
            else:
                finding = missing(exercise.writes, troubles)
            note(asdict(graded(exercises, exercise, finding)))


def missing(name: str, troubles: list[Failed]) -> CheckResult:
    """The finding about a name that is not there; trouble in the file may be why."""
    if troubles:
        return CheckResult("error", f"there is no {name}, and the file fails with {troubles[0]}")
    return CheckResult("not written", f"there is no {name} in the file")


def executed(path: Path) -> tuple[ModuleType, list[Failed]]:
    """The names a file defines, and what failed in it. In a notebook every cell is run, whatever failed before it."""
    module = ModuleType("student")
    sys.modules["student"] = module  # where classes look for their module
    sys.path.insert(0, str(path.parent))
    troubles: list[Failed] = []
    for file, source in sources(path):
        try:
            exec(compile(source, file, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            troubles.append(failed(error, file))
    return module, troubles


if __name__ == "__main__":
    main(*sys.argv[1:])
