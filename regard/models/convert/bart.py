"""BART of Hugging Face, read only: BartForConditionalGeneration and BartModel."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import CheckpointError
from regard.models.convert.settings import choice, expect, flag, real, whole, words
from regard.models.convert.weight_rules import Rule, joined, same, unrolled
from regard.models.transformer import TransformerConfig
from regard.nn.embeddings import SinusoidalPositions

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
OFFSET = 2  # rows of their position tables that stand before position 0, and that nothing reads


class Ends(NamedTuple):
    """The tokens around a text, by their numbers: what a target starts with, what ends it, what fills up a batch."""

    start: int
    end: int
    padding: int


def config(about: Mapping[str, Any]) -> TransformerConfig:
    check_architecture(about, "BartForConditionalGeneration", "BartModel")
    return TransformerConfig(**settings(about), positions="learned", embedding_norm=True)


def settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """What BART and Marian write alike."""
    heads, ff_width = whole(about, "encoder_attention_heads"), whole(about, "encoder_ffn_dim")
    expect(
        about,
        decoder_attention_heads=heads,
        decoder_ffn_dim=ff_width,
        tie_word_embeddings=True,
    )
    # encoder_layerdrop and decoder_layerdrop are not asked for: they leave layers out while training only
    return {
        "vocab": whole(about, "vocab_size"),
        "context": whole(about, "max_position_embeddings"),
        "width": whole(about, "d_model"),
        "depth": whole(about, "encoder_layers"),
        "decoder_depth": whole(about, "decoder_layers"),
        "heads": heads,
        "ff_width": ff_width,
        "activation": choice(about, "activation_function", ACTIVATIONS, "gelu"),
        "scaled": flag(about, "scale_embedding", False),
        "output_bias": True,
        "dropout": real(about, "dropout", 0.1),
        "attention_dropout": real(about, "attention_dropout", 0.0),
        "ff_dropout": real(about, "activation_dropout", 0.0),
    }


def check_architecture(about: Mapping[str, Any], *known: str) -> None:
    for name in words(about, "architectures"):
        if name not in known:
            raise CheckpointError(
                f"config.json of this {about.get('model_type')} is of a {name}; known are {', '.join(known)}"
            )


def ends(about: Mapping[str, Any]) -> Ends:
    """The tokens to write a target with."""
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    return Ends(*(whole(about, name) for name in names))


def rules(config: TransformerConfig) -> list[Rule]:
    found = [
        same("tokens.weight", "model.shared.weight"),
        Rule(("output_bias",), ("final_logits_bias",), _flat, _as_row),
    ]
    for ours, depth, crossing in (
        ("encoder", config.depth, False),
        ("decoder", config.decoder_depth or config.depth, True),
    ):
        found += _stack(ours, depth, crossing)
        if config.positions == "learned":
            positions = f"model.{ours}.embed_positions.weight"
            found.append(Rule((f"{ours}.positions.weight",), (positions,), _without_offset, _with_offset))
        if config.embedding_norm:
            found += _parts(f"{ours}.embedding_norm", f"model.{ours}.layernorm_embedding")
    return found


def cleaned(weights: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """With the prefix of the full model and one table of tokens, and with the output bias, zeros if it was not kept."""
    top = ("model.", "lm_head.", "final_logits_bias")
    kept = {name if name.startswith(top) else f"model.{name}": tensor for name, tensor in weights.items()}
    shared = kept.get("model.shared.weight")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        table = kept.pop(name, None)
        if shared is None:
            shared = table
        elif table is not None and not torch.equal(table, shared):
            raise CheckpointError(f"{name} is not the table that source and target share; only shared ones are served")
    if shared is not None:
        kept["model.shared.weight"] = shared
        kept.setdefault("final_logits_bias", shared.new_zeros(1, config.vocab))
    if config.positions != "learned":  # sinusoids kept as a table, which ours computes
        for stack in ("encoder", "decoder"):
            name = f"model.{stack}.embed_positions.weight"
            if name in kept:
                _check_sinusoids(kept.pop(name), name, config.width)
    return kept


def _stack(ours: str, depth: int, crossing: bool) -> list[Rule]:
    block, theirs = f"{ours}.blocks.{{n}}.", f"model.{ours}.layers.{{n}}."
    found = [
        *_parts(f"{block}attention_norm", f"{theirs}self_attn_layer_norm"),
        *_parts(f"{block}feedforward.up", f"{theirs}fc1"),
        *_parts(f"{block}feedforward.down", f"{theirs}fc2"),
        *_parts(f"{block}feedforward_norm", f"{theirs}final_layer_norm"),
        *_attention(f"{block}attention.", f"{theirs}self_attn."),
    ]
    if crossing:
        found += _parts(f"{block}cross_norm", f"{theirs}encoder_attn_layer_norm")
        found += _attention(f"{block}cross.", f"{theirs}encoder_attn.")
    return unrolled(found, depth)


def _attention(ours: str, theirs: str) -> list[Rule]:
    into = [
        joined(f"{ours}query_key_value.{part}", *(f"{theirs}{name}_proj.{part}" for name in "qkv"))
        for part in ("weight", "bias")
    ]
    return [*into, *_parts(f"{ours}out", f"{theirs}out_proj")]


def _parts(ours: str, theirs: str) -> list[Rule]:
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def _check_sinusoids(table: Tensor, name: str, width: int) -> None:
    """Raise where a table of positions is not the sinusoids that our model computes, but for rounding."""
    allowed = 1e-3 + (torch.finfo(table.dtype).eps if table.is_floating_point() else 0)
    fits = table.ndim == 2 and table.shape[1] == width
    computed = SinusoidalPositions(width, pairing="half")(torch.arange(len(table))) if fits else table
    off = (table.float() - computed).abs().max().item() if fits and len(table) else 0.0
    if not fits or not off <= allowed:  # NaN is refused too
        difference = f"differs from them by {off:.2g}" if fits else f"is {tuple(table.shape)}"
        raise CheckpointError(f"{name} is not the sinusoids of width {width} that are served: it {difference}")


def _flat(parts: list[Tensor]) -> list[Tensor]:
    return [part.flatten() for part in parts]


def _as_row(parts: list[Tensor]) -> list[Tensor]:
    return [part[None] for part in parts]


def _without_offset(parts: list[Tensor]) -> list[Tensor]:
    return [part[OFFSET:].contiguous() for part in parts]


def _with_offset(parts: list[Tensor]) -> list[Tensor]:
    return [pad(part, (0, 0, OFFSET, 0)) for part in parts]
