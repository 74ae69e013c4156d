"""Convert BART of Hugging Face, read only: BartForConditionalGeneration and BartModel."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import CheckpointError
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.weight_rules import WeightRule, concatenate, expand_blocks, rename, rename_all
from regard.models.transformer import TransformerConfig
from regard.nn.embeddings import SinusoidalPositions

# encoder_layerdrop and decoder_layerdrop are not read: they skip layers in training only
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("max_position_embeddings"),
    "width": Field("d_model"),
    "depth": Field("encoder_layers"),
    "decoder_depth": Field("decoder_layers"),
    "heads": Field("encoder_attention_heads"),
    "ff_width": Field("encoder_ffn_dim"),
    "activation": Field("activation_function", fields.ACTIVATION, "gelu"),
    "scale_embedding": Field("scale_embedding", fields.get_bool, False),
    "dropout": Field("dropout", fields.get_float, 0.1),
    "attention_dropout": Field("attention_dropout", fields.get_float, 0.0),
    "ff_dropout": Field("activation_dropout", fields.get_float, 0.0),
}
OFFSET = 2  # rows before position 0 in their position tables, which nothing reads


def read_config(hf: HFConfig) -> TransformerConfig:
    """Our configuration from their config.json."""
    fields.get_architecture(hf, "BartForConditionalGeneration", "BartModel")
    return TransformerConfig(**shared_settings(hf), positions="learned", embedding_norm=True)


def shared_settings(hf: HFConfig) -> dict[str, Any]:
    """The settings that BART and Marian have in common."""
    settings = fields.read_fields(FIELDS, hf)
    fields.expect(
        hf,
        decoder_attention_heads=settings["heads"],
        decoder_ffn_dim=settings["ff_width"],
        tie_word_embeddings=True,
    )
    return {**settings, "output_bias": True}


def rules(config: TransformerConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    found = [
        rename("tokens.weight", "model.shared.weight"),
        WeightRule(
            ("output_bias",),
            ("final_logits_bias",),
            lambda parts: [parts[0].flatten()],
            lambda parts: [parts[0][None]],
        ),
    ]
    for stack, depth in (("encoder", config.depth), ("decoder", config.decoder_depth or config.depth)):
        found += _stack_rules(stack, depth)
        if config.positions == "learned":
            found.append(
                WeightRule(
                    (f"{stack}.positions.weight",),
                    (f"model.{stack}.embed_positions.weight",),
                    lambda parts: [parts[0][OFFSET:].contiguous()],
                    lambda parts: [pad(parts[0], (0, 0, OFFSET, 0))],
                )
            )
        if config.embedding_norm:
            found += rename_all({f"{stack}.embedding_norm": f"model.{stack}.layernorm_embedding"})
    return found


def clean_weights(weights: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Add the prefix of the full model; keep one token table; add the output bias, zero if it is missing."""
    top = ("model.", "lm_head.", "final_logits_bias")
    kept = {name if name.startswith(top) else f"model.{name}": tensor for name, tensor in weights.items()}
    shared = kept.get("model.shared.weight")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        table = kept.pop(name, None)
        if shared is None:
            shared = table
        elif table is not None and not torch.equal(table, shared):
            raise CheckpointError(f"{name} is not the table that source and target share; only one table is supported")
    if shared is not None:
        kept["model.shared.weight"] = shared
        kept.setdefault("final_logits_bias", shared.new_zeros(1, config.vocab))
    if config.positions != "learned":  # sinusoids stored as a table, which ours computes
        for stack in ("encoder", "decoder"):
            name = f"model.{stack}.embed_positions.weight"
            if name in kept:
                _check_sinusoids(kept.pop(name), name, config.width)
    return kept


def _stack_rules(stack: str, depth: int) -> list[WeightRule]:
    block, theirs = f"{stack}.blocks.{{n}}.", f"model.{stack}.layers.{{n}}."
    layers = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if stack == "decoder" else {})
    names = {"feedforward.up": "fc1", "feedforward.down": "fc2", "feedforward_norm": "final_layer_norm"}
    names |= {f"{ours}_norm": f"{other}_layer_norm" for ours, other in layers.items()}
    names |= {f"{ours}.out": f"{other}.out_proj" for ours, other in layers.items()}
    found = rename_all({f"{block}{ours}": f"{theirs}{other}" for ours, other in names.items()})
    for ours, other in layers.items():
        found += concatenate(f"{block}{ours}.query_key_value", [f"{theirs}{other}.{name}_proj" for name in "qkv"])
    return expand_blocks(found, depth)


def _check_sinusoids(table: Tensor, name: str, width: int) -> None:
    """Raise where a table of positions is not the sinusoids that our model computes, up to rounding."""
    allowed = 1e-3 + (torch.finfo(table.dtype).eps if table.is_floating_point() else 0)
    fits = table.ndim == 2 and table.shape[1] == width
    computed = SinusoidalPositions(width, pairing="half")(torch.arange(len(table))) if fits else table
    off = (table.float() - computed).abs().max().item() if fits and len(table) else 0.0
    if not fits or not off <= allowed:  # NaN is refused too
        difference = f"differs from them by {off:.2g}" if fits else f"is {tuple(table.shape)}"
        raise CheckpointError(f"{name} is not the sinusoids of width {width} that are supported: it {difference}")
