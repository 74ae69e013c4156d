"""The base class of masks in which each query sees one contiguous range of keys."""

from abc import abstractmethod

from torch import Tensor

from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import Bounds, BoxVisibility, Flag, Mask, Position


class BandMask(Mask):
    """Base class of masks in which each query sees one range of keys.

    From one query to the next, the first and the last visible key stay or move to later positions.
    """

    @abstractmethod
    def bounds(self, i: Position) -> Bounds:
        """Return the first visible key of query i and the key after the last visible one. None means no limit."""

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

    def key_range(self, i: Tensor, sequence: int) -> Bounds:
        return self.bounds(i)
