"""`regard work`: problems by name, file or typed in, every format, and the check with its exit codes."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from regard.cli import print_errors
from regard.cli.work import mount

run = CliRunner()
app = typer.Typer(rich_markup_mode=None)
app.command("other")(lambda: None)
mount(app, print_errors)

TYPED = ["--q", "1,-1/2;0,1", "--k", "1,1;0,1", "--v", "1;2"]


def work(*words: str) -> str:
    result = run.invoke(app, ["work", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    result = run.invoke(app, ["work", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_a_builtin_problem_is_worked_out() -> None:
    shown = work("three-tokens")
    assert "Worked solution: three-tokens" in shown
    assert "O[3,1] = 0.622459·(5/2) + 0.377541·(-1) + 2.229492e-10·(-2) ≈ 1.178608" in shown
    assert work("solve", "three-tokens") == shown


def test_options_change_the_solution() -> None:
    shown = work("three-tokens", "--scaled", "--mask", "causal()", "--steps", "brief", "--digits", "3")
    assert "Z = S/√2" in shown
    assert "masked by causal()" in shown
    assert "Q[1,1]" not in shown
    assert "1.056" in shown
    assert "Head 2" in work("three-tokens", "--heads", "2", "--steps", "brief")


def test_typed_matrices_are_scaled_by_default() -> None:
    assert "Z = S/√2" in work(*TYPED)
    assert "not scaled" in work(*TYPED, "--unscaled")
    columns = work("--q", "1;2", "--k", "1;1", "--v", "3;5", "--convention", "columns", "--heads", "2")
    assert "a token is a column" in columns


def test_inputs_and_weights_can_be_typed() -> None:
    shown = json.loads(
        work("--inputs", "1,2;0,1", "--wq", "1;0", "--wk", "0;1", "--wv", "1;1", "--wo", "3", "--unscaled", "--json")
    )
    steps = {step["step"]: step for step in shown["steps"]}
    assert steps["q"]["values"] == [[1.0], [0.0]]
    assert steps["weights"]["exact"][1] == ["1/2", "1/2"]
    assert steps["result"]["values"][1] == [6.0]
    assert shown["description"] == [
        "Token 1 attends to token 1 and less to token 2. Token 2 attends equally to all tokens. "
        "Every token attends to itself."
    ]


def test_a_file_is_read_and_a_matrix_in_it_replaced(tmp_path: Path) -> None:
    problem = tmp_path / "mine.json"
    problem.write_text('{"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1], [2]], "mask": "prefix(1)", "scaled": false}')
    (tmp_path / "v.csv").write_text("7\n8\n")
    shown = json.loads(work(str(problem), "--v", str(tmp_path / "v.csv"), "--json"))
    assert shown["problem"] == "mine"
    assert shown["mask"] == "prefix(1)"
    assert shown["steps"][-1]["values"] == [[7.0]]
    assert shown["steps"][1]["values"] == [[1.0, None]], "a hidden score has no number"


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.txt", "Worked"), ("a.md", "# Worked"), ("a.tex", r"\documentclass"), ("a.html", "<!DOCTYPE html>")],
)
def test_the_ending_of_a_file_selects_the_format(name: str, start: str, tmp_path: Path) -> None:
    result = run.invoke(app, ["work", "three-tokens", "--out", str(tmp_path / name)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"saved {tmp_path / name}" in result.stderr
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_a_picture_is_saved(tmp_path: Path) -> None:
    work("three-tokens", "--steps", "brief", "--format", "markdown", "--picture", str(tmp_path / "map.svg"))
    assert "<svg" in (tmp_path / "map.svg").read_text()


def write_answer(tmp_path: Path, third: str = "[1.17, 0.21]") -> str:
    path = tmp_path / "answer.json"
    path.write_text(f'{{"weights": [[0,0,1],[0,0,1],[0.62,0.38,0]], "output": [[-2,-3],[-2,-3],{third}]}}')
    return str(path)


def test_the_exit_code_of_a_check_is_one_for_a_mistake(tmp_path: Path) -> None:
    result = run.invoke(app, ["work", "three-tokens", "--check", write_answer(tmp_path)])
    assert result.exit_code == 1
    assert "the first mistake is at output[3,1]" in result.stdout
    assert "early rounding" in result.stdout
    assert "every step that is written is correct" in work(
        "three-tokens", "--check", write_answer(tmp_path, "[1.18, 0.20]")
    )


def test_a_check_is_printed_as_json(tmp_path: Path) -> None:
    result = run.invoke(app, ["work", "three-tokens", "--check", write_answer(tmp_path), "--json"])
    (comment,) = json.loads(result.stdout)["mistakes"]
    assert (result.exit_code, comment["mistake"], comment["row"]) == (1, "early rounding", 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a problem: three-tokens, udl-12-1, udl-12-2, a file, or --q, --k and --v"),
        (["three-token"], "unknown worked example 'three-token'; did you mean 'three-tokens'?"),
        (["--q", "1"], "k is missing"),
        (["--q", "1;x", "--k", "1", "--v", "1"], "--q, row 2, column 1 is 'x'"),
        (["three-tokens", "--steps", "some"], "--steps is all or brief"),
        (["three-tokens", "--format", "word"], "unknown format 'word'"),
        (["three-tokens", "--out", "a.doc"], "the ending of a.doc is unknown"),
        (["three-tokens", "--picture", "map.gif"], "--picture map.gif has no known picture format; end it in .png"),
        (["three-tokens", "--out", "missing/a.md"], "missing/a.md cannot be written"),
        (["three-tokens", "--mask", "casual()"], "did you mean 'causal'?"),
        (["three-tokens", "--heads", "3"], "which cannot be split into 3 heads; try heads = 2"),
        (["three-tokens", "--check", "answer.npz"], "answer.npz is not a .json file; an answer is a .json file with"),
        (["three-tokens", "--check", "missing.json"], "missing.json cannot be read"),
        (["missing.json"], "missing.json cannot be read: No such file"),
        (["--q", "all.npz"], "all.npz has several matrices"),
    ],
)
def test_an_error_is_one_line(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = refused(*words)
    assert said in shown
    assert shown.count("\n") == 1


def test_help_shows_the_options() -> None:
    shown = work("--help")
    assert "--check" in shown
    assert "--json" in shown


def test_a_further_command_can_be_added() -> None:
    beside = typer.Typer(rich_markup_mode=None)
    beside.command("other")(lambda: None)
    mount(beside, print_errors)
    group = beside.registered_groups[0].typer_instance
    assert group is not None
    group.command("quiz")(lambda: typer.echo("asked"))
    assert run.invoke(beside, ["work", "quiz"]).stdout == "asked\n"
    assert "Worked solution" in run.invoke(beside, ["work", "three-tokens"]).stdout


def test_numbers_above_the_largest_float_are_refused() -> None:
    grown = refused("--q", "1e200", "--k", "1e200", "--v", "1", "--unscaled")
    assert grown == ("regard: scores has a number above 1.8e+308, the largest that is supported; use smaller numbers\n")
    given = refused("--q", "1e400", "--k", "1", "--v", "1")
    assert given == "regard: --q, row 1, column 1 is '1e400', which is too large; the largest number is 1.8e+308\n"


def test_one_token_is_singular() -> None:
    assert "v has 1 token, but k has 2" in refused("--q", "1;2", "--k", "1;2", "--v", "1")
    assert "row 2 has 1 number, but row 1 has 2" in refused("--q", "1,2;3", "--k", "1;2", "--v", "1;2")
