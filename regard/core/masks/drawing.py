"""Draw masks as text for a terminal, or on a matplotlib axis."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.base.shading import shade
from regard.core.absolute_positions import Positions
from regard.core.masks.algebra import Mask, resolve_positions

_MOST_CELLS = 64  # a wider matrix is pooled to at most this many cells a side


def draw(
    mask: Mask, queries: int, keys: int | None = None, *, positions: Positions | None = None, ax: Any = None
) -> str:
    """Rows are queries, columns are keys; a cell's shade is the share of its pairs that is visible."""
    positions, keys = resolve_positions(queries, keys, positions)
    seen = mask.dense(queries, keys, positions=positions)
    seen = seen.flatten(0, -3)[0] if seen.ndim > 2 else seen  # the first sequence is drawn
    shares = _pool(seen)
    if ax is not None:
        first, start = positions.queries, positions.keys if isinstance(positions.keys, int) else 0
        edges = (start - 0.5, start + keys - 0.5, first + queries - 0.5, first - 0.5)
        ax.imshow(seen.numpy(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="equal", extent=edges)
        ax.set_title(repr(mask), fontsize=8)
        ax.set_xlabel("key position j")
        ax.set_ylabel("query position i")
    exact = shares.shape == seen.shape
    return "\n".join("".join(_cell(share, exact) for share in row) for row in shares.tolist())


def _cell(share: float, exact: bool) -> str:
    if exact:
        return "██" if share else " ·"
    return shade(share) * 2


def _pool(seen: Tensor) -> Float[Tensor, "q k"]:
    step = max(1, -(-max(seen.shape) // _MOST_CELLS))
    if step == 1 or not seen.numel():
        return seen.float()
    sums = torch.nn.functional.avg_pool2d(
        seen.float()[None, None], step, ceil_mode=True, count_include_pad=False, divisor_override=None
    )
    return sums[0, 0]
