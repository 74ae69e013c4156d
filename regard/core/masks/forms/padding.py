"""Padding masks from lengths: keys beyond the length of their sequence are hidden."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtyping import Int, Integer
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import Bounds, BoxVisibility, Mask, RowPieces
from regard.core.masks.data import DataMask, as_integers, can_read, format_data

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


@dataclass(frozen=True, eq=False, repr=False)
class PaddingMask(DataMask):
    """The mask of `padding`: key j of sequence b is visible if j < data[b].

    If `width` is set (padding on the left), key j is visible if j >= width - data[b].
    """

    data: Int[Tensor, "b"]
    side: Literal["right", "left"]
    width: int | None

    def visible_keys(self, j: Tensor, batch: Tensor) -> Tensor:
        length = self.data[batch]
        return j < length if self.width is None else j >= self.width - length

    def see(self, grid: Grid) -> Tensor:
        return self.visible_keys(grid.j, grid.batch)

    def table(self, spans: "Spans") -> BoxVisibility:
        length = self.data.cpu()[:, None, None]
        if self.width is None:
            return BoxVisibility(none=spans.start >= length, all=spans.stop < length)
        return BoxVisibility(none=spans.stop < self.width - length, all=spans.start >= self.width - length)

    def key_range(self, i: Tensor, sequence: int) -> Bounds:
        length = int(self.data[sequence])
        return (None, length) if self.width is None else (self.width - length, None)

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if b is not None and b != len(self.data):
            raise ShapeError(
                f"{self!r} has {len(self.data)} lengths, but q has b={b} (batch); give one length per sequence"
            )

    def required_keys(self) -> int:
        return self.width or 0

    def batch(self) -> int | None:
        return len(self.data)

    def with_data(self, data: Tensor) -> Mask:
        return PaddingMask(data, self.side, self.width)

    def settings(self) -> Hashable:
        return self.side, self.width

    def row_pieces(self) -> RowPieces:
        return RowPieces()

    def __repr__(self) -> str:
        rest = f", side='left', width={self.width}" if self.side == "left" else ""
        return f"padding({format_data(self.data)}{rest})"


def padding(
    lengths: Sequence[int] | Integer[Tensor, "b"], *, side: Literal["right", "left"] = "right", width: int | None = None
) -> Mask:
    """Padding mask from lengths: queries see only real keys.

    Key j is real if j < lengths[b], or with side="left" if j >= width - lengths[b].

    lengths  number of real keys of each sequence; an int64 tensor is not copied, so it may be changed later
    side     "right" or "left": where the padding is
    width    with side="left", the common length of the padded sequences; keys appended later are real

    The example prints one row for each of two sequences.

    >>> padding([1, 3]).dense(1, 3).int()[:, 0, 0]
    tensor([[1, 0, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    data = as_integers("padding", "lengths", lengths)
    if can_read(data) and int(data.min()) < 0:
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
    width = None if width is None else check_integer("padding(width)", width, 0, "positions")
    if width is not None and can_read(data) and int(data.max()) > width:
        raise ConfigError(
            f"padding(width) is {width}, but a sequence has {int(data.max())} real keys; they must fit in it"
        )
    return PaddingMask(data, side, width)


def examples(n: int) -> list[str]:
    return [f"padding([{n * 3 // 4}])", f"padding([{n // 2}, 0, {n}])", f"padding([2, 1], side='left', width={n})"]
