"""Dilated attention: a query sees every `step`-th key."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import BoxVisibility, Mask, Position

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """The mask of `dilated`: key j is visible to query i if (i - j) % step == 0."""

    step: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.i - grid.j) % self.step == 0

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        # the differences i - j are first - stop .. last - start: is a multiple of the step among them?
        return BoxVisibility(none=(last - start) // self.step * self.step < first - stop, all=self.step == 1)

    def table(self, spans: "Spans") -> BoxVisibility:
        same = spans.equal_labels(spans.query_positions() % self.step, spans.key_positions() % self.step)
        return BoxVisibility(none=super().table(spans).none | same.none, all=same.all)

    def labels(self, i: Tensor, j: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        return i % self.step, j % self.step

    def steps(self) -> tuple[int, ...]:
        return (self.step,)

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"dilated({constant(self.step)})"


def dilated(step: int) -> Mask:
    """Dilated mask: a query sees every `step`-th key before and after its own, (i - j) % step == 0.

    Beltagy et al. 2020, arXiv:2004.05150.

    >>> dilated(2).dense(3).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    return Dilated(check_integer("dilated(step)", step, 1, "positions"))


def examples(n: int) -> list[str]:
    return ["dilated(3)", "dilated(1)", "dilated(7)"]


def candidates(n: int) -> Iterator[Mask]:
    yield from (dilated(step) for step in range(2, n))
