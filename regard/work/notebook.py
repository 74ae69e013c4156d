"""Write exercises as Jupyter notebooks (format 4.5) and read the code of a student's notebook."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError
from regard.base.files import read_json, read_text
from regard.base.registry import Registry
from regard.work.exercises.exercise import Exercise, ExerciseSet
from regard.work.exercises.run_answer import CELL

Cell = dict[str, Any]
Notebook = dict[str, Any]
ROLE = "regard"  # the metadata key for the role of a cell


def markdown_cell(name: str, text: str) -> Cell:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _split_lines(text)}


def raw_cell(name: str, text: str) -> Cell:
    return {"cell_type": "raw", "id": name, "metadata": {}, "source": _split_lines(text)}


def code_cell(name: str, text: str, *, role: str | None = None) -> Cell:
    """Return a code cell of a Jupyter notebook.

    name  id of the cell
    role  "import", "test" or "training" for a cell that students should not edit; None for an ordinary cell
    """
    fixed = {} if role is None else {"editable": False, "deletable": False, ROLE: {"role": role}}
    return {
        "cell_type": "code",
        "id": name,
        "metadata": fixed,
        "execution_count": None,
        "outputs": [],
        "source": _split_lines(text),
    }


def build_notebook(cells: list[Cell]) -> Notebook:
    """Return a Jupyter notebook (format 4, Python 3) with these cells."""
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _split_lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def exercise_notebook(exercise_set: ExerciseSet, *, answer_key: bool = False, style: str | None = None) -> Notebook:
    """Return an exercise set as a Jupyter notebook: for each exercise the text, a cell to fill in and a test cell.

    answer_key  show the solutions instead of the cells to fill in
    style       "nbgrader" or "otter": return the teacher's notebook for these tools, with the solutions between
                marker lines; the tools create the students' notebook from it
    """
    title = f"# {exercise_set.title}{': the solutions' * answer_key}\n\n{exercise_set.about}"
    cells = [
        *([raw_cell("config", f"# ASSIGNMENT CONFIG\nname: {exercise_set.name}")] if style == "otter" else []),
        markdown_cell("about", title),
        code_cell("setup", exercise_set.setup_code),
        code_cell("grading", "from regard.work import grade", role="import"),
    ]
    for number, exercise in enumerate(exercise_set.exercises, 1):
        variant = f', variant="{exercise_set.variant}"' if exercise_set.variant else ""
        call = f'grade("{exercise_set.name}", "{exercise.name}", {exercise.function_name}{variant})'
        prompt = markdown_cell(f"{exercise.name}-prompt", f"## {number}. {exercise.title}\n\n{exercise.prompt}")
        if style is not None:
            cells += STYLES[style](exercise, prompt, f"result = {call}\nassert result.correct, result")
            continue
        code = exercise.source if answer_key else exercise.starter
        test = code_cell(f"{exercise.name}-test", f"print({call})", role="test")
        cells += [prompt, code_cell(f"{exercise.name}-code", code), test]
    if exercise_set.closing_code:
        cells.append(code_cell("training", exercise_set.closing_code, role="training"))
    return build_notebook(cells)


def _nbgrader_cells(exercise: Exercise, prompt: Cell, test: str) -> list[Cell]:
    """Return the cells of an exercise with nbgrader metadata; the test is worth one point."""
    code = code_cell(f"{exercise.name}-code", exercise.marked_source("### BEGIN SOLUTION", "### END SOLUTION"))
    tests = code_cell(f"{exercise.name}-test", test, role="test")
    for cell, graded in ((code, False), (tests, True)):
        about = {"grade": graded, "solution": not graded, "locked": graded, "task": False, "schema_version": 3}
        cell["metadata"]["nbgrader"] = {**about, "grade_id": cell["id"], **({"points": 1} if graded else {})}
    return [prompt, code, tests]


def _otter_cells(exercise: Exercise, prompt: Cell, test: str) -> list[Cell]:
    """Return the cells of an exercise for `otter assign`; raw cells mark the question, the solution and the tests."""
    name = exercise.name
    code = code_cell(f"{name}-code", exercise.marked_source("# BEGIN SOLUTION", "# END SOLUTION"))
    return [
        raw_cell(f"{name}-begin", f"# BEGIN QUESTION\nname: {name.replace('-', '_')}\npoints: 1"),
        prompt,
        raw_cell(f"{name}-solution", "# BEGIN SOLUTION"),
        code,
        raw_cell(f"{name}-solved", "# END SOLUTION"),
        raw_cell(f"{name}-tests", "# BEGIN TESTS"),
        code_cell(f"{name}-test", test, role="test"),
        raw_cell(f"{name}-tested", "# END TESTS"),
        raw_cell(f"{name}-end", "# END QUESTION"),
    ]


STYLES: Registry[Callable[[Exercise, Cell, str], list[Cell]]] = Registry("style of a notebook")
STYLES.add("nbgrader")(_nbgrader_cells)
STYLES.add("otter")(_otter_cells)


def write_new_file(path: Path, text: str) -> None:
    """Write a new file; raise ConfigError if it exists, because overwriting it could destroy a student's work."""
    if path.exists():
        raise ConfigError(f"{path} already exists and is not overwritten; remove it, or choose another name")
    write_output(path, lambda file: file.write_text(text, encoding="utf-8"))


def to_text(notebook: Notebook) -> str:
    """Return a notebook as the text of an .ipynb file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def read_sources(path: Path) -> list[tuple[str, str]]:
    """Read the code of a .py or .ipynb file, as pairs of the name shown in a traceback and the source code.

    A notebook has one pair for each code cell.
    """
    if path.suffix.lower() == ".ipynb":
        return [(f"{CELL}{number}", source) for number, source in read_code_cells(path)]
    return [(str(path), read_text(path, ConfigError))]


def read_code_cells(path: Path) -> list[tuple[int, str]]:
    """Read the code cells of a notebook, as pairs of cell number and source code.

    Import and test cells that are not the student's, and lines of IPython magic, are left out.
    """
    cells, found = read_json(path, ConfigError, "cells")["cells"], []
    try:
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] == "code" and ROLE not in cell.get("metadata", {}):
                source = cell["source"]
                text = source if isinstance(source, str) else "".join(source)
                # an empty line instead, so that the lines after it keep their numbers
                found.append((number, re.sub(r"(?m)^[ \t]*[%!?].*$", "", text)))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a Jupyter notebook of format 4") from None
    return found
