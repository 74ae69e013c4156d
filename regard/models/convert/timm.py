"""Convert ViT and DaViT of timm from their state dicts.

A state dict has no configuration, so sizes are read from the shapes of the weights. What the shapes do not show, such
as the number of heads, comes from regard's presets or from a keyword argument (a hint).

Two of timm's models can have the same names and shapes and compute different things. timm's defaults are assumed:

vit    act_layer is GELU; a model with a class token reads its logits from that token (global_pool="token"), a model
       without one from the mean of its normalised patches; norms have eps=1e-6, or the hint eps=
davit  cpe_act=False and channel_attn_v2=False; act_layer is GELU; window=7 and eps=1e-5, or the hints

A model that was built with another activation or pooling is not supported, and this cannot be detected: compare the
logits once.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from regard.base.config import override
from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert.weight_rules import WeightRule, WeightTable, read_weights, squeeze
from regard.models.davit import DaViTConfig
from regard.models.model import Config, Model
from regard.models.presets import build_from_config
from regard.models.saving import build_with_weights
from regard.models.vit import PRESETS as VITS, ViTConfig

ConfigType = TypeVar("ConfigType", bound=Config)
BLOCK = {
    "attention_norm": "norm1",
    "attention.out": "attn.proj",
    "attention.query_key_value": "attn.qkv",
    "feedforward_norm": "norm2",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
    "attention_positions": "cpe1.proj",
    "feedforward_positions": "cpe2.proj",
}
VIT_NAMES: WeightTable = {
    "positions.weight": squeeze("pos_embed", axes=1),
    "class_token": squeeze("cls_token", axes=2),
    "patches.projection": "patch_embed.proj",
    "norm": "norm",
    "head": "head",
    **{f"blocks.*.{ours}": f"blocks.*.{theirs}" for ours, theirs in BLOCK.items()},
}
DAVIT_NAMES: WeightTable = {
    "stem.projection": "stem.conv",
    "stem.norm": "stem.norm",
    "norm": "head.norm",
    "head": "head.fc",
    "stages.*.downsample.norm": "stages.*.downsample.norm",
    "stages.*.downsample.projection": "stages.*.downsample.conv",
    **{f"stages.*.blocks.*.window.{ours}": f"stages.*.blocks.*.0.{theirs}" for ours, theirs in BLOCK.items()},
    **{f"stages.*.blocks.*.channel.{ours}": f"stages.*.blocks.*.1.{theirs}" for ours, theirs in BLOCK.items()},
    # channel attention of timm compares its k with its v and mixes its q: ours calls these q, k and v
    "stages.*.blocks.*.channel.attention.query_key_value": WeightRule(
        ("stages.*.blocks.*.1.attn.qkv",),
        lambda parts: parts[0].roll(-(len(parts[0]) // 3), 0),
        lambda whole, config: [whole.roll(len(whole) // 3, 0)],
    ),
}
DAVIT_HEAD_WIDTH = 32  # the width of a head in all models of the paper and of timm


def from_timm(weights: Mapping[str, Tensor], kind: str, **hints: Any) -> Model:
    """Build a model of regard from a timm state dict and return it in eval mode.

    kind   "vit" or "davit"
    hints  settings that the shapes do not show: heads, eps, and window of a davit
    """
    if kind not in READERS:
        raise ConfigError(f"kind is one of {', '.join(READERS)}, not {kind!r}")
    config, ours = READERS[kind](weights, **hints)
    return build_with_weights(config, ours, f"timm's {kind}")


def read_vit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Convert the state dict of timm's VisionTransformer. Returns regard's configuration and state dict.

    hints  settings that the shapes do not show, such as heads=4
    """
    source = "timm's vit"
    if any(name.startswith("fc_norm.") for name in weights):
        raise CheckpointError(
            f"{source} has fc_norm, which normalises after the mean over patches; ours normalises before it, "
            "as timm does with fc_norm=False"
        )
    width, channels, patch, _ = _shape(weights, "patch_embed.proj.weight", source)
    table, first = _shape(weights, "pos_embed", source)[1], 1 if "cls_token" in weights else 0
    config = ViTConfig(
        image=_square_root(table - first) * patch,
        patch=patch,
        channels=channels,
        classes=weights["head.weight"].shape[0] if "head.weight" in weights else 0,
        width=width,
        depth=_count(weights, "blocks."),
        heads=hints.pop("heads", None) or _vit_heads(width),
        ff_width=_shape(weights, "blocks.0.mlp.fc1.weight", source)[0],
        pool="class" if first else "mean",
        query_key_value_bias="blocks.0.attn.qkv.bias" in weights,
    )
    return _read(VIT_NAMES, override(config, hints), weights, source)


def read_davit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[DaViTConfig, dict[str, Tensor]]:
    """Convert the state dict of timm's DaVit. Returns regard's configuration and state dict.

    hints  settings that the shapes do not show, such as window=12
    """
    source = "timm's davit"
    channels = _shape(weights, "stem.conv.weight", source)[1]
    stages = range(_count(weights, "stages."))
    up = [_shape(weights, f"stages.{s}.blocks.0.0.mlp.fc1.weight", source) for s in stages]
    widths = tuple(shape[1] for shape in up)
    if "heads" not in hints and any(width % DAVIT_HEAD_WIDTH for width in widths):
        raise CheckpointError(
            f"{source} has widths {widths}, from which its heads cannot be inferred; pass heads=(1, 2, 4)"
        )
    config = DaViTConfig(
        channels=channels,
        classes=weights["head.fc.weight"].shape[0] if "head.fc.weight" in weights else 0,
        widths=widths,
        depths=tuple(_count(weights, f"stages.{s}.blocks.") for s in stages),
        heads=tuple(hints.pop("heads", None) or (width // DAVIT_HEAD_WIDTH for width in widths)),
        ff_factor=up[0][0] // up[0][1],
        query_key_value_bias="stages.0.blocks.0.0.attn.qkv.bias" in weights,
    )
    return _read(DAVIT_NAMES, override(config, hints), weights, source)


READERS: dict[str, Callable[..., tuple[Any, dict[str, Tensor]]]] = {"vit": read_vit, "davit": read_davit}


def _read(
    names: WeightTable, config: ConfigType, weights: Mapping[str, Tensor], source: str
) -> tuple[ConfigType, dict[str, Tensor]]:
    ours = build_from_config(config, device="meta").state_dict()
    return config, read_weights(names, weights, ours, source)


def _vit_heads(width: int) -> int:
    """Return the number of heads of regard's ViT preset with this width. Raises CheckpointError if there is none."""
    known = {config.width: config.heads for config in VITS.values()}
    if width not in known:
        raise CheckpointError(f"timm's vit is {width} wide, from which its heads cannot be inferred; pass heads=...")
    return known[width]


def _shape(weights: Mapping[str, Tensor], name: str, source: str) -> tuple[int, ...]:
    if name not in weights:
        raise CheckpointError(f"{source} lacks {name}, from which its sizes are read")
    return tuple(weights[name].shape)


def _count(weights: Mapping[str, Tensor], prefix: str) -> int:
    """Count the different name components directly after `prefix`, such as the number of blocks after "blocks."."""
    return len({name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)})


def _square_root(count: int) -> int:
    root = round(count**0.5)
    if root * root != count:
        raise CheckpointError(
            f"timm's vit has positions for {count} patches, which is not a square; only squares are supported"
        )
    return root
