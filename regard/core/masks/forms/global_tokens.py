"""Global tokens: positions that see all keys and are visible to all queries."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import FAR, Bounds, BoxVisibility, CompoundMask, Mask, Or, Position, RowPieces
from regard.core.masks.forms.prefix import Prefix
from regard.core.masks.forms.window import window


@dataclass(frozen=True, repr=False)
class FirstRows(Mask):
    """The mask in which the first `size` queries see every key, and the other queries see no key: i < size."""

    size: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.i < self.size) & (grid.column >= 0)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=first >= self.size, all=last < self.size)

    def key_range(self, i: Tensor, sequence: int) -> Bounds:
        return None, torch.where(i < self.size, FAR, -FAR)

    def row_pieces(self) -> RowPieces:
        return RowPieces(breaks=(self.size,))

    def __repr__(self) -> str:
        return f"first_rows({constant(self.size)})"


@dataclass(frozen=True, repr=False)
class GlobalTokens(CompoundMask):
    """The mask of `global_tokens`: key j is visible to query i if i < size or j < size."""

    size: int

    def expand(self) -> Mask:
        return Or((FirstRows(self.size), Prefix(self.size)))

    def __repr__(self) -> str:
        return f"global_tokens({constant(self.size)})"


def global_tokens(n: int) -> Mask:
    """Global tokens: the first n positions see all keys and are seen by all queries, i < n or j < n.

    Beltagy et al. 2020, arXiv:2004.05150.

    >>> global_tokens(1).dense(3).int()
    tensor([[1, 1, 1],
            [1, 0, 0],
            [1, 0, 0]], dtype=torch.int32)
    """
    return GlobalTokens(check_integer("global_tokens(n)", n, 0, "positions"))


def examples(n: int) -> list[str]:
    return ["global_tokens(2)", "global_tokens(0)"]


def candidates(n: int) -> Iterator[Mask]:
    for size in range(1, n - 1):
        yield global_tokens(size)
        yield from (window(before, before) | global_tokens(size) for before in range(n))
