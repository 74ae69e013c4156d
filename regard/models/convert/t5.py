"""Convert T5 of Hugging Face, versions 1.0 and 1.1. Raffel et al. 2020, arXiv:1910.10683."""

from typing import Any

from torch import Tensor

from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightRule, concatenate
from regard.models.transformer import RelativeBuckets, TransformerConfig

# "gated-gelu" is the approximation by tanh, for checkpoints of version 1.1
ACTIVATION = fields.NameTable(
    {
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu-tanh",
        "silu": "silu",
        "gated-relu": "gated-relu",
        "gated-gelu": "gated-gelu-tanh",
        "gated-silu": "gated-silu",
    }
)
DROPOUT = Field("dropout_rate", fields.get_float, 0.1)
FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field(
        "n_positions", default=512
    ),  # relative positions have no end; published models were trained on 512
    "width": Field("d_model"),
    "depth": Field("num_layers"),
    "decoder_depth": Field("num_decoder_layers", fields.get_optional_int),
    "heads": Field("num_heads"),
    "head_width": Field("d_kv"),
    "ff_width": Field("d_ff"),
    "eps": Field("layer_norm_epsilon", fields.get_float, 1e-6),
    "activation": fields.name_field("feed_forward_proj", ACTIVATION, "relu"),
    "dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "ff_dropout": DROPOUT,
}
IMPLIED = {"order": "pre", "norm": "rms", "bias": False, "beta": 1.0, "scale_embedding": False}
BUCKETS, MAX_DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"
NAMES: dict[str, str | WeightRule] = {"tokens": "shared", "head": "lm_head"}
for _stack, _last in (("encoder", 1), ("decoder", 2)):
    _ours, _theirs = f"{_stack}.blocks.*.", f"{_stack}.block.*.layer."
    NAMES |= {
        f"{_stack}.relative": f"{_stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{_stack}.norm": f"{_stack}.final_layer_norm",
        f"{_ours}feedforward.gate": f"{_theirs}{_last}.DenseReluDense.wi_0",
        f"{_ours}feedforward.up": f"{_theirs}{_last}.DenseReluDense.wi_1",
        f"{_ours}feedforward.down": f"{_theirs}{_last}.DenseReluDense.wo",
        f"{_ours}feedforward_norm": f"{_theirs}{_last}.layer_norm",
    }
    for _number, (_part, _layer) in enumerate((("attention", "SelfAttention"), ("cross", "EncDecAttention"))):
        NAMES |= {
            f"{_ours}{_part}.query_key_value": concatenate(f"{_theirs}{_number}.{_layer}.{{}}", "qkv"),
            f"{_ours}{_part}.out": f"{_theirs}{_number}.{_layer}.o",
            f"{_ours}{_part}_norm": f"{_theirs}{_number}.layer_norm",
        }


class T5Family(Family):
    """The converter of T5, versions 1.0 and 1.1.

    Version 1.0 ties the output layer to the embeddings and scales the input of the output layer. Version 1.1 does
    neither.
    """

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        settings = super().read_settings(hf)
        # releases of transformers before 5 have no setting for the scale
        tied = fields.get_bool(hf, "scale_decoder_outputs", fields.get_bool(hf, "tie_word_embeddings", True))
        largest = fields.get_int(hf, MAX_DISTANCE, 128)
        buckets = RelativeBuckets(buckets=fields.get_int(hf, BUCKETS, 32), max_distance=largest)
        scale = settings["width"] ** -0.5 if tied else 1.0
        return {**settings, **IMPLIED, "positions": buckets, "tied": tied, "output_scale": scale}

    def write_settings(self, config: TransformerConfig) -> dict[str, Any]:
        buckets = config.positions if isinstance(config.positions, RelativeBuckets) else RelativeBuckets()
        return {
            **super().write_settings(config),
            BUCKETS: buckets.buckets,
            MAX_DISTANCE: buckets.max_distance,
            "tie_word_embeddings": config.tied,
            "scale_decoder_outputs": config.tied,
        }

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Add a missing output layer, and rename the feed-forward layer `wi` to `wi_1`.

        An untied model without an output layer gets a copy of the shared embeddings. `wi_1` is the name of the
        feed-forward layer in models with a gate.
        """
        if not config.tied and "shared.weight" in weights:
            weights.setdefault("lm_head.weight", weights["shared.weight"])
        return {name.replace(".wi.", ".wi_1."): tensor for name, tensor in weights.items()}

    def write_weights(self, weights: Any, config: Any) -> dict[str, Tensor]:
        theirs, gated = super().write_weights(weights, config), config.activation.startswith("gated-")
        return theirs if gated else {name.replace(".wi_1.", ".wi."): tensor for name, tensor in theirs.items()}


_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
FAMILIES = {
    "t5": T5Family(
        config=TransformerConfig,
        architectures={"T5Model": {}, "T5ForConditionalGeneration": {}},
        fields=FIELDS,
        names=NAMES,
        prefix="",
        tied=dict.fromkeys(_TIED, "shared.weight"),
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    ),
}
