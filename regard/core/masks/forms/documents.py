"""Packed sequences: documents that do not see each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from regard.base.errors import ShapeError
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import BoxVisibility, Mask
from regard.core.masks.data import DataMask, as_integers, can_read, format_data

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


@dataclass(frozen=True, eq=False, repr=False)
class DocumentMask(DataMask):
    """The mask of `documents`: key j is visible to query i if data[i] == data[j]."""

    data: Int[Tensor, "*b n"]

    def ids(self, positions: Tensor, batch: Tensor) -> Tensor:
        """Return the document id of each position."""
        return self.data[positions] if self.data.ndim == 1 else self.data[batch, positions]

    def see(self, grid: Grid) -> Tensor:
        return self.ids(grid.i, grid.batch) == self.ids(grid.j, grid.batch)

    def labels(self, i: Tensor, j: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        batch = torch.tensor(sequence)
        return self.ids(i, batch), self.ids(j, batch)

    def table(self, spans: "Spans") -> BoxVisibility:
        data = self.data.cpu()
        return spans.equal_labels(data[..., spans.query_positions()], data[..., spans.key_positions()])

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        n = self.data.shape[-1]
        if b is not None and self.batch() not in (None, b):
            raise ShapeError(
                f"{self!r} has ids for {self.batch()} sequences, but q has b={b} (batch); give one row each"
            )
        ends = [positions.queries, positions.queries + i - 1] if i else []
        if i and positions.offsets is not None and can_read(positions.offsets):
            ends = [ends[0] + int(positions.offsets.min()), ends[1] + int(positions.offsets.max())]
        keys = positions.keys
        if isinstance(keys, int):
            ends += [keys, keys + j - 1] if j else []
        elif j and keys.device.type == "cpu":  # reading them elsewhere would synchronise with the device
            ends += [int(keys.min()), int(keys.max())]
        outside = [end for end in ends if not 0 <= end < n]
        if outside:
            raise ShapeError(
                f"{self!r} covers n={n} (positions), but this call reaches position {outside[-1]} "
                f"with i={i} and j={j}; give an id for every position"
            )

    def batch(self) -> int | None:
        return None if self.data.ndim == 1 else len(self.data)

    def length(self) -> int:
        return self.data.shape[-1]

    def with_data(self, data: Tensor) -> Mask:
        return DocumentMask(data)

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"documents({format_data(self.data)})"


def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Integer[Tensor, "*b n"]) -> Mask:
    """Document mask for packed sequences: a query sees the keys of its own document, ids[i] == ids[j].

    ids  document id of each position, (n,) or (b, n)

    >>> documents([7, 7, 3]).dense(3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    data = as_integers("documents", "ids", ids)
    if data.ndim not in (1, 2) or not len(data):
        raise ShapeError(f"ids must be (n,) or (b, n) and not empty, but have shape {tuple(data.shape)}")
    return DocumentMask(data)


def examples(n: int) -> list[str]:
    first, second = n * 5 // 12, n * 8 // 12
    ids = [0] * first + [1] * (second - first) + [2] * (n - second)
    return [f"documents({ids})", f"documents([{ids}, {[at % 3 for at in range(n)]}])"]
