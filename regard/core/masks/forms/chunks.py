"""Chunks of positions, as in streaming speech recognition."""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.masks.algebra import Bounds, Mask, Position, RowPieces
from regard.core.masks.forms.window import check_limit
from regard.core.masks.positional import BandMask


@dataclass(frozen=True, repr=False)
class Chunks(BandMask):
    """The mask of `chunks`: query i sees key j if -before <= j // size - i // size <= after. None means no limit."""

    size: int
    before: int | None
    after: int | None

    def bounds(self, i: Position) -> Bounds:
        own = i // self.size
        low = None if self.before is None else (own - self.before) * self.size
        high = None if self.after is None else (own + (self.after + 1)) * self.size
        return low, high

    def row_pieces(self) -> RowPieces:
        return RowPieces(period=self.size)

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        if self.before == self.after == 0:
            return f"blocks({constant(self.size)})"
        return f"chunks({constant(self.size)}, before={constant(self.before)}, after={constant(self.after)})"


def chunks(size: int, before: int | None = 0, after: int | None = 0) -> Mask:
    """Chunked mask: a query sees its own chunk and neighbouring ones, -before <= j // size - i // size <= after.

    Chen et al. 2021, arXiv:2010.11395.

    size    number of positions in a chunk
    before  number of earlier chunks that are visible; None is all
    after   number of later chunks that are visible; None is all

    >>> chunks(2, before=1).dense(5).int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    return Chunks(
        check_integer("chunks(size)", size, 1, "positions"),
        check_limit("chunks(before)", before, "whole chunks"),
        check_limit("chunks(after)", after, "whole chunks"),
    )


def examples(n: int) -> list[str]:
    return ["chunks(4, before=1)", "chunks(3, after=1)", "chunks(2, None, 0)", "chunks(5, 1, None)"]


def candidates(n: int) -> Iterator[Mask]:
    yield from (
        chunks(size, before, after)
        for size in range(2, n)
        for before in (0, None, 1, 2)
        for after in (0, None, 1)
        if (before, after) != (0, 0)
    )
