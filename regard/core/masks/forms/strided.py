"""Strided attention: all later queries see the keys at multiples of `step`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import BoxVisibility, CompoundMask, Mask, Position
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.window import Window


@dataclass(frozen=True, repr=False)
class Multiples(Mask):
    """The mask in which every query sees the keys with j % step == 0."""

    step: int

    def see(self, grid: Grid) -> Tensor:
        return (grid.j % self.step == 0) & (grid.row >= 0)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=stop // self.step * self.step < start, all=self.step == 1)

    def labels(self, i: Tensor, j: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(i), (j % self.step).clamp(max=1)

    def visible_keys(self, j: Tensor, batch: Tensor) -> Tensor:
        return j % self.step == 0

    def steps(self) -> tuple[int, ...]:
        return (self.step,)

    def __repr__(self) -> str:
        return f"multiples({constant(self.step)})"


@dataclass(frozen=True, repr=False)
class Strided(CompoundMask):
    """The mask of `strided`: key j is visible to query i if j == i, or if j <= i and j % step == 0."""

    step: int

    def expand(self) -> Mask:
        return Window(0, 0) | (Causal() & Multiples(self.step))

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"strided({constant(self.step)})"


def strided(step: int) -> Mask:
    """Strided mask: a query sees its own key and earlier multiples of `step`, j == i, or j <= i and j % step == 0.

    These are the summary positions of the fixed pattern of Child et al. 2019, arXiv:1904.10509.

    >>> strided(2).dense(4).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    return Strided(check_integer("strided(step)", step, 1, "positions"))


def examples(n: int) -> list[str]:
    return ["strided(4)", "strided(1)", "strided(3)"]


def candidates(n: int) -> Iterator[Mask]:
    yield from (strided(step) for step in range(2, n))
