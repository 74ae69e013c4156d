"""Draw masks as text for a terminal, or on a matplotlib axis."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.display import show_grids
from regard.base.shading import shade
from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Mask, resolve_positions
from regard.core.masks.data import DenseMask
from regard.core.masks.mask_mod import BlockMaskMask

_MOST_CELLS = 64  # a wider matrix is pooled to at most this many cells a side


def draw(
    mask: Mask, queries: int, keys: int | None = None, *, positions: Positions | None = None, ax: Any = None
) -> str:
    """Draw a mask as text: rows are queries, columns are keys.

    In the picture of a large mask, a cell is several pairs. Its shade shows the fraction of them that are visible.
    If sequences differ, the first is drawn. With `ax`, the mask is also drawn on that matplotlib axis.
    """
    positions, keys = resolve_positions(queries, keys, positions)
    seen = mask.dense(queries, keys, positions=positions)
    seen = seen.flatten(0, -3)[0] if seen.ndim > 2 else seen  # the first sequence is drawn
    if ax is not None:
        first, start = positions.queries, positions.keys if isinstance(positions.keys, int) else 0
        edges = (start - 0.5, start + keys - 0.5, first + queries - 0.5, first - 0.5)
        ax.imshow(seen.numpy(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="equal", extent=edges)
        ax.set_title(repr(mask), fontsize=8)
        ax.set_xlabel("key position j")
        ax.set_ylabel("query position i")
    return draw_matrix(seen)


def draw_matrix(seen: Bool[Tensor, "i j"]) -> str:
    """Draw a boolean matrix as text."""
    shares = pool_shares(seen)
    exact = shares.shape == seen.shape
    return "\n".join("".join(_cell(share, exact) for share in row) for row in shares.tolist())


def default_sizes(mask: Mask) -> tuple[int, int] | None:
    """Return the numbers of queries and keys that the tensors of a mask cover. None if the mask fits any size."""
    for child in (mask, *mask.children()):
        if isinstance(child, DenseMask):
            return child.data.shape[-2], child.data.shape[-1]
        if isinstance(child, BlockMaskMask):
            return child.lengths
        found = None if child is mask else default_sizes(child)
        if found is not None:
            return found
    length = mask.length()
    return None if length is None else (length, length)


def draw_html(mask: Mask) -> str:
    """Return a mask as an HTML picture for a notebook, with its expression below."""
    queries, keys = default_sizes(mask) or (16, 16)
    queries, keys = (queries, keys) if mask.by_pair() else (min(queries, 48), min(keys, 48))
    seen = mask.dense(queries, keys, positions=Positions(0, 0) if queries == keys else None)
    shares = pool_shares(seen.flatten(0, -3)[0] if seen.ndim > 2 else seen)
    return show_grids([(repr(mask), shade_cells(shares))])


def shade_cells(shares: Float[Tensor, "q k"]) -> list[list[str]]:
    """Return a CSS colour for each number from 0 to 1."""
    return [[f"rgb(42 111 187 / {100 * share:.0f}%)" for share in row] for row in shares.tolist()]


def _cell(share: float, exact: bool) -> str:
    if exact:
        return "██" if share else " ·"
    return shade(share) * 2


def pool_shares(seen: Bool[Tensor, "i j"]) -> Float[Tensor, "q k"]:
    """Return the fraction of visible pairs in each cell of a picture with at most 64 x 64 cells."""
    step = max(1, -(-max(seen.shape) // _MOST_CELLS))
    if step == 1 or not seen.numel():
        return seen.float()
    sums = torch.nn.functional.avg_pool2d(
        seen.float()[None, None], step, ceil_mode=True, count_include_pad=False, divisor_override=None
    )
    return sums[0, 0]
