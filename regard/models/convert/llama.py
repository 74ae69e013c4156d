"""Llama and its kin of Hugging Face: llama, mistral, qwen2 and qwen3 decoders for text.

They are one network with few differences: mistral may see through a window, qwen2 has biases on queries, keys and
values, qwen3 normalises queries and keys.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.core.positions import NTK, Interpolate, Llama3, YaRN
from regard.models.convert.settings import choice, expect, flag, part, real, whole, whole_or_none, words, wrong
from regard.models.convert.weight_rules import Rule, joined, same, unrolled
from regard.models.gpt import GPTConfig

ACTIVATIONS = {"silu": "gated-silu", "gelu": "gated-gelu", "gelu_pytorch_tanh": "gated-gelu-tanh", "relu": "gated-relu"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# what transformers takes where config.json does not have the setting at all; null means none
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
HEAD_WIDTH = {"qwen3": 128}
REACH = {"mistral": 4096}


def config(about: Mapping[str, Any]) -> GPTConfig:
    kind, heads, width = about["model_type"], whole(about, "num_attention_heads"), whole(about, "hidden_size")
    expect(about, mlp_bias=False, pretraining_tp=1, use_sliding_window=False)
    if flag(about, "attention_bias", False):  # theirs would add one to the output too; qwen2 has its own without asking
        raise CheckpointError(f"config.json of this {kind} says attention_bias=True; only False is served")
    kv_heads = whole_or_none(about, "num_key_value_heads", KV_HEADS.get(kind))
    head_width = whole_or_none(about, "head_dim", HEAD_WIDTH.get(kind))
    base, stretch = _rotary(about)
    return GPTConfig(
        vocab=whole(about, "vocab_size"),
        context=whole(about, "max_position_embeddings"),
        width=width,
        depth=whole(about, "num_hidden_layers"),
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_width=None if head_width is None or head_width * heads == width else head_width,
        ff_width=whole(about, "intermediate_size"),
        positions="rotary",
        rotary_base=base,
        rotary_stretch=stretch,
        window=_window(about),
        norm="rms",
        eps=real(about, "rms_norm_eps", 1e-6),
        qk_norm="rms" if kind == "qwen3" else None,
        activation=choice(about, "hidden_act", ACTIVATIONS, "silu"),
        bias=False,
        query_key_value_bias=True if kind == "qwen2" else None,
        tied=flag(about, "tie_word_embeddings", False),
        dropout=0.0,
        attention_dropout=real(about, "attention_dropout", 0.0),
    )


def about(config: Any, model_type: str) -> dict[str, Any]:
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"it is made from a GPTConfig, not {type(config).__name__}")
    theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    stretch, inner_bias = config.rotary_stretch, config.query_key_value_bias
    # each setting, and what this family has there
    wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "positions": (config.positions, ("rotary",)),
        "rotary_pairing": (config.rotary_pairing, ("half",)),
        "synthesizer": (config.synthesizer, ((),)),
        "norm": (config.norm, ("rms",)),
        "bias": (config.bias, (False,)),
        "query_key_value_bias": (config.bias if inner_bias is None else inner_bias, (model_type == "qwen2",)),
        "qk_norm": (config.qk_norm, ("rms" if model_type == "qwen3" else None,)),
        "window": (config.window, (config.window if model_type == "mistral" else None,)),
        "activation": (config.activation, tuple(theirs)),
        "dropout": (config.dropout, (0.0,)),
    }
    unlike = [
        f"{name}={value!r} where it has {' or '.join(map(repr, known))}"
        for name, (value, known) in wanted.items()
        if value not in known
    ]
    if isinstance(stretch, NTK):
        raise ConfigError(f"this has rotary_stretch={stretch!r} where it has Interpolate, Llama3 or YaRN")
    if unlike:
        raise ConfigError(f"this has {'; '.join(unlike)}")
    reach = {} if model_type != "mistral" else {"sliding_window": None if config.window is None else config.window + 1}
    return {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
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
        "rope_parameters": {"rope_theta": config.rotary_base, **_stretched(stretch)},
        "rope_theta": config.rotary_base,  # where older releases look for it
        **reach,
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


def _window(about: Mapping[str, Any]) -> int | None:
    """Earlier tokens that each one sees: theirs counts the token itself, ours does not."""
    kind = about["model_type"]
    reach = whole_or_none(about, "sliding_window", REACH.get(kind)) if kind == "mistral" else None
    if reach is not None and reach < 2:
        raise CheckpointError(
            f"config.json of this {kind} says sliding_window={reach}, so that no token sees another; "
            "served are 2 and more, and null for all"
        )
    seen, others = "full_attention" if reach is None else "sliding_attention", set(words(about, "layer_types"))
    if others - {seen}:
        raise CheckpointError(
            f"config.json of this {kind} says layer_types of {', '.join(sorted(others))}; only {seen} is served here"
        )
    return None if reach is None else reach - 1


def _rotary(about: Mapping[str, Any]) -> tuple[float, Interpolate | Llama3 | YaRN | None]:
    """Base and stretch, from where releases of today and of old keep them."""
    place = "rope_parameters" if about.get("rope_parameters") is not None else "rope_scaling"
    rope = part(about, place)
    names = {name: f"{place}.{name}" for name in ("rope_theta", "rope_type", "type", "factor", *_LLAMA3, *_YARN)}
    base = real(rope, names["rope_theta"], real(about, "rope_theta", 10000.0))
    for where, name in ((about, "partial_rotary_factor"), (rope, f"{place}.partial_rotary_factor")):
        if real(where, name, 1.0) != 1:
            expect(where, **{name: 1.0})
    called = names["rope_type"] if rope.get(names["rope_type"]) is not None else names["type"]
    kind = "default" if rope.get(called) is None else rope[called]
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, Interpolate(real(rope, names["factor"]))
    if kind in ("llama3", "yarn") and about.get("original_max_position_embeddings") is not None:  # it would win
        expect(about, original_max_position_embeddings=whole(rope, names["original_max_position_embeddings"]))
    if kind == "llama3":
        low, high, original = (names[name] for name in _LLAMA3)
        return base, Llama3(real(rope, names["factor"]), real(rope, low), real(rope, high), whole(rope, original))
    if kind == "yarn":
        return base, _yarn(rope, names)
    if not isinstance(kind, str):
        raise wrong(rope, called, "a word")
    raise CheckpointError(f"config.json of this {about['model_type']} stretches positions by {kind!r}: not served")


_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def _yarn(rope: Mapping[str, Any], names: Mapping[str, str]) -> YaRN:
    """YaRN's frequencies alone: theirs sharpens attention as well, if not told to leave it, and ours never does."""
    expect(rope, **{names["truncate"]: True})
    factor = real(rope, names["factor"])
    told, up, down = (
        names["attention_factor"],
        real(rope, names["mscale"], 0.0),
        real(rope, names["mscale_all_dim"], 0.0),
    )
    plain = factor <= 1 or (up == down != 0)
    if (real(rope, told) != 1) if rope.get(told) is not None else not plain:
        raise CheckpointError(
            f"config.json of this {rope['model_type']} stretches positions by 'yarn' and multiplies scores besides; "
            f"only {told}=1.0 is served, and here it is {rope.get(told, 'left to be told from the factor')}"
        )
    fast, slow = real(rope, names["beta_fast"], 32.0), real(rope, names["beta_slow"], 1.0)
    return YaRN(factor, whole(rope, names["original_max_position_embeddings"]), fast, slow)


def _stretched(stretch: Interpolate | Llama3 | YaRN | None) -> dict[str, Any]:
    """A stretch as they write it."""
    if stretch is None:
        return {"rope_type": "default"}
    if isinstance(stretch, Interpolate):
        return {"rope_type": "linear", "factor": stretch.factor}
    if isinstance(stretch, Llama3):
        return {
            "rope_type": "llama3",
            "factor": stretch.factor,
            "low_freq_factor": stretch.low,
            "high_freq_factor": stretch.high,
            "original_max_position_embeddings": stretch.original,
        }
    return {
        "rope_type": "yarn",
        "factor": stretch.factor,
        "beta_fast": stretch.fast,
        "beta_slow": stretch.slow,
        "original_max_position_embeddings": stretch.original,
        "attention_factor": 1.0,  # ours never sharpens attention
    }
