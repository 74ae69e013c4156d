"""Find which axes are heads in attention calls of tensors with any number of axes before (positions, width)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor


@dataclass(frozen=True)
class HeadCount:
    """The number of heads of an attention call, and a note on where this number was found."""

    heads: int
    note: str = ""


@dataclass(frozen=True)
class LeadingAxes:
    """Which of the leading axes, those before (positions n, width c), are the batch and which are the heads.

    Axes `first` to `last` (excluded) are the heads: two axes if query heads are grouped by key head. All other leading
    axes are the batch.

    sizes   sizes of the leading axes; an axis (b h) that merges sequences and heads counts as two axes
    merged  sizes of the leading axes of the tensors, where (b h) is one axis
    note    a remark on how the heads were found, for the record
    """

    sizes: tuple[int, ...]
    first: int
    last: int
    merged: tuple[int, ...]
    note: str = ""

    @property
    def heads(self) -> int:
        """The number of heads."""
        return math.prod(self.sizes[self.first : self.last])

    def to_heads(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "b h n c"]:
        """Reshape a tensor to (b, h, n, c); leading axes that are missing or of size 1 are broadcast."""
        if len(self.sizes) == 2 and self.sizes == self.merged and self.first == 1:
            return x.expand(*self.sizes, -1, -1)  # they are (b, h) already
        x = x.expand(*self.merged, *x.shape[-2:]).reshape(*self.sizes, *x.shape[-2:])
        order = self._order()
        return x.permute(*order, *(len(order) + at for at in range(2))).reshape(-1, self.heads, *x.shape[-2:])

    def from_heads(self, x: Shaped[Tensor, "b h n c"]) -> Shaped[Tensor, "..."]:
        """Reshape (b, h, n, c) back to the original leading axes: the inverse of `to_heads`."""
        order = self._order()
        x = x.reshape(*(self.sizes[at] for at in order), *x.shape[-2:])
        back = [order.index(at) for at in range(len(order))]
        return x.permute(*back, *(len(order) + at for at in range(2))).reshape(*self.merged, *x.shape[-2:])

    def _order(self) -> list[int]:
        heads = list(range(self.first, self.last))
        return [at for at in range(len(self.sizes)) if at not in heads] + heads


def read_leading_axes(sizes: Sequence[int], count: HeadCount | None) -> LeadingAxes:
    """Find which of the leading axes, those before (positions n, width c), are heads.

    A single axis is (b h), sequences times heads, if its size is a multiple of the number of heads, otherwise the
    batch. Two axes are (b, h). If there are three or more axes, the heads are the axis whose size is the number of
    heads, or two adjacent axes whose sizes multiply to this number, as in grouped-query attention. If there are no such
    axes, the heads are the last axis.

    sizes  sizes of the leading axes
    count  the number of heads of the module; None if it is unknown
    """
    sizes = tuple(sizes)
    if len(sizes) == 0:
        return LeadingAxes(sizes, 0, 0, sizes)
    if len(sizes) == 1:
        if count is None or count.heads < 2 or sizes[0] < count.heads or sizes[0] % count.heads:
            return LeadingAxes(sizes, 1, 1, sizes)
        return LeadingAxes((sizes[0] // count.heads, count.heads), 1, 2, sizes, count.note)
    if len(sizes) == 2:
        return LeadingAxes(sizes, 1, 2, sizes)
    if count is not None:
        single = [(at, at + 1) for at in range(len(sizes)) if sizes[at] == count.heads]
        pairs = [(at, at + 2) for at in range(1, len(sizes) - 1) if math.prod(sizes[at : at + 2]) == count.heads]
        # (b, h, blocks) is the usual order, so axis 1 is preferred among equals
        for first, last in sorted(single, key=lambda span: span[0] != 1) + pairs:
            several = f"; axes {sizes} fit in several ways" if len(single) > 1 else ""
            return LeadingAxes(sizes, first, last, sizes, f"{count.note}{several}".removeprefix("; "))
    last = len(sizes)
    note = f"the number of heads is unknown: of the axes {sizes} before positions the last is read as heads"
    return LeadingAxes(sizes, last - 1, last, sizes, note)
