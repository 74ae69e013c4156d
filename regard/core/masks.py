"""The functions that make masks."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.core.algebra import Full, Mask
from regard.core.given import Documents, Matrix, Padding
from regard.core.rules import Causal, Chunks, Dilated, GlobalTokens, Prefix, RandomLinks, Window


def full() -> Mask:
    """Everything is visible."""
    return Full()


def causal() -> Mask:
    """A query sees itself and every earlier key."""
    return Causal()


def window(before: int | None = 0, after: int | None = 0) -> Mask:
    """A query sees itself, `before` keys before it and `after` keys after it (None: all of them)."""
    return Window(_whole("window", "before", before, least=0), _whole("window", "after", after, least=0))


def dilated(step: int) -> Mask:
    """A query sees every `step`-th key, counted from itself."""
    return Dilated(_needed("dilated", "step", step, least=1))


def blocks(size: int) -> Mask:
    """A query sees its own block of `size` positions."""
    return Chunks(_needed("blocks", "size", size, least=1), 0, 0)


def chunks(size: int, before: int | None = 0, after: int | None = 0) -> Mask:
    """A query sees its own chunk of `size` positions and whole chunks before and after it (None: all of them)."""
    return Chunks(
        _needed("chunks", "size", size, least=1),
        _whole("chunks", "before", before, least=0),
        _whole("chunks", "after", after, least=0),
    )


def global_tokens(size: int) -> Mask:
    """The first `size` positions see all and are seen by all."""
    return GlobalTokens(_needed("global_tokens", "size", size, least=0))


def prefix(size: int) -> Mask:
    """The first `size` keys are seen by all."""
    return Prefix(_needed("prefix", "size", size, least=0))


def padding(
    lengths: Sequence[int] | Int[Tensor, "b"], *, side: Literal["right", "left"] = "right", width: int | None = None
) -> Mask:
    """Only real keys are seen: the first `lengths[b]` of sequence b.

    With side="left" sequences were filled up at their front to a common `width`; keys appended later are real.
    """
    data = _integers("padding", "lengths", lengths)
    if data.device.type == "cpu" and data.numel() and int(data.min()) < 0:
        raise ConfigError(f"padding(lengths) counts real keys, so {int(data.min())} cannot be one of the lengths")
    if data.ndim != 1 or not len(data):
        raise ShapeError(f"lengths must be one number per sequence (b,), not of shape {tuple(data.shape)}")
    if side not in ("right", "left"):
        raise ConfigError(f"side must be 'right' or 'left', not {side!r}")
    if (side == "left") != (width is not None):
        raise ConfigError(
            f"side='left' and width= go together (the common width after padding): side={side!r}, width={width}"
        )
    return Padding(data, side, width)


def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "*b n"]) -> Mask:
    """A query sees the keys that carry its own document id: packed sequences stay apart."""
    data = _integers("documents", "ids", ids)
    if data.ndim not in (1, 2) or not len(data):
        raise ShapeError(f"ids must be (n,) or (b, n), not of shape {tuple(data.shape)}")
    return Documents(data)


def random_links(count: int, seed: int = 0) -> Mask:
    """A query sees `count` keys of its past, drawn by seed and position alone (all of them while it has fewer)."""
    return RandomLinks(_needed("random_links", "count", count, least=0), seed)


def as_mask(mask: "Mask | Bool[Tensor, '*bh i j'] | None") -> Mask:
    """The mask meant by what `attend` was handed: a Mask, a boolean matrix, or nothing."""
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise DtypeError(f"mask must be a mask such as regard.causal() or a boolean tensor, not {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask is {mask.dtype}, but a mask is boolean with True meaning visible; "
            "terms to be added to the scores go in scores="
        )
    if not 2 <= mask.ndim <= 4:
        raise ShapeError(
            f"mask is {tuple(mask.shape)}, but a boolean matrix is (i j), (h i j) or (b h i j); "
            "for one row of keys write mask[None].expand(i, -1), or use regard.padding(lengths)"
        )
    return Matrix(mask)


def _needed(form: str, name: str, value: int, least: int) -> int:
    what = "neighbours, so there is no minus sign" if name in ("before", "after") else "positions"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{form}({name}=...) takes a whole number, not {value!r}")
    if value < least:
        raise ConfigError(f"{form}({name}={value}) must be at least {least}; it counts {what}")
    return value


def _whole(form: str, name: str, value: int | None, least: int) -> int | None:
    return None if value is None else _needed(form, name, value, least)


def _integers(form: str, name: str, values: object) -> Tensor:
    data = values if isinstance(values, Tensor) else torch.tensor(values)
    if data.numel() == 0:
        data = data.long()
    if data.is_floating_point() or data.dtype == torch.bool or data.is_complex():
        raise DtypeError(f"{form}({name}) takes whole numbers, not {data.dtype}")
    return data
