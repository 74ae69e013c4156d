"""Convert Llama-like decoders of Hugging Face: llama, mistral, qwen2 and qwen3.

They are one network with few differences: mistral may have a sliding window, qwen2 has biases on queries, keys and
values, qwen3 normalises queries and keys.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.core.positions import NTK, Interpolate, Llama3, Rotary, YaRN
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.weight_rules import WeightRule, concatenate, expand_blocks, rename_all, with_prefix
from regard.models.gpt import DotProductAttention, GPTConfig

CONFIG = GPTConfig
ACTIVATION = fields.NameTable(
    {"silu": "gated-silu", "gelu": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu-tanh", "relu": "gated-relu"}
)
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    "width": Field("hidden_size"),
    "depth": Field("num_hidden_layers"),
    "heads": Field("num_attention_heads"),
    "ff_width": Field("intermediate_size"),
    "eps": Field("rms_norm_eps", fields.get_float, 1e-6),
    "activation": Field("hidden_act", ACTIVATION, "silu"),
    "tied": Field("tie_word_embeddings", fields.get_bool, False),
    "attention_dropout": Field("attention_dropout", fields.get_float, 0.0),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# transformers' defaults for settings that config.json does not have; null means none
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
HEAD_WIDTH = {"qwen3": 128}
SLIDING_WINDOW = {"mistral": 4096}
# their names of our settings
LLAMA3 = {"low": "low_freq_factor", "high": "high_freq_factor", "original": "original_max_position_embeddings"}
YARN = {"original": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow"}


def read_config(hf: HFConfig) -> GPTConfig:
    """Our configuration from their config.json."""
    kind, heads, width = hf["model_type"], fields.get_int(hf, "num_attention_heads"), fields.get_int(hf, "hidden_size")
    # attention_bias would add a bias to the output too; qwen2 has its own without this setting
    fields.expect(hf, mlp_bias=False, pretraining_tp=1, use_sliding_window=False, attention_bias=False)
    kv_heads = fields.get_optional_int(hf, "num_key_value_heads", KV_HEADS.get(kind))
    head_width = fields.get_optional_int(hf, "head_dim", HEAD_WIDTH.get(kind))
    mixer = DotProductAttention(
        kv_heads=None if kv_heads == heads else kv_heads,
        head_width=None if head_width is None or head_width * heads == width else head_width,
        qk_norm="rms" if kind == "qwen3" else None,
        query_key_value_bias=True if kind == "qwen2" else None,
    )
    return GPTConfig(
        **fields.read_fields(FIELDS, hf),
        positions=_read_rotary(hf),
        mixer=mixer,
        window=_read_window(hf),
        norm="rms",
        bias=False,
        dropout=0.0,
    )


def write_config(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """Their config.json from our configuration."""
    mixer, rotary = config.mixer, config.positions
    if not isinstance(mixer, DotProductAttention) or not isinstance(rotary, Rotary):
        raise ConfigError(f"this has mixer={mixer!r} and positions={rotary!r} where it has attention and Rotary")
    if isinstance(rotary.stretch, NTK):
        raise ConfigError(f"this has stretch={rotary.stretch!r} where it has Interpolate, Llama3 or YaRN")
    bias = mixer.query_key_value_bias
    # each setting, ours and what this family has
    wanted = {
        "positions": (rotary, Rotary(base=rotary.base, stretch=rotary.stretch)),
        "norm": (config.norm, "rms"),
        "bias": (config.bias, False),
        "query_key_value_bias": (config.bias if bias is None else bias, model_type == "qwen2"),
        "qk_norm": (mixer.qk_norm, "rms" if model_type == "qwen3" else None),
        "window": (config.window, config.window if model_type == "mistral" else None),
        "dropout": (config.dropout, 0.0),
    }
    different = [
        f"{name}={ours!r} where it has {theirs!r}" for name, (ours, theirs) in wanted.items() if ours != theirs
    ]
    if different:
        raise ConfigError(f"this has {'; '.join(different)}")
    window = {"sliding_window": None if config.window is None else config.window + 1}
    return {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        **fields.write_fields(FIELDS, config),
        "num_key_value_heads": mixer.kv_heads or config.heads,
        "head_dim": mixer.head_width or config.width // config.heads,
        "rope_parameters": {"rope_theta": rotary.base, **_write_stretch(rotary.stretch)},
        "rope_theta": rotary.base,  # where older releases look for it
        **(window if model_type == "mistral" else {}),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rules(config: GPTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    assert isinstance(config.mixer, DotProductAttention)
    block, theirs = "blocks.{n}.", "model.layers.{n}."
    attention = f"{theirs}self_attn."
    kv_heads = config.mixer.kv_heads or config.heads
    names = {
        "tokens": "model.embed_tokens",
        "norm": "model.norm",
        f"{block}attention.out": f"{attention}o_proj",
        f"{block}feedforward.gate": f"{theirs}mlp.gate_proj",
        f"{block}feedforward.up": f"{theirs}mlp.up_proj",
        f"{block}feedforward.down": f"{theirs}mlp.down_proj",
        f"{block}attention_norm": f"{theirs}input_layernorm",
        f"{block}feedforward_norm": f"{theirs}post_attention_layernorm",
    }
    if config.mixer.qk_norm:
        names |= {f"{block}attention.{which}_norm": f"{attention}{which[0]}_norm" for which in ("query", "key")}
    if not config.tied:
        names["head"] = "lm_head"
    projections = concatenate(
        f"{block}attention.query_key_value",
        [f"{attention}{name}_proj" for name in "qkv"],
        ["weight", "bias"] if config.mixer.query_key_value_bias else ["weight"],
        shares=(config.heads, kv_heads, kv_heads),
    )
    return expand_blocks([*rename_all(names, ["weight"]), *projections], config.depth)


def clean_weights(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Add the prefix of the full model; drop frequencies stored as buffers and the copy of tied weights."""
    extra = ("rotary_emb.inv_freq", *(["lm_head.weight"] if config.tied else []))
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(extra)}
    return with_prefix(kept, "model.", ("lm_head.",))


def _read_window(hf: HFConfig) -> int | None:
    """Earlier tokens that each token sees: theirs counts the token itself, ours does not."""
    kind = hf["model_type"]
    size = fields.get_optional_int(hf, "sliding_window", SLIDING_WINDOW.get(kind)) if kind == "mistral" else None
    if size is not None and size < 2:
        raise CheckpointError(
            f"config.json of this {kind} says sliding_window={size}, so that no token sees another; "
            "supported are 2 and more, and null for all"
        )
    layer, layers = (
        "full_attention" if size is None else "sliding_attention",
        set(fields.get_strings(hf, "layer_types")),
    )
    if layers - {layer}:
        raise CheckpointError(
            f"config.json of this {kind} says layer_types of {', '.join(sorted(layers))}; only {layer} is supported"
        )
    return None if size is None else size - 1


def _read_rotary(hf: HFConfig) -> Rotary:
    """The rotary positions, from where releases of today and older ones store them."""
    section = "rope_parameters" if hf.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.get_section(hf, section)
    base = fields.get_float(rope, f"{section}.rope_theta", fields.get_float(hf, "rope_theta", 10000.0))
    for where, name in ((hf, "partial_rotary_factor"), (rope, f"{section}.partial_rotary_factor")):
        if fields.get_float(where, name, 1.0) != 1:
            fields.expect(where, **{name: 1.0})
    key = f"{section}.rope_type" if rope.get(f"{section}.rope_type") is not None else f"{section}.type"
    kind = "default" if rope.get(key) is None else rope[key]
    if not isinstance(kind, str):
        raise fields.wrong_type(rope, key, "a word")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"config.json of this {hf['model_type']} stretches positions by {kind!r}: not supported")
    if kind == "default":
        return Rotary(base=base)
    factor = fields.get_float(rope, f"{section}.factor")
    if kind == "linear":
        return Rotary(base=base, stretch=Interpolate(factor))
    names = {ours: f"{section}.{theirs}" for ours, theirs in (LLAMA3 if kind == "llama3" else YARN).items()}
    if hf.get("original_max_position_embeddings") is not None:  # it would take precedence
        fields.expect(hf, original_max_position_embeddings=fields.get_int(rope, names["original"]))
    if kind == "llama3":
        low, high = fields.get_float(rope, names["low"]), fields.get_float(rope, names["high"])
        return Rotary(base=base, stretch=Llama3(factor, low, high, fields.get_int(rope, names["original"])))
    _check_yarn(rope, section, factor)
    fast, slow = fields.get_float(rope, names["fast"], 32.0), fields.get_float(rope, names["slow"], 1.0)
    return Rotary(base=base, stretch=YaRN(factor, fields.get_int(rope, names["original"]), fast, slow))


def _check_yarn(rope: HFConfig, section: str, factor: float) -> None:
    """Raise where their YaRN also multiplies the scores; ours changes the frequencies only."""
    fields.expect(rope, **{f"{section}.truncate": True})
    name = f"{section}.attention_factor"
    scale, scale_all = (fields.get_float(rope, f"{section}.{each}", 0.0) for each in ("mscale", "mscale_all_dim"))
    unscaled = factor <= 1 or (scale == scale_all != 0)
    if (fields.get_float(rope, name) != 1) if rope.get(name) is not None else not unscaled:
        raise CheckpointError(
            f"config.json of this {rope['model_type']} stretches positions by 'yarn' and multiplies scores too; "
            f"only {name}=1.0 is supported, and here it is {rope.get(name, 'computed from the factor')}"
        )


def _write_stretch(stretch: Any) -> dict[str, Any]:
    """The stretch of rotary positions as they write it."""
    if stretch is None:
        return {"rope_type": "default"}
    if isinstance(stretch, Interpolate):
        return {"rope_type": "linear", "factor": stretch.factor}
    kind, names = ("llama3", LLAMA3) if isinstance(stretch, Llama3) else ("yarn", YARN)
    rest = {theirs: getattr(stretch, ours) for ours, theirs in names.items()}
    extra = {} if kind == "llama3" else {"attention_factor": 1.0}  # ours does not multiply the scores
    return {"rope_type": kind, "factor": stretch.factor, **rest, **extra}
