"""Tests of every model on images."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.models.model import Config, Model
from regard.models.presets import MODEL_CLASSES, build_from_config
from regard.models.saving import load, save
from tests.models.images import BASELINES, DAVIT, VIT, enlarged, images

CONFIGS: dict[str, Config] = {
    "vit": VIT,
    "vit mean": dataclasses.replace(VIT, pool="mean", head="mlp-tanh"),
    "vit local": dataclasses.replace(VIT, attention="local", reach=1),
    "vit global-local": dataclasses.replace(VIT, attention="global-local", reach=1),
    "vit linear": dataclasses.replace(VIT, attention="linear"),
    "vit without positions": dataclasses.replace(VIT, positions="none", query_key_value_bias=False),
    "davit": DAVIT,
    **BASELINES,
}
TRACED = ["vit", "vit global-local", "vit linear", "davit", "mlp", "resnet"]  # every architecture and mask


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Model:
    model = build_from_config(CONFIGS[request.param])
    enlarged(model)
    return model.eval()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(images()).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_logits_have_one_number_for_each_class(model: Model) -> None:
    assert model(images()).shape == (3, 5)


def test_images_of_a_batch_do_not_affect_each_other(model: Model) -> None:
    together, alone = model(images()), torch.cat([model(image[None]) for image in images()])
    torch.testing.assert_close(together, alone)
    assert together.std(0).min() > 1e-3  # and judged at all


def test_every_parameter_counts(model: Model) -> None:
    assert not [name for name, grad in gradients(model).items() if not grad.abs().max() > 0 and "key" not in name]


def test_recomputing_gives_the_same_gradients_and_statistics(model: Model) -> None:
    other = copy.deepcopy(model.train())
    other.gradient_checkpointing = True
    expected, actual = gradients(model), gradients(other)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


@pytest.mark.parametrize("model", ["vit", "vit linear", "davit"], indirect=True)
def test_recomputing_keeps_less(model: Model) -> None:
    kept = []
    for recompute in (False, True):
        model.gradient_checkpointing, sizes = recompute, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model(images(16))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_autocast_stays_near(model: Model) -> None:
    exact = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        near = model(images())
    assert near.shape == exact.shape
    assert (near.float() - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(near.float(), exact)


def compiled_alike(model: Model, backend: str) -> None:
    torch.compiler.reset()  # it counts recompilations of code, and these models share theirs
    compiled, other = torch.compile(model, fullgraph=True, backend=backend), copy.deepcopy(model)
    expected, actual = gradients(other), gradients(compiled)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[f"_orig_mod.{name}"], gradient, rtol=1e-3, atol=1e-3)
    for actual, expected in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("model", TRACED, indirect=True)
def test_it_compiles_as_one_graph(model: Model) -> None:
    compiled_alike(model, "eager")


@pytest.mark.parametrize("model", ["vit"], indirect=True)
def test_it_compiles_with_recomputation_too(model: Model) -> None:
    model.train().gradient_checkpointing = True
    compiled_alike(model, "aot_eager")


@pytest.mark.parametrize("model", TRACED, indirect=True)
def test_it_exports_with_any_batch(model: Model) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(exported(images(7)), model(images(7)))


def test_on_the_meta_device_it_is_only_counted(model: Model) -> None:
    counted = build_from_config(model.config, device="meta")
    assert all(parameter.is_meta for parameter in counted.parameters())
    assert counted.parameter_count == model.parameter_count


def test_it_is_saved_and_loaded_exactly(model: Model, tmp_path: Path) -> None:
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(images()), model(images()))


def test_the_same_seed_gives_the_same_model(model: Model) -> None:
    one, two, other = (build_from_config(model.config, seed=seed).state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_fresh_model_gives_moderate_logits(model: Model) -> None:
    logits = build_from_config(model.config).eval()(images(32))
    assert 1e-3 < logits.std() < 5


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (images(channels=3), ShapeError, r"image is (3, 3, 12, 12), but is read as (b channels y x) with 2 channels"),
        (images(0), ShapeError, "with 2 channels and b of at least one"),
        (images()[0], ShapeError, "image is (2, 12, 12), but is read as (b channels y x)"),
        (
            images().long(),
            DtypeError,
            "image must be a floating-point tensor read as (b channels y x), not torch.int64",
        ),
        ([1.0], DtypeError, "image must be a floating-point tensor read as (b channels y x), not list"),
    ],
)
def test_a_wrong_image_is_refused(model: Model, wrong: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        model(wrong)
    assert text in str(caught.value)


def test_a_model_is_built_from_its_own_configuration_only(model: Model) -> None:
    other = next(MODEL_CLASSES[name] for name in MODEL_CLASSES if MODEL_CLASSES[name].Config is not type(model.config))
    with pytest.raises(
        ConfigError, match=f"is built from a {other.Config.__name__}, not {type(model.config).__name__}"
    ):
        other(model.config)
