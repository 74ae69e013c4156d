"""Compute scores and weights for one block of queries at a time, so that the i x j matrix is never formed.

Any mask and score terms are supported.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core.absolute_positions import Grid, key_positions
from regard.core.input_checks import disable_autocast
from regard.core.kernels.request import Request
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import NONE, BlockTable, block_table
from regard.core.masks.data import DenseMask
from regard.core.scores import BoundTerm
from regard.core.softargmax import softargmax

BLOCK = 128
AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}  # scores in memory at a time: the CPU cache, enough work for a GPU
LOW = -1e30  # the score of a hidden pair: exp gives 0, and 0 * LOW is 0, which 0 * -inf is not


@dataclass(frozen=True)
class RowBlock:
    """The attention weights and statistics of a block of queries.

    The weights are those on some keys, whose indices are `columns`. Every key that one of these queries sees is among
    them.
    """

    rows: Int[Tensor, "r"]
    columns: Int[Tensor, "s"] | slice  # a slice if the keys are neighbours
    grid: Grid
    lse: Float[Tensor, "b h r"]  # -inf for a row that sees nothing, NaN where a score is NaN or inf
    entropy: Float[Tensor, "b h r"]
    largest: Float[Tensor, "b h r"]
    where: Int[Tensor, "b h r"]  # index among `columns`; any number for an empty row
    weights: Float[Tensor, "b h r s"]
    hidden: Bool[Tensor, "#b #h r s"] | None


def iterate_row_blocks(
    call: Request, rows: Int[Tensor, "r"] | None = None, lse: Float[Tensor, "b h i"] | None = None
) -> Iterator[RowBlock]:
    """Yield the attention weights in blocks of queries, in order; the size of a block is limited by its memory.

    call  the inputs of the attention call
    rows  indices of the queries; None is all
    lse   the log-sum-exp of all queries, if known; then only the weights are computed, which takes half the time
    """
    b, h, _, i, j, _, _ = call.sizes
    device = call.q.device
    terms = call.bound_terms()
    rows = torch.arange(i, device=device) if rows is None else rows.to(device)
    table = _table(call)
    most = AT_ONCE.get(device.type, AT_ONCE["cpu"])
    step = max(1, most // max(1, b * h * j)) if table is None else BLOCK
    positions = key_positions(call.positions, j, device)
    finite = not terms and all(bool(x.isfinite().all()) for x in (call.q, call.k))
    for some in rows.split(step):
        columns = _dense_columns(call.mask, some, j) if table is None else _visible_columns(table, some, j)
        width = len(range(j)[columns]) if isinstance(columns, slice) else len(columns)
        for few in some.split(max(1, most // max(1, b * h * width))):
            yield _compute_block(call, terms, few, columns, positions, lse, finite)


def see_rows(mask: Mask, grid: Grid, columns: Tensor | slice = slice(None)) -> Bool[Tensor, "#b #h r s"]:
    """Return which keys some queries see, as a boolean tensor that is True for visible pairs.

    The matrix of a dense mask is indexed, which is faster than `mask.see`.

    grid     the grid of these queries and the keys
    columns  indices of the keys; by default all
    """
    if isinstance(mask, DenseMask):
        data = mask.data.reshape(*(1,) * (4 - mask.data.ndim), *mask.data.shape)
        data = data if data.shape[2] == 1 else data.index_select(2, grid.row.flatten())
        data = data if data.shape[3] == 1 else data[..., columns]
        return data.expand(-1, -1, grid.row.numel(), grid.column.numel())
    seen = mask.see(grid)
    return seen.expand(*(1,) * (4 - seen.ndim), *seen.shape[:-2], grid.row.shape[-2], grid.column.shape[-1])


def _compute_block(
    call: Request,
    terms: list[BoundTerm],
    rows: Tensor,
    columns: Tensor | slice,
    positions: Tensor,
    lse: Tensor | None,
    finite: bool,
) -> RowBlock:
    b, h, g, _, j, c, _ = call.sizes
    device, exact = call.q.device, torch.promote_types(call.q.dtype, torch.float32)
    q, k = call.q[:, :, rows].to(exact), call.k[:, :, columns].to(exact)
    index = torch.arange(j, device=device)[columns]
    grid = Grid(
        batch=torch.arange(b, device=device)[:, None, None, None],
        head=torch.arange(h, device=device)[:, None, None],
        row=rows[:, None],
        column=index[None, :],
        i=rows[:, None] + call.positions.queries,
        j=positions[columns][None, :],
    )
    with disable_autocast(q):
        q = q if call.steep else q * call.beta  # softargmax applies a large beta after centring the scores
        scores = (q.reshape(b, g, -1, c) @ k.mT).reshape(b, h, len(rows), len(index))
    for term in terms:
        scores = term(scores, grid)
    hidden = None
    if not isinstance(call.mask, Full):
        hidden = ~see_rows(call.mask, grid, columns)
        if not call.steep and finite:  # three times as fast as masked_fill_, but NaN would not be hidden
            # in the dtype of the scores: LOW must stay what `_normalise` compares with
            most = torch.where(hidden, scores.new_full((), LOW), scores.new_full((), math.inf))
            torch.minimum(scores, most, out=scores)
        else:
            scores = scores.masked_fill_(hidden, -math.inf if call.steep else LOW)
    if lse is None or call.steep:
        return RowBlock(rows, columns, grid, *_normalise(call, scores), hidden)
    known = lse[:, :, rows]
    scores = scores.sub_(known.masked_fill(known == -math.inf, 0)[..., None])
    unused = torch.zeros_like(known)
    return RowBlock(rows, columns, grid, known, unused, unused, unused.long(), _exp(scores), hidden)


def _normalise(call: Request, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Apply the softmax to scores in place.

    Returns for each query the log-sum-exp, the entropy, the largest weight and its index, and then the weights.
    """
    if not scores.shape[-1]:
        empty = scores.sum(-1)
        return empty - math.inf, empty, empty, empty.long(), scores
    if call.steep:
        return _normalise_steep(call, scores)
    if call.terms:
        scores = scores.clamp(min=LOW)  # -inf that was added
    best, where = scores.max(-1)
    nonempty = best != LOW  # NaN is not empty: all statistics of its row are NaN
    top = best if call.sink is None else torch.maximum(best, call.sink.to(best)[:, None])
    top = top.masked_fill(~nonempty, 0)
    below = scores.sub_(top[..., None])
    weights = _exp(below)
    total = kept = weights.sum(-1)
    if call.sink is not None:
        total = kept + torch.where(nonempty, (call.sink.to(top)[:, None] - top).exp(), 0)
    share = torch.where(nonempty, 1 / total, 0)
    # -sum w log w, where log w = below - log total
    entropy = (kept * total.log() - below.mul_(weights).sum(-1)) * share
    lse = torch.where(nonempty, top + total.log(), -math.inf)
    largest = torch.where(nonempty, (best - top).exp() * share, 0)
    return lse, entropy.masked_fill(~nonempty, 0).clamp(min=0), largest, where, weights.mul_(share[..., None])


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), but 0 where the result is near or below the smallest normal floating-point number. Overwrites x.

    This avoids denormal numbers, with which arithmetic is about ten times as slow.
    """
    smallest = 2 * torch.finfo(x.dtype).tiny
    found = x.clamp_(min=math.log(smallest)).exp()
    return torch.nn.functional.threshold(found, 1.1 * smallest, 0.0, inplace=True)


def _normalise_steep(call: Request, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    side = math.copysign(1.0, call.beta)
    top = torch.where(scores == -math.inf, -math.inf, scores * side).amax(-1)
    weights = softargmax(scores, call.beta).masked_fill(top.isnan()[..., None], math.nan)
    # a score of zero times an infinite beta is zero
    lse = torch.where(top == 0, top, top * abs(call.beta)).masked_fill(weights.isnan().any(-1), math.nan)
    return lse, torch.special.entr(weights).sum(-1), *weights.max(-1), weights


def _table(call: Request) -> BlockTable | None:
    """Return the table of visible blocks of the mask; None if at most 10 % are hidden, or there is no table.

    A table is not computed for the mask `full()`, for masks that must be evaluated on every pair (`Mask.opaque`), and
    if the positions of the keys are a tensor instead of consecutive numbers.
    """
    if isinstance(call.mask, Full) or call.mask.opaque() or not isinstance(call.positions.keys, int):
        return None
    table = block_table(call.mask, call.q.shape[2], call.k.shape[2], BLOCK, positions=call.positions)
    return table if table.density < 0.9 else None


def _visible_columns(table: BlockTable, rows: Tensor, j: int) -> Tensor | slice:
    blocks = (rows // BLOCK).unique().cpu()
    hit = (table.union()[blocks] != NONE).any(0)
    inside = hit.repeat_interleave(BLOCK)[:j].nonzero()[:, 0]
    if len(inside) and int(inside[-1] - inside[0]) + 1 == len(inside):
        return slice(int(inside[0]), int(inside[-1]) + 1)
    return inside.to(rows.device)


def _dense_columns(mask: Mask, rows: Tensor, j: int) -> slice:
    """Return the range from the first to the last key that at least one of the queries in `rows` sees.

    Indices in `rows` select the queries. If the mask is not a dense matrix, the range of all keys is returned.
    """
    if not isinstance(mask, DenseMask) or mask.data.shape[-1] != j or not len(rows):
        return slice(None)
    data = mask.data if mask.data.shape[-2] == 1 else mask.data.index_select(-2, rows.to(mask.data.device))
    seen = data.flatten(0, -2).any(0).nonzero()[:, 0]
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
