"""One matrix of a student's answer, with tokens in rows, held against what it could be."""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.work.attention_steps import Array
from regard.work.student_answer import Sheet, StudentAnswer


@dataclass(frozen=True)
class Paper:
    """A student's matrix with tokens in rows."""

    cells: Sheet

    def __iter__(self) -> Iterator[tuple[int, int, StudentAnswer]]:
        for r, row in enumerate(self.cells):
            for c, cell in enumerate(row):
                if cell is not None:
                    yield r, c, cell

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0])

    @property
    def turned(self) -> "Paper":
        return Paper(tuple(zip(*self.cells, strict=True)))

    @property
    def digits(self) -> int:
        """The decimals in which it was written."""
        return max(self.digits_of_rows)

    @property
    def digits_of_rows(self) -> tuple[int, ...]:
        """The decimals in which each row was written."""
        return tuple(max((0 if cell is None else cell.digits or 0 for cell in row), default=0) for row in self.cells)

    def cell(self, entry: tuple[int, int]) -> StudentAnswer:
        """A number that was written."""
        found = self.cells[entry[0]][entry[1]]
        assert found is not None
        return found

    def wrong(self, true: Array) -> list[tuple[int, int]]:
        """The entries that the true numbers do not round to."""
        return [(r, c) for r, c, cell in self if not cell.matches(float(true[r, c]))]

    def fits(self, true: Array) -> bool:
        return true.shape == self.shape and not self.wrong(true)

    def over(self, true: Array) -> Array:
        """The student's numbers, with the true ones in the gaps."""
        found = true.copy()
        for r, c, cell in self:
            found[r, c] = cell.value
        return found
