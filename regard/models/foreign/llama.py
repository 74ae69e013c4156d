"""Llama and its kin of Hugging Face: llama, mistral, qwen2 and qwen3 decoders for text."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.core.positions import Interpolate, Llama3
from regard.models.foreign.rules import Rule, joined, same, unrolled
from regard.models.foreign.settings import choice, expect, needed
from regard.models.gpt import GPTConfig

ACTIVATIONS = {"silu": "gated-silu", "gelu": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu-tanh", "relu": "gated-relu"}


def config(about: Mapping[str, Any]) -> GPTConfig:
    kind, heads, width = about["model_type"], needed(about, "num_attention_heads"), needed(about, "hidden_size")
    expect(about, mlp_bias=False, pretraining_tp=1, use_sliding_window=False)
    if set(about.get("layer_types") or []) > {"full_attention"}:
        raise CheckpointError(f"config.json of this {kind} mixes kinds of layers: {sorted(set(about['layer_types']))}")
    bias = kind == "qwen2" or about.get("attention_bias", False)
    if bias and kind != "qwen2":
        raise CheckpointError(f"config.json of this {kind} says attention_bias=True; only False is served")
    head_width, kv_heads = about.get("head_dim"), about.get("num_key_value_heads")
    base, stretch = _rotary(about)
    reach = about.get("sliding_window") if kind == "mistral" else None
    return GPTConfig(
        vocab=needed(about, "vocab_size"),
        context=needed(about, "max_position_embeddings"),
        width=width,
        depth=needed(about, "num_hidden_layers"),
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_width=None if head_width is None or head_width * heads == width else head_width,
        ff_width=needed(about, "intermediate_size"),
        positions="rotary",
        rotary_base=base,
        rotary_stretch=stretch,
        window=None if reach is None else reach - 1,  # theirs counts the token itself
        norm="rms",
        eps=about.get("rms_norm_eps", 1e-6),
        qk_norm="rms" if kind == "qwen3" else None,
        activation=choice(about, "hidden_act", ACTIVATIONS, "silu"),
        bias=False,
        query_key_value_bias=True if bias else None,
        tied=about.get("tie_word_embeddings", False),
        dropout=0.0,
        attention_dropout=about.get("attention_dropout", 0.0),
    )


def about(config: Any) -> dict[str, Any]:
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"it is made from a GPTConfig, not {type(config).__name__}")
    theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    stretch = config.rotary_stretch
    odd = {
        "positions": config.positions != "rotary" or config.rotary_pairing != "half",
        "synthesizer": bool(config.synthesizer),
        "norm": config.norm != "rms",
        "bias": config.bias,
        "query_key_value_bias": bool(config.query_key_value_bias),
        "qk_norm": config.qk_norm is not None,
        "window": config.window is not None,
        "activation": config.activation not in theirs,
        "rotary_stretch": not isinstance(stretch, Interpolate | Llama3 | None),
        "dropout": config.dropout > 0,
    }
    if any(odd.values()):
        named = ", ".join(name for name, is_odd in odd.items() if is_odd)
        raise ConfigError(f"it has no place for {named} as set here")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if isinstance(stretch, Interpolate):
        rope |= {"rope_type": "linear", "factor": stretch.factor}
    elif isinstance(stretch, Llama3):
        rope |= {
            "rope_type": "llama3",
            "factor": stretch.factor,
            "low_freq_factor": stretch.low,
            "high_freq_factor": stretch.high,
            "original_max_position_embeddings": stretch.original,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_width or config.width // config.heads,
        "intermediate_size": config.ff_width or 4 * config.width,
        "hidden_act": theirs[config.activation],
        "rms_norm_eps": config.eps,
        "rope_parameters": rope,
        "rope_theta": config.rotary_base,  # where older releases look for it
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rules(config: GPTConfig) -> list[Rule]:
    block, theirs = "blocks.{n}.", "model.layers.{n}."
    attention, into = f"{theirs}self_attn.", f"{block}attention.query_key_value"
    kv_heads = config.kv_heads or config.heads
    shares = (config.heads, kv_heads, kv_heads)
    each = [
        joined(
            f"{block}attention.query_key_value.weight", *(f"{attention}{x}_proj.weight" for x in "qkv"), shares=shares
        ),
        same(f"{block}attention.out.weight", f"{attention}o_proj.weight"),
        same(f"{block}feedforward.gate.weight", f"{theirs}mlp.gate_proj.weight"),
        same(f"{block}feedforward.up.weight", f"{theirs}mlp.up_proj.weight"),
        same(f"{block}feedforward.down.weight", f"{theirs}mlp.down_proj.weight"),
        same(f"{block}attention_norm.weight", f"{theirs}input_layernorm.weight"),
        same(f"{block}feedforward_norm.weight", f"{theirs}post_attention_layernorm.weight"),
    ]
    if config.query_key_value_bias:
        biases = (f"{attention}{x}_proj.bias" for x in "qkv")
        each.append(joined(f"{into}.bias", *biases, shares=shares))
    if config.qk_norm:
        each += [
            same(f"{block}attention.query_norm.weight", f"{attention}q_norm.weight"),
            same(f"{block}attention.key_norm.weight", f"{attention}k_norm.weight"),
        ]
    once = [
        same("tokens.weight", "model.embed_tokens.weight"),
        same("norm.weight", "model.norm.weight"),
        *([] if config.tied else [same("head.weight", "lm_head.weight")]),
    ]
    return unrolled(once + each, config.depth)


def cleaned(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """With the prefix of the full model, without frequencies kept as buffers or a second copy of tied weights."""
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        kept.pop("lm_head.weight", None)
    if not any(name.startswith("model.") for name in kept):
        kept = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in kept.items()}
    return kept


def _rotary(about: Mapping[str, Any]) -> tuple[float, Interpolate | Llama3 | None]:
    """Base and stretch, from where releases of today and of old keep them."""
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or about.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, Interpolate(float(rope["factor"]))
    if kind == "llama3":
        turns = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return base, Llama3(float(rope["factor"]), *turns, int(rope["original_max_position_embeddings"]))
    raise CheckpointError(f"config.json of this {about['model_type']} stretches positions by {kind!r}: not served")
