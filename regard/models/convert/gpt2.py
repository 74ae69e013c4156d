"""GPT-2 of Hugging Face: GPT2LMHeadModel and GPT2Model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import ConfigError
from regard.models.convert.settings import choice, expect, flag, real, whole, whole_or_none
from regard.models.convert.weight_rules import Rule, same, turned, unrolled
from regard.models.gpt import GPTConfig

ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu", "relu": "relu"}
LINEAR = {
    "attention.query_key_value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
NORMS = {"attention_norm": "ln_1", "feedforward_norm": "ln_2"}


def config(about: Mapping[str, Any]) -> GPTConfig:
    expect(
        about,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    # ours has one rate for both embd_pdrop and resid_pdrop: where they differ, only training does
    return GPTConfig(
        vocab=whole(about, "vocab_size"),
        context=whole(about, "n_positions"),
        width=whole(about, "n_embd"),
        depth=whole(about, "n_layer"),
        heads=whole(about, "n_head"),
        ff_width=whole_or_none(about, "n_inner"),
        eps=real(about, "layer_norm_epsilon", 1e-5),
        activation=choice(about, "activation_function", ACTIVATIONS, "gelu_new"),
        tied=flag(about, "tie_word_embeddings", True),
        dropout=real(about, "resid_pdrop", 0.1),
        attention_dropout=real(about, "attn_pdrop", 0.1),
    )


def about(config: Any, model_type: str) -> dict[str, Any]:
    if not isinstance(config, GPTConfig):
        raise ConfigError(f"it is made from a GPTConfig, not {type(config).__name__}")
    usual = GPTConfig(
        vocab=config.vocab,
        context=config.context,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        ff_width=config.ff_width,
        eps=config.eps,
        activation=config.activation,
        tied=config.tied,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
    if config != usual:
        raise ConfigError("it has learned positions, full multi-head attention, layer norms and biases, and no more")
    theirs = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in theirs:
        raise ConfigError(f"it has no activation {config.activation!r}")
    return {
        "model_type": model_type,
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.depth,
        "n_head": config.heads,
        "n_inner": config.ff_width,
        "layer_norm_epsilon": config.eps,
        "activation_function": theirs[config.activation],
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rules(config: GPTConfig) -> list[Rule]:
    block, theirs = "blocks.{n}.", "transformer.h.{n}."
    each: list[Rule] = []
    for ours, other in LINEAR.items():
        each.append(turned(f"{block}{ours}.weight", f"{theirs}{other}.weight"))
        each.append(same(f"{block}{ours}.bias", f"{theirs}{other}.bias"))
    for ours, other in NORMS.items():
        each += [same(f"{block}{ours}.{part}", f"{theirs}{other}.{part}") for part in ("weight", "bias")]
    once = [
        same("tokens.weight", "transformer.wte.weight"),
        same("positions.weight", "transformer.wpe.weight"),
        same("norm.weight", "transformer.ln_f.weight"),
        same("norm.bias", "transformer.ln_f.bias"),
        *([] if config.tied else [same("head.weight", "lm_head.weight")]),
    ]
    return unrolled(once + each, config.depth)


def cleaned(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """With the prefix of the full model, without masks kept as buffers and without a second copy of tied weights."""
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if config.tied:
        kept.pop("lm_head.weight", None)
    if not any(name.startswith("transformer.") for name in kept):
        kept = {name if name == "lm_head.weight" else f"transformer.{name}": tensor for name, tensor in kept.items()}
    return kept
