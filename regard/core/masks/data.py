"""The masks that hold data: lengths, document ids, a boolean matrix."""

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.base.axes import format_axis
from regard.base.errors import ShapeError
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import BoxVisibility, Mask

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


class DataMask(Mask):
    """A mask that holds a tensor: equal by its contents, remembered by the tensor's identity and version."""

    data: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def key(self) -> Hashable | None:
        if self.data.is_inference():
            return None  # such a tensor counts no versions, so it could change unseen
        return (type(self), self._settings(), id(self.data), self.data._version)

    def to(self, device: torch.device) -> Mask:
        if self.data.device == device:
            return self
        if torch.compiler.is_compiling() or self.data.is_inference():
            return self._holding(self.data.to(device))
        # one copy per device and version, so that what is remembered about it is found again
        moved: dict[torch.device, tuple[int, Mask]] = self.__dict__.setdefault("_moved", {})
        if device not in moved or moved[device][0] != self.data._version:
            moved[device] = (self.data._version, self._holding(self.data.to(device)))
        return moved[device][1]

    @abstractmethod
    def _holding(self, data: Tensor) -> Mask:
        """The same mask with other data."""

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, DataMask)
            and self._settings() == other._settings()
            and (
                self.data is other.data
                or (self.data.shape == other.data.shape and torch.equal(self.data.cpu(), other.data.cpu()))
            )
        )

    def __hash__(self) -> int:
        return hash((type(self), self.data.shape, self._settings()))

    def _settings(self) -> Hashable:
        return ()


@dataclass(frozen=True, eq=False, repr=False)
class PaddingMask(DataMask):
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

    def table(self, spans: "Spans") -> BoxVisibility:
        length = self.data.cpu()[:, None, None]
        if self.width is None:
            return BoxVisibility(none=spans.start >= length, all=spans.stop < length)
        return BoxVisibility(none=spans.stop < self.width - length, all=spans.start >= self.width - length)

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if b is not None and b != len(self.data):
            raise ShapeError(
                f"{self!r} has {len(self.data)} lengths, but q has b={b} (batch); give one length per sequence"
            )

    def batch(self) -> int | None:
        return len(self.data)

    def _holding(self, data: Tensor) -> Mask:
        return PaddingMask(data, self.side, self.width)

    def _settings(self) -> Hashable:
        return self.side, self.width

    def __repr__(self) -> str:
        rest = f", side='left', width={self.width}" if self.side == "left" else ""
        return f"padding({_short(self.data)}{rest})"


@dataclass(frozen=True, eq=False, repr=False)
class DocumentMask(DataMask):
    """Keys that belong to the query's own document."""

    data: Int[Tensor, "*b n"]

    def labels(self, positions: Tensor, batch: Tensor) -> Tensor:
        return self.data[positions] if self.data.ndim == 1 else self.data[batch, positions]

    def see(self, grid: Grid) -> Tensor:
        return self.labels(grid.i, grid.batch) == self.labels(grid.j, grid.batch)

    def table(self, spans: "Spans") -> BoxVisibility:
        rows, columns = (self.data.cpu()[..., at] for at in (spans.query_positions(), spans.key_positions()))
        low_row, high_row = rows.amin(-1)[..., :, None], rows.amax(-1)[..., :, None]
        low_column, high_column = columns.amin(-1)[..., None, :], columns.amax(-1)[..., None, :]
        alike = (low_row == high_row) & (low_column == high_column) & (low_row == low_column)
        return BoxVisibility(none=(high_row < low_column) | (high_column < low_row), all=alike)

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        n = self.data.shape[-1]
        if b is not None and self.batch() not in (None, b):
            raise ShapeError(
                f"{self!r} has ids for {self.batch()} sequences, but q has b={b} (batch); give one row each"
            )
        ends = [positions.queries, positions.queries + i - 1] if i else []
        keys = positions.keys
        if isinstance(keys, int):
            ends += [keys, keys + j - 1] if j else []
        elif j and keys.device.type == "cpu":  # elsewhere it would have to wait for the device
            ends += [int(keys.min()), int(keys.max())]
        outside = [end for end in ends if not 0 <= end < n]
        if outside:
            raise ShapeError(
                f"{self!r} covers n={n} (positions), but this call reaches position {outside[-1]} "
                f"with i={i} and j={j}; give an id for every position"
            )

    def batch(self) -> int | None:
        return None if self.data.ndim == 1 else len(self.data)

    def _holding(self, data: Tensor) -> Mask:
        return DocumentMask(data)

    def __repr__(self) -> str:
        return f"documents({_short(self.data)})"


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(DataMask):
    """A boolean matrix as it was given, by row and column of this call instead of by position."""

    data: Bool[Tensor, "*bh i j"]

    def see(self, grid: Grid) -> Tensor:
        if grid.whole:
            return self.data
        sizes = (*self._leading(), *self.data.shape[-2:])
        indices = (grid.batch, grid.head, grid.row, grid.column)
        where = tuple(at if size > 1 else at * 0 for at, size in zip(indices, sizes, strict=True))
        return self.data.reshape(sizes)[where]

    def table(self, spans: "Spans") -> BoxVisibility:
        b, h = self._leading()
        matrices = self.data.cpu().reshape(b * h, *self.data.shape[-2:]).expand(-1, spans.i, spans.j)
        return spans.pooled(matrices.any(0), matrices.all(0))

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        letters = ["b", "h", "i", "j"][-self.data.ndim :]
        form = f"mask is {tuple(self.data.shape)} read as ({' '.join(letters)})"
        for letter, name, size, own in zip("ij", "qk", (i, j), self.data.shape[-2:], strict=True):
            if own not in (1, size):
                turned = "; did you mean mask.mT?" if self.data.shape[-2:] == (j, i) else ""
                raise ShapeError(
                    f"mask has {format_axis(letter, own)}, but {name} has {letter}={size}; {form}; "
                    f"a boolean matrix must end in ({i}, {j}), or 1 where all are alike{turned}"
                )
        for letter, wanted, own in zip("bh", (b, h), self._leading(), strict=True):
            if wanted is not None and own not in (1, wanted):
                raise ShapeError(
                    f"mask has {format_axis(letter, own)}, but q has {letter}={wanted}; {form}; use 1 or {wanted} there"
                )

    def _leading(self) -> tuple[int, int]:
        b, h = (1, 1, *self.data.shape[:-2])[-2:]
        return b, h

    def batch(self) -> int | None:
        return self._leading()[0] if self._leading()[0] > 1 else None

    def heads(self) -> int | None:
        return self._leading()[1] if self._leading()[1] > 1 else None

    def opaque(self) -> bool:
        return True

    def _holding(self, data: Tensor) -> Mask:
        return DenseMask(data)

    def __repr__(self) -> str:
        return f"matrix{tuple(self.data.shape)}"


def has_matrix(mask: Mask) -> bool:
    """Whether some part is a boolean matrix, which goes by row and column instead of by position."""
    return isinstance(mask, DenseMask) or any(has_matrix(child) for child in mask.children())


def _short(data: Tensor, most: int = 12) -> str:
    """The contents while they are few, else their shape."""
    return str(data.tolist()) if data.numel() <= most else f"<{' x '.join(map(str, data.shape))}>"
