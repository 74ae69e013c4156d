"""`regard plan`: the predicted memory as a table and as JSON, and an exit code that says whether it fits."""

import json

import pytest
from typer.testing import CliRunner, Result

from regard.base.config import override
from regard.cli import app
from regard.recipes.recipe import RECIPES, RunLocation, get_recipe
from regard.train.memory import measure_step_memory, predict_memory

CHANGES = {
    "people": 12,
    "validation": 3,
    "model.depth": 1,
    "model.width": 16,
    "model.heads": 2,
    "pretraining.batch_size": 12,
}
TINY = ["birthplaces", *(word for name, value in CHANGES.items() for word in ("--set", f"{name}={value}"))]


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_json_is_the_prediction() -> None:
    ran = plan(*TINY, "--device", "cpu", "--json")
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout)
    recipe = get_recipe("birthplaces")
    start = recipe.module.prepare(override(recipe.settings(real=False), CHANGES), RunLocation())
    (phase,) = start.phases
    expected = predict_memory(measure_step_memory(start.model, phase.task, phase.plan), phase.plan)
    found = printed["phases"]["pretraining"]
    assert printed["recipe"] == "birthplaces"
    assert found["total_bytes"] == expected.memory.total
    assert found["parameters"] == start.model.parameter_count
    assert (found["fits"], found["limit"]) == (True, None)


def test_the_table_says_what_fits_and_what_would() -> None:
    ran = plan(*TINY, "--device", "cpu", "--memory", "0.001", "--devices", "3", "--parallel", "fsdp")
    assert ran.exit_code == 0, ran.output
    assert "3 x CPU" in ran.stdout
    assert "FSDP: a shard of each parameter on each" in ran.stdout
    assert "of 1.0 MiB: fits" in ran.stdout
    ran = plan(*TINY, "--device", "cpu", "--memory", "0.0004")
    assert ran.exit_code == 1
    assert "does not fit" in ran.stdout
    assert "would fit: gradient_accumulation_steps=" in ran.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name: str) -> None:
    ran = plan(name, "--device", "cpu", "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["phases"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no recipe 'nothing'"),
        ([*TINY, "--memory", "0"], "--memory must be a number of GiB above 0, not 0"),
        ([*TINY, "--memory", "inf"], "--memory must be a number of GiB above 0, not inf"),
        ([*TINY, "--devices", "5"], "batch_size=12 cannot be divided evenly by world size 5"),
        ([*TINY, "--data", "nowhere"], "--data nowhere does not exist"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str) -> None:
    ran = plan(*words)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
