"""`attn_implementation="regard"` feature by feature: masks, caches, terms, compilation, errors, explanations."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.base.errors import ConfigError, ShapeError
from regard.core.explain_model import ModelExplanation
from regard.core.kernels import observe_requests
from regard.integrations import huggingface
from regard.integrations.huggingface import ModelMask, attention_forward, build_mask
from tests.integrations.tiny_models import TinyModel, make

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def registered() -> None:
    huggingface.register()


def masks_of(tiny: TinyModel, **inputs: Any) -> tuple[Tensor, list[str]]:
    """Logits, and the mask of every attention call."""
    masks: list[str] = []
    with torch.no_grad(), observe_requests(lambda name, request, out: masks.append(repr(request.mask))):
        out = tiny.model(**inputs)
    return out.logits, masks


def eager_and_regard(family: str, settings: dict[str, Any], **inputs: Any) -> tuple[Tensor, Tensor, list[str]]:
    tiny = make(family, **settings)
    with torch.no_grad():
        expected = tiny.model(**inputs).logits
    tiny.model.set_attn_implementation("regard")
    out, masks = masks_of(tiny, **inputs)
    return expected, out, masks


def draw_ids(b: int, n: int) -> Tensor:
    return torch.randint(3, 97, (b, n), generator=torch.Generator().manual_seed(5))


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "causal": ("llama decoder", {}, {}, "causal()"),
    "padding on either side": ("llama decoder", {}, {"attention_mask": PADDED}, "causal() & key_padding"),
    "sliding window": ("mistral decoder", {}, {}, "window(before=4, after=None) & causal()"),
    "sliding window, padded": (
        "mistral decoder", {}, {"attention_mask": PADDED}, "window(before=4, after=None) & causal() & key"
    ),
    "chunks": ("llama4_text decoder", {}, {}, "blocks(4) & causal()"),
    "chunks, padded": (
        "llama4_text decoder", {}, {"attention_mask": PADDED[:1]}, "blocks(4) from [3] & causal() & key_padding"
    ),
    "packed documents": (
        "llama decoder", {}, {"position_ids": PACKED, "use_cache": False}, "causal() & documents([[0, 0, 0, 0, 1,"
    ),
    "both ways": ("bert encoder", {}, {"attention_mask": PADDED}, "key_padding"),
    "both ways in a window": ("modernbert encoder", {}, {}, "window(before=5, after=5)"),
    "soft-cap": ("gemma2 decoder", {"attn_logit_softcapping": 3.0}, {}, "causal()"),
    "sinks": ("gpt_oss decoder", {}, {"attention_mask": PADDED[:2]}, "causal() & key_padding"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_mask_of_a_model_is_a_mask_of_regard_and_logits_equal_eager(name: str) -> None:
    family, settings, inputs, mask = CASES[name]
    given = next(iter(inputs.values()), PADDED)
    expected, out, masks = eager_and_regard(family, settings, input_ids=draw_ids(len(given), 9), **inputs)
    assert any(found.startswith(mask) for found in masks), masks
    assert not any("matrix" in found or "mod" in found for found in masks)
    real = inputs.get("attention_mask", torch.ones(len(given), 9)).bool()
    torch.testing.assert_close(out[real], expected[real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama decoder", "gemma3_text decoder", "t5 seq2seq"])
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_generated_tokens_equal_eager_with_every_cache(family: str, settings: dict[str, Any]) -> None:
    tiny = make(family)
    inputs = {name: x for name, x in tiny.inputs.items() if name != "decoder_input_ids"}
    settings = {"max_new_tokens": 9, "do_sample": False, **settings}
    expected = tiny.model.generate(**inputs, **settings)
    tiny.model.set_attn_implementation("regard")
    assert torch.equal(tiny.model.generate(**inputs, **settings), expected)


def test_a_split_through_a_cache_gives_the_logits_of_one_pass() -> None:
    tiny = make("mistral decoder", "regard")
    ids = draw_ids(2, 13)
    with torch.no_grad():
        whole = tiny.model(ids).logits
        cache, parts = None, []
        for part in ids.split([6, 1, 4, 2], 1):
            out = tiny.model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-6, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    tiny = make("llama decoder", "regard", attention_dropout=0.5)
    ids = draw_ids(2, 9)
    assert torch.equal(tiny.model(ids).logits, tiny.model(ids).logits)
    tiny.model.train()
    assert not torch.equal(tiny.model(ids).logits, tiny.model(ids).logits)


def test_output_attentions_returns_the_weights_of_eager() -> None:
    tiny = make("gpt_oss decoder")
    with torch.no_grad():
        expected = tiny.model(**tiny.inputs, output_attentions=True).attentions
        tiny.model.set_attn_implementation("regard")
        weights = tiny.model(**tiny.inputs, output_attentions=True).attentions
    assert len(weights) == len(expected) == 2
    real = tiny.real[:, None, :, None].expand_as(weights[0])
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["boolean", "additive", "block mask"])
def test_a_mask_with_four_axes_is_taken_as_it_is(kind: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    tiny = make("llama decoder", "sdpa")
    ids = draw_ids(2, 9)
    visible = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.5) | torch.eye(9).bool()
    mask: Any = visible
    if kind == "additive":
        mask = torch.zeros(2, 1, 9, 9).masked_fill(~visible, torch.finfo(torch.float32).min)
    if kind == "block mask":
        mask = create_block_mask(lambda b, h, q, kv: visible[b, 0, q, kv], 2, None, 9, 9, device="cpu")
    with torch.no_grad():
        expected = tiny.model(ids, attention_mask=visible).logits
        tiny.model.set_attn_implementation("regard")
        out = tiny.model(ids, attention_mask=mask).logits
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_model_with_attention_code_of_its_own_raises_the_reason() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM has attention code of its own"):
        make("bloom decoder", "regard")
    tiny = make("bloom decoder")
    with pytest.raises(ConfigError, match="does not call the functions of AttentionInterface"):
        tiny.model.set_attn_implementation("regard")
    assert tiny.model.config._attn_implementation == "eager"


def test_a_model_with_a_table_of_attention_classes_raises_the_reason() -> None:
    from transformers import SamVisionConfig, SamVisionModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "output_channels": 8,
    }
    with pytest.raises(ConfigError, match="SamVisionModel has attention code of its own"):
        SamVisionModel(SamVisionConfig(**sizes, attn_implementation="regard"))
    with pytest.raises(ConfigError, match="SamVisionModel has attention code of its own"):
        SamVisionModel(SamVisionConfig(**sizes)).set_attn_implementation("regard")


def test_arithmetic_on_the_mask_raises_the_reason() -> None:
    mask = build_mask(2, 5, 5)
    assert isinstance(mask, ModelMask)
    for compute in (lambda: mask + 1.0, lambda: torch.zeros(5, 5) + mask, lambda: (1.0 - mask) * -1e9):
        with pytest.raises(ConfigError, match="attention code of its own"):
            compute()


def test_a_mask_that_a_model_indexes_is_the_boolean_matrix() -> None:
    mask = build_mask(2, 3, 5, q_offset=2)
    assert isinstance(mask, ModelMask)
    expected = torch.ones(3, 5).bool().tril(2).expand(2, 1, 3, 5)
    assert torch.equal(mask[:, :, -2:], expected[:, :, -2:])
    assert torch.equal(torch.cat([mask, expected]), torch.cat([expected, expected]))
    assert torch.equal(mask.to(torch.float32), expected.float())
    assert torch.equal(torch.where(mask, 1, 0), expected.int())
    assert (mask.shape, mask.ndim, mask.dtype, mask.contiguous()) == ((2, 1, 3, 5), 4, torch.bool, mask)


def test_what_the_attention_function_cannot_take_raises_the_reason() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ShapeError, match="flash attention only"):
        attention_forward(nn.Identity(), q, q, q, torch.ones(1, 5))
    with pytest.raises(ShapeError, match="adds keys of its own"):
        attention_forward(nn.Identity(), q, q, q, build_mask(1, 5, 4))
    with pytest.raises(ConfigError, match="paged cache"):
        attention_forward(nn.Identity(), q, q, q, None, cache=object())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_matrix_for_keys_that_a_sliding_cache_has_dropped_raises_an_error(dtype: torch.dtype) -> None:
    from transformers import DynamicCache

    tiny = make("mistral decoder", "regard")
    ids, visible = draw_ids(1, 13), torch.ones(1, 1, 13, 13).tril().bool()
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    cache = DynamicCache(config=tiny.model.config)
    tiny.model(ids[:, :9], attention_mask=mask[:, :, :9, :9], past_key_values=cache)
    with pytest.raises(ShapeError, match=r"has 4 queries and 13 keys, but the call has 4 and 8: .* cache has dropped"):
        tiny.model(ids[:, 9:], attention_mask=mask[:, :, 9:], past_key_values=cache)


def test_explain_names_the_kernel_of_every_layer_and_why() -> None:
    tiny = make("gemma3_text decoder", "regard", num_hidden_layers=7, sliding_window=5)
    found = regard.explain(tiny.model, {"input_ids": draw_ids(1, 9)})
    assert isinstance(found, ModelExplanation)
    assert [layer for layer, _ in found.layers] == [f"model.layers.{n}.self_attn" for n in range(7)]
    assert sum(found.kernels.values()) == 7
    assert found["model.layers.0.self_attn"].mask == "window(before=4, after=None) & causal()"
    assert found["model.layers.5.self_attn"].mask == "causal()"
    assert "flex       refuses: it needs a GPU" in str(found)
    assert "model.layers.0.self_attn, model.layers.1.self_attn" in str(found)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny.model.modules())


def test_explain_names_attention_modules_that_do_not_call_attend() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours = regard.nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
            self.theirs = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.ours(x, x, x, need_weights=False)[0]
            out: Tensor = self.theirs(x, x, x, need_weights=False)[0]
            return out

    found = regard.explain(Pair(), torch.zeros(1, 5, 12))
    assert [layer for layer, _ in found.layers] == ["ours"]
    assert found.left_out == ("theirs",)
    assert str(found).endswith("theirs\n  no call of attend: attention code of its own")
    model, state = Pair(), torch.get_rng_state()
    regard.explain(model, torch.zeros(1, 5, 12))
    assert torch.equal(torch.get_rng_state(), state)


def test_explain_raises_for_a_model_that_does_not_call_attend() -> None:
    with pytest.raises(ConfigError, match=r"made no call of regard\.attend"):
        regard.explain(nn.Linear(3, 3), torch.randn(2, 3))


def test_watch_records_the_weights_of_such_a_model() -> None:
    tiny = make("llama decoder")
    expected = tiny.model(**tiny.inputs, output_attentions=True).attentions
    tiny.model.set_attn_implementation("regard")
    with torch.no_grad(), regard.watch(tiny.model) as seen:
        tiny.model(**tiny.inputs)
    weights = seen["model.layers.1.self_attn"].weights()
    real = tiny.real[:, None, :, None].expand_as(weights)
    torch.testing.assert_close(weights[real], expected[1][real], atol=1e-6, rtol=1e-5)


def test_a_torchvision_that_cannot_be_imported_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transformers:
        @property
        def AttentionInterface(self) -> None:  # noqa: N802 (the name of transformers)
            raise ModuleNotFoundError("Could not import module 'AttentionInterface'")

    monkeypatch.setattr(huggingface, "import_optional", lambda *_: Transformers())
    for present, error, words in (
        (True, ConfigError, r"torchvision was built for another torch.*let_torchvision_load\(\) first"),
        (False, ModuleNotFoundError, "Could not import module 'AttentionInterface'"),
    ):
        monkeypatch.setattr(huggingface, "find_spec", lambda _, present=present: present or None)
        monkeypatch.setattr(huggingface, "can_import", lambda: False)
        with pytest.raises(error, match=words):
            huggingface.register()


def test_registering_twice_is_registering_once() -> None:
    from transformers import PreTrainedModel, masking_utils

    before = masking_utils.chunked_overlay, PreTrainedModel.set_attn_implementation
    huggingface.register()
    assert (masking_utils.chunked_overlay, PreTrainedModel.set_attn_implementation) == before


def test_other_implementations_are_unchanged() -> None:
    tiny = make("llama4_text decoder", "sdpa")
    twin = copy.deepcopy(tiny.model)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        out, expected = tiny.output(), tiny.output(twin)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
