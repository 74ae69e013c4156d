"""Write exercises as Jupyter notebooks (format 4.5) and read the code of a student's notebook."""

import json
import re
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.work.exercises.exercise import ExerciseSet
from regard.work.exercises.run_answer import CELL

Cell = dict[str, Any]
Notebook = dict[str, Any]
ROLE = "regard"  # the metadata key for the role of a cell
TEST = "test"


def markdown_cell(name: str, text: str) -> Cell:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _split_lines(text)}


def code_cell(name: str, text: str, *, role: str | None = None) -> Cell:
    """A code cell. One with a role is not meant to be changed."""
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


def _split_lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def exercise_notebook(exercise_set: ExerciseSet, *, answer_key: bool = False) -> Notebook:
    """A set as a notebook: for each exercise a text, a cell to fill in and a test. The answer key has the solutions."""
    title = f"# {exercise_set.title}{': the solutions' * answer_key}\n\n{exercise_set.about}"
    cells = [
        markdown_cell("about", title),
        code_cell("setup", exercise_set.setup_code),
        code_cell("grading", "from regard.work import grade", role="import"),
    ]
    for number, exercise in enumerate(exercise_set.exercises, 1):
        test = f'print(grade("{exercise_set.name}", "{exercise.name}", {exercise.function_name}))'
        cells += [
            markdown_cell(f"{exercise.name}-prompt", f"## {number}. {exercise.title}\n\n{exercise.prompt}"),
            code_cell(f"{exercise.name}-code", exercise.source if answer_key else exercise.starter),
            code_cell(f"{exercise.name}-test", test, role=TEST),
        ]
    return build_notebook(cells)


def notebook_paths(path: Path) -> tuple[Path, Path]:
    """The paths of a notebook and its answer key, `a.ipynb` and `a.key.ipynb`; raises if one of them exists."""
    if path.suffix != ".ipynb":
        raise ConfigError(f"the name of a notebook ends in .ipynb, not {path}")
    files = path, path.with_name(f"{path.stem}.key.ipynb")
    for file in files:
        if file.exists():  # a student may have worked in it
            raise ConfigError(f"{file} already exists and is not overwritten; remove it, or choose another name")
    return files


def write_notebooks(student: Notebook, answer_key: Notebook, path: Path) -> tuple[Path, Path]:
    """Write a student's notebook and its answer key; return both paths."""
    files = notebook_paths(path)
    for file, notebook in zip(files, (student, answer_key), strict=True):
        try:
            file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return files


def read_sources(path: Path) -> list[tuple[str, str]]:
    """The code of a .py or .ipynb file: pairs of the file name shown in a traceback and the source."""
    if path.suffix.lower() == ".ipynb":
        return [(f"{CELL}{number}", source) for number, source in read_code_cells(path)]
    try:
        return [(str(path), path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def read_code_cells(path: Path) -> list[tuple[int, str]]:
    """The code cells of a notebook with their numbers, without the cells that have a role and IPython magic lines."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found = []
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] == "code" and ROLE not in cell.get("metadata", {}):
                source = cell["source"]
                text = source if isinstance(source, str) else "".join(source)
                # an empty line instead, so that the lines after it keep their numbers
                found.append((number, re.sub(r"(?m)^[ \t]*[%!?].*$", "", text)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a Jupyter notebook of format 4") from None
    return found
