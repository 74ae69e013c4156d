"""Attention you can run, see and prove: an attention and Transformer workbench for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are loaded on first use, so that `regard --help` and tools that only read the version import no torch.
_WHERE = {
    "regard.base.errors": ("RegardError",),
    "regard.core.attend": ("attend", "explain"),
    "regard.core.softargmax": ("softargmax",),
    "regard.core.algebra": ("Mask",),
    "regard.core.grid": ("Places",),
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
    "regard.core.positions": ("grid_positions", "rotary", "sinusoidal"),
    "regard.core.linear": ("elu_plus_one", "linear_attend", "performer", "relu", "squared_relu"),
    "regard.core.channel": ("channel_attend",),
    "regard.core.cache": ("Growing", "Rolling", "Static", "Stream"),
    "regard.core.kernels": ("recording",),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from regard.base.errors import RegardError as RegardError
    from regard.core.algebra import Mask as Mask
    from regard.core.attend import attend as attend
    from regard.core.attend import explain as explain
    from regard.core.cache import Growing as Growing
    from regard.core.cache import Rolling as Rolling
    from regard.core.cache import Static as Static
    from regard.core.cache import Stream as Stream
    from regard.core.channel import channel_attend as channel_attend
    from regard.core.grid import Places as Places
    from regard.core.kernels import recording as recording
    from regard.core.linear import (
        elu_plus_one as elu_plus_one,
    )
    from regard.core.linear import (
        linear_attend as linear_attend,
    )
    from regard.core.linear import (
        performer as performer,
    )
    from regard.core.linear import (
        relu as relu,
    )
    from regard.core.linear import (
        squared_relu as squared_relu,
    )
    from regard.core.masks import (
        blocks as blocks,
    )
    from regard.core.masks import (
        causal as causal,
    )
    from regard.core.masks import (
        chunks as chunks,
    )
    from regard.core.masks import (
        dilated as dilated,
    )
    from regard.core.masks import (
        documents as documents,
    )
    from regard.core.masks import (
        full as full,
    )
    from regard.core.masks import (
        global_tokens as global_tokens,
    )
    from regard.core.masks import (
        padding as padding,
    )
    from regard.core.masks import (
        prefix as prefix,
    )
    from regard.core.masks import (
        random_links as random_links,
    )
    from regard.core.masks import (
        window as window,
    )
    from regard.core.positions import grid_positions as grid_positions
    from regard.core.positions import rotary as rotary
    from regard.core.positions import sinusoidal as sinusoidal
    from regard.core.scores import (
        additive as additive,
    )
    from regard.core.scores import (
        alibi as alibi,
    )
    from regard.core.scores import (
        shaw as shaw,
    )
    from regard.core.scores import (
        sink as sink,
    )
    from regard.core.scores import (
        softcap as softcap,
    )
    from regard.core.scores import (
        t5_buckets as t5_buckets,
    )
    from regard.core.softargmax import softargmax as softargmax


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
