"""Sliding windows."""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.masks.algebra import Bounds, Mask, Position, RowPieces
from regard.core.masks.forms.causal import Causal
from regard.core.masks.positional import BandMask


@dataclass(frozen=True, repr=False)
class Window(BandMask):
    """The mask of `window`: key j is visible to query i if i - before <= j <= i + after. None means no limit."""

    before: int | None
    after: int | None

    def bounds(self, i: Position) -> Bounds:
        return None if self.before is None else i - self.before, None if self.after is None else i + (self.after + 1)

    def as_window(self) -> tuple[int | None, int | None]:
        return self.before, self.after

    def row_pieces(self) -> RowPieces:
        return RowPieces()

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        before, after = constant(self.before), constant(self.after)
        return f"window(before={before})" if after == 0 else f"window(before={before}, after={after})"


def window(before: int | None = 0, after: int | None = 0) -> Mask:
    """Sliding window mask: i - before <= j <= i + after. Beltagy et al. 2020, arXiv:2004.05150.

    before  number of earlier keys that are visible, in addition to the query's own; None is all
    after   number of later keys that are visible; None is all

    >>> window(before=2).dense(4).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    return Window(
        check_limit("window(before)", before, "neighbours"), check_limit("window(after)", after, "neighbours")
    )


def check_limit(what: str, value: int | None, counts: str) -> int | None:
    """Return `value` as an int of at least 0, or None for no limit. Raises ConfigError for anything else."""
    return None if value is None else check_integer(what, value, 0, counts)


def examples(n: int) -> list[str]:
    return ["window(before=3)", "window()", "window(1, 2)", "window(None, 1)", "window(2, None)"]


def candidates(n: int) -> Iterator[Mask]:
    yield window()
    yield Causal() & ~window()
    yield from (Causal() & window(before) for before in range(1, n))  # the usual way to write it
    yield from (window(before, after) for before in (None, *range(n)) for after in (None, *range(1, n)))
