"""A mask that was seen, in the words of `regard.core.masks`."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.core.absolute_positions import Positions
from regard.core.masks import blocks, causal, chunks, dilated, full, global_tokens, prefix, window
from regard.core.masks.algebra import Mask

OWN = "a mask of its own"


def describe(visible: Bool[Tensor, "i j"]) -> tuple[str, str | None]:
    """A mask in words, and where queries stand among the keys if that can be told."""
    for words, aligned in _candidates(*visible.shape):
        fits = [name for name, seen in aligned.items() if torch.equal(seen, visible)]
        if fits:
            return words, fits[0] if len(fits) < len(aligned) else None
    return OWN, None


@lru_cache(maxsize=16)
def _candidates(i: int, j: int) -> list[tuple[str, dict[str, Tensor]]]:
    """Each mask in words, and as a matrix for queries that are the last positions or the first."""
    aligned = {"bottom-right": Positions(j - i), "top-left": Positions(0)}
    return [
        (repr(mask), {name: mask.dense(i, j, positions=positions) for name, positions in aligned.items()})
        for mask in _masks(max(i, j))
    ]


def _masks(n: int) -> Iterator[Mask]:
    """The masks that have a name, the simplest first."""
    yield from (full(), causal(), causal() & ~window())
    yield from (causal() & window(before=before) for before in range(1, n))
    yield from (window(None, after) for after in range(1, n))
    yield from (window(before, None) for before in range(n))
    yield from (window(before, after) for before in range(n) for after in range(n))
    for size in range(2, n):
        yield blocks(size)
        yield from (chunks(size, before, after) for before in (0, None, 1, 2) for after in (0, None, 1))
        yield causal() & blocks(size)
        yield from (causal() & chunks(size, before) for before in (1, 2))
        yield from (dilated(size), causal() & dilated(size))
        yield from (prefix(size - 1), causal() | prefix(size), causal() & prefix(size - 1))
        for before in range(n):
            yield causal() & window(before=before) | prefix(size - 1)
            yield window(before, before) | global_tokens(size - 1)
