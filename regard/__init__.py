"""Attention you can run, see and prove: an attention and Transformer toolkit for PyTorch."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Names are loaded on first use, so that `regard --help` and tools that only read the version do not import torch.
_MODULES = {
    "regard.base.errors": ("RegardError",),
    "regard.core.attend": ("attend", "explain"),
    "regard.core.softargmax": ("softargmax",),
    "regard.core.masks.algebra": ("Mask",),
    "regard.core.absolute_positions": ("Positions",),
    "regard.core.scores": ("additive", "alibi", "shaw", "sink", "softcap", "t5_buckets"),
    "regard.core.positions": ("grid_positions", "rotary", "sinusoidal"),
    "regard.core.linear": ("linear_attend",),
    "regard.core.channel": ("channel_attend",),
    "regard.core.cache": ("DynamicCache", "SlidingWindowCache", "StaticCache", "Stream"),
    "regard.core.kernels": ("recording",),
    "regard.models.presets": ("build", "list_models"),
    "regard.models.saving": ("load",),
    "regard.models.generation": ("generate",),
    "regard.see.interventions.intervene": ("intervene",),
    "regard.see.watch": ("watch",),
    "regard.conform": ("Report", "check", "conformance"),
    "regard.explorer.notebook": ("show",),
}
_ROOT = Path(__file__).parent
_PACKAGES = [path.parent.name for path in _ROOT.glob("*/__init__.py")]
# every file of this folder defines a function of the same name, which makes a mask
_MASKS = [path.stem for path in _ROOT.glob("core/masks/forms/[a-z]*.py")]
_HOME = {name: module for module, names in _MODULES.items() for name in names} | dict.fromkeys(
    _MASKS, "regard.core.masks"
)

__all__ = ["__version__", *sorted((*_HOME, *_PACKAGES))]

if TYPE_CHECKING:
    from regard import (
        base as base,
        cli as cli,
        conform as conform,
        core as core,
        data as data,
        explorer as explorer,
        integrations as integrations,
        lab as lab,
        models as models,
        nn as nn,
        recipes as recipes,
        see as see,
        train as train,
        work as work,
    )
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
    from regard.core.linear import linear_attend as linear_attend
    from regard.core.masks.algebra import Mask as Mask
    from regard.core.masks.forms.blocks import blocks as blocks
    from regard.core.masks.forms.causal import causal as causal
    from regard.core.masks.forms.chunks import chunks as chunks
    from regard.core.masks.forms.dilated import dilated as dilated
    from regard.core.masks.forms.documents import documents as documents
    from regard.core.masks.forms.full import full as full
    from regard.core.masks.forms.global_tokens import global_tokens as global_tokens
    from regard.core.masks.forms.key_padding import key_padding as key_padding
    from regard.core.masks.forms.padding import padding as padding
    from regard.core.masks.forms.prefix import prefix as prefix
    from regard.core.masks.forms.random_links import random_links as random_links
    from regard.core.masks.forms.strided import strided as strided
    from regard.core.masks.forms.window import window as window
    from regard.core.positions import grid_positions as grid_positions, rotary as rotary, sinusoidal as sinusoidal
    from regard.core.scores import (
        additive as additive,
        alibi as alibi,
        shaw as shaw,
        sink as sink,
        softcap as softcap,
        t5_buckets as t5_buckets,
    )
    from regard.core.softargmax import softargmax as softargmax
    from regard.explorer.notebook import show as show
    from regard.models.generation import generate as generate
    from regard.models.presets import build as build, list_models as list_models
    from regard.models.saving import load as load
    from regard.see.interventions.intervene import intervene as intervene
    from regard.see.watch import watch as watch
else:  # a type checker would take every unknown name for Any

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"regard.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
