"""Every kind of model, built small by its preset: what all of them have to do."""

import pytest
import torch

import regard
from regard.models.model import Model

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


def inputs(model: Model, name: str, batch: int) -> tuple[torch.Tensor, ...]:
    return model.example(batch, LENGTHS.get(name, 12))


@pytest.mark.parametrize("name", SMALL)
def test_it_exports_for_every_batch(name: str) -> None:
    model = regard.build(name, **SMALL[name]).eval()
    example = inputs(model, name, 3)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, example, dynamic_shapes=tuple({0: batch} for _ in example))
    other = inputs(model, name, 5)
    with torch.no_grad():
        for ours, theirs in zip(parts(model(*other)), parts(program.module()(*other)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def parts(out: object) -> list[torch.Tensor]:
    """The tensors of an output, be it one or a named tuple of some."""
    return [out] if isinstance(out, torch.Tensor) else [part for part in out if part is not None]  # type: ignore[attr-defined]


def test_its_own_example_is_one_that_it_takes(model: Model) -> None:
    with torch.no_grad():
        out = model(*model.example())
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
    example = model.example(2, length)
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


def test_presets_are_those_that_were_promised() -> None:
    from regard.models.presets import PRESETS

    promised = """transformer-tiny transformer-base transformer-big gpt2 gpt2-medium gpt2-large gpt2-xl birthplace
        birthplace-rotary birthplace-synthesizer bert-base bert-large vit-ti/16 vit-s/16 vit-b/16 vit-b/32 vit-l/16
        vit-h/14 davit-tiny davit-small davit-base speech-stream"""
    assert set(promised.split()) <= set(PRESETS)
