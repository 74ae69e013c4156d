"""`regard train`, `eval` and `ask`: from a recipe's name to an answer, with errors in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from regard.cli import app
from regard.cli.settings import read_value
from regard.cli.train import completed
from regard.recipes.recipe import recipe

TINY = [
    "--set", "people=12", "--set", "held=3", "--set", "model.width=16", "--set", "model.depth=1", "--set",
    "model.heads=2", "--set", "pretraining.steps=4", "--set", "pretraining.batch=4", "--device", "cpu",
]  # fmt: skip


def regard(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=typed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "births"
    ran = regard("train", "birthplaces", "--folder", str(place), *TINY, "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["recipe"] == "birthplaces"
    assert told["settings"]["people"] == 12
    return place


def test_recipes_are_listed_with_what_to_expect() -> None:
    listed = {each["name"]: each for each in json.loads(regard("train", "list", "--json").stdout)}
    assert {"birthplaces", "vision", "translation", "language", "speech"} == set(listed)
    assert all(each["expected"] and each["time"] and each["memory"] for each in listed.values())
    assert "birthplaces" in regard("train", "list").stdout


def test_progress_goes_to_stderr_and_figures_to_stdout(tmp_path: Path) -> None:
    ran = regard("train", "birthplaces", "--folder", str(tmp_path / "run"), *TINY)
    assert "loss" in ran.stderr
    assert "left" in ran.stderr
    assert "loss" not in ran.stdout
    assert "test accuracy" in ran.stdout


def test_a_finished_run_is_judged_as_it_was(folder: Path) -> None:
    told = json.loads(regard("eval", str(folder), "--json", "--device", "cpu").stdout)["figures"]
    kept = json.loads((folder / "result.json").read_text())["figures"]
    assert told == {name: kept[name] for name in told}


def test_a_folder_with_a_run_is_not_written_over(folder: Path) -> None:
    for words in ((), ("--form", "course")):
        again = regard("train", "birthplaces", "--folder", str(folder), *TINY, *words)
        assert again.exit_code == 2
        assert "--resume" in again.stderr


def test_a_worker_that_torchrun_starts_again_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert regard("train", "birthplaces", "--folder", str(folder), *TINY).exit_code == 0


def test_a_run_is_gone_on_with_by_its_own_settings(folder: Path) -> None:
    ran = regard("train", "birthplaces", "--folder", str(folder), *TINY, "--set", "seed=3", "--resume")
    assert (ran.exit_code, "seed was 0 and is 3" in ran.stderr) == (2, True), ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["birthplaces", "translation"])
def test_recipes_that_generate_are_trained_in_pieces(name: str, tmp_path: Path) -> None:
    small = ["model.width=16", "model.depth=1", *(["people=12", "held=3"] if name == "birthplaces" else [])]
    plan = "pretraining" if name == "birthplaces" else "plan"
    small += [f"{plan}.steps=4", f"{plan}.batch=4", f"{plan}.evaluate_every=2"]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "regard", "train", name,
         "--parallel", "sharded", "--device", "cpu", "--folder", str(tmp_path / "run"),
         *(word for each in small for word in ("--set", each))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("plan.optimiser=AdamW", "AdamW"), ("plan.schedule=linear", "Linear"), ("plan.averaging=none", "NoneType")],
)
def test_kinds_of_settings_are_named(text: str, kind: str) -> None:
    settings = completed(recipe("vision"), None, None, [text])
    assert type(getattr(settings.plan, text.split("=")[0].split(".")[1])).__name__ == kind


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "nothing"), "there is no recipe 'nothing'; there are birthplaces"),
        (("train", "birthplaces", "--set", "model.widht=4"), "did you mean 'width'"),
        (("train", "birthplaces", "--set", "pretraining.steps=many"), "takes a whole number, not 'many'"),
        (("train", "birthplaces", "--set", "held"), "--set takes name=value"),
        (("train", "birthplaces", "--data", "nowhere"), "--data nowhere is not there"),
        (("eval", "nowhere"), "holds no finished run"),
        (("ask",), "ask a question, or give --learn"),
        (("ask", "Where?", "--folder", "nowhere"), "holds no finished run"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words: tuple[str, ...], said: str) -> None:
    ran = regard(*words)
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_question_nobody_can_answer_ends_with_1_and_an_answer_is_kept(folder: Path, tmp_path: Path) -> None:
    asking = ("ask", "Where was Ada Nemo born?", "--folder", str(folder), "--store", str(tmp_path / "facts.sqlite"))
    ran = regard(*asking)
    assert ran.exit_code == 1
    assert "nobody knows" in ran.stderr
    assert regard(*asking, "--answer", "Bern").exit_code == 0
    answered = regard(*asking)
    assert (answered.exit_code, answered.stdout) == (0, "Bern\n")
    assert "store of facts" in answered.stderr
    told = json.loads(regard(*asking, "--json").stdout)
    assert (told["answer"], told["source"]) == ("Bern", "store")
    sure = json.loads(regard(*asking, "--threshold", "0", "--json").stdout)
    assert (sure["source"], sure["guess"]) == ("store", None), "the model has learned too little to write anything"


def test_names_in_a_list_may_have_quotes() -> None:
    for text in ("dense,dot", "(dense, dot)", "('dense', 'dot')", '["dense","dot"]'):
        assert read_value(text, tuple[str, ...]) == ("dense", "dot")
