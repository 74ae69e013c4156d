"""The forms of mask there are, each by absolute position, and the functions that make them."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.base.axes import spelled
from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.seeds import scramble
from regard.core.algebra import UNKNOWN, Flag, Full, Mask, Or, Position, Verdict
from regard.core.grid import Grid, Places

if TYPE_CHECKING:
    from regard.core.tables import Spans


class Band(Mask):
    """Shows each query one run of keys, whose two ends never move back as the query moves on."""

    @abstractmethod
    def bounds(self, i: Position) -> tuple[Position | None, Position | None]:
        """The first visible key and the one after the last; None where that side is open."""

    def see(self, grid: Grid) -> Tensor:
        low, high = self.bounds(grid.i)
        if low is None:
            return grid.column >= 0 if high is None else grid.j < high
        return grid.j >= low if high is None else (grid.j >= low) & (grid.j < high)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> Verdict:
        (low_first, high_first), (low_last, high_last) = self.bounds(first), self.bounds(last)
        none: Flag = False
        everything: Flag = True
        if low_first is not None and low_last is not None:
            none, everything = stop < low_first, start >= low_last
        if high_first is not None and high_last is not None:
            none, everything = none | (start >= high_last), everything & (stop < high_first)
        return Verdict(none, everything)


@dataclass(frozen=True, repr=False)
class Causal(Band):
    """Itself and every earlier key."""

    def bounds(self, i: Position) -> tuple[None, Position]:
        return None, i + 1

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, repr=False)
class Window(Band):
    """Itself, `before` keys before and `after` keys after; None is no limit."""

    before: int | None
    after: int | None

    def bounds(self, i: Position) -> tuple[Position | None, Position | None]:
        return None if self.before is None else i - self.before, None if self.after is None else i + (self.after + 1)

    def __repr__(self) -> str:
        return f"window(before={self.before})" if self.after == 0 else f"window(before={self.before}, after={self.after})"


@dataclass(frozen=True, repr=False)
class Chunks(Band):
    """Its own chunk of `size` positions, `before` whole chunks before and `after` after; None is no limit."""

    size: int
    before: int | None
    after: int | None

    def bounds(self, i: Position) -> tuple[Position | None, Position | None]:
        own = i // self.size
        low = None if self.before is None else (own - self.before) * self.size
        high = None if self.after is None else (own + (self.after + 1)) * self.size
        return low, high

    def __repr__(self) -> str:
        if self.before == self.after == 0:
            return f"blocks({self.size})"
        return f"chunks({self.size}, before={self.before}, after={self.after})"


@dataclass(frozen=True, repr=False)
class Prefix(Band):
    """The first `size` keys, for every query."""

    size: int

    def bounds(self, i: Position) -> tuple[None, Position]:
        return None, self.size

    def __repr__(self) -> str:
        return f"prefix({self.size})"


@dataclass(frozen=True, repr=False)
class FirstRows(Mask):
    """Every key, for the first `size` queries: the half of `global_tokens` that looks out."""

    size: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.i < self.size) & (grid.column >= 0)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> Verdict:
        return Verdict(none=first >= self.size, all=last < self.size)

    def __repr__(self) -> str:
        return f"first_rows({self.size})"


@dataclass(frozen=True, repr=False)
class GlobalTokens(Mask):
    """The first `size` positions see all and are seen by all."""

    size: int

    def meaning(self) -> Mask:
        return Or((FirstRows(self.size), Prefix(self.size)))

    def see(self, grid: Grid) -> Tensor:
        return self.meaning().see(grid)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> Verdict:
        return self.meaning().box(first, last, start, stop)

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        return self.meaning().within(first, last, start, stop)

    def __repr__(self) -> str:
        return f"global_tokens({self.size})"


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """Every `step`-th key, counted from itself in both directions."""

    step: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.i - grid.j) % self.step == 0

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> Verdict:
        # the differences i - j fill the range first - stop .. last - start: is a multiple of the step among them?
        return Verdict(none=(last - start) // self.step * self.step < first - stop, all=self.step == 1)

    def __repr__(self) -> str:
        return f"dilated({self.step})"


@dataclass(frozen=True, repr=False)
class RandomLinks(Mask):
    """`links` keys among a query's own past and itself: one from each of that many equal stretches of it.

    A draw depends on the seed and on the query's position alone, so a cache step sees the links that training saw.
    """

    links: int
    seed: int

    def link(self, i: Tensor, which: int) -> tuple[Tensor, Tensor]:
        """The key drawn from stretch `which`, and whether that stretch holds any key."""
        past = (i + 1).clamp(min=0)
        low, high = past * which // self.links, past * (which + 1) // self.links
        return low + scramble(i * self.links + which, self.seed) % (high - low).clamp(min=1), high > low

    def see(self, grid: Grid) -> Tensor:
        seen = grid.j < -grid.i.abs() - 1  # false everywhere, in the shape of the grid
        for which in range(self.links):
            key, exists = self.link(grid.i, which)
            seen = seen | ((grid.j == key) & exists)
        return seen

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> Verdict:
        return Verdict(none=start > last, all=False)

    def table(self, spans: "Spans") -> Verdict:
        rows = spans.query_positions()
        hit = torch.zeros(spans.shape, dtype=torch.bool)
        for which in range(self.links):
            key, exists = self.link(rows, which)
            block = torch.searchsorted(spans.start[0], key, right=True) - 1
            exists = exists & (block >= 0) & (key <= spans.stop[0][block.clamp(min=0)])
            hit |= torch.zeros_like(hit).scatter_reduce_(1, block.clamp(min=0), exists, "amax")
        return Verdict(none=~hit, all=torch.tensor(False))

    def __repr__(self) -> str:
        return f"random_links({self.links}, seed={self.seed})"


class Data(Mask):
    """A mask that holds a tensor: equal by its contents, remembered by the tensor's identity and version."""

    data: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def key(self) -> Hashable:
        # a tensor made in inference mode counts no versions, so nothing may be remembered about it
        return (type(self), id(self.data), object() if self.data.is_inference() else self.data._version)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Data) and self._settings() == other._settings() and (
            self.data is other.data or (self.data.shape == other.data.shape and torch.equal(self.data.cpu(), other.data.cpu()))
        )

    def __hash__(self) -> int:
        return hash((type(self), self.data.shape, self._settings()))

    def _settings(self) -> Hashable:
        return ()


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Data):
    """Keys that are real: the first `data[b]` of each sequence, or all but the first `width - data[b]`."""

    data: Int[Tensor, "b"]
    side: Literal["right", "left"]
    width: int | None

    def real(self, j: Int[Tensor, "..."], batch: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Whether the key at position j of sequence `batch` is real."""
        length = self.data[batch]
        return j < length if self.width is None else j >= self.width - length

    def see(self, grid: Grid) -> Tensor:
        return self.real(grid.j, grid.batch)

    def table(self, spans: "Spans") -> Verdict:
        length = self.data.cpu()[:, None, None]
        if self.width is None:
            return Verdict(none=spans.start >= length, all=spans.stop < length)
        return Verdict(none=spans.stop < self.width - length, all=spans.start >= self.width - length)

    def check(self, places: Places, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if b is not None and b != len(self.data):
            raise ShapeError(f"{self!r} has {len(self.data)} lengths, but q has b={b} (batch); give one length per sequence")

    def batch(self) -> int | None:
        return len(self.data)

    def to(self, device: torch.device) -> Mask:
        return Padding(self.data.to(device), self.side, self.width)

    def _settings(self) -> Hashable:
        return self.side, self.width

    def __repr__(self) -> str:
        rest = f", side='left', width={self.width}" if self.side == "left" else ""
        return f"padding({_short(self.data)}{rest})"


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Data):
    """Keys that belong to the query's own document."""

    data: Int[Tensor, "*b n"]

    def labels(self, positions: Tensor, batch: Tensor) -> Tensor:
        return self.data[positions] if self.data.ndim == 1 else self.data[batch, positions]

    def see(self, grid: Grid) -> Tensor:
        return self.labels(grid.i, grid.batch) == self.labels(grid.j, grid.batch)

    def table(self, spans: "Spans") -> Verdict:
        rows, columns = (self.data.cpu()[..., at] for at in (spans.query_positions(), spans.key_positions()))
        low_row, high_row = rows.amin(-1)[..., :, None], rows.amax(-1)[..., :, None]
        low_column, high_column = columns.amin(-1)[..., None, :], columns.amax(-1)[..., None, :]
        alike = (low_row == high_row) & (low_column == high_column) & (low_row == low_column)
        return Verdict(none=(high_row < low_column) | (high_column < low_row), all=alike)

    def check(self, places: Places, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        n = self.data.shape[-1]
        if b is not None and self.batch() not in (None, b):
            raise ShapeError(f"{self!r} has ids for {self.batch()} sequences, but q has b={b} (batch); give one row each")
        ends = [places.queries, places.queries + i - 1] if i else []
        ends += [places.keys, places.keys + j - 1] if j and isinstance(places.keys, int) else []
        outside = [end for end in ends if not 0 <= end < n]
        if outside:
            raise ShapeError(
                f"{self!r} covers n={n} (positions), but this call reaches position {outside[-1]} with i={i} and j={j}; "
                "give an id for every position"
            )

    def batch(self) -> int | None:
        return None if self.data.ndim == 1 else len(self.data)

    def to(self, device: torch.device) -> Mask:
        return Documents(self.data.to(device))

    def __repr__(self) -> str:
        return f"documents({_short(self.data)})"


@dataclass(frozen=True, eq=False, repr=False)
class Matrix(Data):
    """A boolean matrix as it was given, by row and column of this call instead of by position."""

    data: Bool[Tensor, "*bh i j"]

    def see(self, grid: Grid) -> Tensor:
        if grid.whole:
            return self.data
        batch, head = (index if size > 1 else index * 0 for index, size in zip((grid.batch, grid.head), self._leading(), strict=True))
        return self.data.reshape(*self._leading(), *self.data.shape[-2:])[batch, head, grid.row, grid.column]

    def table(self, spans: "Spans") -> Verdict:
        return spans.pooled(self.data.cpu().flatten(0, -3).any(0), self.data.cpu().flatten(0, -3).all(0))

    def check(self, places: Places, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if self.data.shape[-2:] != (i, j):
            raise ShapeError(
                f"mask is {tuple(self.data.shape)} and ends in {tuple(self.data.shape[-2:])}, but q has i={i} (query positions) "
                f"and k has j={j} (key positions); a boolean matrix must end in ({i}, {j})"
            )
        for letter, size, own in zip("bh", (b, h), self._leading(), strict=True):
            if size is not None and own not in (1, size):
                raise ShapeError(
                    f"mask is {tuple(self.data.shape)} read as (b h i j), but q has {spelled(letter, size)}; "
                    f"use 1 or {size} there"
                )

    def _leading(self) -> tuple[int, int]:
        b, h = ((1, 1) + tuple(self.data.shape[:-2]))[-2:]
        return b, h

    def batch(self) -> int | None:
        return self._leading()[0] if self._leading()[0] > 1 else None

    def opaque(self) -> bool:
        return True

    def to(self, device: torch.device) -> Mask:
        return Matrix(self.data.to(device))

    def __repr__(self) -> str:
        return f"matrix{tuple(self.data.shape)}"


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
    if data.ndim != 1:
        raise ShapeError(f"lengths must be one number per sequence (b,), not of shape {tuple(data.shape)}")
    if side not in ("right", "left"):
        raise ConfigError(f"side must be 'right' or 'left', not {side!r}")
    if (side == "left") != (width is not None):
        raise ConfigError(f"side='left' and width= go together (the common width after padding): side={side!r}, width={width}")
    return Padding(data, side, width)


def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "*b n"]) -> Mask:
    """A query sees the keys that carry its own document id: packed sequences stay apart."""
    data = _integers("documents", "ids", ids)
    if data.ndim not in (1, 2):
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
        raise DtypeError(f"mask must be a regard mask or a boolean tensor, not {type(mask).__name__}; see regard.causal() and its kin")
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask is {mask.dtype}, but a mask is boolean with True meaning visible; "
            "terms to be added to the scores go in scores="
        )
    if not 2 <= mask.ndim <= 4:
        raise ShapeError(f"mask has {mask.ndim} axes {tuple(mask.shape)}; a boolean matrix is (i j), (h i j) or (b h i j)")
    return Matrix(mask)


def _needed(form: str, name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{form}({name}=...) takes a whole number, not {value!r}")
    if value < least:
        raise ConfigError(f"{form}({name}={value}) must be at least {least}; it counts neighbours, not an offset")
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


def _short(data: Tensor, most: int = 12) -> str:
    """The contents while they are few, else their shape."""
    return str(data.tolist()) if data.numel() <= most else f"<{' x '.join(map(str, data.shape))}>"


__all__ = [
    "UNKNOWN", "Mask", "as_mask", "blocks", "causal", "chunks", "dilated", "documents", "full", "global_tokens",
    "padding", "prefix", "random_links", "window",
]
