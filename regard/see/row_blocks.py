"""Scores and weights of a block of rows at a time, for every mask and score term, without the i x j matrix."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core.absolute_positions import Grid, key_positions
from regard.core.input_checks import disable_autocast
from regard.core.kernels.request import Request
from regard.core.masks.algebra import Full
from regard.core.masks.block_tables import NONE, BlockTable, block_table
from regard.core.scores import BoundTerm
from regard.core.softargmax import softargmax

BLOCK = 128
AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}  # scores in memory at a time: the CPU cache, enough work for a GPU


@dataclass(frozen=True)
class RowBlock:
    """The weights of some queries for the keys that any of them may see."""

    rows: Int[Tensor, "r"]
    columns: Int[Tensor, "s"] | slice  # a slice if all keys are visible to some query
    distance: Float[Tensor, "r s"]  # |i - j|
    lse: Float[Tensor, "b h r"]  # -inf for a row that sees nothing, NaN where a score is NaN or inf
    entropy: Float[Tensor, "b h r"]
    weights: Float[Tensor, "b h r s"]
    hidden: Bool[Tensor, "#b #h r s"] | None


def iterate_row_blocks(call: Request, rows: Int[Tensor, "r"] | None = None) -> Iterator[RowBlock]:
    """Yield blocks of all rows, or of some, in order, each within the memory budget."""
    b, h, _, i, j, _, _ = call.sizes
    device = call.q.device
    terms = call.bound_terms()
    rows = torch.arange(i, device=device) if rows is None else rows.to(device)
    table = _table(call)
    most = AT_ONCE.get(device.type, AT_ONCE["cpu"])
    step = max(1, most // max(1, b * h * j)) if table is None else BLOCK
    positions = key_positions(call.positions, j, device)
    for some in rows.split(step):
        columns = slice(None) if table is None else _visible_columns(table, some, j)
        width = j if isinstance(columns, slice) else len(columns)
        for few in some.split(max(1, most // max(1, b * h * width))):
            yield _compute_block(call, terms, few, columns, positions)


def _compute_block(
    call: Request, terms: list[BoundTerm], rows: Tensor, columns: Tensor | slice, positions: Tensor
) -> RowBlock:
    b, h, g, _, j, _, _ = call.sizes
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
        scores = torch.einsum("bgric,bgjc->bgrij", q.unflatten(1, (g, h // g)), k).flatten(1, 2)
    if not call.steep:  # softargmax applies a large beta after centring the scores
        scores = scores * call.beta
    for term in terms:
        scores = term(scores, grid)
    hidden = None
    if not isinstance(call.mask, Full):
        seen = call.mask.see(grid)
        hidden = ~seen.expand(*(1,) * (4 - seen.ndim), *seen.shape[:-2], len(rows), len(index))
        scores = scores.masked_fill_(hidden, -math.inf)
    return RowBlock(rows, columns, (grid.i - grid.j).abs().to(exact), *_normalise(call, scores), hidden)


def _normalise(call: Request, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp, the entropy and the weights. The weights overwrite the scores."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], -math.inf), scores.sum(-1), scores
    if call.steep:
        side = math.copysign(1.0, call.beta)
        top = torch.where(scores == -math.inf, -math.inf, scores * side).amax(-1)
        weights = softargmax(scores, call.beta).masked_fill(top.isnan()[..., None], math.nan)
        # a score of zero times an infinite beta is zero
        lse = torch.where(top == 0, top, top * abs(call.beta)).masked_fill(weights.isnan().any(-1), math.nan)
        return lse, torch.special.entr(weights).sum(-1), weights
    top = scores.amax(-1)
    nonempty = top != -math.inf  # NaN is not empty: all statistics of its row are NaN
    if call.sink is not None:
        top = torch.maximum(top, call.sink.to(top)[:, None])
    top = top.masked_fill(~nonempty, 0)
    below = scores.sub_(top[..., None]).clamp_(min=-2000)  # exp(-2000) is zero in every dtype
    weights = below.exp()
    total = kept = weights.sum(-1)
    if call.sink is not None:
        total = kept + torch.where(nonempty, (call.sink.to(top)[:, None] - top).exp(), 0)
    share = torch.where(nonempty, 1 / total, 0)
    # -sum w log w, where log w = below - log total
    entropy = (kept * total.log() - below.mul_(weights).sum(-1)) * share
    lse = torch.where(nonempty, top + total.log(), -math.inf)
    return lse, entropy.masked_fill(~nonempty, 0).clamp(min=0), weights.mul_(share[..., None])


def _table(call: Request) -> BlockTable | None:
    """The block table of the mask, or None if it would skip too little to pay."""
    if isinstance(call.mask, Full) or call.mask.opaque() or not isinstance(call.positions.keys, int):
        return None
    table = block_table(call.mask, call.q.shape[2], call.k.shape[2], BLOCK, positions=call.positions)
    return table if table.density < 0.9 else None


def _visible_columns(table: BlockTable, rows: Tensor, j: int) -> Tensor:
    blocks = (rows // BLOCK).unique().cpu()
    hit = (table.union()[blocks] != NONE).any(0)
    inside = hit.repeat_interleave(BLOCK)[:j]
    return inside.nonzero()[:, 0].to(rows.device)
