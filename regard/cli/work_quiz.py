"""`regard work quiz`: predict what an experiment gives, then see it run."""

import json as files
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.cli.output import show_json, tell

if TYPE_CHECKING:
    from regard.work.quiz import Quiz, QuizQuestion, Revealed

DEFAULTS: dict[str, Any] = {"student": "student", "count": 5, "seed": 0}


def command(
    student: Annotated[str | None, typer.Option(help="Whose quiz: every name has questions of its own")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="How many questions; 5 unless given")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed, other questions; 0 unless given")] = None,
    answers: Annotated[
        Path | None, typer.Option(help='Grade a file instead of asking: {"student": ..., "answers": {"1": "b"}}')
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the quiz as a notebook, a.ipynb, and its answers beside it, a.key.ipynb")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The questions, or the marks, as JSON")] = False,
) -> None:
    """Predict what experiments of the lab give, then see them run."""
    from regard.work.quiz import Quiz

    chosen: dict[str, Any] = {"student": student, "count": count, "seed": seed}
    given: dict[str, Any] = {}
    if answers is not None:
        if export is not None:
            raise ConfigError("--export writes a quiz and --answers grades one; use one of them")
        given, own = read_answers(answers)
        chosen = agreed(chosen, own, answers)
    settings = {name: DEFAULTS[name] if value is None else value for name, value in chosen.items()}
    quiz = Quiz.of(settings["student"], count=settings["count"], seed=settings["seed"])
    if answers is not None:
        review(quiz, given, json)
    elif export is not None:
        write(quiz, export)
    elif json:
        show_json(quiz.to_dict())
    else:
        ask(quiz)


def read_answers(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers of a file by the numbers of their questions, and whose they are if it says so."""
    try:
        found = files.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("answers"), dict):
        raise ConfigError(f'{path} should hold an object like {{"student": "ann", "answers": {{"1": "b", "2": 0.3}}}}')
    own = {name: value for name, value in found.items() if name != "answers"}
    for name, value in own.items():
        if name not in DEFAULTS:
            raise ConfigError(f"{path} has {name!r}, which is none of student, count, seed and answers")
        if type(value) is not type(DEFAULTS[name]):
            words = "a word" if name == "student" else "a whole number"
            raise ConfigError(f"{name} in {path} is {words}, not {value!r}")
    return found["answers"], own


def agreed(chosen: dict[str, Any], own: dict[str, Any], path: Path) -> dict[str, Any]:
    """Settings from the command line and from the file, which must not contradict each other."""
    for name, value in own.items():
        if chosen[name] not in (None, value):
            raise ConfigError(f"{path} is for {name} {value!r}, but --{name} says {chosen[name]!r}")
    return {**chosen, **own}


def ask(quiz: "Quiz") -> None:
    """Ask every question in turn, until the input ends."""
    typer.echo(f"{len(quiz.questions)} questions for {quiz.student}, seed {quiz.seed}. Predict; the run then tells.")
    marks: list[Revealed] = []
    for question in quiz.questions:
        typer.echo(f"\n{question}")
        given = predicted(question)
        if given is None:
            typer.echo("\nStopped here.")
            break
        announce(question)
        marks.append(question.reveal(given))
        typer.echo(str(marks[-1]))
    typer.echo(f"\n{sum(mark.ok for mark in marks)} of {len(marks)} correct.")


def predicted(question: "QuizQuestion") -> object | None:
    """What is typed for a question, in the form it has; None where the input ends."""
    while True:
        typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return None
        try:
            return question.read(line.strip())
        except ConfigError as error:
            typer.echo(str(error))


def announce(question: "QuizQuestion") -> None:
    tell(f"running {question.claim.id}")


def review(quiz: "Quiz", given: dict[str, Any], json: bool) -> None:
    """Mark answers; exit code 1 unless all of them are right."""
    marks = quiz.grade(given, announce)
    right = sum(mark.ok for mark in marks)
    if json:
        about = {name: value for name, value in quiz.to_dict().items() if name != "questions"}
        show_json({**about, "right": right, "marks": [mark.to_dict() for mark in marks]})
    else:
        for mark in marks:
            typer.echo(f"{mark.question}\n{mark}\n")
        typer.echo(f"{right} of {len(marks)} correct.")
    if right < len(marks):
        raise typer.Exit(1)


def write(quiz: "Quiz", path: Path) -> None:
    """Write the quiz as a notebook, and its answers, for which every experiment is run."""
    from regard.work.notebook import notebook_paths, write_notebooks
    from regard.work.quiz_notebook import of_quiz

    notebook_paths(path)  # before anything runs
    tell(f"running {len(quiz.questions)} experiments for the key")
    for file in write_notebooks(of_quiz(quiz), of_quiz(quiz, key=True), path):
        tell(f"saved {file}")
