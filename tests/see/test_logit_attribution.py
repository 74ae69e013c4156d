"""Direct logit attribution and the logit lens of the supported models: parts sum to the logit, computed two ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.base.errors import ConfigError
from regard.models.bert import BERT, BERTConfig
from regard.models.vit import ViT, ViTConfig
from regard.see.interventions.logit_attribution import direct_logit_attribution
from regard.see.interventions.logit_lens import logit_lens
from tests.see.model_cases import CASES, ids, randomise

TOKENS = ids(2, 7)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 12 * 12, dtype=torch.float64).reshape(2, 3, 12, 12).sin()
SMALL: dict[str, Any] = {"width": 24, "heads": 3, "depth": 2}


def ours(name: str, **settings: Any) -> nn.Module:
    return regard.build(name, seed=1, context=16, **SMALL, **settings)


def huggingface_vit() -> nn.Module:
    from transformers import ViTConfig as Config, ViTForImageClassification

    return ViTForImageClassification(
        Config(image_size=12, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
               intermediate_size=20, num_labels=5)
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "gpt2 of hugging face": (lambda: CASES["gpt2 sdpa"]().model, TOKENS),
    "llama of hugging face": (lambda: CASES["llama eager"]().model, TOKENS),
    "bert of hugging face": (lambda: CASES["bert sdpa"]().model, TOKENS),
    "vit of hugging face": (huggingface_vit, PIXELS),
    "gpt": (lambda: ours("birthplace"), TOKENS),
    "llama": (lambda: ours("birthplace-rotary", norm="rms", activation="gated-silu"), TOKENS),
    "bert": (lambda: BERT(BERTConfig(vocab=37, **SMALL)), TOKENS),
    "vit": (lambda: ViT(ViTConfig(image=12, patch=4, classes=5, head="mlp-tanh", pool="class-mean", **SMALL)), PIXELS),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Tensor]:
    make, x = MODELS[request.param]
    model = make().double().eval()
    randomise(model)
    return request.param, model, x


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def test_the_parts_sum_to_the_logit(case: tuple[str, nn.Module, Tensor]) -> None:
    name, model, x = case
    logits = logits_of(model, x).detach()
    last = logits if logits.ndim == 2 else logits[:, 3]
    found = direct_logit_attribution(model, lambda: model(x), 4, against=2, position=3)
    room = 1e-5 if name == "llama of hugging face" else 1e-10  # its norm computes in float32
    torch.testing.assert_close(found.values.sum(1), last[:, 4] - last[:, 2], atol=room, rtol=room)
    heads = 6 if name == "llama of hugging face" else 3
    assert found.values.shape == (2, len(found.parts))
    assert len(found.parts) == 1 + 2 * (heads + 1) + 1
    assert found.parts[0] == "embedding"
    assert found.parts[-1] == "bias"
    assert len(set(found.parts)) == len(found.parts)
    assert bool((found.values[:, :-1].abs().amax(0) > 1e-6).all())
    assert all(not parameter.grad_fn for parameter in model.parameters())


def test_a_part_of_the_last_block_is_what_its_removal_changes() -> None:
    """Ablating a head of the last layer changes a logit by its part, up to the norms, which are held constant."""
    make, x = MODELS["gpt2 of hugging face"]
    model = make().double().eval()
    model.get_submodule("transformer.h.1.mlp").register_forward_hook(lambda module, args, out: out * 0)
    model.get_submodule("transformer").register_module("ln_f", nn.Identity())
    found = direct_logit_attribution(model, lambda: model(x), 4)
    for head in range(3):
        with torch.no_grad(), regard.intervene(model) as edit:
            edit.ablate("h.1.attn", heads=[head])
            without = logits_of(model, x)[:, -1, 4]
        torch.testing.assert_close(found.logits - without, found.of(f"transformer.h.1.attn head {head}"))


def test_the_logit_lens_ends_with_the_logits_and_starts_with_the_embedding(case: tuple[str, nn.Module, Tensor]) -> None:
    name, model, x = case
    found = logit_lens(model, lambda: model(x), progress=False)
    with torch.no_grad():
        logits = logits_of(model, x)
    assert found.shape == (3, *logits.shape)
    torch.testing.assert_close(found[2], logits)
    assert not torch.allclose(found[0], found[1])
    if name == "gpt2 of hugging face":
        with torch.no_grad():
            hidden = model(x, output_hidden_states=True).hidden_states  # the last is after the final norm
            expected = [model.lm_head(model.transformer.ln_f(each)) for each in hidden[:2]]  # type: ignore[union-attr, operator]
        torch.testing.assert_close(found[:2], torch.stack(expected))


def test_parameters_without_gradients_stay_without() -> None:
    model = ours("birthplace").eval().requires_grad_(False)
    found = direct_logit_attribution(model, lambda: model(TOKENS), 4)
    torch.testing.assert_close(found.values.sum(1), model(TOKENS)[:, -1, 4], atol=1e-5, rtol=1e-4)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_parts_of_the_keys_sum_to_the_part_of_the_head(case: tuple[str, nn.Module, Tensor]) -> None:
    name, model, x = case
    found = direct_logit_attribution(model, lambda: model(x), 4, position=3)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    room = 1e-5 if name == "llama of hugging face" else 1e-9
    for record in seen.records:
        for head in range(record.q.shape[1]):
            expected = found.of(f"{record.name} head {head}")
            torch.testing.assert_close(found.of_keys(record, head).sum(-1).to(expected), expected, atol=room, rtol=room)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"token": 37}, "token is 37, but there are 37 logits; choose from 0 to 36"),
    "a negative token": ({"token": -1}, "token is -1, but there are 37 logits"),
    "against": ({"against": 99}, "against is 99, but there are 37 logits"),
    "position": ({"position": 7}, "position is 7, but there are 7 positions of the logits; choose from 0 to 6"),
    "a position before the start": ({"position": -8}, "position is -8, but there are 7 positions"),
    "a fraction": ({"token": 0.5}, "token takes a whole number, not 0.5"),
}


def test_the_parts_of_the_keys_are_those_of_edited_weights() -> None:
    model = regard.build("birthplace", depth=2, width=24, heads=3, context=32, seed=1).eval()
    x = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(0))
    with regard.intervene(model) as edit:
        edit.hide(1, keys=[2], heads=[1])
        edit.scale_beta(0, 3.0, heads=[2])
        found = direct_logit_attribution(model, lambda: model(x), 5)
        with torch.no_grad(), regard.watch(model) as seen:
            model(x)
    assert found.of_keys(seen.records[1], 1)[0, 2] == 0
    for record, head in zip(seen.records, (2, 1), strict=True):
        whole = found.of(f"{record.name} head {head}")
        torch.testing.assert_close(found.of_keys(record, head).sum(-1), whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", WRONG)
def test_indices_of_an_attribution_are_checked(name: str) -> None:
    wrong, words = WRONG[name]
    model = BERT(BERTConfig(vocab=37, **SMALL)).eval()
    with pytest.raises(ConfigError, match=words):
        direct_logit_attribution(model, lambda: model(TOKENS), **({"token": 4} | wrong))


def test_the_head_of_a_key_attribution_is_checked_and_counts_from_the_end() -> None:
    model = CASES["llama eager"]().model  # with fewer key heads than query heads
    found = direct_logit_attribution(model, lambda: model(TOKENS), 4)
    with torch.no_grad(), regard.watch(model) as seen:
        model(TOKENS)
    record = seen.records[0]
    h = record.q.shape[1]
    assert torch.equal(found.of_keys(record, -1), found.of_keys(record, h - 1))
    assert not torch.equal(found.of_keys(record, -1), found.of_keys(record, 0))
    for head in (h, -h - 1, "0"):
        with pytest.raises(ConfigError, match=r"head (is|takes a whole number)"):
            found.of_keys(record, head)  # type: ignore[arg-type]
