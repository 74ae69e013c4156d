"""`regard plan`: what a recipe will take, as a table and as JSON, and an exit code that says whether it fits."""

import json

import pytest
from typer.testing import CliRunner, Result

from regard.base.config import override
from regard.cli import app
from regard.cli.plan import in_seconds
from regard.recipes.recipe import RECIPES, RunLocation, get_recipe
from regard.train.cost_model import predict_memory
from regard.train.machine_rates import MACHINES
from regard.train.step_cost import count_step

TINY = ["birthplaces", "--set", "people=12", "--set", "held=3", "--set", "model.depth=1", "--set", "model.width=16",
        "--set", "model.heads=2", "--set", "pretraining.batch_size=12"]  # fmt: skip


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_json_is_the_prediction() -> None:
    ran = plan(*TINY, "--machine", "cpu", "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    chosen = get_recipe("birthplaces")
    changes = {
        "people": 12,
        "held": 3,
        "model.depth": 1,
        "model.width": 16,
        "model.heads": 2,
        "pretraining.batch_size": 12,
    }
    start = chosen.module.start(override(chosen.settings(real=False), changes), RunLocation())
    (phase,) = start.phases
    truth = predict_memory(count_step(start.model, phase.task, phase.plan), phase.plan, MACHINES["cpu"])
    found = told["phases"]["pretraining"]
    assert (told["recipe"], told["rates"]["name"]) == ("birthplaces", "cpu")
    assert found["total_bytes"] == truth.memory.total
    assert found["parameters"] == start.model.parameter_count
    assert found["seconds"]["step"] == pytest.approx(truth.seconds.step)
    assert found["fits"] is True


def test_the_table_says_what_fits_and_what_would() -> None:
    ran = plan(*TINY, "--machine", "cpu", "--memory", "0.001", "--devices", "3", "--parallel", "sharded")
    assert ran.exit_code == 0, ran.output
    assert "3 x cpu" in ran.stdout
    assert "a piece of each weight on each" in ran.stdout
    assert "of 1.0 MiB: fits" in ran.stdout
    ran = plan(*TINY, "--machine", "cpu", "--memory", "0.0004")
    assert ran.exit_code == 1
    assert "does not fit" in ran.stdout
    assert "would fit: accumulate=" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name: str) -> None:
    ran = plan(name, "--machine", "cpu", "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["phases"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no recipe 'nothing'"),
        ([*TINY, "--machine", "abacus"], "there is no machine 'abacus'"),
        ([*TINY, "--machine", "cpu", "--memory", "0"], "--memory is a number of GiB above 0, not 0"),
        ([*TINY, "--machine", "cpu", "--memory", "inf"], "--memory is a number of GiB above 0, not inf"),
        ([*TINY, "--machine", "cpu", "--devices", "5"], "a batch of 12 has no 5 equal shares"),
        ([*TINY, "--data", "nowhere"], "--data nowhere is not there"),
    ],
)
def test_requests_that_make_no_sense_are_one_line(words: list[str], said: str) -> None:
    ran = plan(*words)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0 us"), (2.5e-5, "25 us"), (0.0123, "12.3 ms"), (61.5, "61.5 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_seconds_are_told_in_units_that_fit(seconds: float, told: str) -> None:
    assert in_seconds(seconds) == told
