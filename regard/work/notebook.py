"""Notebooks of Jupyter, format 4.5, written and read as the JSON they are."""

import json
import re
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.work.exercises.checks import CELL
from regard.work.exercises.exercise import Exercise, Exercises

Cell = dict[str, Any]
Notebook = dict[str, Any]
ROLE = "regard"  # the name under which a cell's metadata says what it is for
TEST = "test"


def markdown(name: str, text: str) -> Cell:
    """A cell of words."""
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _lines(text)}


def code(name: str, text: str, *, role: str | None = None) -> Cell:
    """A cell of code. One with a role is not meant to be changed."""
    fixed = {} if role is None else {"editable": False, "deletable": False, ROLE: {"role": role}}
    return {
        "cell_type": "code",
        "id": name,
        "metadata": fixed,
        "execution_count": None,
        "outputs": [],
        "source": _lines(text),
    }


def notebook(cells: list[Cell]) -> Notebook:
    """A notebook for Python 3."""
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def of_exercises(exercises: Exercises, *, key: bool = False) -> Notebook:
    """A set as a notebook: words, a cell to write in and a test for each exercise; the key has the solutions."""
    title = f"# {exercises.title}{': the solutions' * key}\n\n{exercises.about}"
    given = f"{exercises.given.rstrip()}\n"
    cells = [
        markdown("about", title),
        code("given", given),
        code("grading", "from regard.work import grade", role="import"),
    ]
    for number, exercise in enumerate(exercises.tasks, 1):
        cells += [
            markdown(f"{exercise.name}-prompt", f"## {number}. {exercise.title}\n\n{exercise.prompt}"),
            code(f"{exercise.name}-code", exercise.source if key else exercise.starter),
            code(f"{exercise.name}-test", asking(exercises, exercise), role=TEST),
        ]
    return notebook(cells)


def asking(exercises: Exercises, exercise: Exercise) -> str:
    """The cell that asks the package whether an exercise is right."""
    return f'print(grade("{exercises.name}", "{exercise.name}", {exercise.writes}))'


def key_path(path: Path) -> Path:
    """Where the teacher's key stands: beside the notebook, `a.ipynb` and `a.key.ipynb`."""
    return path.with_name(f"{path.stem}.key.ipynb")


def free(path: Path) -> tuple[Path, Path]:
    """Where a notebook and its key are to be written. Nothing is overwritten: a student may have worked in it."""
    if path.suffix != ".ipynb":
        raise ConfigError(f"a notebook ends in .ipynb, but {path} does not")
    files = path, key_path(path)
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} is there already, and is not overwritten; remove it, or give another name")
    return files


def export(student: Notebook, key: Notebook, path: Path) -> tuple[Path, Path]:
    """Write a notebook and its key."""
    files = free(path)
    for file, made in zip(files, (student, key), strict=True):
        try:
            file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return files


def sources(path: Path) -> list[tuple[str, str]]:
    """The pieces of code of a .py or .ipynb file, each with what it is called in a traceback."""
    if path.suffix.lower() == ".ipynb":
        return [(f"{CELL}{number}", source) for number, source in code_of(path)]
    try:
        return [(str(path), path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8") from None


def code_of(path: Path) -> list[tuple[int, str]]:
    """The code cells of a notebook with their numbers among all cells, tests left out and lines for IPython too."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found = []
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] == "code" and cell.get("metadata", {}).get(ROLE, {}).get("role") != TEST:
                source = cell["source"]
                text = source if isinstance(source, str) else "".join(source)
                # an empty line in its place, so that the lines after it keep their numbers
                found.append((number, re.sub(r"(?m)^[ \t]*[%!?].*$", "", text)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is no notebook of Jupyter, format 4") from None
    return found
