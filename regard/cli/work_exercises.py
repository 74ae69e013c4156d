"""`regard work exercises`: write exercise sets as notebooks, and grade what students wrote."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from regard.base.errors import ConfigError
from regard.cli.output import JsonOption, print_message, show, show_json
from regard.cli.work_grade import ClassSeed, Seconds

if TYPE_CHECKING:
    from regard.work.exercises.exercise import ExerciseSet


KeyOption = Annotated[bool, typer.Option("--key", help="--export: also write the answers, to a.key.ipynb")]
StudentOption = Annotated[str | None, typer.Option(help="Name of the student")]


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="self-attention, two-heads, byte-pairs, decoding or vit")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write the set as a notebook, .ipynb, or to print, .html")] = None,
    key: KeyOption = False,
    style: Annotated[
        str | None, typer.Option(help="--export --key: nbgrader or otter, one notebook that these tools turn into two")
    ] = None,
    student: StudentOption = None,
    class_seed: ClassSeed = None,
    grade: Annotated[Path | None, typer.Option(help="Grade a student's .py or .ipynb file")] = None,
    seconds: Seconds = 60.0,
    json: JsonOption = False,
) -> None:
    """List exercise sets, write one as a notebook, or grade a file.

    Example: regard work exercises self-attention --export attention.ipynb
    """
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
    if (student is None) != (class_seed is None):
        raise ConfigError("--student and --class-seed go together: they draw the variants of a student")
    if student is not None and class_seed is not None:
        exercise_set = exercise_set.for_student(student, class_seed)
    if export is not None and grade is not None:
        raise ConfigError("--export writes a set and --grade reads an answer; use one of them")
    if export is not None:
        export_set(exercise_set, export, key, style)
    elif grade is not None:
        grade_student_file(exercise_set, grade, seconds, json)
    elif json:
        show_json(to_json(exercise_set))
    else:
        print_set(exercise_set)


def export_set(exercise_set: "ExerciseSet", path: Path, key: bool, style: str | None) -> None:
    """Write an exercise set as a notebook or an HTML page.

    key    whether to write a second file with the answers
    style  "nbgrader" or "otter" writes one notebook that contains the solutions, in the format of this tool; None
           writes a notebook or page without solutions
    """
    from regard.work.notebook import STYLES, exercise_notebook, to_text
    from regard.work.printing import exercise_page

    if style is not None:
        STYLES[style]
        if not key or path.suffix != ".ipynb":
            raise ConfigError(f"--style {style} writes an .ipynb file that contains the solutions; add --key")
        write_exports(path, lambda _: to_text(exercise_notebook(exercise_set, style=style)), key=False)
    elif path.suffix == ".html":
        write_exports(path, lambda answers: exercise_page(exercise_set, answer_key=answers), key)
    else:
        write_exports(path, lambda answers: to_text(exercise_notebook(exercise_set, answer_key=answers)), key)


def write_exports(path: Path, make: Callable[[bool], str], key: bool) -> None:
    """Write a new .ipynb or .html file. An existing file is not overwritten.

    make  function that returns the content of a file; its argument says whether to include the answers
    key   whether to write a second file, NAME.key.ipynb or NAME.key.html, with the answers
    """
    from regard.work.notebook import write_new_file

    if path.suffix not in (".ipynb", ".html"):
        raise ConfigError(f"--export writes an .ipynb or .html file, not {path}")
    files = {path: False, **({path.with_name(f"{path.stem}.key{path.suffix}"): True} if key else {})}
    for file in files:
        if file.exists():  # raise before any experiment runs
            raise ConfigError(f"{file} already exists and is not overwritten; remove it, or choose another name")
    for file, answers in files.items():
        write_new_file(file, make(answers))
        print_message(f"saved {file}")


def grade_student_file(exercise_set: "ExerciseSet", path: Path, seconds: float, json: bool) -> None:
    """Run and grade a student's file, and print the result. Exits with code 1 unless everything is correct.

    seconds  time limit for running the file
    """
    from regard.work.grading import grade_file

    print_message(f"running {path}")
    result = grade_file(exercise_set, path, seconds)
    if json:
        show_json(result.to_dict())
    else:
        typer.echo(str(result))
    if not result.ok:
        raise typer.Exit(1)


def to_json(exercise_set: "ExerciseSet") -> dict[str, Any]:
    """Convert an exercise set to a JSON object, without its solutions."""
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
