"""`regard work quiz`: predict the result of an experiment, then run it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.base.errors import ConfigError
from regard.base.files import read_json
from regard.cli.output import JsonOption, print_message, show_json
from regard.cli.work_exercises import KeyOption, StudentOption, write_exports
from regard.cli.work_grade import ClassSeed

if TYPE_CHECKING:
    from regard.work.quiz import QuestionResult, Quiz, QuizQuestion

DEFAULTS: dict[str, Any] = {"student": "student", "count": 5, "seed": 0}


def command(
    student: StudentOption = None,
    count: Annotated[int | None, typer.Option(min=1, help="Number of questions [default: 5]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the questions [default: 0]")] = None,
    class_seed: ClassSeed = None,
    answers: Annotated[
        Path | None, typer.Option(help='Grade a file of answers: {"student": ..., "answers": {"1": "b"}}')
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write the quiz as a notebook, .ipynb, or a page, .html")] = None,
    key: KeyOption = False,
    json: JsonOption = False,
) -> None:
    """Predict the results of experiments of the lab, then run them.

    Example: regard work quiz --student ann --count 3
    """
    from regard.work.quiz import Quiz

    if class_seed is not None:
        from regard.work.exercises.exercise import student_seed

        if student is None or seed is not None:
            raise ConfigError("--class-seed needs --student and replaces --seed")
        seed = student_seed(student, class_seed)
    chosen: dict[str, Any] = {"student": student, "count": count, "seed": seed}
    given: dict[str, Any] = {}
    if answers is not None:
        if export is not None:
            raise ConfigError("--export writes a quiz and --answers grades one; use one of them")
        given, own = read_answers(answers)
        chosen = merge_settings(chosen, own, answers)
    settings = {name: DEFAULTS[name] if value is None else value for name, value in chosen.items()}
    quiz = Quiz.for_student(settings["student"], count=settings["count"], seed=settings["seed"])
    if answers is not None:
        grade_answers(quiz, given, json)
    elif export is not None:
        export_quiz(quiz, export, key)
    elif json:
        show_json(quiz.to_dict())
    else:
        ask_questions(quiz)


def read_answers(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a JSON file of quiz answers. Returns the answers by question number, and the quiz settings in the file."""
    found = read_json(path, ConfigError)
    if not isinstance(found, dict) or not isinstance(found.get("answers"), dict):
        raise ConfigError(f'{path} should hold an object like {{"student": "ann", "answers": {{"1": "b", "2": 0.3}}}}')
    own = {name: value for name, value in found.items() if name != "answers"}
    for name, value in own.items():
        if name not in DEFAULTS:
            raise ConfigError(f"{path} has the unknown name {name!r}; known are student, count, seed and answers")
        if type(value) is not type(DEFAULTS[name]):
            kind = "text" if name == "student" else "a whole number"
            raise ConfigError(f"{name} in {path} should be {kind}, not {value!r}")
    return found["answers"], own


def merge_settings(chosen: dict[str, Any], own: dict[str, Any], path: Path) -> dict[str, Any]:
    """Merge the quiz settings of the command line and of the answer file.

    Raises ConfigError if they contradict each other.

    chosen  settings of the command line; None for those that are not set
    own     settings in the answer file
    path    the answer file, for the error message
    """
    for name, value in own.items():
        if chosen[name] not in (None, value):
            raise ConfigError(f"{path} is for {name} {value!r}, but --{name} is {chosen[name]!r}")
    return {**chosen, **own}


def ask_questions(quiz: "Quiz") -> None:
    """Ask every question of the quiz on the terminal. After each answer, run its experiment and show the result.

    No further questions are asked if the input ends.
    """
    typer.echo(
        f"{len(quiz.questions)} questions for {quiz.student}, seed {quiz.seed}. Predict; then the experiment runs."
    )
    results: list[QuestionResult] = []
    for question in quiz.questions:
        typer.echo(f"\n{question}")
        answer = read_prediction(question)
        if answer is None:
            typer.echo("\nStopped here.")
            break
        show_progress(question)
        results.append(question.grade(answer))
        typer.echo(str(results[-1]))
    typer.echo(f"\n{sum(result.ok for result in results)} of {len(results)} correct.")


def read_prediction(question: "QuizQuestion") -> object | None:
    """Read an answer from stdin; ask again until it is well-formed. Returns None if the input ends."""
    while True:
        typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return None
        try:
            return question.parse_answer(line.strip())
        except ConfigError as error:
            typer.echo(str(error))


def show_progress(question: "QuizQuestion") -> None:
    print_message(f"running {question.claim.id}")


def grade_answers(quiz: "Quiz", answers: dict[str, Any], json: bool) -> None:
    """Grade quiz answers by running the experiments, and print the results.

    Exit with code 1 unless all answers are correct.
    """
    results = quiz.grade(answers, show_progress)
    correct = sum(result.ok for result in results)
    if json:
        about = {name: value for name, value in quiz.to_dict().items() if name != "questions"}
        show_json({**about, "correct": correct, "results": [result.to_dict() for result in results]})
    else:
        for result in results:
            typer.echo(f"{result.question}\n{result}\n")
        typer.echo(f"{correct} of {len(results)} correct.")
    if correct < len(results):
        raise typer.Exit(1)


def export_quiz(quiz: "Quiz", path: Path, key: bool) -> None:
    """Write the quiz as a notebook or an HTML page.

    key  whether to write a second file with the answers, for which every experiment is run
    """
    from regard.work.notebook import to_text
    from regard.work.printing import quiz_page
    from regard.work.quiz_notebook import quiz_notebook

    def make(answers: bool) -> str:
        if path.suffix == ".html":
            return quiz_page(quiz, answer_key=answers)
        return to_text(quiz_notebook(quiz, answer_key=answers))

    if key:
        print_message(f"running {len(quiz.questions)} experiments for the answer key")
    write_exports(path, make, key)
