"""`regard tour`: its numbers, its width, and that what it tells to try works."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.tour import NEXT, explanations
from regard.core.masks.forms import FORMS

run = CliRunner()
SCORES = [[1.5, -2.5, 8], [-3.5, -3.5, 6], [8.5, 8, -13.25]]
OUTPUT = [[-1.954484, -2.981484], [-1.993364, -2.990950], [1.056176, 0.356344]]


@pytest.mark.parametrize("columns", ["80", "132"])
def test_the_tour_fits_the_terminal_without_colour(columns: str) -> None:
    result = run.invoke(app, ["tour"], env={"COLUMNS": columns})
    assert result.exit_code == 0
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "\x1b" not in result.stdout


def test_the_tour_shows_every_step_every_mask_and_every_kernel() -> None:
    shown = run.invoke(app, ["tour"], env={"COLUMNS": "80"}).stdout
    for step in ("Q = X W_Q", "K = X W_K", "V = X W_V", "S = Q Kᵀ", "Z = S/√2", "A = softmax(Z)", "O = A V"):
        assert f" {step}" in shown
    assert "⎡ -1.954  -2.981 ⎤" in shown
    for name in FORMS:
        assert f"{name}(" in shown
    for code, _, answer in explanations():
        assert code in shown
        for each in answer.answers:
            assert each.kernel in shown
    assert "refuses: " in shown


def test_the_numbers_come_as_json() -> None:
    shown = json.loads(run.invoke(app, ["tour", "--json"]).stdout)
    steps = {step["step"]: step["values"] for step in shown["three_tokens"]["steps"]}
    assert steps["scores"] == SCORES
    assert steps["output"] == [pytest.approx(row, abs=5e-7) for row in OUTPUT]
    assert {entry["mask"]: entry["visible"] for entry in shown["masks"]}.items() >= {
        "full()": 144,
        "causal()": 78,
    }.items()
    assert all(entry["chosen"] for entry in shown["kernels"])
    best = shown["trained"]["heads"][0]
    assert (best["layer"], best["induction"] > 0.9) == ("blocks.1.attention", True)
    assert (shown["trained"]["chosen"]["layer"], shown["trained"]["chosen"]["head"]) == (best["layer"], best["head"])
    assert shown["trained"]["weights"] == "trained, from the package"


@pytest.mark.parametrize("line", NEXT.splitlines())
def test_the_commands_at_the_end_of_the_tour_work(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(line)
    assert program == "regard"
    assert len(line) <= 80
    assert run.invoke(app, words).exit_code == 0
