"""Convert ViT of Hugging Face: ViTForImageClassification, and ViTModel as classes=0.

The pooler of a ViTModel is left out: the features are its inputs. At other resolutions than its own a model differs a
little from theirs: timm and we use antialiasing when we interpolate positions, transformers does not.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.weight_rules import BOTH, WeightRule, concatenate, expand_blocks, rename_all, squeeze
from regard.models.vit import ViTConfig

CONFIG = ViTConfig
CLASSIFIER, FEATURES = "ViTForImageClassification", "ViTModel"


def get_side(hf: HFConfig, name: str, default: int) -> int:
    """The side of a square, written as one number or two equal ones."""
    size = default if hf.get(name) is None else hf[name]
    both = size if isinstance(size, list | tuple) else [size]
    if not both or not all(isinstance(side, int) and not isinstance(side, bool) for side in both):
        raise fields.wrong_type(hf, name, "a whole number, or two")
    if len(set(both)) > 1:
        raise CheckpointError(f"config.json of this vit says {name}={size!r}; only squares are supported")
    return int(both[0])


FIELDS = {
    "image": Field("image_size", get_side, 224),
    "patch": Field("patch_size", get_side, 16),
    "channels": Field("num_channels", default=3),
    "width": Field("hidden_size"),
    "depth": Field("num_hidden_layers"),
    "heads": Field("num_attention_heads"),
    "ff_width": Field("intermediate_size"),
    "query_key_value_bias": Field("qkv_bias", fields.get_bool, True),
    "eps": Field("layer_norm_eps", fields.get_float, 1e-12),
    "dropout": Field("hidden_dropout_prob", fields.get_float, 0.0),
    "attention_dropout": Field("attention_probs_dropout_prob", fields.get_float, 0.0),
}
BLOCK = {
    "attention.out": "attention.output.dense",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "attention_norm": "layernorm_before",
    "feedforward_norm": "layernorm_after",
}


def read_config(hf: HFConfig) -> ViTConfig:
    """Our configuration from their config.json."""
    fields.expect(hf, hidden_act="gelu")
    features = fields.get_architecture(hf, CLASSIFIER, FEATURES) == FEATURES
    return ViTConfig(**fields.read_fields(FIELDS, hf), classes=0 if features else fields.get_num_labels(hf))


def write_config(config: ViTConfig, model_type: str) -> dict[str, Any]:
    """Their config.json from our configuration."""
    supported = {"pool": "class", "head": "linear", "positions": "learned", "attention": "full", "drop_path": 0.0}
    different = [name for name, value in supported.items() if getattr(config, name) != value]
    if different:
        raise ConfigError(f"it has no {', '.join(f'{name}={getattr(config, name)!r}' for name in different)}")
    return {
        "model_type": model_type,
        "architectures": [CLASSIFIER if config.classes else FEATURES],
        **fields.write_fields(FIELDS, config),
        "hidden_act": "gelu",
        **(fields.label_names(config.classes) if config.classes else {}),
    }


def rules(config: ViTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    prefix = "vit." if config.classes else ""
    block, theirs = "blocks.{n}.", f"{prefix}encoder.layer.{{n}}."
    names = {f"{block}{ours}": f"{theirs}{other}" for ours, other in BLOCK.items()}
    names |= {"patches.projection": f"{prefix}embeddings.patch_embeddings.projection", "norm": f"{prefix}layernorm"}
    names |= {"head": "classifier"} if config.classes else {}
    inner = [f"{theirs}attention.attention.{name}" for name in ("query", "key", "value")]
    biased = BOTH if config.query_key_value_bias else ("weight",)
    return expand_blocks(
        [
            squeeze("class_token", f"{prefix}embeddings.cls_token", axes=2),
            squeeze("positions.weight", f"{prefix}embeddings.position_embeddings", axes=1),
            *rename_all(names),
            *concatenate(f"{block}attention.query_key_value", inner, biased),
        ],
        config.depth,
    )


def clean_weights(weights: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Drop the pooler of a ViTModel."""
    pooler = () if config.classes else ("pooler.dense.weight", "pooler.dense.bias")
    return {name: tensor for name, tensor in weights.items() if name not in pooler}
