"""Convert BART and the translation models of Marian (OPUS-MT) of Hugging Face."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import CheckpointError
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightRule, concatenate, skip_rows, squeeze
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
    "activation": fields.name_field("activation_function", fields.ACTIVATION, "gelu"),
    "scale_embedding": Field("scale_embedding", fields.get_bool, False),
    "dropout": Field("dropout", fields.get_float, 0.1),
    "attention_dropout": Field("attention_dropout", fields.get_float, 0.0),
    "ff_dropout": Field("activation_dropout", fields.get_float, 0.0),
}
STACKS = ("encoder", "decoder")
NAMES: dict[str, str | WeightRule] = {
    "tokens": "model.shared",
    "output_bias": squeeze("final_logits_bias", axes=1),
}
for _stack in STACKS:
    _block = f"model.{_stack}.layers.*."
    NAMES |= {
        f"{_stack}.positions": skip_rows(f"model.{_stack}.embed_positions", 2),
        f"{_stack}.embedding_norm": f"model.{_stack}.layernorm_embedding",
        f"{_stack}.blocks.*.feedforward.up": f"{_block}fc1",
        f"{_stack}.blocks.*.feedforward.down": f"{_block}fc2",
        f"{_stack}.blocks.*.feedforward_norm": f"{_block}final_layer_norm",
    }
    for _ours, _theirs in (("attention", "self_attn"), ("cross", "encoder_attn")):
        NAMES |= {
            f"{_stack}.blocks.*.{_ours}.query_key_value": concatenate(f"{_block}{_theirs}.{{}}_proj", "qkv"),
            f"{_stack}.blocks.*.{_ours}.out": f"{_block}{_theirs}.out_proj",
            f"{_stack}.blocks.*.{_ours}_norm": f"{_block}{_theirs}_layer_norm",
        }


@dataclass(frozen=True, kw_only=True)
class BARTFamily(Family):
    """The converter of BART and Marian. Marian is BART with sinusoidal positions.

    implied  settings of regard's configuration that are the same for all models of this model type
    """

    implied: dict[str, Any]

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        settings = super().read_settings(hf)
        fields.expect(hf, decoder_attention_heads=settings["heads"], decoder_ffn_dim=settings["ff_width"])
        if hf.get("decoder_vocab_size") is not None:
            fields.expect(hf, decoder_vocab_size=settings["vocab"])
        return {**settings, **self.implied}

    def write_settings(self, config: TransformerConfig) -> dict[str, Any]:
        decoder = {"decoder_attention_heads": config.heads, "decoder_ffn_dim": config.ff_width}
        return {**super().write_settings(config), **decoder, "forced_eos_token_id": None}

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Add an output bias of zeros if the checkpoint has none. For Marian, check and remove the position tables.

        The tables must be sinusoidal. Regard's model computes sinusoidal positions and does not store them.
        """
        # as long as the table of tokens: a damaged config.json may state any size
        tables = [weights[name] for name in ("model.shared.weight", *_TIED) if name in weights]
        if tables and "final_logits_bias" not in weights:
            weights["final_logits_bias"] = tables[0].new_zeros(1, len(tables[0]))
        if config.positions != "learned":
            for name in (f"model.{stack}.embed_positions.weight" for stack in STACKS):
                if name in weights:
                    _check_sinusoids(weights.pop(name), name, config.width)
        return weights


def _check_sinusoids(table: Tensor, name: str, width: int) -> None:
    """Check that a table of positions equals the sinusoids that regard's model computes, else raise CheckpointError.

    name   name of the table in the error message
    width  model width
    """
    if table.ndim != 2 or table.shape[1] != width:
        off = f"is {tuple(table.shape)}"
    else:
        computed = SinusoidalPositions(width, pairing="half")(torch.arange(len(table)))
        error = (table.float() - computed).abs().max().item()
        if error <= 1e-3 + torch.finfo(table.dtype).eps:  # False for NaN
            return
        off = f"differs from them by {error:.2g}"
    raise CheckpointError(f"{name} is not the sinusoids of width {width} that are supported: it {off}")


_TIED = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
_COMMON: dict[str, Any] = {
    "config": TransformerConfig,
    "fields": FIELDS,
    "names": NAMES,
    "prefix": "model.",
    "tied": dict.fromkeys(_TIED, "model.shared.weight"),
}
FAMILIES = {
    "bart": BARTFamily(
        architectures={"BartModel": {}, "BartForConditionalGeneration": {}},
        fixed={"tie_word_embeddings": True},
        implied={"positions": "learned", "embedding_norm": True, "output_bias": True},
        **_COMMON,
    ),
    "marian": BARTFamily(
        architectures={"MarianModel": {}, "MarianMTModel": {}},
        fixed={"tie_word_embeddings": True, "share_encoder_decoder_embeddings": True},
        implied={"positions": "sinusoidal-half", "output_bias": True},
        **_COMMON,
    ),
}
