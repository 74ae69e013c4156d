"""GPT-2 and Llama-style decoders of Hugging Face, read and written: same logits, exact round trips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.models.files import load
from regard.models.foreign import export
from regard.models.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

NOTHING = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def gpt2(**changes: Any) -> Any:
    settings = {"vocab_size": 53, "n_positions": 17, "n_embd": 24, "n_layer": 3, "n_head": 4, **NOTHING, **changes}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


LLAMA = {
    **NOTHING,
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 19,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False, activation_function="relu", n_inner=30),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-5)
    ),
    "llama stretched": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=STRETCHED)
    ),
    "mistral in a window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=5)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=10)),
}
BOTH_WAYS = ["gpt2", "gpt2 untied", "llama", "llama tied", "llama stretched"]


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Any:
    """A model of theirs with weights large enough that no part of it hides."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 53, (2, 13), generator=torch.Generator().manual_seed(1))


def near(ours: Tensor, theirs: Any) -> bool:
    """Whether our logits are off by no more than twice what theirs are in the same precision."""
    with torch.no_grad():
        single = theirs(tokens()).logits.double()
        truth = theirs.double()(tokens()).logits
        theirs.float()
    allowed = 2 * (single - truth).abs().max() + 1e-6
    return bool((ours.double() - truth).abs().max() <= allowed)


@pytest.mark.parametrize("drawn", MODELS, indirect=True)
def test_the_logits_are_theirs(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        assert near(model(tokens()), drawn)
    assert not model.training


@pytest.mark.parametrize("drawn", BOTH_WAYS, indirect=True)
def test_a_round_trip_is_exact(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    export(ours, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == ours.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    reopened = type(drawn).from_pretrained(tmp_path / "again")
    for name, tensor in drawn.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], tensor), name
    with torch.no_grad():
        assert torch.equal(reopened(tokens()).logits, drawn(tokens()).logits)


@pytest.mark.parametrize("drawn", ["gpt2", "llama"], indirect=True)
def test_weights_may_lie_in_several_files(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    ours = load(tmp_path / "theirs")
    export(ours, tmp_path / "again", shard=8000)
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    reopened = type(drawn).from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(reopened(tokens()).logits, drawn(tokens()).logits)


def test_the_bare_decoder_is_read_too(tmp_path: Path) -> None:
    full = gpt2()
    full.transformer.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert torch.equal(model.state_dict()["tokens.weight"], full.state_dict()["transformer.wte.weight"])


def test_a_model_of_ours_opens_as_theirs(tmp_path: Path) -> None:
    config = GPTConfig(
        vocab=53, context=19, width=24, depth=2, heads=6, kv_heads=3, positions="rotary", norm="rms", bias=False,
        activation="gated-silu", tied=False, dropout=0.0, attention_dropout=0.0, eps=1e-6,
    )  # fmt: skip
    model = GPT(config).eval()
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens()).logits, model(tokens()), atol=1e-5)


def test_what_has_no_form_among_theirs_says_why(tmp_path: Path) -> None:
    model = GPT(GPTConfig(vocab=53, context=19, width=24, depth=1, heads=4, synthesizer=("dense",)))
    with pytest.raises(ConfigError, match=r"no form among those of Hugging Face:\n  - gpt2: it has learned positions"):
        export(model, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "a pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "unpickling runs"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors and no model.safet"),
    "cut short": (lambda folder: cut(folder / "model.safetensors"), "not a whole safetensors file"),
    "another type": (lambda folder: change(folder, model_type="gtp2"), "'gtp2'; did you mean 'gpt2'"),
    "no type": (lambda folder: change(folder, model_type=None), "unknown model_type 'None'"),
    "another depth": (lambda folder: change(folder, n_layer=4), r"lacks transformer\.h\.3\.attn\.c_attn\.weight"),
    "fewer layers": (lambda folder: change(folder, n_layer=2), "12 tensors without a place in the model"),
    "another width": (lambda folder: change(folder, n_embd=48), r"is \(53, 24\), but by its configuration \(53, 48\)"),
    "an odd scale": (lambda folder: change(folder, scale_attn_weights=False), "scale_attn_weights=False; only True"),
    "an odd activation": (lambda folder: change(folder, activation_function="mish"), "says activation_function='mish'"),
    "no vocabulary": (lambda folder: change(folder, vocab_size=None), "lacks vocab_size"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "should hold an object"),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_folder_is_refused(name: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    spoil, message = REFUSED[name]
    spoil(tmp_path)
    with pytest.raises((CheckpointError, ValueError), match=message):
        load(tmp_path)
