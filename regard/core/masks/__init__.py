"""The functions that make masks."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.validation import check_integer
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import DenseMask, DocumentMask, PaddingMask
from regard.core.masks.positional import Causal, Chunks, Dilated, GlobalTokens, Prefix, RandomLinks, Window


def full() -> Mask:
    """Everything is visible."""
    return Full()


def causal() -> Mask:
    """A query sees itself and every earlier key."""
    return Causal()


def window(before: int | None = 0, after: int | None = 0) -> Mask:
    """A query sees itself, `before` keys before it and `after` keys after it (None: all of them)."""
    return Window(_side("window(before)", before, "neighbours"), _side("window(after)", after, "neighbours"))


def dilated(step: int) -> Mask:
    """A query sees every `step`-th key, counted from itself."""
    return Dilated(check_integer("dilated(step)", step, 1, "positions"))


def blocks(size: int) -> Mask:
    """A query sees its own block of `size` positions."""
    return Chunks(check_integer("blocks(size)", size, 1, "positions"), 0, 0)


def chunks(size: int, before: int | None = 0, after: int | None = 0) -> Mask:
    """A query sees its own chunk of `size` positions and whole chunks before and after it (None: all of them)."""
    return Chunks(
        check_integer("chunks(size)", size, 1, "positions"),
        _side("chunks(before)", before, "whole chunks"),
        _side("chunks(after)", after, "whole chunks"),
    )


def global_tokens(n: int) -> Mask:
    """The first n positions see all and are seen by all."""
    return GlobalTokens(check_integer("global_tokens(n)", n, 0, "positions"))


def prefix(n: int) -> Mask:
    """The first n keys are seen by all."""
    return Prefix(check_integer("prefix(n)", n, 0, "positions"))


def padding(
    lengths: Sequence[int] | Integer[Tensor, "b"], *, side: Literal["right", "left"] = "right", width: int | None = None
) -> Mask:
    """Only real keys are seen: the first `lengths[b]` of sequence b. A tensor of lengths is used as it is, not copied.

    With side="left" sequences were filled up at their front to a common `width`; keys appended later are real.
    """
    data = _integers("padding", "lengths", lengths)
    if _readable(data) and int(data.min()) < 0:
        raise ConfigError(f"padding(lengths) counts real keys, so {int(data.min())} cannot be one of the lengths")
    if data.ndim != 1 or not len(data):
        raise ShapeError(
            f"lengths must be one number per sequence (b,) and not empty, but have shape {tuple(data.shape)}"
        )
    if side not in ("right", "left"):
        raise ConfigError(f"side must be 'right' or 'left', not {side!r}")
    if (side == "left") != (width is not None):
        raise ConfigError(
            f"side='left' and width= go together (the common width after padding): side={side!r}, width={width}"
        )
    if (
        width is not None
        and _readable(data)
        and int(data.max()) > check_integer("padding(width)", width, 0, "positions")
    ):
        raise ConfigError(
            f"padding(width) is {width}, but a sequence has {int(data.max())} real keys; they must fit in it"
        )
    return PaddingMask(data, side, width)


def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Integer[Tensor, "*b n"]) -> Mask:
    """A query sees the keys that carry its own document id: packed sequences stay apart."""
    data = _integers("documents", "ids", ids)
    if data.ndim not in (1, 2) or not len(data):
        raise ShapeError(f"ids must be (n,) or (b, n) and not empty, but have shape {tuple(data.shape)}")
    return DocumentMask(data)


def random_links(count: int, seed: int = 0) -> Mask:
    """A query sees `count` keys of its past, drawn by seed and position alone (all of them while it has fewer)."""
    return RandomLinks(
        check_integer("random_links(count)", count, 0, "keys"), check_integer("random_links(seed)", seed, 0)
    )


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
            + ("for one row of keys write mask[None].expand(i, -1)" if mask.ndim == 1 else "reshape it to one of these")
        )
    return DenseMask(mask)


def _readable(data: Tensor) -> bool:
    """Whether looking at the values costs nothing: not on another device, nor while they are being traced."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(data)
    return not traced and data.device.type == "cpu" and data.numel() > 0


def _side(what: str, value: int | None, counts: str) -> int | None:
    return None if value is None else check_integer(what, value, 0, counts)


def _integers(form: str, name: str, values: object) -> Tensor:
    try:
        data = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"{form}({name}) takes whole numbers in rows of one length, not {values!r}") from None
    if data.numel() == 0:
        data = data.long()
    if data.is_floating_point() or data.dtype == torch.bool or data.is_complex():
        raise DtypeError(f"{form}({name}) takes whole numbers, not {data.dtype}")
    return data.long()  # positions and sums with them may not fit a narrower type
