"""ViT of Hugging Face, read and written: same logits, exact round trips."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert import FAMILIES, export
from regard.models.presets import build_from_config
from regard.models.saving import load
from regard.models.vit import ViT
from tests.models.images import VIT, enlarged, images

transformers = pytest.importorskip("transformers", reason="transformers is compared with where it is installed")

FAMILY = FAMILIES["vit"]
SETTINGS = {
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}


def theirs(kind: str = "classifier", **changes: Any) -> nn.Module:
    settings = transformers.ViTConfig(**{**SETTINGS, "num_labels": 5, **changes})
    if kind == "classifier":
        return enlarged(transformers.ViTForImageClassification(settings)).eval()
    return enlarged(transformers.ViTModel(settings, add_pooling_layer=kind == "pooled")).eval()


def answer(model: nn.Module, image: Tensor) -> Tensor:
    """Logits, or without a classifier what the class token has become."""
    with torch.no_grad():
        out = model(image)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state[:, 0]


def alike(ours: nn.Module, other: nn.Module) -> None:
    """Ours may be off by twice what theirs is in the same precision, and a little."""
    with torch.no_grad():
        actual, single = ours(images()), answer(other, images())
        exact = answer(other.double(), images().double())
    assert exact.std() > 0.01
    assert (actual - exact).abs().max() <= 2 * (single - exact).abs().max() + 1e-6


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("classifier", {}),
        ("classifier", {"qkv_bias": False, "layer_norm_eps": 1e-3, "image_size": [12, 12], "num_labels": 2}),
        ("features", {}),
        ("pooled", {}),
    ],
)
def test_a_saved_model_is_read_and_gives_the_same_logits(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    other = theirs(kind, **changes)
    other.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, ViT)
    alike(ours, other)


@pytest.mark.parametrize("classes", [5, 0])
@pytest.mark.parametrize("bias", [True, False])
def test_a_written_model_is_read_by_transformers_and_gives_the_same_logits(
    classes: int, bias: bool, tmp_path: Path
) -> None:
    ours = enlarged(build_from_config(replace(VIT, classes=classes, query_key_value_bias=bias, eps=1e-4))).eval()
    export(ours, tmp_path)
    kind = transformers.ViTForImageClassification if classes else transformers.ViTModel
    other, report = kind.from_pretrained(
        tmp_path, output_loading_info=True, **({} if classes else {"add_pooling_layer": False})
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    alike(ours, other.eval())


@pytest.mark.parametrize("classes", [5, 0])
def test_a_round_trip_through_their_names_is_exact(classes: int) -> None:
    ours = enlarged(build_from_config(replace(VIT, classes=classes, dropout=0.1)))
    settings = FAMILY.read_config(FAMILY.write_config(ours.config, "vit"))
    assert settings == ours.config
    written = FAMILY.write_weights(ours.state_dict(), ours.config)
    back = FAMILY.read_weights(written, ours.state_dict(), settings, "what was written")
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())


def test_a_round_trip_through_our_names_is_exact(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    theirs().save_pretrained(tmp_path / "theirs")
    export(load(tmp_path / "theirs"), tmp_path / "ours")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_transformers_reads_the_exported_configuration() -> None:
    written = FAMILY.write_config(VIT, "vit")
    known = transformers.ViTConfig(**written).to_dict()
    assert {name: known[name] for name in SETTINGS} == SETTINGS
    assert transformers.ViTConfig(**written).num_labels == 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "relu"}, "config.json of this vit says hidden_act='relu'; only 'gelu' is supported"),
        ({"image_size": [12, 8]}, "config.json of this vit says image_size=[12, 8], which should be a square"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "is of a ViTForMaskedImageModeling; supported are"),
        ({"hidden_size": None}, "config.json of this vit lacks hidden_size"),
        ({"hidden_size": "x"}, "says hidden_size='x', which should be a whole number of 0 or more"),
        ({"image_size": "x"}, "says image_size='x', which should be a whole number, or two"),
        ({"patch_size": []}, "says patch_size=[], which should be a whole number, or two"),
        ({"patch_size": 4.0}, "says patch_size=4.0, which should be a whole number, or two"),
        ({"qkv_bias": "no"}, "says qkv_bias='no', which should be true or false"),
        ({"layer_norm_eps": True}, "says layer_norm_eps=True, which should be a number"),
        ({"hidden_dropout_prob": float("nan")}, "says hidden_dropout_prob=nan, which should be a number"),
        ({"architectures": "ViTModel"}, "says architectures='ViTModel', which should be a list of words"),
        ({"num_labels": -1}, "says num_labels=-1, which should be a whole number of 0 or more"),
    ],
)
def test_an_unsupported_configuration_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        FAMILY.read_config({"model_type": "vit", **SETTINGS, **changes})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"pool": "mean", "head": "mlp-tanh"},
            "this has pool='mean' where it has 'class'; head='mlp-tanh' where it has 'linear'",
        ),
        (
            {"attention": "local", "reach": 1},
            "this has attention='local' where it has 'full'; reach=1 where it has None",
        ),
        ({"drop_path": 0.1}, "this has drop_path=0.1 where it has 0.0"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.write_config(replace(VIT, **changes), "vit")
    assert text in str(caught.value)
