"""The KV caches of a model, one for each of its blocks."""

from collections.abc import Callable, Iterator

from torch import Tensor

from regard.base.errors import CacheError
from regard.core.cache import Cache


class Caches:
    """The KV caches of all blocks of a model. All hold the same number of positions.

    make   function that returns the empty cache of one block
    depth  number of blocks
    """

    def __init__(self, make: Callable[[], Cache], depth: int) -> None:
        self.layers = [make() for _ in range(depth)]

    @property
    def length(self) -> int:
        """The number of positions in every cache.

        Raises CacheError if the caches differ in length because a forward pass failed half-way.
        """
        length = self.layers[0].length
        if any(cache.length != length for cache in self.layers):
            raise CacheError("a call failed half-way, and some blocks have stored it; start again with model.cache()")
        return length

    @property
    def nbytes(self) -> int:
        """The size of all caches in bytes."""
        return sum(cache.nbytes for cache in self.layers)

    def __iter__(self) -> Iterator[Cache]:
        return iter(self.layers)

    def reorder(self, rows: Tensor) -> None:
        """Reorder the sequences of every cache, as beam search does: sequence r becomes the old sequence rows[r]."""
        for cache in self.layers:
            cache.reorder(rows)


def check_caches(caches: Caches, depth: int) -> Caches:
    """Return `caches` if they were made by the `cache` method of a model with this depth.

    Raises CacheError otherwise.
    """
    if not isinstance(caches, Caches):
        raise CacheError(f"cache takes the result of model.cache(), not {type(caches).__name__}")
    if len(caches.layers) != depth:
        raise CacheError(f"this cache was made for {len(caches.layers)} blocks, but the model has {depth}")
    return caches
