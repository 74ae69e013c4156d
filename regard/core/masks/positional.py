"""The masks that are rules: what is visible follows from positions alone."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.base.seeds import hash_integers
from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import BoxVisibility, Flag, Mask, Or, Position

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


class BandMask(Mask):
    """Shows each query one run of keys, whose two ends never move back as the query moves on."""

    @abstractmethod
    def bounds(self, i: Position) -> tuple[Position | None, Position | None]:
        """The first visible key and the one after the last; None where that side is open."""

    def see(self, grid: Grid) -> Tensor:
        low, high = self.bounds(grid.i)
        if low is None:
            return grid.column >= 0 if high is None else grid.j < high
        return grid.j >= low if high is None else (grid.j >= low) & (grid.j < high)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        (low_first, high_first), (low_last, high_last) = self.bounds(first), self.bounds(last)
        none: Flag = False
        everything: Flag = True
        if low_first is not None and low_last is not None:
            none, everything = stop < low_first, start >= low_last
        if high_first is not None and high_last is not None:
            none, everything = none | (start >= high_last), everything & (stop < high_first)
        return BoxVisibility(none, everything)


@dataclass(frozen=True, repr=False)
class Causal(BandMask):
    """Itself and every earlier key."""

    def bounds(self, i: Position) -> tuple[None, Position]:
        return None, i + 1

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, repr=False)
class Window(BandMask):
    """Itself, `before` keys before and `after` keys after; None is no limit."""

    before: int | None
    after: int | None

    def bounds(self, i: Position) -> tuple[Position | None, Position | None]:
        return None if self.before is None else i - self.before, None if self.after is None else i + (self.after + 1)

    def __repr__(self) -> str:
        return (
            f"window(before={self.before})" if self.after == 0 else f"window(before={self.before}, after={self.after})"
        )


@dataclass(frozen=True, repr=False)
class Chunks(BandMask):
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
class Prefix(BandMask):
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

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=first >= self.size, all=last < self.size)

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

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return self.meaning().box(first, last, start, stop)

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        simpler = self.meaning().within(first, last, start, stop)
        return self if isinstance(simpler, Or) else simpler

    def __repr__(self) -> str:
        return f"global_tokens({self.size})"


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """Every `step`-th key, counted from itself in both directions."""

    step: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.i - grid.j) % self.step == 0

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        # the differences i - j fill the range first - stop .. last - start: is a multiple of the step among them?
        return BoxVisibility(none=(last - start) // self.step * self.step < first - stop, all=self.step == 1)

    def table(self, spans: "Spans") -> BoxVisibility:
        rows, columns = spans.query_positions() % self.step, spans.key_positions() % self.step
        low_row, high_row = rows.amin(1)[:, None], rows.amax(1)[:, None]
        low_column, high_column = columns.amin(1), columns.amax(1)
        apart = (high_row < low_column) | (high_column < low_row)
        alike = (low_row == high_row) & (low_column == high_column) & (low_row == low_column)
        return BoxVisibility(none=super().table(spans).none | apart, all=alike)

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
        return low + hash_integers(i * self.links + which, self.seed) % (high - low).clamp(min=1), high > low

    def see(self, grid: Grid) -> Tensor:
        seen = grid.j < -grid.i.abs() - 1  # false everywhere, in the shape of the grid
        for which in range(self.links):
            key, exists = self.link(grid.i, which)
            seen = seen | ((grid.j == key) & exists)
        return seen

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=start > last, all=False)

    def table(self, spans: "Spans") -> BoxVisibility:
        if isinstance(spans.positions.keys, Tensor) or not spans.j:
            return spans.swept(self)  # only keys in a row can be looked up
        rows = spans.query_positions()
        hit = torch.zeros(spans.shape, dtype=torch.bool)
        for which in range(self.links):
            key, exists = self.link(rows, which)
            column = key - spans.positions.keys
            exists = exists & (column >= 0) & (column < spans.j)
            block = spans.column_blocks.slots[column.clamp(0, spans.j - 1)] // spans.size
            hit |= torch.zeros_like(hit).scatter_reduce_(1, block, exists, "amax")
        return BoxVisibility(none=~hit, all=torch.tensor(False))

    def __repr__(self) -> str:
        return f"random_links({self.links}, seed={self.seed})"
