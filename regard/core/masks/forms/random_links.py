"""Random attention: a query sees randomly chosen earlier keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.base.seeds import hash_integers
from regard.base.tracing import constant
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid
from regard.core.masks.algebra import BoxVisibility, Mask, Position

if TYPE_CHECKING:
    from regard.core.masks.block_tables import Spans


@dataclass(frozen=True, repr=False)
class RandomLinks(Mask):
    """The mask of `random_links`: each query sees up to `links` random keys at its own and earlier positions.

    The positions from 0 to the query's own are divided into `links` ranges of about equal length, and one key is drawn
    from each. The choice depends on the seed and the query's position only, so it is the same in training and in
    generation with a KV cache.
    """

    links: int
    seed: int

    def link(self, i: Tensor, which: int) -> tuple[Tensor, Tensor]:
        """Return, for each query, the key drawn from its range number `which`, and whether this range has any key.

        i      positions of the queries
        which  from 0 to `links` - 1
        """
        past = (i + 1).clamp(min=0)
        low, high = past * which // self.links, past * (which + 1) // self.links
        return low + hash_integers(i * self.links + which, self.seed) % (high - low).clamp(min=1), high > low

    def see(self, grid: Grid) -> Tensor:
        seen = grid.j < -grid.i.abs() - 1  # False everywhere, in the shape of the grid
        for key, exists in self.listed_keys(grid.i):
            seen = seen | ((grid.j == key) & exists)
        return seen

    def listed_keys(self, i: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.link(i, which) for which in range(self.links))

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=start > last, all=False)

    def table(self, spans: "Spans") -> BoxVisibility:
        if isinstance(spans.positions.keys, Tensor) or not spans.j:
            return spans.evaluate(self)  # only consecutive keys can be looked up
        hit = torch.zeros(spans.shape, dtype=torch.bool)
        for key, exists in self.listed_keys(spans.query_positions()):
            column = key - spans.positions.keys
            exists = exists & (column >= 0) & (column < spans.j)
            block = spans.column_blocks.slots[column.clamp(0, spans.j - 1)] // spans.size
            hit |= torch.zeros_like(hit).scatter_reduce_(1, block, exists, "amax")
        return BoxVisibility(none=~hit, all=torch.tensor(False))

    def __repr__(self) -> str:
        return f"random_links({constant(self.links)}, seed={constant(self.seed)})"


def random_links(count: int, seed: int = 0) -> Mask:
    """Random mask: a query sees `count` random keys at its own and earlier positions, or all if there are fewer.

    Zaheer et al. 2020, arXiv:2007.14062. The choice depends on the seed and the query's position only. The example
    prints the number of visible keys of each query.

    >>> random_links(2).dense(9).sum(1)
    tensor([1, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    return RandomLinks(
        check_integer("random_links(count)", count, 0, "keys"), check_integer("random_links(seed)", seed, 0)
    )


def examples(n: int) -> list[str]:
    return ["random_links(3)", "random_links(1, seed=5)", "random_links(0)"]
