"""The vision recipe: data splits, training task, resuming, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from regard.base.config import from_json, override, to_json
from regard.base.errors import ConfigError
from regard.data.images import Images
from regard.models.cnn import CNNConfig
from regard.models.davit import DaViTConfig
from regard.models.presets import build_from_config
from regard.models.vit import ViTConfig
from regard.recipes import vision
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.train.averaging import ExponentialAverage
from regard.train.loop import Progress
from regard.train.plan import TrainingPlan

KINDS = {"vit": ViTConfig, "davit": DaViTConfig, "cnn": CNNConfig}


def tiny(**changes: Any) -> vision.VisionSettings:
    """The built-in settings, for a run of seconds."""
    plan = TrainingPlan(steps=6, batch_size=28, averaging=ExponentialAverage(decay=0.5), evaluate_every=3, save_every=2)
    short = {"plan": plan, "model.width": 24, "model.heads": 3, "model.depth": 2, "model.ff_width": 40}
    mixed = {"augmentation.mixup": 0.3, "augmentation.cutmix": 0.3, "model.drop_path": 0.2}
    return override(vision.built_in(), {**short, **mixed, **changes})


def task(settings: vision.VisionSettings | None = None) -> vision.ImageClassificationTask:
    settings = tiny() if settings is None else settings
    found = vision.load_data(None, settings)
    return vision.ImageClassificationTask(found.train, found.validation, replace(settings, seed=3))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [weight.detach() for weight in model.parameters()]


def alike(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(model), weights(other), strict=True))


def test_the_built_in_run_reaches_its_accuracy() -> None:
    outcome = get_recipe("vision").run(vision.built_in(), RunLocation())
    assert outcome.metrics["test accuracy"] >= 0.98


@pytest.mark.parametrize("architecture", ["davit", "cnn"])
def test_the_other_architectures_reach_the_accuracy(architecture: str) -> None:
    outcome = get_recipe("vision").run(override(vision.built_in(), {"architecture": architecture}), RunLocation())
    assert outcome.metrics["test accuracy"] >= 0.98


def test_a_saved_run_gives_the_same_metrics(tmp_path: Path) -> None:
    outcome = get_recipe("vision").run(tiny(), RunLocation(folder=tmp_path))
    found, settings, model, tokenizer = load_finished_run(tmp_path)
    assert (found.name, settings, tokenizer) == ("vision", tiny(), None)
    assert alike(model, outcome.model)
    told = vision.evaluate(settings, model, tokenizer, RunLocation())
    assert told == {name: outcome.metrics[name] for name in ("test accuracy", "validation accuracy")}
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == outcome.metrics


def test_an_interrupted_run_resumes_to_the_same_parameters(tmp_path: Path) -> None:
    settings = tiny()
    whole = get_recipe("vision").run(settings, RunLocation(folder=tmp_path / "whole"))

    def kill(phase: str, progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_recipe("vision").run(settings, RunLocation(folder=tmp_path / "killed", on_progress=kill))
    resumed = get_recipe("vision").run(settings, RunLocation(folder=tmp_path / "killed", resume=True))
    assert alike(whole.model, resumed.model)
    assert whole.metrics["test accuracy"] == resumed.metrics["test accuracy"]


@pytest.mark.parametrize("architecture", ["davit", "cnn"])
def test_every_architecture_can_be_trained(architecture: str) -> None:
    settings = override(
        vision.built_in(), {"architecture": architecture, "plan.steps": 2, "plan.batch_size": 6, "test": 7}
    )
    outcome = get_recipe("vision").run(settings, RunLocation())
    assert type(outcome.model.config) is KINDS[architecture]
    assert 0 <= outcome.metrics["test accuracy"] <= 1


@pytest.mark.parametrize("make_settings", [vision.built_in, vision.real])
def test_an_architecture_is_chosen_by_its_name(make_settings: Any) -> None:
    for name, kind in KINDS.items():
        settings = override(make_settings(), {"architecture": name})
        assert type(settings.model) is kind
        assert sorted(vision.ARCHITECTURE_NAMES[type(each)] for each in settings.alternatives) == sorted(
            set(KINDS) - {name}
        )
        assert override(settings, {"architecture": "vit"}).model == make_settings().model  # and back
        assert from_json("here", vision.VisionSettings, json.loads(json.dumps(to_json(settings)))) == settings
    assert override(make_settings(), {"model.depth": 3}).model.depth == 3
    assert override(override(make_settings(), {"architecture": "davit"}), {"model.window": 3}).model.window == 3


def test_the_network_for_real_images_is_a_plain_one_of_at_most_six_million_parameters() -> None:
    settings = vision.real()
    model = build_from_config(settings.model, device="meta")
    assert model.parameter_count <= 6_000_000
    assert isinstance(settings.model, ViTConfig)
    assert [name for name, each in model.named_modules() if isinstance(each, nn.Conv2d)] == ["patches.projection"]


def test_the_splits_share_no_image_and_are_reproducible() -> None:
    first, again = vision.load_data(None, tiny()), vision.load_data(None, tiny())
    parts = [*vars(first).values()]
    assert [len(part) for part in parts] == [1797 - 150 - 360, 150, 360]
    assert all(torch.equal(part.pixels, same.pixels) for part, same in zip(parts, vars(again).values(), strict=True))
    every = torch.cat([part.pixels for part in parts]).flatten(1)
    assert len(every.unique(dim=0)) == 1797  # no two digits are alike
    other = vision.load_data(None, tiny(seed=1))
    assert torch.equal(other.test.pixels, first.test.pixels)  # no seed learns from what another is judged by


def test_the_test_images_do_not_depend_on_the_size_of_validation() -> None:
    few, many = vision.load_data(None, tiny(validation=0)), vision.load_data(None, tiny(validation=700))
    assert torch.equal(few.test.pixels, many.test.pixels)
    assert len(few.train) == 1797 - 360


def test_the_shards_of_a_batch_concatenate_to_the_batch() -> None:
    whole = task().batch(5, 0, 1)
    shares = [task().batch(5, part, 7) for part in range(7)]
    assert torch.equal(torch.cat([share.records for share in shares]), whole.records)
    assert torch.equal(torch.cat([share.draws for share in shares]), whole.draws)
    other = task().batch(6, 0, 1)
    assert not torch.equal(other.draws, whole.draws)


def test_the_losses_of_the_shards_sum_to_that_of_the_batch() -> None:
    settings = tiny(**{"model.drop_path": 0.0})
    model = build_from_config(vision.adapt_config(settings.model, task().train))
    whole = task().loss(model, task().batch(2, 0, 1))
    shares = [task().loss(model, task().batch(2, part, 7)) for part in range(7)]
    torch.testing.assert_close(torch.stack([share.total for share in shares]).sum(), whole.total)
    assert sum(int(share.count) for share in shares) == int(whole.count) == 28


def test_without_mixing_the_loss_is_the_one_of_plain_labels() -> None:
    off = {"shift": 0, "flip": 0.0, "operations": 0, "erase": 0.0, "mixup": 0.0, "cutmix": 0.0}
    plain = tiny(**{f"augmentation.{name}": value for name, value in off.items()})
    model = build_from_config(vision.adapt_config(plain.model, task().train)).eval()
    batch = task(plain).batch(0, 0, 1)
    images = task(plain).train.select(batch.records)
    logits = model(images.pixels / 255 * 4 - 2)
    expected = nn.functional.cross_entropy(logits, images.labels, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(task(plain).loss(model, batch).total, expected)


class Bright(nn.Module):
    """Takes bright images for the second class, others for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.threshold.expand(len(x)), x.mean((1, 2, 3))], 1)


def test_accuracy_is_the_share_of_correct_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "EVAL_BATCH", 2)
    pixels = torch.tensor([250, 3, 140, 120, 90], dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 3, 3)
    images = Images(pixels, torch.tensor([1, 0, 1, 1, 0]), ("dark", "bright"))
    assert vision.accuracy(Bright(), images) == 4 / 5


def test_without_validation_images_there_are_no_validation_metrics() -> None:
    settings = tiny(validation=0)
    assert task(settings).evaluate(Bright()) == {}
    assert set(get_recipe("vision").run(settings, RunLocation()).metrics) == {"test accuracy", "seconds"}


def test_real_images_are_read_from_a_folder_and_decide_channels_and_classes(tmp_path: Path) -> None:
    draw = numpy.random.default_rng(0)
    records = draw.integers(0, 256, (40, 2 + 3072), dtype=numpy.uint8)
    records[:, 0], records[:, 1] = 7, draw.integers(0, 100, 40)
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    short = {"plan.steps": 2, "plan.batch_size": 4, "plan.compile": False, "plan.schedule.warmup": 1, "test": 11}
    small = {"validation": 9, "model.width": 16, "model.heads": 2, "model.depth": 1, "model.ff_width": 24}
    outcome = get_recipe("vision").run(override(vision.real(), {**short, **small}), RunLocation(data=tmp_path))
    assert isinstance(outcome.model.config, ViTConfig)
    assert (outcome.model.config.channels, outcome.model.config.classes, outcome.model.config.image) == (3, 100, 32)


def test_images_of_several_sizes_are_resized(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (5 + number, 7)).save(tmp_path / "ab"[number % 2] / f"{number}.png")
    found = vision.load_data(tmp_path, tiny(size=9, test=3, validation=2))
    assert [tuple(part.pixels.shape) for part in vars(found).values()] == [(7, 3, 9, 9), (2, 3, 9, 9), (3, 3, 9, 9)]
    assert vision.load_data(None, tiny(size=12)).train.pixels.shape[1:] == (1, 12, 12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "resnet"}, "architecture is one of cnn, davit, vit, not 'resnet'"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, not 1"),
        ({"test": 0}, "test is 0, but must be at least 1: it counts images"),
        ({"validation": -1}, "validation is -1, but must be at least 0: it counts images"),
        ({"size": 0}, "size is 0, but must be at least 1: it counts pixels"),
        ({"validation": 0, "plan.load_best_at_end": True}, "need validation images, but validation=0"),
        ({"validation": 0, "plan.patience": 2}, "need validation images, but validation=0"),
        ({"model.depht": 3}, "did you mean 'depth'"),
        ({"augmentation.flip": 2.0}, r"Augmentation\(flip\) must be at least 0 and at most 1"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        override(vision.built_in(), changes)


def test_settings_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="test=1700 and validation=97 leave none of 1797 images for training"):
        get_recipe("vision").run(tiny(test=1700, validation=97), RunLocation())
    odd = tiny(**{"plan.batch_size": 28, "plan.gradient_accumulation_steps": 4})
    with pytest.raises(ConfigError, match="a batch of 28 in 4 shares has 7 in each; use an even number, or mixup=0"):
        get_recipe("vision").run(odd, RunLocation())
    wide = Images(torch.zeros(2, 3, 5, 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), ("one",))
    with pytest.raises(ConfigError, match="square images, not 5 x 7; try architecture=davit"):
        vision.adapt_config(ViTConfig(), wide)
    assert vision.adapt_config(CNNConfig(), wide) == replace(CNNConfig(), channels=3, classes=1)
