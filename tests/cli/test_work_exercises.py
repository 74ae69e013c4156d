"""`regard work quiz` and `regard work exercises`: what they print, write and grade, and their exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from markupsafe import escape
from typer.testing import CliRunner, Result

from regard.cli import print_errors
from regard.cli.work import mount
from regard.work.exercises import EXERCISE_SETS
from regard.work.exercises.exercise import student_seed
from regard.work.quiz import Quiz

run = CliRunner()
app = typer.Typer(rich_markup_mode=None)
app.command("other")(lambda: None)
mount(app, print_errors)


def work(*words: str, typed: str | None = None) -> Result:
    return run.invoke(app, ["work", *words], input=typed)


def test_exercise_sets_are_listed() -> None:
    done = work("exercises")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in EXERCISE_SETS)
    told = json.loads(work("exercises", "--json").stdout)
    assert [each["name"] for each in told] == list(EXERCISE_SETS)
    assert told[0]["exercises"][0]["function"] == "softmax_columns"


def test_an_exercise_set_is_described() -> None:
    shown = work("exercises", "vit").stdout
    assert "2. Multi-head self-attention (attention: write SelfAttention)" in shown
    assert "regard work exercises vit --export vit.ipynb" in shown
    told = json.loads(work("exercises", "vit", "--json").stdout)
    assert "raise NotImplementedError" in told["exercises"][2]["starter"]
    assert "feedforward_norm(x)" not in json.dumps(told)


@pytest.mark.parametrize("ending", ["ipynb", "html"])
def test_answers_are_written_only_with_the_key_option(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"heads.{ending}"
    done = work("exercises", "two-heads", "--export", str(path))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"saved {path}\n")
    assert "omega_c @ two_heads" not in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again = work("exercises", "two-heads", "--export", str(path), "--key")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "is not overwritten" in again.stderr
    path.unlink()
    assert work("exercises", "two-heads", "--export", str(path), "--key").exit_code == 0
    assert "omega_c @ two_heads" in (tmp_path / f"heads.key.{ending}").read_text()
    assert "omega_c @ two_heads" not in path.read_text()


def test_a_grading_tool_gets_one_file_with_the_solutions(tmp_path: Path) -> None:
    path = tmp_path / "heads.ipynb"
    done = work("exercises", "two-heads", "--export", str(path), "--style", "nbgrader", "--key")
    assert (done.exit_code, [file.name for file in tmp_path.iterdir()]) == (0, ["heads.ipynb"])
    assert "### BEGIN SOLUTION" in path.read_text()


def test_a_student_gets_variants_of_the_tasks(tmp_path: Path) -> None:
    told = json.loads(work("exercises", "vit", "--student", "ann", "--class-seed", "secret", "--json").stdout)
    drawn = EXERCISE_SETS["vit"].for_student("ann", "secret")
    assert [each["prompt"] for each in told["exercises"]] == [each.prompt for each in drawn.exercises]
    assert "**Your variant:**" in json.dumps(told)
    path = tmp_path / "quiz.html"
    assert work("quiz", "--student", "ann", "--class-seed", "a", "--count", "2", "--export", str(path)).exit_code == 0
    questions = Quiz.for_student("ann", count=2, seed=student_seed("ann", "a")).questions
    page = path.read_text()
    assert all(str(escape(question.content.text)) in page for question in questions)


def test_a_class_is_graded_to_a_csv_file(tmp_path: Path) -> None:
    folder, out = tmp_path / "class", tmp_path / "out.csv"
    folder.mkdir()
    exercises = EXERCISE_SETS["self-attention"]
    right = "\n\n".join([exercises.setup_code, *(task.source for task in exercises.exercises)])
    (folder / "ann.py").write_text(right)
    (folder / "ben.py").write_text(right.replace(" / np.sqrt(Q.shape[0])", ""))
    done = work("grade", str(folder), "--csv", str(out), "--seconds", "30", "--megabytes", "900")
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines() if "self-attention" in line] == [
        ["ann", "self-attention", "3", "of", "3"],
        ["ben", "self-attention", "2", "of", "3"],
    ]
    lines = out.read_text().splitlines()
    assert lines[0] == "student,exercise,question,points,max_points,status,message"
    assert lines[-1].startswith("ben,self-attention,scaled,0,1,wrong,missing scale: you did not divide the scores")
    (folder / "ben.py").unlink()
    shown = work("grade", str(folder), "--exercises", "self-attention", "--quiz", "1", "--class-seed", "x", "--json")
    assert [each["exercise"] for each in json.loads(shown.stdout)] == ["self-attention"] * 3 + ["quiz"]


def test_a_file_is_graded_with_an_exit_code(tmp_path: Path) -> None:
    exercises = EXERCISE_SETS["self-attention"]
    right = "\n\n".join([exercises.setup_code, *(task.source for task in exercises.exercises)])
    path = tmp_path / "student.py"
    path.write_text(right)
    done = work("exercises", "self-attention", "--grade", str(path))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "3 of 3 correct.")
    assert done.stderr == f"running {path}\n"


def test_the_exit_code_of_a_wrong_file_is_one(tmp_path: Path) -> None:
    exercises = EXERCISE_SETS["self-attention"]
    right = "\n\n".join([exercises.setup_code, *(task.source for task in exercises.exercises)])
    path = tmp_path / "student.py"
    path.write_text(right.replace(" / np.sqrt(Q.shape[0])", ""))
    done = work("exercises", "self-attention", "--grade", str(path), "--json", "--seconds", "40")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"]) == (1, False)
    assert [(each["exercise"], each["mistake"]) for each in told["grades"]] == [
        ("softmax", None),
        ("attention", None),
        ("scaled", "missing scale"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exercises", "two-head"], "unknown exercise set 'two-head'; did you mean 'two-heads'?"),
        (["exercises", "--export", "a.ipynb"], "name an exercise set: self-attention, two-heads"),
        (["exercises", "vit", "--export", "a.txt"], "--export writes an .ipynb or .html file, not a.txt"),
        (["exercises", "vit", "--export", "a.ipynb", "--style", "otter"], "contains the solutions; add --key"),
        (["exercises", "vit", "--export", "a.ipynb", "--style", "ottr"], "unknown style of a notebook 'ottr'"),
        (["exercises", "vit", "--student", "ann"], "--student and --class-seed go together"),
        (["quiz", "--class-seed", "x"], "--class-seed needs --student and replaces --seed"),
        (["grade", "missing"], "missing is not a folder; give the folder of the submissions"),
        (["grade", ".", "--exercises", "vits"], "unknown exercise set 'vits'"),
        (["grade", ".", "--csv", "missing/a.csv"], "there is no folder missing"),
        (["grade", ".", "--megabytes", "0"], "seconds and megabytes must be positive"),
        (["exercises", "vit", "--grade", "a.txt"], "a.txt is neither a .py nor an .ipynb file"),
        (["exercises", "vit", "--grade", "a.py"], "a.py cannot be read: No such file"),
        (["exercises", "vit", "--grade", "a.py", "--export", "a.ipynb"], "use one of them"),
        (["quiz", "--answers", "a.json"], "a.json cannot be read: No such file"),
        (["quiz", "--answers", "text.json"], "text.json, line 1, column 1 is not JSON"),
        (["quiz", "--answers", "list.json"], "list.json should hold an object like"),
        (["quiz", "--answers", "other.json"], "other.json has the unknown name 'name'; known are student, count, seed"),
        (["quiz", "--answers", "typed.json"], "count in typed.json should be a whole number, not '3'"),
        (
            ["quiz", "--answers", "ann.json", "--student", "ben"],
            "ann.json is for student 'ann', but --student is 'ben'",
        ),
        (["quiz", "--answers", "ann.json"], "question 1 needs"),
        (["quiz", "--answers", "ann.json", "--export", "a.ipynb"], "use one of them"),
        (["quiz", "--export", "a.py"], "--export writes an .ipynb or .html file"),
    ],
)
def test_an_error_is_one_line(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "text": "x",
        "list": "[]",
        "other": '{"name": "ann", "answers": {}}',
        "typed": '{"count": "3", "answers": {}}',
        "ann": '{"student": "ann", "count": 1, "answers": {"1": "zz"}}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    done = work(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]


def answers(quiz: Quiz, change: dict[str, Any] | None = None) -> str:
    given = {str(question.number): question.correct_answer for question in quiz.questions}
    return json.dumps({"student": quiz.student, "count": 3, "answers": {**given, **(change or {})}})


def test_a_quiz_is_printed_as_json_without_answers() -> None:
    done = work("quiz", "--student", "ann", "--count", "3", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == Quiz.for_student("ann", count=3).to_dict()


def test_answers_are_graded_with_an_exit_code(tmp_path: Path) -> None:
    quiz, path = Quiz.for_student("ann", count=3), tmp_path / "answers.json"
    path.write_text(answers(quiz))
    done = work("quiz", "--answers", str(path))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "3 of 3 correct.")
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["running"] * 3
    path.write_text(answers(quiz, {"2": None}))
    done = work("quiz", "--answers", str(path), "--student", "ann", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["student"], told["correct"]) == (1, "ann", 2)
    assert [result["ok"] for result in told["results"]] == [True, False, True]
    assert told["results"][1]["correct_answer"] == quiz[2].correct_answer


def test_a_quiz_asks_until_the_input_ends() -> None:
    quiz = Quiz.for_student("ann", count=3)
    first, second = (str(quiz[number].correct_answer) for number in (1, 2))
    done = work("quiz", "--student", "ann", "--count", "3", typed=f"what?\n{first}\n{second}\n")
    assert done.exit_code == 0
    assert done.stdout.startswith("3 questions for ann, seed 0.")
    assert "question 1 needs" in done.stdout
    assert done.stdout.count("Correct: the answer is") == 2
    assert done.stdout.endswith("Stopped here.\n\n2 of 2 correct.\n")
    assert work("quiz", typed="").stdout.endswith("Stopped here.\n\n0 of 0 correct.\n")


def test_a_quiz_answered_to_the_end_does_not_stop_early() -> None:
    quiz = Quiz.for_student("cy", count=1, seed=5)
    done = work("quiz", "--student", "cy", "--count", "1", "--seed", "5", typed=f"{quiz[1].correct_answer}\n")
    assert "Stopped" not in done.stdout
    assert done.stdout.endswith("\n1 of 1 correct.\n")


def test_a_quiz_is_written_as_a_notebook(tmp_path: Path) -> None:
    path = tmp_path / "quiz.ipynb"
    done = work("quiz", "--student", "ann", "--count", "2", "--export", str(path), "--key")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Quiz.for_student('ann', count=2, seed=0)" in path.read_text()
    assert "The run: " in (tmp_path / "quiz.key.ipynb").read_text()
    assert "The run: " not in path.read_text()


def test_a_worked_solution_is_the_default_command() -> None:
    assert "Worked solution: three-tokens" in work("three-tokens").stdout
    assert "Also: quiz, exercises, grade." in work("--help").stdout
