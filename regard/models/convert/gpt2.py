"""Convert GPT-2 of Hugging Face: GPT2LMHeadModel and GPT2Model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import ConfigError
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.weight_rules import WeightRule, expand_blocks, rename_all, transpose, with_prefix
from regard.models.gpt import GPTConfig

CONFIG = GPTConfig
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("n_positions"),
    "width": Field("n_embd"),
    "depth": Field("n_layer"),
    "heads": Field("n_head"),
    "ff_width": Field("n_inner", fields.get_optional_int),
    "eps": Field("layer_norm_epsilon", fields.get_float, 1e-5),
    "activation": Field("activation_function", fields.ACTIVATION, "gelu_new"),
    "tied": Field("tie_word_embeddings", fields.get_bool, True),
    "dropout": Field("resid_pdrop", fields.get_float, 0.1),  # embd_pdrop too: where they differ, only training does
    "attention_dropout": Field("attn_pdrop", fields.get_float, 0.1),
}
LINEAR = {
    "attention.query_key_value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
NORMS = {"attention_norm": "ln_1", "feedforward_norm": "ln_2"}


def read_config(hf: HFConfig) -> GPTConfig:
    """Our configuration from their config.json."""
    fields.expect(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GPTConfig(**fields.read_fields(FIELDS, hf))


def write_config(config: GPTConfig, model_type: str) -> dict[str, Any]:
    """Their config.json from our configuration."""
    if config != GPTConfig(**{name: getattr(config, name) for name in FIELDS}):
        raise ConfigError("it has learned positions, full multi-head attention, layer norms and biases, and no more")
    return {
        "model_type": model_type,
        "architectures": ["GPT2LMHeadModel"],
        **fields.write_fields(FIELDS, config),
        "embd_pdrop": config.dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rules(config: GPTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    block, theirs = "blocks.{n}.", "transformer.h.{n}."
    linear = {f"{block}{ours}": f"{theirs}{other}" for ours, other in LINEAR.items()}
    norms = {f"{block}{ours}": f"{theirs}{other}" for ours, other in NORMS.items()} | {"norm": "transformer.ln_f"}
    tables = {"tokens": "transformer.wte", "positions": "transformer.wpe"} | (
        {} if config.tied else {"head": "lm_head"}
    )
    return expand_blocks(
        [
            *rename_all(tables, ["weight"]),
            *rename_all(norms),
            *rename_all(linear, ["bias"]),
            *(transpose(f"{ours}.weight", f"{other}.weight") for ours, other in linear.items()),
        ],
        config.depth,
    )


def clean_weights(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Add the prefix of the full model; drop masks stored as buffers and the copy of tied weights."""
    extra = (".attn.bias", ".attn.masked_bias", *(["lm_head.weight"] if config.tied else []))
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(extra)}
    return with_prefix(kept, "transformer.", ("lm_head.",))
