"""The baselines on images: perceptron, convolutions, residual network."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.base.errors import RegardError, ShapeError
from regard.models.cnn import CNNConfig
from regard.models.mlp import MLPConfig
from regard.models.model import Config
from regard.models.presets import build, build_from_config
from regard.models.resnet import ResNetConfig
from tests.models.images import BASELINES, images, stripes, trained


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    parts = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (width,))
    return {f"{name}.{part}": shape for part, shape in {**parts, "num_batches_tracked": ()}.items()}


def conv_norm(name: str, old: int, new: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.convolution.weight": (new, old, 3, 3), **norm(f"{name}.norm", new)}


NAMES = {
    "mlp": {
        "layers.0.weight": (17, 288),
        "layers.0.bias": (17,),
        "layers.1.weight": (13, 17),
        "layers.1.bias": (13,),
        "head.weight": (5, 13),
        "head.bias": (5,),
    },
    "cnn": {
        **conv_norm("stages.0", 2, 7),
        **conv_norm("stages.1", 7, 11),
        "head.weight": (5, 11),
        "head.bias": (5,),
    },
    "resnet": {
        **conv_norm("stem", 2, 6),
        **conv_norm("blocks.0.first", 6, 6),
        **conv_norm("blocks.0.second", 6, 6),
        **conv_norm("blocks.1.first", 6, 12),
        **conv_norm("blocks.1.second", 12, 12),
        **conv_norm("blocks.2.first", 12, 24),
        **conv_norm("blocks.2.second", 24, 24),
        "head.weight": (5, 24),
        "head.bias": (5,),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_weights_stay(name: str) -> None:
    assert {key: tuple(x.shape) for key, x in build_from_config(BASELINES[name]).state_dict().items()} == NAMES[name]


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_presets_are_built_by_name(name: str) -> None:
    model = build(name)
    side = 28 if name == "mlp" else 19
    assert model(torch.randn(2, model.config.channels, side, side)).shape == (2, 10)


@pytest.mark.parametrize(("depth", "millions"), [(20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85"), (110, "1.73")])
def test_residual_networks_have_the_parameters_of_the_paper(depth: int, millions: str) -> None:
    assert f"{build('resnet', depth=depth, device='meta').parameter_count / 1e6:.2f}" == millions


def test_a_fresh_residual_block_without_its_convolutions_passes_on_what_went_in() -> None:
    model = build_from_config(BASELINES["resnet"]).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.second.norm.weight.zero_()
        x = torch.rand(2, 6, 5, 7)
        assert torch.equal(model.blocks[0](x), x)
        wider = model.blocks[1](x)
    assert torch.equal(wider[:, 3:9], x[:, :, ::2, ::2])  # every second row and column, zeros on both sides
    assert not wider[:, :3].any()
    assert not wider[:, 9:].any()


def test_a_residual_block_adds_two_convolutions_with_a_relu_between_and_one_after() -> None:
    block, x = build_from_config(BASELINES["resnet"]).eval().blocks[0], torch.randn(2, 6, 5, 7)
    changed = block.second(torch.relu(block.first(x)))
    torch.testing.assert_close(block(x), torch.relu(changed + x))


def test_without_hidden_layers_the_perceptron_is_linear() -> None:
    model = build_from_config(replace(BASELINES["mlp"], widths=()))
    torch.testing.assert_close(model(images() + images(seed=5)), model(images()) + model(images(seed=5)))


def test_the_perceptron_takes_images_of_one_size() -> None:
    with pytest.raises(ShapeError) as caught:
        build_from_config(BASELINES["mlp"])(images(rows=9, columns=16))  # as many pixels, but others
    assert "image is 9 x 16, but a perceptron has one weight for each pixel of 12 x 12" in str(caught.value)


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_convolutions_take_images_of_any_size(name: str) -> None:
    model = build_from_config(BASELINES[name]).eval()
    assert model(images(rows=7, columns=1)).shape == (3, 5)
    assert model.hidden(images(rows=9, columns=5)).shape[2:] == ((5, 3) if name == "cnn" else (3, 2))


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_maps_are_cut_off_at_zero(name: str) -> None:
    maps = build_from_config(BASELINES[name]).hidden(images())
    assert maps.min() == 0
    assert maps.max() > 0


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_dropout_acts_in_training_alone(name: str) -> None:
    model = build_from_config(replace(BASELINES[name], dropout=0.5))
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mlp", {"widths": (3, 0)}, "widths is 0, but must be at least 1"),
        ("mlp", {"activation": "sine"}, "unknown activation 'sine'"),
        ("cnn", {"widths": ()}, "widths has one number for each stage and cannot be empty"),
        ("cnn", {"classes": 0}, "classes is 0, but must be at least 1"),
        ("resnet", {"depth": 18}, "depth is 6 n + 2, for n blocks in each of three stages: depth=18; try 20"),
        ("resnet", {"depth": 2}, "depth=2; try 8"),
    ],
)
def test_impossible_settings_are_refused(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RegardError) as caught:
        replace(BASELINES[name], **changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (MLPConfig(image=8, channels=1, classes=3, widths=(32, 32)), 150),
        (CNNConfig(channels=1, classes=3, widths=(8, 16)), 60),
        (ResNetConfig(channels=1, classes=3, width=4, depth=8), 60),
    ],
    ids=["mlp", "cnn", "resnet"],
)
def test_it_learns_which_way_stripes_run(config: Config, steps: int) -> None:
    assert trained(build_from_config(config), stripes, steps=steps, rate=1e-2) > 0.98
