"""Convert ViT of Hugging Face: ViTForImageClassification, and ViTModel as classes=0.

The pooler of a ViTModel is left out: the features are its inputs. At other resolutions than its own a model differs a
little from theirs: timm and we use antialiasing when we interpolate positions, transformers does not.
"""

from regard.base.errors import CheckpointError
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightTable, concatenate, squeeze
from regard.models.vit import ViTConfig


def get_side(hf: HFConfig, name: str, default: int) -> int:
    """The side of a square, written as one number or two equal ones."""
    size = default if hf.get(name) is None else hf[name]
    both = size if isinstance(size, list | tuple) else [size]
    if not both or not all(type(side) is int for side in both):
        raise fields.wrong_type(hf, name, "a whole number, or two")
    if len(set(both)) > 1:
        raise CheckpointError(f"config.json of this vit says {name}={size!r}; only squares are supported")
    return int(both[0])


FIELDS = {
    "image": Field("image_size", get_side, 224),
    "patch": Field("patch_size", get_side, 16),
    "channels": Field("num_channels", default=3),
    **fields.SIZES,
    "query_key_value_bias": Field("qkv_bias", fields.get_bool, True),
    "eps": Field("layer_norm_eps", fields.get_float, 1e-12),
    "dropout": Field("hidden_dropout_prob", fields.get_float, 0.0),
    "attention_dropout": Field("attention_probs_dropout_prob", fields.get_float, 0.0),
    "classes": Field("num_labels", fields.get_num_labels, 2, fields.write_labels),
}
NAMES: WeightTable = {
    "class_token": squeeze("vit.embeddings.cls_token", axes=2),
    "positions.weight": squeeze("vit.embeddings.position_embeddings", axes=1),
    "patches.projection": "vit.embeddings.patch_embeddings.projection",
    "blocks.*.attention.query_key_value": concatenate(
        "vit.encoder.layer.*.attention.attention.{}", ("query", "key", "value")
    ),
    "blocks.*.attention.out": "vit.encoder.layer.*.attention.output.dense",
    "blocks.*.feedforward.up": "vit.encoder.layer.*.intermediate.dense",
    "blocks.*.feedforward.down": "vit.encoder.layer.*.output.dense",
    "blocks.*.attention_norm": "vit.encoder.layer.*.layernorm_before",
    "blocks.*.feedforward_norm": "vit.encoder.layer.*.layernorm_after",
    "norm": "vit.layernorm",
    "head": "classifier",
}
FAMILIES = {
    "vit": Family(
        config=ViTConfig,
        architectures={"ViTForImageClassification": {}, "ViTModel": {"classes": 0}},
        fields=FIELDS,
        names=NAMES,
        prefix="vit.",
        fixed={"hidden_act": "gelu"},
        ignored=("vit.pooler.*",),
    )
}
