"""Where the queries of a foreign call stand among its keys: what its shapes cannot tell, its mask can.

A cache of fixed length hands out more keys than are in use, so the queries need not be the last rows. But a causal
mask ends at the query itself, and says so row by row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.data import DenseMask
from regard.see.call_adapters import FlexMask, InterceptedCall

ROWS = 16  # asked of the mask: enough to tell a diagonal from chance
UNKNOWN = "not known where its queries stand: the mask hides the last key and shows no diagonal"


def stood(heard: InterceptedCall, causal: bool = False) -> InterceptedCall:
    """The call with its queries where its mask shows them, or told to stand nowhere that is known.

    causal  whether each query is known to see itself and nothing later, so that a single row tells where it stands
    """
    i, j = heard.q.shape[2], heard.k.shape[2]
    if heard.told or not 0 < i < j or not isinstance(heard.mask, DenseMask | FlexMask):
        return heard
    rows = torch.linspace(0, i - 1, min(i, ROWS), device=heard.q.device).long()
    seen = _sight(heard, rows)
    awake = seen.any(-1)
    if not bool(awake.any()):
        return heard
    last = torch.where(seen, torch.arange(j, device=rows.device), -1).amax(-1)
    begins, counts = (last - rows)[awake].unique(return_counts=True)
    begin, most = int(begins[counts.argmax()]), int(counts.max())
    diagonal = 2 * most > int(awake.sum()) and (i > 1 or causal)
    if diagonal:
        return replace(heard, positions=Positions(begin))
    if bool((last[:, -1] == j - 1).any()):
        return replace(heard, positions=Positions.last_rows(i, j))
    return replace(heard, located=False, note="; ".join(part for part in (heard.note, UNKNOWN) if part))


def _sight(heard: InterceptedCall, rows: Tensor) -> Tensor:
    """What the first head sees in some rows, (b r j): masks of caches are alike for all heads."""
    b, j, device = heard.q.shape[0], heard.k.shape[2], heard.q.device
    row, column = rows[:, None], torch.arange(j, device=device)[None, :]
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    seen = heard.mask.see(Grid(batch, head, row, column, row, column))
    return seen.expand(b, 1, len(rows), j)[:, 0]
