"""Infer the positions of queries among the keys from the mask of an intercepted call.

A static KV cache holds more keys than are in use, so the queries need not be the last positions. The last visible key
of each row of a causal mask is the query itself.
"""

from dataclasses import replace

import torch
from torch import Tensor

from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.data import DenseMask
from regard.see.call_adapters import FlexMask
from regard.see.record import Record

ROWS = 16  # rows of the mask that are read
UNKNOWN = "the positions of its queries are unknown: the mask hides the last key and has no diagonal"


def infer_query_positions(record: Record, causal: bool = False) -> Record:
    """The record with the positions of its queries as its mask shows them, or marked as unknown.

    causal  whether the call is causal self-attention, so that a single row shows the position of its query
    """
    i, j = record.q.shape[2], record.k.shape[2]
    if not 0 < i < j or not isinstance(record.mask, DenseMask | FlexMask):
        return record
    rows = torch.linspace(0, i - 1, min(i, ROWS), device=record.q.device).long()
    seen = _visible_to_first_head(record, rows)
    nonempty = seen.any(-1)
    if not bool(nonempty.any()):
        return record
    last = torch.where(seen, torch.arange(j, device=rows.device), -1).amax(-1)
    offsets, counts = (last - rows)[nonempty].unique(return_counts=True)
    is_diagonal = 2 * int(counts.max()) > int(nonempty.sum()) and (i > 1 or causal)
    if is_diagonal:
        return replace(record, positions=Positions(int(offsets[counts.argmax()])))
    if bool((last[:, -1] == j - 1).any()):
        return replace(record, positions=Positions.last_rows(i, j))
    return replace(record, positions_known=False, note="; ".join(part for part in (record.note, UNKNOWN) if part))


def _visible_to_first_head(record: Record, rows: Tensor) -> Tensor:
    """What the first head sees in some rows, (b r j): masks for a KV cache are the same for all heads."""
    b, j, device = record.q.shape[0], record.k.shape[2], record.q.device
    row, column = rows[:, None], torch.arange(j, device=device)[None, :]
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    seen = record.mask.see(Grid(batch, head, row, column, row, column))
    return seen.expand(b, 1, len(rows), j)[:, 0]
