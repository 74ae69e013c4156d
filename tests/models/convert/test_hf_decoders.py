"""GPT-2 and Llama-style decoders of Hugging Face, read and written: same logits, exact round trips."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError, RegardError
from regard.core.positions import NTK, Rotary, YaRN
from regard.models.convert import export, load_config
from regard.models.convert.family import resolve_defaults
from regard.models.gpt import GPT, DotProductAttention, GPTConfig, SyntheticAttention
from regard.models.saving import load

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
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 640,
    "beta_fast": 12.0,
    "attention_factor": 1.0,
}
MODELS = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False, activation_function="relu", n_inner=30),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-5)
    ),
    "llama scaled": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, rope_parameters=SCALED)),
    "mistral in a window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=5)
    ),
    "mistral in none": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=None)
    ),
    "llama in yarn": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=YARN, head_dim=16)
    ),
    "llama in yarn as it is by default": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters={**YARN, "attention_factor": None})
    ),
    "llama in yarn of two scales": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **LLAMA, rope_parameters={**YARN, "attention_factor": None, "mscale": 0.7, "mscale_all_dim": 0.4}
        )
    ),
    "llama in dynamic scaling": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{**LLAMA, "max_position_embeddings": 9},
            rope_parameters={"rope_type": "dynamic", "factor": 2.0},
            head_dim=16,
        )
    ),
    "llama with attention biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True)
    ),
    "llama with all biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA, sliding_window=5)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "qwen2 of wide heads": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA, head_dim=10)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=10, rms_norm_eps=1e-2)),
}


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
def test_the_logits_equal_those_of_transformers(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        assert near(model(tokens()), drawn)
    assert not model.training


@pytest.mark.parametrize("drawn", MODELS, indirect=True)
def test_a_round_trip_is_exact(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    export(ours, tmp_path / "again", model_type=drawn.config.model_type)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == drawn.config.model_type
    assert written["architectures"] == [type(drawn).__name__]
    again = load(tmp_path / "again")
    assert resolve_defaults(again.config) == resolve_defaults(ours.config)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    reopened = type(drawn).from_pretrained(tmp_path / "again")
    for name, tensor in drawn.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], tensor), name
    extra = {name for name in reopened.state_dict() if name not in drawn.state_dict()}
    assert not any(reopened.state_dict()[name].any() for name in extra)  # biases that ours has and theirs did not
    with torch.no_grad():
        assert torch.equal(reopened(tokens()).logits, drawn(tokens()).logits)


@pytest.mark.parametrize("drawn", ["gpt2", "llama"], indirect=True)
def test_sharded_weights_are_loaded(drawn: Any, tmp_path: Path) -> None:
    drawn.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    drawn.save_pretrained(tmp_path / "whole")
    ours, whole = load(tmp_path / "theirs"), load(tmp_path / "whole")
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_a_base_decoder_is_loaded(tmp_path: Path) -> None:
    full = gpt2()
    full.transformer.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert torch.equal(model.state_dict()["tokens.weight"], full.state_dict()["transformer.wte.weight"])


def test_an_exported_model_is_loaded_by_transformers(tmp_path: Path) -> None:
    config = GPTConfig(
        vocab=53, context=19, width=24, depth=2, heads=6,
        mixer=DotProductAttention(kv_heads=3), positions=Rotary(), norm="rms", bias=False,
        activation="gated-silu", tied=False, dropout=0.0, attention_dropout=0.0, eps=1e-6,
    )  # fmt: skip
    model = GPT(config).eval()
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens()).logits, model(tokens()), atol=1e-5)


def test_a_model_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    model = GPT(GPTConfig(vocab=53, context=19, width=24, depth=1, heads=4, mixer=SyntheticAttention()))
    with pytest.raises(ConfigError, match=r"cannot be exported to Hugging Face:\n  - gpt2: this has mixer=Syn"):
        export(model, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "unpickling can run",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors and no model.safet"),
    "cut short": (lambda folder: cut(folder / "model.safetensors"), "not a complete safetensors file"),
    "another type": (
        lambda folder: change(folder, model_type="gtp2"),
        "'gtp2' cannot be converted; did you mean 'gpt2'",
    ),
    "no type": (lambda folder: change(folder, model_type=None), "model_type 'None' cannot be converted"),
    "another depth": (lambda folder: change(folder, n_layer=4), r"lacks transformer\.h\.3\.attn\.c_attn\.weight"),
    "fewer layers": (lambda folder: change(folder, n_layer=2), "12 tensors that the model does not have"),
    "another width": (lambda folder: change(folder, n_embd=48), r"is \(53, 24\), but its configuration has \(53, 48\)"),
    "an odd scale": (lambda folder: change(folder, scale_attn_weights=False), "scale_attn_weights=False; only True"),
    "an odd activation": (lambda folder: change(folder, activation_function="mish"), "says activation_function='mish'"),
    "no vocabulary": (lambda folder: change(folder, vocab_size=None), "lacks vocab_size"),
    "a depth in words": (
        lambda folder: change(folder, n_layer="3"),
        "says n_layer='3', which should be a whole number",
    ),
    "a list of widths": (lambda folder: change(folder, n_inner=[30]), r"says n_inner=\[30\], which should be a whole"),
    "tied in words": (lambda folder: change(folder, tie_word_embeddings="no"), "embeddings='no', which should be true"),
    "a rate in words": (lambda folder: change(folder, attn_pdrop="no"), "attn_pdrop='no', which should be a number"),
    "no heads": (lambda folder: change(folder, n_head=0), "has settings that no model can have"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "should be an object"),
}


@pytest.mark.parametrize("name", ["mixtral", "mt5", "phi", "albert", "gpt_neox", "vilt", "qwen2_moe"])
def test_the_refusal_of_another_family_says_how_to_run_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(RegardError) as caught:
        load_config(tmp_path, {"model_type": name})
    assert f"model_type {name!r} cannot be converted (there are: gpt2, llama" in str(caught.value)
    assert "attn_implementation='regard', after regard.integrations.huggingface.register()" in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(("slip", "name"), [("gtp2", "gpt2"), ("GPT-2", "gpt2"), ("Llama", "llama"), ("bret", "bert")])
def test_a_slip_in_a_model_type_is_corrected(slip: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=f"'{slip}' cannot be converted; did you mean '{name}'"):
        export(decoder(), tmp_path, model_type=slip)


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


ODD_LLAMAS = {
    "linear without its factor": (
        {"rope_parameters": {"rope_type": "linear"}},
        "config.json of this llama lacks rope_parameters.factor",
    ),
    "linear of old": ({"rope_scaling": {"type": "linear"}}, "lacks rope_scaling.factor"),
    "llama3 without its bounds": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
        "lacks rope_parameters.original_max_position_embeddings",
    ),
    "llama3 without its context": (
        {"rope_parameters": {k: v for k, v in SCALED.items() if not k.startswith("original")}},
        "lacks rope_parameters.original_max_position_embeddings",
    ),
    "llama3 of two contexts": (
        {"rope_parameters": SCALED, "original_max_position_embeddings": 32},
        "says original_max_position_embeddings=32; only 64 is supported",
    ),
    "a word for positions": ({"rope_parameters": "x"}, "says rope_parameters='x', which should be an object"),
    "a number for a kind": ({"rope_parameters": {"rope_type": 3}}, "says rope_parameters.rope_type=3, which should be"),
    "a word for a factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
        "says rope_parameters.factor='two', which should be a number",
    ),
    "another scaling": (
        {"rope_parameters": {"rope_type": "longrope"}},
        "scales positions by 'longrope': not supported",
    ),
    "half turned": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; only 1.0 is"),
    "a base in words": ({"rope_theta": "x"}, "says rope_theta='x', which should be a number"),
    "yarn not truncated": ({"rope_parameters": {**YARN, "truncate": False}}, "truncate=False; only True is supported"),
    "a number of kinds": ({"layer_types": 3}, "says layer_types=3, which should be a list of words"),
    "other layers": ({"layer_types": ["sliding_attention"] * 2}, "layer_types of sliding_attention; only full_attent"),
    "a list of activations": ({"hidden_act": ["silu"]}, "says hidden_act=['silu'], which should be one of silu, gelu"),
    "tied in words": ({"tie_word_embeddings": "no"}, "says tie_word_embeddings='no', which should be true or false"),
    "biased in words": ({"attention_bias": "no"}, "says attention_bias='no', which should be true or false"),
    "a head in words": ({"head_dim": "x"}, "says head_dim='x', which should be a whole number of 0 or more"),
    "a head too many": (
        {"num_key_value_heads": 4},
        "has settings that no model can have: heads must be a multiple of kv_heads",
    ),
    "heads of an odd width": ({"head_dim": 3}, "has settings that no model can have: rotary over 1 axes rotates"),
    "no eps": ({"rms_norm_eps": []}, "says rms_norm_eps=[], which should be a number"),
}


@pytest.mark.parametrize("name", ODD_LLAMAS)
def test_a_damaged_llama_names_the_setting(name: str, tmp_path: Path) -> None:
    changes, message = ODD_LLAMAS[name]
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path, {"model_type": "llama", **LLAMA, **changes})
    assert message in str(caught.value)


def test_a_yarn_that_leaves_scores_alone_by_its_two_scales_is_read(tmp_path: Path) -> None:
    scales = {**YARN, "attention_factor": None, "mscale": 0.7, "mscale_all_dim": 0.7}
    plain, scaled = (
        load_config(tmp_path, {"model_type": "llama", **LLAMA, "rope_parameters": rope}) for rope in (YARN, scales)
    )
    assert plain == scaled
    assert plain.positions.scaling == YaRN(4.0, 640, fast=12.0)


def test_missing_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    few = {k: v for k, v in LLAMA.items() if k not in NOTHING}
    assert load_config(tmp_path, {"model_type": "mistral", **few}).window == 4095
    assert load_config(tmp_path, {"model_type": "mistral", **few, "sliding_window": None}).window is None
    assert load_config(tmp_path, {"model_type": "mistral", **few, "sliding_window": 2}).window == 1
    with pytest.raises(
        CheckpointError, match="sliding_window=1, so that no token sees another; supported are 2 and more"
    ):
        load_config(tmp_path, {"model_type": "mistral", **few, "sliding_window": 1})
    many = {**few, "num_attention_heads": 8, "hidden_size": 48}
    del many["num_key_value_heads"]
    for kind in ("llama", "mistral"):
        assert load_config(tmp_path, {"model_type": kind, **many}).mixer.kv_heads is None
    with pytest.raises(CheckpointError, match="kv_heads"):  # 32 of them
        load_config(tmp_path, {"model_type": "qwen2", **many})
    assert load_config(tmp_path, {"model_type": "qwen3", **few}).mixer.head_width == 128


def decoder(**changes: Any) -> GPT:
    config = GPTConfig(
        vocab=53, context=19, width=24, depth=2, heads=6,
        mixer=DotProductAttention(kv_heads=3), positions=Rotary(), norm="rms", bias=False,
        activation="gated-silu", ff_width=40, tied=False, dropout=0.0, attention_dropout=0.0, eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(replace(config, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


KIN = {
    "llama": ({}, ["llama", "mistral"]),
    "mistral": ({"window": 3}, ["mistral"]),
    "qwen2": ({"mixer": DotProductAttention(kv_heads=3, query_key_value_bias=True)}, ["qwen2"]),
    "qwen3": ({"mixer": DotProductAttention(kv_heads=3, qk_norm="rms")}, ["qwen3"]),
}


@pytest.mark.parametrize("name", KIN)
def test_a_decoder_is_exported_to_the_family_it_fits(name: str, tmp_path: Path) -> None:
    changes, fitting = KIN[name]
    model = decoder(**changes)
    for wanted in (None, *fitting):
        export(model, tmp_path / str(wanted), model_type=wanted)
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / str(wanted), output_loading_info=True
        )
        assert theirs.config.model_type == (wanted or name)
        assert type(theirs).__name__ == theirs.config.architectures[0]
        assert not any(report.values())
        with torch.no_grad():
            assert torch.allclose(theirs(tokens()).logits, model(tokens()), rtol=0, atol=1e-4)
        assert load(tmp_path / str(wanted)).config == model.config


WRONG_KIN = {
    ("llama", "qwen2"): "qwen2: this has mixer.query_key_value_bias=False where it has True",
    ("llama", "qwen3"): "qwen3: this has mixer.qk_norm=None where it has 'rms'",
    ("mistral", "llama"): "llama: this has window=3 where it has None",
    ("mistral", "qwen3"): "qwen3: this has mixer.qk_norm=None where it has 'rms'; window=3 where it has None",
    ("qwen2", "llama"): "llama: this has mixer.query_key_value_bias=True where it has False",
    ("qwen2", "mistral"): "mistral: this has mixer.query_key_value_bias=True where it has False",
    ("qwen3", "llama"): "llama: this has mixer.qk_norm='rms' where it has None",
    (
        "qwen3",
        "qwen2",
    ): "qwen2: this has mixer.qk_norm='rms' where it has None; mixer.query_key_value_bias=False where it has True",
}


@pytest.mark.parametrize(("model", "wanted"), WRONG_KIN)
def test_export_to_a_wrong_family_is_refused(model: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export(decoder(**KIN[model][0]), tmp_path / "new", model_type=wanted)
    assert str(caught.value).endswith(f"cannot be exported to Hugging Face:\n  - {WRONG_KIN[model, wanted]}")
    assert not (tmp_path / "new").exists()


def test_export_of_an_unsupported_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"llama: this has scaling=NTK\(factor=2\.0\) where it has one of Interpolate"
    ):
        export(decoder(positions=Rotary(scaling=NTK(2.0))), tmp_path, model_type="llama")


def test_a_dropout_that_is_only_for_training_changes_nothing(tmp_path: Path) -> None:
    theirs = gpt2(embd_pdrop=0.3, resid_pdrop=0.2).eval()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.config.dropout == 0.2
    with torch.no_grad():
        assert torch.allclose(ours(tokens()), theirs(tokens()).logits, atol=1e-5)


def weights_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if "safetensors" in file.name}


def test_an_export_over_another_is_the_new_model(tmp_path: Path) -> None:
    old, new = decoder(), decoder(eps=1e-3)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(2)
    export(old, tmp_path)
    (tmp_path / "model-of-mine.safetensors").write_text("not of an export")
    export(new, tmp_path)
    ours, theirs = load(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.config == new.config
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in new.state_dict().items())
    assert torch.equal(theirs.state_dict()["lm_head.weight"], new.state_dict()["head.weight"])
    assert weights_in(tmp_path) == {"model.safetensors", "model-of-mine.safetensors"}


def test_an_export_over_a_sharded_model_removes_its_files(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path, max_shard_size="8KB")
    export(decoder(), tmp_path)
    assert weights_in(tmp_path) == {"model.safetensors"}


def test_two_forms_of_weights_in_one_folder_are_refused(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path, max_shard_size="8KB")
    export(decoder(), tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "model.safetensors")
    message = r"has both model\.safetensors and model\.safetensors\.index\.json, which can be of two models; remove one"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path, max_shard_size="8KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"has no weight_map from tensors to files|is not JSON"):
        load(tmp_path)


def test_an_export_onto_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(CheckpointError, match="a is a file; a model is saved as a folder"):
        export(decoder(), tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"


def test_a_model_without_numbers_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokens\.weight has no numbers to export: the model was built on the meta"
    ):
        export(decoder().to("meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
