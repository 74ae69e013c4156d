"""`regard tour`: its numbers, its width, and that what it tells to try works."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.tour import NEXT, compute_example, explanations, matrix, number, product, side_by_side
from regard.core.masks.forms import FORMS

run = CliRunner()
SCORES = [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]]
OUTPUT = [[-1.954484, -2.981484], [-1.993364, -2.990950], [1.056176, 0.356344]]


def near(values: torch.Tensor, truth: list[list[float]], error: float) -> bool:
    return bool((values - torch.tensor(truth, dtype=values.dtype)).abs().max() <= error)


def test_the_example_by_hand_has_the_numbers_of_the_book() -> None:
    worked = compute_example()
    assert worked.q.tolist() == [[1, 3], [-1, 1], [2.5, -2]]
    assert worked.k.tolist() == [[3, -0.5], [2, -1.5], [-2.5, 3.5]]
    assert worked.v.tolist() == [[2.5, -1.5], [-1, 3], [-2, -3]]
    assert worked.scores.tolist() == SCORES
    assert near(worked.output, OUTPUT, 5e-7)
    assert near(worked.weights.sum(1, keepdim=True), [[1.0], [1.0], [1.0]], 1e-15)


def test_attend_gives_the_same() -> None:
    worked = compute_example()
    assert near(worked.attended, OUTPUT, 5e-7)
    assert 0 <= worked.difference < 1e-14


@pytest.mark.parametrize("columns", ["80", "132"])
def test_the_tour_fits_the_terminal_without_colour(columns: str) -> None:
    result = run.invoke(app, ["tour"], env={"COLUMNS": columns})
    assert result.exit_code == 0
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "\x1b" not in result.stdout


def test_the_tour_shows_every_step_every_mask_and_every_kernel() -> None:
    shown = run.invoke(app, ["tour"], env={"COLUMNS": "80"}).stdout
    for step in ("Q = I W_Q", "K = I W_K", "V = I W_V", "scores = Q K^T", "scaled =", "weights =", "output ="):
        assert f") {step}" in shown
    assert "[   8.50    8.00  -13.25 ]" in shown
    assert "[ -1.9545  -2.9815 ]" in shown
    assert "Q[0, 0] = 1*0 + (-1)*1 + 0*(-0.5) + 2*1 = 1\n" in "\n".join(map(str.rstrip, shown.splitlines()))
    for name in FORMS:
        assert f"{name}(" in shown
    for code, _, answer in explanations():
        assert code in shown
        for each in answer.answers:
            assert each.kernel in shown
    assert "refuses: " in shown


def test_the_numbers_come_as_json() -> None:
    shown = json.loads(run.invoke(app, ["tour", "--json"]).stdout)
    worked = compute_example()
    assert shown["three_tokens"]["scores"] == SCORES
    assert shown["three_tokens"]["output"] == worked.output.tolist()
    assert {entry["mask"]: entry["visible"] for entry in shown["masks"]}.items() >= {
        "full()": 144,
        "causal()": 78,
    }.items()
    assert all(entry["chosen"] for entry in shown["kernels"])


@pytest.mark.parametrize("line", NEXT.splitlines())
def test_the_commands_at_the_end_of_the_tour_work(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "regard"
    assert len(line) <= 80
    assert run.invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("value", "text"), [(2, "2"), (-0.5, "-0.5"), (13.25, "13.25"), (1 / 3, "0.3333"), (1e-12, "0"), (4e-5, "0.0000")]
)
def test_numbers_are_as_short_as_they_are_exact(value: float, text: str) -> None:
    assert number(value) == text


def test_matrices_stand_side_by_side() -> None:
    left, right = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5], [3.0]])
    assert side_by_side(matrix("A", left), "x", matrix("B", right)) == [
        "    A             B",
        "[  1  -2 ]     [ 0.5 ]",
        "            x  [ 3.0 ]",
    ]
    assert product("C", left[0], right[:, 0], (left @ right)[0, 0]) == "C[0, 0] = 1*0.5 + (-2)*3 = -5.5"
