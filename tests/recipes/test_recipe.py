"""What all recipes share: steps, settings for a CPU, the estimated time, extending a run and the next command."""

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from regard.base.config import override
from regard.base.errors import ConfigError, UnknownNameError
from regard.cli import app
from regard.models.presets import build_from_config
from regard.recipes import birthplaces
from regard.recipes.recipe import (
    RECIPES,
    Phase,
    RunLocation,
    TimeEstimate,
    TrainingSetup,
    find_plans,
    format_duration,
    get_recipe,
    set_steps,
)
from regard.train.loop import Timing
from regard.train.plan import TrainingPlan
from tests.train.tiny import Points

COMMANDS = typer.main.get_command(app).commands


def steps(settings: Any) -> list[int]:
    return [plan.steps for plan in find_plans(settings).values()]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_steps_mean_the_steps_of_the_whole_run(name: str, real: bool) -> None:
    settings = get_recipe(name).settings(real=real)
    assert sum(steps(set_steps(settings, 340))) == 340
    assert set_steps(settings, sum(steps(settings))) == settings
    with pytest.raises(ConfigError, match="steps is 0, but must be at least 1"):
        set_steps(settings, 0)


def test_phases_keep_their_proportion() -> None:
    assert steps(birthplaces.real()) == [7000, 1500]
    assert steps(set_steps(birthplaces.real(), 850)) == [700, 150]
    bert = get_recipe("language").settings(real=True, variant="bert")
    assert find_plans(bert) == {"bert.plan": bert.bert.plan}


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_for_a_cpu_are_smaller(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.settings(real=False, variant="cpu") == recipe.settings(real=False)
    large, small = recipe.settings(real=True), recipe.settings(real=True, variant="cpu")
    for one, other in zip(find_plans(large).values(), find_plans(small).values(), strict=True):
        assert one.steps * one.batch_size > 4 * other.steps * other.batch_size
        assert (other.precision, other.compile) == ("float32", False)
    for settings in (large, small):
        config = settings.chosen.model if name == "language" else settings.model
        build_from_config(config, seed=0)


def test_variants_are_combined_and_unknown_ones_are_refused() -> None:
    recipe = get_recipe("birthplaces")
    both = recipe.settings(real=True, variant="finetune,cpu")
    assert both.finetuning is not None
    assert (both.pretraining.precision, both.self_training) == ("float32", None)
    with pytest.raises(UnknownNameError, match=r"has no variant 'small'; available: finetune, .*, cpu"):
        recipe.settings(real=True, variant="small")


@pytest.mark.parametrize("name", RECIPES)
def test_the_next_command_is_a_command(name: str, tmp_path: Path) -> None:
    recipe = get_recipe(name)
    for variant in recipe.variants:
        settings = recipe.settings(real=False, variant=variant)
        program, command, *words = shlex.split(recipe.next_command(settings, tmp_path))
        assert program == "regard"
        parsed = COMMANDS[command].make_context(command, list(words))  # raises where the words are no arguments
        assert Path(str(parsed.params.get("folder") or parsed.params.get("model"))) in (tmp_path, tmp_path / "model")


def test_a_long_run_on_a_cpu_is_reported_before_it_starts_with_smaller_settings() -> None:
    recipe = get_recipe("vision")
    assert recipe.describe_time(TimeEstimate(70, before=True), "cpu") is None
    text = recipe.describe_time(TimeEstimate(72_000, before=True), "cpu")
    assert text == (
        "this run would take about 20 hours on this CPU. Settings for a CPU: `regard train vision --variant cpu`. "
        "Fewer steps: --set steps=N. Ctrl-C saves a checkpoint and stops"
    )
    first, second = (TimeEstimate(95, with_evaluations=both) for both in (False, True))
    assert recipe.describe_time(first, "cuda") == (
        "the training steps take about 1.6 minutes on this GPU, without validations"
    )
    assert recipe.describe_time(second, "cpu") == (
        "with validations and the final evaluation the run takes about 1.6 minutes on this CPU"
    )


def test_the_estimate_counts_all_phases_validations_and_the_final_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [TrainingPlan(steps=20, batch_size=8, evaluate_every=5), TrainingPlan(steps=10, batch_size=4)]
    phases = tuple(Phase(str(number), Points(each.batch_size), each) for number, each in enumerate(plans))
    setup = TrainingSetup(build_from_config(birthplaces.built_in().model, seed=0), phases, final_validations=3)
    found: list[TimeEstimate] = []

    def fit(*args: object, on_timing: Callable[[Timing], None], **rest: object) -> Any:
        on_timing(Timing(2.0, 16, None, 4))
        on_timing(Timing(1.0, 15, 10.0, 3))
        return SimpleNamespace(seconds=1.0)

    monkeypatch.setattr("regard.recipes.recipe.fit", fit)
    monkeypatch.setattr("regard.recipes.recipe.measure_step_seconds", lambda *args: 4.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    begun: list[int] = []
    setup.train(RunLocation(on_estimate=found.append, on_start=lambda: begun.append(len(found))))
    assert begun == [1], "the first estimate is made before the run begins"
    assert found == [
        TimeEstimate(4.0 * (20 + 5), before=True),
        TimeEstimate(2.0 * (16 + 5)),
        TimeEstimate(1.0 * (15 + 5) + 10.0 * (3 + 1 + 3), with_evaluations=True),
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 seconds"), (89, "89 seconds"), (95, "1.6 minutes"), (5500, "1.5 hours"), (7e6, "1,944 hours")],
)
def test_durations_are_readable(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def tiny(**changes: Any) -> birthplaces.BirthplaceSettings:
    settings = override(
        birthplaces.built_in(), {"people": 12, "validation": 3, "pretraining.steps": 5, "model.width": 16}
    )
    return replace(settings, finetuning=replace(settings.pretraining, steps=5), **changes)


def test_a_run_is_extended_in_its_last_phase_only(tmp_path: Path) -> None:
    recipe = get_recipe("birthplaces")
    estimates: list[str] = []
    location = RunLocation(folder=tmp_path / "run", on_message=estimates.append)
    recipe.run(tiny(), location)
    assert len([text for text in estimates if "with validations and" in text]) == 1, "one estimate for all phases"
    assert estimates[-1].startswith("the run took ")
    again = replace(location, resume=True)
    longer = override(tiny(), {"finetuning.steps": 7})
    seen: list[tuple[str, int]] = []
    recipe.run(longer, replace(again, on_progress=lambda phase, now: seen.append((phase, now.step))))
    assert seen == [("finetuning", 7)]
    with pytest.raises(ConfigError, match=r"pretraining\.steps cannot be increased, because finetuning has begun; ext"):
        recipe.run(override(longer, {"pretraining.steps": 9}), again)
