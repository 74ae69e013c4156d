"""Attention you can run, see and prove: an attention and Transformer workbench for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are loaded on first use, so that `regard --help` and tools that only read the version import no torch.
_WHERE = {
    "regard.base.errors": ("RegardError",),
    "regard.core.attend": ("attend", "explain"),
    "regard.core.softargmax": ("softargmax",),
    "regard.core.masks.algebra": ("Mask",),
    "regard.core.absolute_positions": ("Positions",),
    "regard.core.masks": (
        "blocks",
        "causal",
        "chunks",
        "dilated",
        "documents",
        "full",
        "global_tokens",
        "padding",
        "prefix",
        "random_links",
        "window",
    ),
    "regard.core.scores": ("additive", "alibi", "shaw", "sink", "softcap", "t5_buckets"),
    "regard.core.positions": ("NTK", "Interpolate", "Llama3", "YaRN", "grid_positions", "rotary", "sinusoidal"),
    "regard.core.linear": ("elu_plus_one", "linear_attend", "performer", "relu", "squared_relu"),
    "regard.core.channel": ("channel_attend",),
    "regard.core.cache": ("DynamicCache", "SlidingWindowCache", "StaticCache", "Stream"),
    "regard.core.kernels": ("recording",),
    "regard.models.presets": ("build",),
    "regard.models.saving": ("load",),
    "regard.models.generation": ("generate",),
    "regard.see.watch": ("watch",),
    "regard.conform": ("Report", "check", "conformance"),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}
_PARTS = ("see",)  # sub-packages that are used by their own name: regard.see.xray(fn)

__all__ = ["__version__", *sorted((*_HOME, *_PARTS))]

if TYPE_CHECKING:
    from regard import see as see
    from regard.base.errors import RegardError as RegardError
    from regard.conform import Report as Report, check as check, conformance as conformance
    from regard.core.absolute_positions import Positions as Positions
    from regard.core.attend import attend as attend, explain as explain
    from regard.core.cache import (
        DynamicCache as DynamicCache,
        SlidingWindowCache as SlidingWindowCache,
        StaticCache as StaticCache,
        Stream as Stream,
    )
    from regard.core.channel import channel_attend as channel_attend
    from regard.core.kernels import recording as recording
    from regard.core.linear import (
        elu_plus_one as elu_plus_one,
        linear_attend as linear_attend,
        performer as performer,
        relu as relu,
        squared_relu as squared_relu,
    )
    from regard.core.masks import (
        blocks as blocks,
        causal as causal,
        chunks as chunks,
        dilated as dilated,
        documents as documents,
        full as full,
        global_tokens as global_tokens,
        padding as padding,
        prefix as prefix,
        random_links as random_links,
        window as window,
    )
    from regard.core.masks.algebra import Mask as Mask
    from regard.core.positions import (
        NTK as NTK,
        Interpolate as Interpolate,
        Llama3 as Llama3,
        YaRN as YaRN,
        grid_positions as grid_positions,
        rotary as rotary,
        sinusoidal as sinusoidal,
    )
    from regard.core.scores import (
        additive as additive,
        alibi as alibi,
        shaw as shaw,
        sink as sink,
        softcap as softcap,
        t5_buckets as t5_buckets,
    )
    from regard.core.softargmax import softargmax as softargmax
    from regard.models.generation import generate as generate
    from regard.models.presets import build as build
    from regard.models.saving import load as load
    from regard.see.watch import watch as watch


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"regard.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
