"""Prefix masks: the first n keys are visible to every query."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.masks.algebra import Mask, Position, RowPieces
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.window import window
from regard.core.masks.positional import BandMask


@dataclass(frozen=True, repr=False)
class Prefix(BandMask):
    """The mask of `prefix`: key j is visible to query i if j < size."""

    size: int

    def bounds(self, i: Position) -> tuple[None, Position]:
        return None, self.size

    def visible_keys(self, j: Tensor, batch: Tensor) -> Tensor:
        return j < self.size

    def row_pieces(self) -> RowPieces:
        return RowPieces()

    def __repr__(self) -> str:
        return f"prefix({constant(self.size)})"


def prefix(n: int) -> Mask:
    """Prefix mask: every query sees the first n keys, j < n. `causal() | prefix(n)` is the mask of a prefix LM.

    Raffel et al. 2020, arXiv:1910.10683.

    >>> (causal() | prefix(2)).dense(3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return Prefix(check_integer("prefix(n)", n, 0, "positions"))


def examples(n: int) -> list[str]:
    return ["prefix(4)", "prefix(0)"]


def candidates(n: int) -> Iterator[Mask]:
    for size in range(1, n - 1):
        yield prefix(size)
        yield from (Causal() & window(before) | prefix(size) for before in range(n))
