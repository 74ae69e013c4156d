"""`regard work exercises`: sets of exercises as notebooks, and what students wrote, graded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from regard.base.errors import ConfigError
from regard.cli.output import show, show_json, tell

if TYPE_CHECKING:
    from regard.work.exercises.exercise import Exercises


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="self-attention, two-heads, byte-pairs, decoding or vit")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the set as a notebook, a.ipynb, and the key beside it, a.key.ipynb")
    ] = None,
    grade: Annotated[Path | None, typer.Option(help="Grade what a student wrote, a .py or .ipynb file")] = None,
    seconds: Annotated[float, typer.Option(help="How long the file and each exercise may take")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="The list or the grades as JSON")] = False,
) -> None:
    """List sets of exercises, write one as a notebook, or grade a file."""
    from regard.work.exercises import SETS

    if name is None:
        if export is not None or grade is not None:
            raise ConfigError(f"say which set is meant: {', '.join(SETS)}")
        sets = [SETS[each] for each in SETS]
        if json:
            show_json([told(each) for each in sets])
        else:
            show(table(sets))
        return
    exercises = SETS[name]
    if export is not None and grade is not None:
        raise ConfigError("--export writes a set and --grade reads an answer; give one of them")
    if export is not None:
        from regard.work.notebook import export as write, of_exercises

        for file in write(of_exercises(exercises), of_exercises(exercises, key=True), export):
            tell(f"saved {file}")
    elif grade is not None:
        review(name, grade, seconds, json)
    elif json:
        show_json(told(exercises))
    else:
        describe(exercises)


def review(name: str, path: Path, seconds: float, json: bool) -> None:
    """Grade a file; exit code 1 unless all of it is right."""
    from regard.work.grading import grade_file

    tell(f"running {path}")
    found = grade_file(name, path, seconds)
    if json:
        show_json(found.to_dict())
    else:
        typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(1)


def told(exercises: "Exercises") -> dict[str, Any]:
    """A set as plain values, without its solutions."""
    return {
        "name": exercises.name,
        "title": exercises.title,
        "exercises": [
            {
                "name": each.name,
                "title": each.title,
                "writes": each.writes,
                "prompt": each.prompt,
                "start": each.starter,
            }
            for each in exercises.tasks
        ],
    }


def table(sets: "list[Exercises]") -> Table:
    lines = Table("set", "exercises", box=box.SIMPLE_HEAD)
    lines.columns[0].no_wrap = True
    for each in sets:
        lines.add_row(each.name, Text(f"{each.title}: {', '.join(task.title for task in each.tasks)}"))
    return lines


def describe(exercises: "Exercises") -> None:
    """A set on the terminal."""
    typer.echo(f"{exercises.title}\n\n{exercises.about}")
    for number, task in enumerate(exercises.tasks, 1):
        typer.echo(f"{number}. {task.title} ({task.name}, writes {task.writes})\n{task.prompt}")
    typer.echo(f"To work on it: regard work exercises {exercises.name} --export {exercises.name}.ipynb")
