"""Tests of every preset: parameter counts, example inputs, export; `list_models`."""

from pathlib import Path

import pytest
import torch

import regard
from regard.base.errors import ConfigError
from regard.models import presets
from regard.models.model import Model
from regard.models.presets import MODEL_CLASSES

SMALL = {
    "transformer-tiny": {"depth": 1, "width": 16, "vocab": 31},
    "birthplace": {"depth": 1, "width": 16},
    "birthplace-rotary": {"depth": 1, "width": 16},
    "birthplace-synthesizer": {"depth": 1, "width": 16},
    "bert-base": {"depth": 1, "width": 24, "heads": 4, "vocab": 31},
    "vit-ti/16": {"depth": 1, "image": 32, "classes": 5},
    "speech-stream": {"depth": 1, "width": 16},
    "rnn": {"vocab": 31, "width": 16},
    "rnn-attention": {"vocab": 31, "width": 16},
    "mlp": {},
    "cnn": {},
    "resnet": {},
}
LENGTHS = {"vit-ti/16": 32, "speech-stream": 40, "mlp": None, "cnn": None, "resnet": None}


@pytest.fixture(params=SMALL)
def model(request: pytest.FixtureRequest) -> Model:
    return regard.build(request.param, **SMALL[request.param]).eval()


# images are exported in test_image_models.py
@pytest.mark.parametrize(
    "name", ["transformer-tiny", "birthplace-rotary", "bert-base", "speech-stream", "rnn-attention"]
)
def test_it_exports_for_every_batch(name: str) -> None:
    model = regard.build(name, **SMALL[name]).eval()
    example = model.example_inputs(3, LENGTHS.get(name, 12))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, example, dynamic_shapes=tuple({0: batch} for _ in example))
    other = model.example_inputs(5, LENGTHS.get(name, 12))
    with torch.no_grad():
        for ours, theirs in zip(parts(model(*other)), parts(program.module()(*other)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def parts(out: object) -> list[torch.Tensor]:
    """The tensors of an output, be it one or a named tuple of some."""
    return [out] if isinstance(out, torch.Tensor) else [part for part in out if part is not None]  # type: ignore[attr-defined]


def test_it_accepts_its_example_inputs(model: Model) -> None:
    with torch.no_grad():
        out = model(*model.example_inputs())
    logits = out if isinstance(out, torch.Tensor) else out.logits
    assert logits.isfinite().all()


MORE = {
    "gpt2": {"depth": 2, "width": 32, "heads": 2, "vocab": 31},
    "vit-ti/16 local": {"depth": 2, "image": 64, "classes": 5, "attention": "local", "reach": 1},
    "vit-ti/16 global-local": {"depth": 2, "image": 64, "classes": 5, "attention": "global-local", "reach": 1},
    "vit-ti/16 linear": {"depth": 2, "image": 64, "classes": 5, "attention": "linear"},
    "davit-tiny": {"classes": 5},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*SMALL, *MORE])
def test_a_gpu_gives_the_same_logits_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would round to ten bits
    model = regard.build(name.partition(" ")[0], **{**SMALL, **MORE}[name]).eval()
    length = 64 if "vit" in name else 64 if name == "davit-tiny" else LENGTHS.get(name, 12)
    example = model.example_inputs(2, length)
    if example[0].is_floating_point():
        example = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in example)
    if name in ("cnn", "resnet"):  # rounding that carries a map across zero would switch its gradient off
        model, example = model.double(), tuple(x.double() for x in example)

    def rows_and_slopes(device: str) -> list[torch.Tensor]:
        model.to(device).zero_grad()
        out = parts(model(*(x.to(device) for x in example)))
        sum(part.float().square().sum() for part in out if part.is_floating_point()).backward()
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.detach().cpu() for x in (*out, *slopes)]

    for cpu, gpu in zip(rows_and_slopes("cpu"), rows_and_slopes("cuda"), strict=True):
        assert (cpu - gpu).abs().max() <= 2e-4 * max(1.0, cpu.abs().max().item())


FORMS = {name.partition(" ")[0]: settings for name, settings in {**SMALL, **MORE}.items()}


def test_every_architecture_is_registered_small_and_documented() -> None:
    files = {path.stem for path in Path(presets.__file__).parent.glob("*.py") if "\nPRESETS = " in path.read_text()}
    assert set(MODEL_CLASSES) == files, "add the file and its class to _FILES in regard/models/presets.py"
    small = {type(presets.PRESETS[name]) for name in FORMS}
    missing = [name for name in MODEL_CLASSES if MODEL_CLASSES[name].Config not in small]
    assert not missing, f"add a small form of {missing} to SMALL"
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    missing = [name for name in MODEL_CLASSES if f"`{name}.py`" not in page]
    assert not missing, f"add {missing} to the table of presets in docs/models.md"


@pytest.mark.parametrize("name", FORMS)
def test_every_parameter_has_a_gradient(name: str) -> None:
    model = regard.build(name, **FORMS[name]).train()
    example = model.example_inputs(2, 64 if name == "davit-tiny" else LENGTHS.get(name, 12))
    source = torch.Generator().manual_seed(0)
    example = tuple(torch.randn(x.shape, generator=source) if x.is_floating_point() else x for x in example)
    sum(part.square().sum() for part in parts(model(*example)) if part.is_floating_point()).backward()
    missing = [key for key, each in model.named_parameters() if each.grad is None or not each.grad.isfinite().all()]
    assert not missing


@pytest.mark.parametrize("name", FORMS)
def test_it_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = regard.build(name, **FORMS[name])
    model.save(tmp_path)
    loaded = regard.load(tmp_path)
    assert loaded.config == model.config
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# exact counts; papers and model cards publish them in millions, see docs/models.md where they differ
PARAMETERS = {
    "transformer-tiny": 2_605_056,
    "transformer-base": 64_976_896,  # 65 M
    "transformer-big": 213_016_576,  # 213 M
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "birthplace": 3_323_392,
    "birthplace-rotary": 3_290_624,
    "birthplace-synthesizer": 3_076_988,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "vit-ti/16": 5_717_416,
    "vit-s/16": 22_050_664,
    "vit-b/16": 86_567_656,
    "vit-b/32": 88_224_232,
    "vit-l/16": 304_326_632,
    "vit-h/14": 632_045_800,
    "davit-tiny": 28_360_168,  # 28.3 M
    "davit-small": 49_745_896,  # 49.7 M
    "davit-base": 87_954_408,  # 87.9 M
    "speech-stream": 9_743_645,
    "rnn": 22_038_528,
    "rnn-attention": 22_563_328,
    "mlp": 269_322,
    "cnn": 94_186,
    "resnet": 269_722,  # 0.27 M
}


@pytest.mark.parametrize("name", regard.list_models())
def test_every_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert name in PARAMETERS, f"add the published number of parameters of {name} to PARAMETERS"
    assert regard.build(name, device="meta").parameter_count == PARAMETERS[name]


def test_every_preset_of_the_table_exists() -> None:
    assert regard.list_models() == sorted(PARAMETERS)


def test_list_models_filters_by_pattern() -> None:
    assert regard.list_models("gpt2*") == ["gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl"]
    assert regard.list_models("*/14") == ["vit-h/14"]
    assert regard.list_models("gtp*") == []


def test_a_folder_of_the_zoo_is_listed_and_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "ZOO", tmp_path)
    assert regard.list_models(pretrained=True) == []
    model = regard.build("mlp", widths=(5,), seed=3)
    model.save(tmp_path / "digits-mlp" / "model")
    (tmp_path / "notes").mkdir()
    assert regard.list_models(pretrained=True) == ["digits-mlp"]
    assert regard.list_models("vit*", pretrained=True) == []
    loaded = regard.load("digits-mlp")
    assert loaded.config == model.config
    assert torch.equal(loaded.state_dict()["head.weight"], model.state_dict()["head.weight"])
    with pytest.raises(regard.RegardError, match="there is no folder 'digits-vit', and no model of this name"):
        regard.load("digits-vit")


def test_a_model_of_an_impossible_width_is_our_error() -> None:
    with pytest.raises(ConfigError, match="does not fit into memory"):
        regard.build("birthplace", depth=1, width=10**12, device="meta")
