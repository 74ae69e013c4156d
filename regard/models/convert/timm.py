"""Convert ViT and DaViT of timm from their state dicts.

A state dict has no configuration, so sizes are read from shapes. What shapes do not show, such as the number of heads,
comes from our presets or from a hint.

Two of timm's models can have the same names and shapes and compute different things. timm's defaults are assumed:

vit    act_layer is GELU; a model with a class token reads its logits from that token (global_pool="token"); norms have
       eps=1e-6, or the hint eps=. A model without a class token takes the mean of its normalised patches
davit  cpe_act=False and channel_attn_v2=False; act_layer is GELU; window=7 and eps=1e-5, or the hints

A model that was built with another activation or pooling is not supported, and this cannot be detected: compare the
logits once.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from regard.base.config import override
from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert.weight_rules import BOTH, WeightRule, expand_blocks, read_weights, rename_all, squeeze
from regard.models.davit import DaViTConfig
from regard.models.model import Model
from regard.models.saving import build_with_weights
from regard.models.vit import PRESETS as VITS, ViTConfig

VIT_BLOCK = {
    "attention_norm": "norm1",
    "attention.out": "attn.proj",
    "feedforward_norm": "norm2",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}
DAVIT_BLOCK = {
    **VIT_BLOCK,
    "attention_positions": "cpe1.proj",
    "feedforward_positions": "cpe2.proj",
}
DAVIT_HEAD_WIDTH = 32  # in all models of the paper and of timm


def from_timm(weights: Mapping[str, Tensor], kind: str, **hints: Any) -> Model:
    """The model of a timm state dict, in eval mode.

    kind   "vit" or "davit"
    hints  settings that shapes do not show: heads, eps, and window of a davit
    """
    if kind not in READERS:
        raise ConfigError(f"kind is one of {', '.join(READERS)}, not {kind!r}")
    config, ours = READERS[kind](weights, **hints)
    return build_with_weights(config, ours, f"timm's {kind}")


def read_vit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Our configuration and weights of timm's VisionTransformer; hints: settings such as heads=4."""
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
    if hints.get("pool", config.pool) != config.pool:
        token = "has" if first else "lacks"
        raise CheckpointError(
            f"{source} {token} cls_token, so pool={config.pool!r}; pool={hints['pool']!r} is not supported"
        )
    config = override(config, hints)
    return config, read_weights(vit_rules(config), weights, source)


def read_davit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[DaViTConfig, dict[str, Tensor]]:
    """Our configuration and weights of timm's DaVit; hints: settings such as window=12."""
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
    config = override(config, hints)
    return config, read_weights(davit_rules(config), weights, source)


READERS: dict[str, Callable[..., tuple[Any, dict[str, Tensor]]]] = {"vit": read_vit, "davit": read_davit}


def vit_rules(config: ViTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    block = "blocks.{n}."
    names = {f"{block}{ours}": f"{block}{theirs}" for ours, theirs in VIT_BLOCK.items()}
    names |= {"patches.projection": "patch_embed.proj", "norm": "norm"} | ({"head": "head"} if config.classes else {})
    biased = BOTH if config.query_key_value_bias else ("weight",)
    return expand_blocks(
        [
            squeeze("positions.weight", "pos_embed", axes=1),
            *([squeeze("class_token", "cls_token", axes=2)] if config.pool == "class" else []),
            *rename_all(names),
            *rename_all({f"{block}attention.query_key_value": f"{block}attn.qkv"}, biased),
        ],
        config.depth,
    )


def davit_rules(config: DaViTConfig) -> list[WeightRule]:
    """The rules that convert the weights, in both directions."""
    biased = BOTH if config.query_key_value_bias else ("weight",)
    names = {"stem.projection": "stem.conv", "stem.norm": "stem.norm", "norm": "head.norm"}
    names |= {"head": "head.fc"} if config.classes else {}
    rules: list[WeightRule] = []
    for stage, depth in enumerate(config.depths):
        if stage:
            ours, theirs = f"stages.{stage}.downsample.", f"stages.{stage}.downsample."
            names |= {f"{ours}norm": f"{theirs}norm", f"{ours}projection": f"{theirs}conv"}
        for pair in range(depth):
            block = f"stages.{stage}.blocks.{pair}"
            rules += rename_all({f"{block}.window.attention.query_key_value": f"{block}.0.attn.qkv"}, biased)
            rules += [_roll_projections(f"{block}.channel.", f"{block}.1.", part) for part in biased]
            for kind, number in (("window", 0), ("channel", 1)):
                names |= {
                    f"{block}.{kind}.{ours}": f"{block}.{number}.{theirs}" for ours, theirs in DAVIT_BLOCK.items()
                }
    return rules + rename_all(names)


def _roll_projections(ours: str, theirs: str, part: str) -> WeightRule:
    """Channel attention of timm compares its k with its v and mixes its q: ours calls these q, k and v."""
    return WeightRule(
        (f"{ours}attention.query_key_value.{part}",),
        (f"{theirs}attn.qkv.{part}",),
        lambda parts: [parts[0].roll(-(len(parts[0]) // 3), 0)],
        lambda parts: [parts[0].roll(len(parts[0]) // 3, 0)],
    )


def _vit_heads(width: int) -> int:
    """The number of heads of the preset of this width; most have heads of width 64, but not the huge one."""
    known = {config.width: config.heads for config in VITS.values()}
    if width not in known:
        raise CheckpointError(f"timm's vit is {width} wide, from which its heads cannot be inferred; pass heads=...")
    return known[width]


def _shape(weights: Mapping[str, Tensor], name: str, source: str) -> tuple[int, ...]:
    if name not in weights:
        raise CheckpointError(f"{source} lacks {name}, from which its sizes are read")
    return tuple(weights[name].shape)


def _count(weights: Mapping[str, Tensor], prefix: str) -> int:
    """How many different names follow the prefix."""
    return len({name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)})


def _square_root(count: int) -> int:
    root = round(count**0.5)
    if root * root != count:
        raise CheckpointError(
            f"timm's vit has positions for {count} patches, which is not a square; only squares are supported"
        )
    return root
