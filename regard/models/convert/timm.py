"""ViT and DaViT of timm: their state dicts in our terms.

timm keeps no configuration beside the weights of these, so sizes are read from shapes. What shapes do not tell, the
number of heads above all, comes from our presets or from a hint.

Two of timm's models may have the same names and shapes and yet compute different things, and nothing in a state dict
tells them apart. Assumed is what timm's constructors have by default:

vit    act_layer is GELU; a model with a class token reads its logits from that token (global_pool="token"); norms have
       eps=1e-6, for which eps=... is a hint. A model without a class token takes the mean of its normalised patches
davit  cpe_act=False and channel_attn_v2=False; act_layer is GELU; window=7 and eps=1e-5, for which there are hints

Ours has no other activation and no other pooling, so what was built otherwise cannot be served, and is not noticed:
compare logits once.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from regard.base.config import override
from regard.base.errors import CheckpointError, ConfigError
from regard.models.convert.weight_rules import Rule, read, same, squeezed, unrolled
from regard.models.davit import DaViTConfig
from regard.models.model import Model
from regard.models.saving import assembled
from regard.models.vit import PRESETS as VITS, ViTConfig

BOTH = ("weight", "bias")
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
    hints  settings of its configuration that shapes do not tell: heads, eps, of a davit window. What no hint can say is
           assumed to be as timm has it by default, see above
    """
    if kind not in READERS:
        raise ConfigError(f"kind is one of {', '.join(READERS)}, not {kind!r}")
    config, ours = READERS[kind](weights, **hints)
    return assembled(config, ours, f"timm's {kind}")


def read_vit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Our configuration and weights of timm's VisionTransformer; hints such as heads=4 say what shapes do not."""
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
            f"{source} {token} cls_token, so pool={config.pool!r}; pool={hints['pool']!r} is not served"
        )
    config = override(config, hints)
    return config, read(vit_rules(config), weights, source)


def read_davit(weights: Mapping[str, Tensor], **hints: Any) -> tuple[DaViTConfig, dict[str, Tensor]]:
    """Our configuration and weights of timm's DaVit; hints such as window=12 say what shapes do not."""
    source = "timm's davit"
    channels = _shape(weights, "stem.conv.weight", source)[1]
    stages = range(_count(weights, "stages."))
    up = [_shape(weights, f"stages.{s}.blocks.0.0.mlp.fc1.weight", source) for s in stages]
    widths = tuple(shape[1] for shape in up)
    if "heads" not in hints and any(width % DAVIT_HEAD_WIDTH for width in widths):
        raise CheckpointError(f"{source} has widths {widths}, from which its heads cannot be told; say heads=(1, 2, 4)")
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
    return config, read(davit_rules(config), weights, source)


READERS: dict[str, Callable[..., tuple[Any, dict[str, Tensor]]]] = {"vit": read_vit, "davit": read_davit}


def vit_rules(config: ViTConfig) -> list[Rule]:
    block, inner = "blocks.{n}.", BOTH if config.query_key_value_bias else ("weight",)
    each = [same(f"{block}attention.query_key_value.{part}", f"{block}attn.qkv.{part}") for part in inner]
    each += [
        same(f"{block}{ours}.{part}", f"{block}{theirs}.{part}") for ours, theirs in VIT_BLOCK.items() for part in BOTH
    ]
    once = [
        squeezed("positions.weight", "pos_embed", axes=1),
        *([squeezed("class_token", "cls_token", axes=2)] if config.pool == "class" else []),
        *(same(f"patches.projection.{part}", f"patch_embed.proj.{part}") for part in BOTH),
        *(same(f"norm.{part}", f"norm.{part}") for part in BOTH),
        *(same(f"head.{part}", f"head.{part}") for part in BOTH if config.classes),
    ]
    return unrolled(once + each, config.depth)


def davit_rules(config: DaViTConfig) -> list[Rule]:
    inner = BOTH if config.query_key_value_bias else ("weight",)
    names = {"stem.projection": "stem.conv", "stem.norm": "stem.norm", "norm": "head.norm"}
    names |= {"head": "head.fc"} if config.classes else {}
    rules: list[Rule] = []
    for stage, depth in enumerate(config.depths):
        if stage:
            here = f"stages.{stage}"
            names |= {f"{here}.coarser.{ours}": f"{here}.downsample.{theirs}" for ours, theirs in COARSER.items()}
        for pair in range(depth):
            block = f"stages.{stage}.blocks.{pair}"
            into, theirs_into = f"{block}.window.attention.query_key_value", f"{block}.0.attn.qkv"
            rules += [same(f"{into}.{part}", f"{theirs_into}.{part}") for part in inner]
            rules += [_turned_about(f"{block}.channel.", f"{block}.1.", part) for part in inner]
            for ours, theirs in (("window", 0), ("channel", 1)):
                names |= {f"{block}.{ours}.{a}": f"{block}.{theirs}.{b}" for a, b in DAVIT_BLOCK.items()}
    return rules + [same(f"{ours}.{part}", f"{theirs}.{part}") for ours, theirs in names.items() for part in BOTH]


COARSER = {"norm": "norm", "projection": "conv"}


def _turned_about(ours: str, theirs: str, part: str) -> Rule:
    """Between channels timm compares its k with its v and mixes its q: to us these are q, k and v."""
    return Rule(
        (f"{ours}attention.query_key_value.{part}",),
        (f"{theirs}attn.qkv.{part}",),
        lambda parts: [parts[0].roll(-(len(parts[0]) // 3), 0)],
        lambda parts: [parts[0].roll(len(parts[0]) // 3, 0)],
    )


def _vit_heads(width: int) -> int:
    """Heads are 64 wide in most of these models, but not in the huge one: only known widths are answered for."""
    known = {config.width: config.heads for config in VITS.values()}
    if width not in known:
        raise CheckpointError(f"timm's vit is {width} wide, from which its heads cannot be told; say heads=...")
    return known[width]


def _shape(weights: Mapping[str, Tensor], name: str, source: str) -> tuple[int, ...]:
    if name not in weights:
        raise CheckpointError(f"{source} lacks {name}, from which its sizes are read")
    return tuple(weights[name].shape)


def _count(weights: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbers follow the prefix."""
    return len({name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)})


def _square_root(count: int) -> int:
    root = round(count**0.5)
    if root * root != count:
        raise CheckpointError(
            f"timm's vit has positions for {count} patches, which are no square; only squares are served"
        )
    return root
