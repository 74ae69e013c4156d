"""The causal mask of decoders."""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.core.masks.algebra import Mask, Position, RowPieces
from regard.core.masks.positional import BandMask


@dataclass(frozen=True, repr=False)
class Causal(BandMask):
    """The mask of `causal`: key j is visible to query i if j <= i."""

    def bounds(self, i: Position) -> tuple[None, Position]:
        return None, i + 1

    def as_window(self) -> tuple[None, int]:
        return None, 0

    def row_pieces(self) -> RowPieces:
        return RowPieces()

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "causal()"


def causal() -> Mask:
    """Causal mask: a query sees its own key and all earlier ones, j <= i. Vaswani et al. 2017, arXiv:1706.03762.

    >>> causal().dense(3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return _CAUSAL


_CAUSAL = Causal()  # one object, so that calls with causal() written inline find their plan by its identity


def examples(n: int) -> list[str]:
    return ["causal()"]


def candidates(n: int) -> Iterator[Mask]:
    yield causal()
