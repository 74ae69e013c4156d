"""`regard work exercises`: write exercise sets as notebooks, and grade what students wrote."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell

if TYPE_CHECKING:
    from regard.work.exercises.exercise import ExerciseSet


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="self-attention, two-heads, byte-pairs, decoding or vit")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the set as a notebook, a.ipynb, and the answer key, a.key.ipynb")
    ] = None,
    grade: Annotated[Path | None, typer.Option(help="Grade a student's .py or .ipynb file")] = None,
    seconds: Annotated[float, typer.Option(help="Time limit for the file and for each exercise")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the list or the grades as JSON")] = False,
) -> None:
    """List exercise sets, write one as a notebook, or grade a file."""
    from regard.work.exercises import EXERCISE_SETS

    if name is None:
        if export is not None or grade is not None:
            raise ConfigError(f"name an exercise set: {', '.join(EXERCISE_SETS)}")
        sets = [EXERCISE_SETS[each] for each in EXERCISE_SETS]
        if json:
            show_json([to_json(each) for each in sets])
        else:
            show(sets_table(sets))
        return
    exercise_set = EXERCISE_SETS[name]
    if export is not None and grade is not None:
        raise ConfigError("--export writes a set and --grade reads an answer; use one of them")
    if export is not None:
        from regard.work.notebook import exercise_notebook, write_notebooks

        answer_key = exercise_notebook(exercise_set, answer_key=True)
        for file in write_notebooks(exercise_notebook(exercise_set), answer_key, export):
            tell(f"saved {file}")
    elif grade is not None:
        grade_student_file(name, grade, seconds, json)
    elif json:
        show_json(to_json(exercise_set))
    else:
        print_set(exercise_set)


def grade_student_file(name: str, path: Path, seconds: float, json: bool) -> None:
    """Grade a file; the exit code is 1 unless everything is correct."""
    from regard.work.grading import grade_file

    tell(f"running {path}")
    result = grade_file(name, path, seconds)
    if json:
        show_json(result.to_dict())
    else:
        typer.echo(str(result))
    if not result.ok:
        raise typer.Exit(1)


def to_json(exercise_set: "ExerciseSet") -> dict[str, Any]:
    """A set as plain values, without its solutions."""
    return {
        "name": exercise_set.name,
        "title": exercise_set.title,
        "exercises": [
            {
                "name": each.name,
                "title": each.title,
                "function": each.function_name,
                "prompt": each.prompt,
                "starter": each.starter,
            }
            for each in exercise_set.exercises
        ],
    }


def sets_table(sets: "list[ExerciseSet]") -> Table:
    lines = Table("set", "exercises", box=box.SIMPLE_HEAD)
    lines.columns[0].no_wrap = True
    for each in sets:
        lines.add_row(each.name, Text(f"{each.title}: {', '.join(exercise.title for exercise in each.exercises)}"))
    return lines


def print_set(exercise_set: "ExerciseSet") -> None:
    typer.echo(f"{exercise_set.title}\n\n{exercise_set.about}")
    for number, exercise in enumerate(exercise_set.exercises, 1):
        typer.echo(f"{number}. {exercise.title} ({exercise.name}: write {exercise.function_name})\n{exercise.prompt}")
    typer.echo(f"To start: regard work exercises {exercise_set.name} --export {exercise_set.name}.ipynb")
