"""`regard work grade`: grade the submissions of a class."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from regard.cli.output import JsonOption, check_folder, print_message, show, show_json, write_file

ClassSeed = Annotated[str | None, typer.Option(help="Secret of the teacher: draws variants for each student")]
Seconds = Annotated[float, typer.Option(help="Time limit for the file and each call")]


def command(
    folder: Annotated[Path, typer.Argument(help="Submissions: ann.ipynb, ben.py, or a folder per student")],
    csv: Annotated[Path | None, typer.Option(help="Write the points to this .csv file")] = None,
    exercises: Annotated[
        list[str] | None,
        typer.Option(help="Grade this exercise set; may be repeated [default: those that a file defines]"),
    ] = None,
    quiz: Annotated[int, typer.Option(min=0, help="Number of questions of the quiz; 0: no quiz")] = 0,
    class_seed: ClassSeed = None,
    seconds: Seconds = 60.0,
    megabytes: Annotated[int, typer.Option(help="Memory limit for a submission")] = 2048,
    json: JsonOption = False,
) -> None:
    """Grade a class: each submission runs in its own process, on new inputs.

    Example: regard work grade submissions --exercises self-attention
    """
    from dataclasses import asdict

    from regard.work.exercises.answer_process import Limits
    from regard.work.exercises.run_answer import landlock_version
    from regard.work.grade_folder import ClassOptions, grade_folder, to_csv

    check_folder(csv)
    if landlock_version() == 0:
        print_message("without Landlock of Linux native code of a submission can read the solutions: see docs/work.md")
    options = ClassOptions(tuple(exercises or ()), quiz, class_seed, Limits(seconds, megabytes))
    rows = list(grade_folder(folder, options, print_message))
    if csv is not None:
        write_file(csv, lambda file: file.write_text(to_csv(rows), encoding="utf-8"))
    if json:
        show_json([asdict(row) for row in rows])
        return
    table = Table("student", "exercise", "points", box=box.SIMPLE_HEAD)
    for student, exercise in dict.fromkeys((row.student, row.exercise) for row in rows):
        own = [row for row in rows if (row.student, row.exercise) == (student, exercise)]
        points = f"{sum(row.points for row in own)} of {sum(row.max_points for row in own)}"
        table.add_row(student, exercise or own[0].message, points if exercise else "")
    show(table)
