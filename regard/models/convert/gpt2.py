"""Convert GPT-2 of Hugging Face: GPT2LMHeadModel and GPT2Model."""

from typing import Any

from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightTable, transpose
from regard.models.gpt import GPTConfig

FIELDS = {
    "vocab": Field("vocab_size"),
    "context": Field("n_positions"),
    "width": Field("n_embd"),
    "depth": Field("n_layer"),
    "heads": Field("n_head"),
    "ff_width": Field("n_inner", fields.get_optional_int),
    "eps": Field("layer_norm_epsilon", fields.get_float, 1e-5),
    "activation": fields.name_field("activation_function", fields.ACTIVATION, "gelu_new"),
    "tied": Field("tie_word_embeddings", fields.get_bool, True),
    "dropout": Field("resid_pdrop", fields.get_float, 0.1),  # embd_pdrop too: where they differ, only training does
    "attention_dropout": Field("attn_pdrop", fields.get_float, 0.1),
}
NAMES: WeightTable = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks.*.attention.query_key_value": transpose("transformer.h.*.attn.c_attn"),
    "blocks.*.attention.out": transpose("transformer.h.*.attn.c_proj"),
    "blocks.*.feedforward.up": transpose("transformer.h.*.mlp.c_fc"),
    "blocks.*.feedforward.down": transpose("transformer.h.*.mlp.c_proj"),
    "blocks.*.attention_norm": "transformer.h.*.ln_1",
    "blocks.*.feedforward_norm": "transformer.h.*.ln_2",
}


class GPT2Family(Family):
    """The converter of GPT-2 between Hugging Face and regard."""

    def write_settings(self, config: Any) -> dict[str, Any]:
        return {**super().write_settings(config), "embd_pdrop": config.dropout}


FAMILIES = {
    "gpt2": GPT2Family(
        config=GPTConfig,
        architectures={"GPT2Model": {}, "GPT2LMHeadModel": {}},
        fields=FIELDS,
        names=NAMES,
        prefix="transformer.",
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        tied={"lm_head.weight": "transformer.wte.weight"},
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks
    )
}
