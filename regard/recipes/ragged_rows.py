"""Rows of different lengths, stored in one flat array, so that they are selected and padded without a Python loop."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

Integers = NDArray[Any]


@dataclass(frozen=True)
class RaggedRows:
    """Rows of integers of different lengths.

    values   the integers of all rows, row after row
    starts   index in `values` at which each row begins
    lengths  number of integers in each row
    """

    values: Integers
    starts: Integers
    lengths: Integers

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[int]]) -> "RaggedRows":
        """Build ragged rows from lists of integers.

        >>> RaggedRows.from_lists([[5, 6], [], [7]]).lengths.tolist()
        [2, 0, 1]
        """
        listed = list(rows)
        lengths = numpy.array([len(row) for row in listed], numpy.int64)
        values = numpy.array([value for row in listed for value in row], numpy.int64)
        return cls(values, numpy.cumsum(lengths) - lengths, lengths)

    def select(self, numbers: Integers) -> "RaggedRows":
        """Return the rows with these indices, in this order.

        >>> RaggedRows.from_lists([[5, 6], [], [7]]).select(numpy.array([2, 0])).values.tolist()
        [7, 5, 6]
        """
        lengths = self.lengths[numbers]
        starts = numpy.cumsum(lengths) - lengths
        where = numpy.repeat(self.starts[numbers] - starts, lengths) + numpy.arange(int(lengths.sum()))
        return RaggedRows(self.values[where], starts, lengths)

    def join(self, counts: Integers) -> "RaggedRows":
        """Concatenate consecutive rows to longer rows.

        counts  number of old rows in each new row

        The rows must follow each other in `values` without gaps, as `from_lists` and `select` return them. Here the
        second new row consists of two old rows:

        >>> RaggedRows.from_lists([[5, 6], [], [7]]).join(numpy.array([1, 2])).lengths.tolist()
        [2, 1]
        """
        ends = numpy.concatenate([[0], numpy.cumsum(self.lengths)])
        last = numpy.cumsum(counts)
        starts = ends[last - counts]
        return RaggedRows(self.values, starts, ends[last] - starts)

    def pad(self, width: int, fill: int, first: int = 0) -> Integers:
        """Return the rows as a matrix, padded on the right.

        The rows must follow each other in `values` without gaps, as `from_lists` and `select` return them.

        width  number of columns
        fill   integer used for padding
        first  column in which the rows begin; the columns before it are padding too

        >>> RaggedRows.from_lists([[5, 6], [], [7]]).pad(3, fill=0).tolist()
        [[5, 6, 0], [0, 0, 0], [7, 0, 0]]
        """
        padded = numpy.full((len(self.lengths), width), fill, numpy.int64)
        columns = numpy.arange(width) - first
        padded[(columns >= 0) & (columns < self.lengths[:, None])] = self.values
        return padded
