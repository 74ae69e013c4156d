"""Find the name of a measured mask in the notation of `regard.core.masks`, such as causal(), and its band of keys."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.core.absolute_positions import Positions
from regard.core.masks import causal
from regard.core.masks.algebra import Mask
from regard.core.masks.forms import candidates

UNNAMED = "a mask without a name"


@dataclass(frozen=True)
class VisibleBand:
    """A band of visible keys: `before` keys before the query, the key at its position, and `after` keys after it.

    `before=None` means all earlier keys, and `after=None` all later keys.
    """

    before: int | None
    after: int | None

    def __str__(self) -> str:
        if self.before is None and self.after is None:
            return "every key"
        if self.before is not None and self.before < 0:
            return "later keys only"
        if self.after == 0:
            return "causal" if self.before is None else f"causal, {self.before} earlier keys and itself"
        earlier = "all earlier keys" if self.before is None else f"{self.before} earlier keys"
        later = "all later ones" if self.after is None else f"{self.after} later one{'s' * (self.after != 1)}"
        return f"{earlier}, itself and {later}"

    def cut_to(self, n: int) -> "VisibleBand":
        """Return the band for n queries and n keys: a limit of n - 1 or more, which hides nothing, becomes None."""
        return VisibleBand(*(None if end is None or end >= n - 1 else end for end in (self.before, self.after)))

    def visible(self, i: int, j: int, alignment: str = "bottom-right") -> Bool[Tensor, "i j"]:
        """Return the visible pairs of the band as a boolean matrix.

        alignment  "bottom-right": the i queries are at the last of the j positions; "top-left": they are at the first
        """
        row = torch.arange(i)[:, None] + (j - i if alignment == "bottom-right" else 0)
        column = torch.arange(j)[None, :]
        seen = torch.ones(i, j, dtype=torch.bool)
        if self.before is not None:
            seen &= column >= row - self.before
        if self.after is not None:
            seen &= column <= row + self.after
        return seen


def smallest_band(visible: Bool[Tensor, "n n"]) -> VisibleBand | None:
    """Return the smallest band around the diagonal that contains all visible pairs; None if no pair is visible."""
    n = len(visible)
    distance = (torch.arange(n)[None, :] - torch.arange(n)[:, None])[visible]
    return VisibleBand(-int(distance.min()), int(distance.max())).cut_to(n) if len(distance) else None


def describe_mask(visible: Bool[Tensor, "i j"]) -> tuple[str, str | None]:
    """Return the name of a mask, found by comparison with known masks, and its alignment.

    The alignment says at which positions the queries are if there are more keys than queries: "bottom-right" (the last
    positions), "top-left" (the first), or None if the mask is the same for both.
    """
    for name, aligned in _candidates(*visible.shape):
        fits = [alignment for alignment, seen in aligned.items() if torch.equal(seen, visible)]
        if fits:
            return name, fits[0] if len(fits) < len(aligned) else None
    return UNNAMED, None


@lru_cache(maxsize=16)
def _candidates(i: int, j: int) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the name of each known mask, and its visible pairs as a matrix (i j) for each of the two alignments."""
    aligned = {"bottom-right": Positions(j - i), "top-left": Positions(0)}
    return [
        (repr(mask), {name: mask.dense(i, j, positions=positions) for name, positions in aligned.items()})
        for mask in _masks(max(i, j))
    ]


def _masks(n: int) -> Iterator[Mask]:
    """Yield the known masks for n positions, such as windows and chunks, alone and with causal(), simplest first."""
    alone = list(candidates(n))
    combined = [mask for each in alone if each.as_window() is None for mask in (causal() & each, causal() | each)]
    yield from sorted(
        [*alone, *combined], key=lambda mask: (repr(mask).count("("), len(re.findall(r"\d+", repr(mask))))
    )
