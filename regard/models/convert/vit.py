"""ViT of Hugging Face: ViTForImageClassification, and ViTModel as classes=0.

A ViTModel's pooler, where it has one, is left out: the features are what would go into it. At another resolution than
its own a model differs a little from theirs: timm and we smooth while interpolating positions, transformers does not.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert.settings import classes, expect, flag, real, whole, words, wrong
from regard.models.convert.weight_rules import Rule, joined, same, squeezed, unrolled
from regard.models.vit import ViTConfig

CLASSIFIER, FEATURES = "ViTForImageClassification", "ViTModel"
LINEAR = {
    "attention.out": "attention.output.dense",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "attention_norm": "layernorm_before",
    "feedforward_norm": "layernorm_after",
}


def config(about: Mapping[str, Any]) -> ViTConfig:
    expect(about, hidden_act="gelu")
    architecture = (words(about, "architectures") or [CLASSIFIER])[0]
    if architecture not in (CLASSIFIER, FEATURES):
        raise CheckpointError(f"config.json of this vit says {architecture}; served are {CLASSIFIER} and {FEATURES}")
    return ViTConfig(
        image=_side(about, "image_size", 224),
        patch=_side(about, "patch_size", 16),
        channels=whole(about, "num_channels", 3),
        classes=0 if architecture == FEATURES else classes(about),
        width=whole(about, "hidden_size"),
        depth=whole(about, "num_hidden_layers"),
        heads=whole(about, "num_attention_heads"),
        ff_width=whole(about, "intermediate_size"),
        query_key_value_bias=flag(about, "qkv_bias", True),
        eps=real(about, "layer_norm_eps", 1e-12),
        dropout=real(about, "hidden_dropout_prob", 0.0),
        attention_dropout=real(about, "attention_probs_dropout_prob", 0.0),
    )


def about(config: Any, model_type: str) -> dict[str, Any]:
    if not isinstance(config, ViTConfig):
        raise ConfigError(f"it is made from a ViTConfig, not {type(config).__name__}")
    unlike = [
        f"{name}={getattr(config, name)!r}"
        for name, usual in (("pool", "class"), ("head", "linear"), ("positions", "learned"), ("attention", "full"))
        if getattr(config, name) != usual
    ]
    if unlike or config.drop_path:
        raise ConfigError(f"it has no {', '.join(unlike or [f'drop_path={config.drop_path}'])}")
    numbers = range(config.classes)
    return {
        "model_type": model_type,
        "architectures": [CLASSIFIER if config.classes else FEATURES],
        "image_size": config.image,
        "patch_size": config.patch,
        "num_channels": config.channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width if config.ff_width is None else config.ff_width,
        "hidden_act": "gelu",
        "qkv_bias": config.query_key_value_bias,
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        **({"id2label": {str(n): f"LABEL_{n}" for n in numbers}} if config.classes else {}),
        **({"label2id": {f"LABEL_{n}": n for n in numbers}} if config.classes else {}),
    }


def rules(config: ViTConfig) -> list[Rule]:
    prefix = "vit." if config.classes else ""
    block, theirs = "blocks.{n}.", f"{prefix}encoder.layer.{{n}}."
    biased = ("weight", "bias")
    inner = biased if config.query_key_value_bias else ("weight",)
    three = [f"{theirs}attention.attention.{name}" for name in ("query", "key", "value")]
    each = [joined(f"{block}attention.query_key_value.{part}", *(f"{x}.{part}" for x in three)) for part in inner]
    for ours, other in LINEAR.items():
        each += [same(f"{block}{ours}.{part}", f"{theirs}{other}.{part}") for part in biased]
    projection = f"{prefix}embeddings.patch_embeddings.projection"
    once = [
        squeezed("class_token", f"{prefix}embeddings.cls_token", axes=2),
        squeezed("positions.weight", f"{prefix}embeddings.position_embeddings", axes=1),
        *(same(f"patches.projection.{part}", f"{projection}.{part}") for part in biased),
        *(same(f"norm.{part}", f"{prefix}layernorm.{part}") for part in biased),
        *(same(f"head.{part}", f"classifier.{part}") for part in biased if config.classes),
    ]
    return unrolled(once + each, config.depth)


def cleaned(weights: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Without the pooler of a ViTModel."""
    pooler = () if config.classes else ("pooler.dense.weight", "pooler.dense.bias")
    return {name: tensor for name, tensor in weights.items() if name not in pooler}


def _side(about: Mapping[str, Any], name: str, usual: int) -> int:
    size = usual if about.get(name) is None else about[name]
    both = size if isinstance(size, list | tuple) else [size]
    if not both or not all(isinstance(side, int) and not isinstance(side, bool) for side in both):
        raise wrong(about, name, "a whole number, or two")
    sides = set(both)
    if len(sides) > 1:
        raise CheckpointError(f"config.json of this vit says {name}={size!r}; only squares are served")
    return int(sides.pop())
