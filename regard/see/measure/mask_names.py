"""A mask that was seen, in the words of `regard.core.masks`."""

import re
from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.core.absolute_positions import Positions
from regard.core.masks import causal
from regard.core.masks.algebra import Mask
from regard.core.masks.forms import candidates

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
    """The candidates of every form, alone and combined with causal(): those of fewest parts and numbers first."""
    alone = list(candidates(n))
    combined = [mask for each in alone if each.as_window() is None for mask in (causal() & each, causal() | each)]
    yield from sorted(
        [*alone, *combined], key=lambda mask: (repr(mask).count("("), len(re.findall(r"\d+", repr(mask))))
    )
