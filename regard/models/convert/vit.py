"""Convert ViT, DeiT and DINOv2 of Hugging Face: models with a classifier, and base models without one (classes=0).

The pooler of a base model is dropped, so that the model returns the inputs of the pooler. At another resolution than a
model was trained for, results differ slightly: regard and timm interpolate positions with antialiasing, transformers
without. DeiT: Touvron et al. 2020, arXiv:2012.12877. DINOv2: Oquab et al. 2023, arXiv:2304.07193.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from regard.models.convert import config_fields as fields
from regard.models.convert.config_fields import Field, HFConfig
from regard.models.convert.family import Family
from regard.models.convert.weight_rules import WeightRule, concatenate, squeeze
from regard.models.vit import ViTConfig


def get_side(hf: HFConfig, name: str, default: int) -> int:
    """Return a size of a config.json, such as image_size, that is one number or two equal numbers.

    Two different numbers raise CheckpointError, because regard supports only squares.
    """
    size = default if hf.get(name) is None else hf[name]
    both = size if isinstance(size, list | tuple) else [size]
    if not both or not all(type(side) is int for side in both):
        raise fields.wrong_type(hf, name, "a whole number, or two")
    if len(set(both)) > 1:
        raise fields.wrong_type(hf, name, "a square")
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
DINOV2_FIELDS = {name: field for name, field in FIELDS.items() if name != "ff_width"}
DINOV2_FIELDS["eps"] = Field("layer_norm_eps", fields.get_float, 1e-6)


def encoder_names(prefix: str, up: str, down: str, norms: tuple[str, str]) -> dict[str, str | WeightRule]:
    """Return a table that maps regard's names of weights to Hugging Face's names.

    prefix    start of all Hugging Face names
    up, down  Hugging Face's names of the first and the second feed-forward layer of a block
    norms     Hugging Face's names of the norms before attention and before the feed-forward network
    """
    block = f"{prefix}.encoder.layer.*."
    return {
        "class_token": squeeze(f"{prefix}.embeddings.cls_token", axes=2),
        "distillation_token": squeeze(f"{prefix}.embeddings.distillation_token", axes=2),
        "positions.weight": squeeze(f"{prefix}.embeddings.position_embeddings", axes=1),
        "patches.projection": f"{prefix}.embeddings.patch_embeddings.projection",
        "blocks.*.attention.query_key_value": concatenate(
            f"{block}attention.attention.{{}}", ("query", "key", "value")
        ),
        "blocks.*.attention.out": f"{block}attention.output.dense",
        "blocks.*.feedforward.up": f"{block}{up}",
        "blocks.*.feedforward.down": f"{block}{down}",
        "blocks.*.attention_norm": f"{block}{norms[0]}",
        "blocks.*.feedforward_norm": f"{block}{norms[1]}",
        "norm": f"{prefix}.layernorm",
        "head": "classifier",
    }


def _deit_heads(part: str) -> list[str]:
    return [f"cls_classifier.{part}", f"distillation_classifier.{part}"]


class DeiTFamily(Family):
    """The converter of DeiT, which has a class token and a distillation token, each with a classifier.

    The logits of the model are the mean of the logits of both classifiers.
    """

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Join the two classifiers into one layer, which computes the mean of their logits.

        DeiTForImageClassification has only the classifier of the class token. Zeros are added for the distillation
        token, so that the logits depend on the class token only.
        """
        for part in ("weight", "bias"):
            both = [weights.pop(name) for name in _deit_heads(part) if name in weights]
            if len(both) == 2:
                weights[f"classifier.{part}"] = torch.cat(both, -1) / 2 if part == "weight" else (both[0] + both[1]) / 2
            elif part == "weight" and "classifier.weight" in weights:
                one = weights["classifier.weight"]
                weights["classifier.weight"] = torch.cat([one, torch.zeros_like(one)], -1)
        return weights

    def write_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        theirs = super().write_weights(weights, config)
        if config.classes:
            halves, bias = (2 * theirs.pop("classifier.weight")).chunk(2, -1), theirs.pop("classifier.bias")
            theirs |= zip(_deit_heads("weight"), (half.contiguous() for half in halves), strict=True)
            theirs |= zip(_deit_heads("bias"), (bias, bias.clone()), strict=True)
        return theirs


LAYER_SCALES = {"layer_scale1.lambda1": "attention.output.dense", "layer_scale2.lambda1": "mlp.fc2"}


class DINOv2Family(Family):
    """The converter of DINOv2, which multiplies the output of each attention and feed-forward layer by a layer scale.

    Regard's ViT has no layer scale. So on import, it is multiplied into the weights that compute these outputs.
    """

    def read_settings(self, hf: HFConfig) -> dict[str, Any]:
        settings = super().read_settings(hf)
        return {**settings, "ff_width": int(settings["width"] * fields.get_float(hf, "mlp_ratio", 4.0))}

    def write_settings(self, config: Any) -> dict[str, Any]:
        return {**super().write_settings(config), "mlp_ratio": config.ff_width // config.width}

    def clean_weights(self, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        for number, (scale, layer) in product(range(config.depth), LAYER_SCALES.items()):
            block = f"dinov2.encoder.layer.{number}."
            factor = weights.pop(f"{block}{scale}", torch.ones(1))
            for name in (f"{block}{layer}.weight", f"{block}{layer}.bias"):
                if name in weights:
                    weights[name] = weights[name] * (factor[:, None] if name.endswith("weight") else factor)
        return weights

    def write_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        theirs = super().write_weights(weights, config)
        ones = torch.ones_like(weights["norm.weight"])
        layers = [f"dinov2.encoder.layer.{number}.{scale}" for number in range(config.depth) for scale in LAYER_SCALES]
        return {**theirs, **{name: ones.clone() for name in layers}}


VIT_BLOCK = ("intermediate.dense", "output.dense", ("layernorm_before", "layernorm_after"))
FAMILIES = {
    "vit": Family(
        config=ViTConfig,
        architectures={"ViTForImageClassification": {}, "ViTModel": {"classes": 0}},
        fields=FIELDS,
        names=encoder_names("vit", *VIT_BLOCK),
        prefix="vit.",
        fixed={"hidden_act": "gelu"},
        ignored=("vit.pooler.*",),
    ),
    "deit": DeiTFamily(
        config=ViTConfig,
        architectures={
            "DeiTForImageClassification": {"pool": "class-distilled"},
            "DeiTForImageClassificationWithTeacher": {"pool": "class-distilled"},
            "DeiTModel": {"pool": "class-distilled", "classes": 0},
        },
        fields=FIELDS,
        names=encoder_names("deit", *VIT_BLOCK),
        prefix="deit.",
        fixed={"hidden_act": "gelu"},
        ignored=("deit.pooler.*", "deit.embeddings.mask_token"),
    ),
    "dinov2": DINOv2Family(
        config=ViTConfig,
        architectures={
            "Dinov2Model": {"pool": "class", "classes": 0},
            "Dinov2ForImageClassification": {"pool": "class-mean"},
        },
        fields=DINOV2_FIELDS,
        names=encoder_names("dinov2", "mlp.fc1", "mlp.fc2", ("norm1", "norm2")),
        prefix="dinov2.",
        fixed={"hidden_act": "gelu", "use_swiglu_ffn": False},
        ignored=("dinov2.embeddings.mask_token",),
    ),
}
