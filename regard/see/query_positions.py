"""Find the positions of the queries of an intercepted attention call, or mark the positions as unknown.

Without a cache, or with one that grows, the queries are at the positions of the last keys. A static KV cache has empty
slots after the keys in use, so this need not be true. The positions are therefore read from the causal mask: the last
key that a query sees is at the position of the query. In cross-attention, the positions of queries and keys are
unrelated. If keys are pooled or queries come in chunks, they are unknown.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import Full
from regard.core.masks.data import DenseMask
from regard.see.call_adapters import FlexMask
from regard.see.record import Record

ROWS = 16  # rows of the mask that are read
CROSS_ATTENTION = "the positions of its queries are unknown: queries and keys are different sequences"
NO_DIAGONAL = "the positions of its queries are unknown: i={i} queries, j={j} keys, and the mask has no diagonal"


def infer_query_positions(record: Record, causal: bool = False, cross: bool = False) -> Record:
    """Return a record whose query positions are inferred from its mask, or marked as unknown.

    causal  whether the call is known to be causal self-attention. If so, a mask of one query is enough to find its
            position, and without a mask the queries are at the last positions
    cross   whether queries and keys are different sequences
    """
    if cross or not record.positions_known:
        return _without_positions(record, CROSS_ATTENTION)
    i, j = record.q.shape[2], record.k.shape[2]
    if i in (0, j) or not isinstance(record.mask, Full | DenseMask | FlexMask):
        return record
    unknown = NO_DIAGONAL.format(i=i, j=j)
    if isinstance(record.mask, Full):
        return record if causal and i < j else _without_positions(record, unknown)
    rows = torch.linspace(0, i - 1, min(i, ROWS), device=record.q.device).long()
    seen = _visible_to_first_head(record, rows)
    nonempty = seen.any(-1)
    if not bool(nonempty.any()):
        return record
    last = torch.where(seen, torch.arange(j, device=rows.device), -1).amax(-1)
    offsets, counts = (last - rows)[nonempty].unique(return_counts=True)
    if 2 * int(counts.max()) > int(nonempty.sum()) and (i > 1 or causal):
        return replace(record, positions=Positions(int(offsets[counts.argmax()])))
    if causal and bool((last[:, -1] == j - 1).any()):
        return replace(record, positions=Positions.last_rows(i, j))
    return _without_positions(record, unknown)


def _without_positions(record: Record, reason: str) -> Record:
    return replace(record, positions_known=False, note="; ".join(part for part in (record.note, reason) if part))


def is_over_channels(record: Record, find_module: Callable[[], nn.Module | None]) -> bool:
    """Return whether attention is over channels instead of positions, as in the channel attention of DaViT and XCiT.

    This is inferred from sizes: heads times channels is the width of the model, which is the size of an axis of the
    module's parameters. So attention is over channels if the number of heads times the number of queries is such a
    size, and the number of heads times the width of q is not.

    find_module  function that returns the module of the call; None if it is unknown
    """
    (_, h, i, c), j = record.q.shape, record.k.shape[2]
    if i != j or i == c or not isinstance(record.mask, Full) or (module := find_module()) is None:
        return False
    widths = {size for parameter in module.parameters() for size in parameter.shape}
    return h * i in widths and h * c not in widths


def _visible_to_first_head(record: Record, rows: Tensor) -> Tensor:
    """Return a boolean tensor (b r j) that is True where query rows[r] sees key j in the first head.

    Only the first head is read, because the mask of a KV cache is the same in all heads.
    """
    b, j, device = record.q.shape[0], record.k.shape[2], record.q.device
    row, column = rows[:, None], torch.arange(j, device=device)[None, :]
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    seen = record.mask.see(Grid(batch, head, row, column, row, column))
    return seen.expand(b, 1, len(rows), j)[:, 0]
