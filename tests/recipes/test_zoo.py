"""The pretrained models: each keeps the figure of its card, and `make zoo` is what trained it."""

import json
import platform
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from regard.base.errors import CheckpointError, TrainingError, UnknownNameError
from regard.cli.settings import apply_settings
from regard.models import presets
from regard.models.cards import Card, read_card
from regard.models.presets import ZOO
from regard.recipes import zoo
from regard.recipes.recipe import RESULT_FILE, get_recipe, load_finished_run

NAMES = [each.name for each in zoo.MODELS]
MAX_BYTES = 6_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_model_keeps_the_figure_of_its_card(name: str) -> None:
    card, entry = read_card(name), zoo.get_entry(name)
    _, settings, model, tokenizer = load_finished_run(Path(name))
    measured = entry.measure(settings, model, tokenizer, card.subset)
    assert card.meets_bound(measured)
    if (
        name != "text-gpt" or card.python == platform.python_version()
    ):  # the text of Python's help depends on the version
        assert measured == pytest.approx(card.subset_value, rel=1e-3, abs=0.011), "rounding may change one record"


@pytest.mark.parametrize("name", NAMES)
def test_the_card_describes_the_model_and_its_run(name: str) -> None:
    card, entry, folder = read_card(name), zoo.get_entry(name), ZOO / name
    recipe, settings, model, _ = load_finished_run(folder)
    for field in ("about", "command", "metric", "unit", "at_least", "at_most", "subset", "data", "licence"):
        assert getattr(card, field) == getattr(entry, field), f"{field}: train the model again with `make zoo`"
    assert recipe.name == entry.recipe
    words = entry.command.split()
    assert words[:3] == ["regard", "train", entry.recipe]
    changes = [word for before, word in pairwise(words) if before == "--set"]
    assert settings == apply_settings(get_recipe(entry.recipe).settings(real=False, variant=entry.variant), changes)
    assert card.value in json.loads((folder / RESULT_FILE).read_text())["metrics"].values()
    assert card.meets_bound(card.value)
    assert (card.parameters, card.seed) == (model.parameter_count, settings.seed)
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "card.json"]
    assert card.bytes == sum(file.stat().st_size for file in files)
    assert card.example in card.example_command or (folder / card.example).is_file()


def test_all_models_are_listed_loaded_by_name_and_small() -> None:
    assert regard.list_models(pretrained=True) == sorted(NAMES)
    for name in NAMES:
        model = regard.load(name)
        assert not model.training
        assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert sum(file.stat().st_size for file in ZOO.rglob("*") if file.is_file()) < MAX_BYTES


def test_a_bound_is_kept_or_broken() -> None:
    card = read_card("induction-gpt")
    assert card.at_least == 0.9
    assert card.meets_bound(0.9)
    assert not card.meets_bound(0.8999)
    low = replace(card, at_least=None, at_most=0.01, unit="%")
    assert (low.meets_bound(0.01), low.meets_bound(0.0101), low.format(0.01)) == (True, False, "1 %")


def test_a_model_that_breaks_its_bound_gets_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(
        zoo.get_entry("digits-vit"), changes={"plan.steps": 1, "validation": 5, "model.width": 8, "model.heads": 2}
    )
    for module in (presets, zoo):
        monkeypatch.setattr(module, "ZOO", tmp_path)
    with pytest.raises(TrainingError, match=r"digits-vit has \d+\.?\d* %, accuracy on 360 test images, which is not g"):
        zoo.train_model(entry, print)
    assert (tmp_path / "digits-vit" / "model" / "config.json").is_file()
    with pytest.raises(CheckpointError, match=r"card\.json"):
        read_card("digits-vit")
    card = zoo.train_model(replace(entry, at_least=0.01), print)
    assert card == read_card("digits-vit")
    assert isinstance(card, Card)
    assert card.command.startswith("regard train vision --set plan.steps=1 --set validation=5")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="there is no model 'digits'; available: induction-gpt, digits-vit"):
        zoo.main(["digits"])
    with pytest.raises(CheckpointError, match=r"there is no pretrained model 'gpt2'; `list_models\(pretrained=True\)`"):
        read_card("gpt2")


def test_the_table_of_the_docs_is_that_of_the_cards(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.main(["--table"])
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 2 + len(NAMES)
    assert table in (root / "docs" / "models.md").read_text(encoding="utf-8"), "`python -m regard.recipes.zoo --table`"
