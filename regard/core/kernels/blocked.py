"""Block-sparse attention: gathers the key blocks that each query block sees and calls the fused kernel on them.

Time and memory are proportional to the number of visible blocks, on the CPU too, with gradients.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.kernels import sdpa
from regard.core.kernels.request import Request, sum_terms, visible_keys
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import (
    NONE,
    Blocks,
    BlockTable,
    Spans,
    find_hidden_keys_and_empty_rows,
    sparsest_table,
)
from regard.core.masks.data import has_matrix
from regard.core.masks.plan_cache import Memo, joint_key

SUMMARY = "gathers the visible key blocks and runs torch's fused attention on them"
RANK = 3
SIZE = 64  # fine enough that a window of 256 wastes little, coarse enough to fill the fused kernel
_ALIKE = 4  # number of patterns that query blocks share; the other blocks have their own mask
_AT_ONCE = 1 << 24  # pairs evaluated at once while planning
_KEEP = 1 << 26  # largest number of pairs of a plan that is cached


@dataclass(frozen=True)
class BlockGroup:
    """Query blocks (r) that see the same number of key blocks (m), and the mask inside these blocks."""

    rows: Int[Tensor, "r"]
    columns: Int[Tensor, "r m"]
    visible: Bool[Tensor, "#r #b s l"]

    @cached_property
    def nonempty(self) -> Bool[Tensor, "#r #b s l"]:
        """The mask with all keys visible in rows that see nothing: the fused kernel needs finite scores there."""
        return self.visible | ~self.visible.any(-1, keepdim=True)

    @cached_property
    def sliding(self) -> bool:
        """Whether the key blocks form a sliding window, so that views can replace copies."""
        if not self.columns.shape[1]:
            return False
        steps = torch.arange(len(self.rows))
        run = self.columns[0, 0] + steps[:, None] + torch.arange(self.columns.shape[1])
        return torch.equal(self.rows, self.rows[0] + steps) and torch.equal(self.columns, run)


@dataclass(frozen=True)
class GatherPlan:
    """Which key blocks each group of query blocks gathers, for one mask and size."""

    spans: Spans  # the blocks that rows and columns of the groups index
    groups: tuple[BlockGroup, ...]
    unseen: Bool[Tensor, "#b 1 j 1"] | None  # keys that nobody sees
    blind: Bool[Tensor, "#b 1 i 1"] | None  # queries that see nothing

    @property
    def pairs(self) -> int:
        """Number of pairs that the masks of the groups hold."""
        return sum(group.visible.numel() for group in self.groups)


def refusals(request: Request) -> list[str]:
    reasons = sdpa.refusals(request)
    if isinstance(request.mask, Full):
        reasons.append("the mask hides nothing, so no block can be skipped")
    if has_matrix(request.mask):
        reasons.append("a boolean matrix is dense already; write the rule with regard's masks")
    if torch.compiler.is_compiling():
        reasons.append("the list of visible blocks is computed in Python, which torch.compile cannot trace")
    if 0 in request.sizes:
        reasons.append("it does not take empty tensors")
    return reasons


def work(request: Request) -> float:
    b, h, _, i, j, _, _ = request.sizes
    if request.q.device.type != "cpu" and request.mask.tensors():
        return (
            2.0 * b * h * i * j
        )  # a block table would synchronise with the device; assume that nothing can be skipped
    return 1.5 * b * h * _visited_blocks(_get_block_table(request)) * SIZE * SIZE + 2e5


def memory(request: Request) -> int:
    b, h, g, _, _, c, e = request.sizes
    table = _get_block_table(request)
    size, visited = request.q.element_size(), _visited_blocks(table)
    pairs = b * h * visited * SIZE * SIZE
    needed = b * h * visited * SIZE * (c + e) * size + visited * SIZE * SIZE
    if request.terms:
        needed += pairs * size
    learned = any(tensor.requires_grad for term in request.terms for tensor in term.tensors())
    if request.q.device.type == "cpu" and (request.dropout or learned):
        # torch's unfused path: scores and weights, twice with a backward pass
        training = learned or any(x.requires_grad for x in (request.q, request.k, request.v))
        needed += (4 if training and torch.is_grad_enabled() else 2) * pairs * max(4, size)
    if table.steps:  # reordered copies of q, k, v and the output
        rows, columns = table.state.shape[-2:]
        needed += b * SIZE * (h * rows + g * columns) * (c + e) * size
    return needed


def run(request: Request) -> Float[Tensor, "b h i e"]:
    b, h, _, _, _, _, e = request.sizes
    plan = _get_plan(request)
    rows, columns = plan.spans.row_blocks, plan.spans.column_blocks
    k, v = request.k, request.v
    if plan.unseen is not None:
        k, v = k.masked_fill(plan.unseen, 0), v.masked_fill(plan.unseen, 0)
    if plan.blind is not None:
        request = replace(request, q=request.q.masked_fill(plan.blind, 0))
    laid = ((request.q, rows), (k, columns), (v, columns))
    q, k, v = (_split_into_blocks(x, blocks, plan.spans.steps) for x, blocks in laid)  # (b h) n c
    terms = request.bound_terms()
    sink = None if request.sink is None else request.sink.repeat(b)
    outs = []
    for group in plan.groups:
        blocks = _query_blocks(q, group)
        if not group.columns.shape[1]:
            # zeros that are connected to q, so that backward works if the mask hides everything
            nothing = blocks[..., :1].masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0)
            outs.append(nothing.expand(*blocks.shape[:3], e))
            continue
        visible = group.visible if terms and request.hides_by_score else group.nonempty
        visible = visible.expand(-1, b, -1, -1).repeat_interleave(h, 1) if visible.shape[1] > 1 else visible
        bias, keys, values, hidden = None, _key_blocks(k, group), _key_blocks(v, group), None
        if terms:
            bias = sum_terms(terms, _grid(request, plan.spans, group), request.q)
            bias = bias.expand(len(group.rows), b, h, SIZE, group.columns.shape[1] * SIZE).flatten(1, 2)
        if bias is not None and request.hides_by_score:
            seen = visible & (bias != -math.inf)
            unseen, hidden = ~visible_keys(seen, keys.shape[1]), ~seen.any(-1, keepdim=True)
            keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
            # a row that sees nothing needs finite scores inside the fused kernel; it is zeroed below
            visible, bias, blocks = seen | hidden, bias.masked_fill(hidden, 0), blocks.masked_fill(hidden, 0)
        out = sdpa.masked_attention(blocks, keys, values, visible, bias, sink, request.beta, request.dropout)
        outs.append(out if hidden is None else out.masked_fill(hidden, 0))
    out = torch.cat(outs)  # r (b h) s e
    order = torch.cat([group.rows for group in plan.groups])
    if not torch.equal(order, torch.arange(len(order))):
        out = out[order.argsort().to(out.device)]
    out = out.transpose(0, 1).flatten(1, 2)
    out = out.index_select(1, rows.slots.to(out.device)) if plan.spans.steps else out[:, : plan.spans.i]
    out = out.reshape(b, h, plan.spans.i, e)
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def _query_blocks(q: Float[Tensor, "bh n c"], group: BlockGroup) -> Float[Tensor, "r bh s c"]:
    blocks = q.reshape(q.shape[0], -1, SIZE, q.shape[2])
    if group.sliding:
        first = int(group.rows[0])
        return blocks[:, first : first + len(group.rows)].transpose(0, 1)
    return blocks.index_select(1, group.rows.to(q.device)).transpose(0, 1)


def _key_blocks(k: Float[Tensor, "bg n c"], group: BlockGroup) -> Float[Tensor, "r bg l c"]:
    rows, run = group.columns.shape
    if group.sliding:
        first = int(group.columns[0, 0]) * SIZE
        stretch = k[:, first : first + (rows + run - 1) * SIZE]
        return stretch.unfold(1, run * SIZE, SIZE).permute(1, 0, 3, 2)
    blocks = k.reshape(k.shape[0], -1, SIZE, k.shape[2])
    gathered = blocks.index_select(1, group.columns.reshape(-1).to(k.device))
    return gathered.reshape(k.shape[0], rows, run * SIZE, k.shape[2]).transpose(0, 1)


def _grid(request: Request, spans: Spans, group: BlockGroup) -> Grid:
    """The grid of a group's pairs, with axes r, b, h, s, l."""
    b, h, _, _, j, _, _ = request.sizes
    device = request.q.device
    row, column = spans.rows[group.rows], spans.columns[group.columns].flatten(1)
    row, column = row.to(device)[:, None, None, :, None], column.to(device)[:, None, None, None, :]
    positions = key_positions(request.positions, j, device)
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.arange(h, device=device)[:, None, None]
    return Grid(batch, head, row, column, row + request.positions.queries, positions[column])


_plans: Memo[GatherPlan] = Memo(16)


def _get_plan(request: Request) -> GatherPlan:
    i, j, device = request.q.shape[2], request.k.shape[2], request.q.device
    rest = (request.positions, i, j, device) if isinstance(request.positions.keys, int) else None
    make = lambda: _build_plan(request.mask, request.positions, i, j, device)  # noqa: E731 (a name for a long argument)
    return _plans.get(joint_key(request.mask, rest), request.mask, make, lambda plan: plan.pairs <= _KEEP)


def _build_plan(mask: Mask, positions: Positions, i: int, j: int, device: torch.device) -> GatherPlan:
    mask = mask.to(torch.device("cpu"))
    table = sparsest_table(mask, i, j, SIZE, positions=positions)
    spans = Spans(positions, i, j, SIZE, table.steps)
    unseen, blind = find_hidden_keys_and_empty_rows(mask, positions, i, j, table)
    state = table.union()
    runs = (state != NONE).sum(1)
    groups: list[BlockGroup] = []
    for run in runs.unique().tolist():
        rows = (runs == run).nonzero()[:, 0]
        columns = (state[rows] != NONE).nonzero()[:, 1].reshape(len(rows), run)
        look = partial(_visible_in_blocks, mask, spans)
        groups += [
            BlockGroup(r, c, seen_there.to(device)) for r, c, seen_there in _group_by_pattern(rows, columns, look)
        ]
    return GatherPlan(
        spans=spans,
        groups=tuple(sorted(groups, key=lambda group: int(group.rows[0]))),
        unseen=None if unseen is None else unseen[:, None, :, None].to(device),
        blind=None if blind is None else blind[:, None, :, None].to(device),
    )


def _visible_in_blocks(mask: Mask, spans: Spans, rows: Tensor, columns: Tensor) -> Bool[Tensor, "r b s l"]:
    row, i = (x[rows][:, None, :, None] for x in (spans.rows, spans.query_positions()))
    column, j, real = (
        x[columns].flatten(1)[:, None, None, :]
        for x in (spans.columns, spans.key_positions(), spans.column_blocks.real)
    )
    batch = torch.arange(mask.batch() or 1)[:, None, None]
    seen = mask.see(Grid(batch, torch.zeros(1, dtype=torch.long), row, column, i, j)) & real
    return seen.expand(len(rows), mask.batch() or 1, SIZE, columns.shape[1] * SIZE)


def _group_by_pattern(
    rows: Tensor, columns: Tensor, look: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group query blocks that see the same pattern, so that they share one mask; a window has a few patterns.

    Blocks are evaluated in chunks, so that a long sequence never needs all of its pairs in memory.
    """
    patterns: list[Tensor] = []
    kinds: list[Tensor] = []
    odd: list[Tensor] = []
    for some in torch.arange(len(rows)).split(max(1, _AT_ONCE // (SIZE * SIZE * max(columns.shape[1], 1)))):
        visible = look(rows[some], columns[some])
        kind = torch.full_like(some, _ALIKE)
        for which in range(_ALIKE):
            left = (kind == _ALIKE).nonzero()[:, 0]
            if not len(left):
                break
            if which == len(patterns):
                patterns.append(visible[left[:1]].clone())
            kind[left[(visible[left] == patterns[which]).flatten(1).all(1)]] = which
        kinds.append(kind)
        odd.append(visible[kind == _ALIKE])
    which_kind = torch.cat(kinds)
    for which, pattern in enumerate(patterns):
        same = which_kind == which
        yield rows[same], columns[same], pattern
    if (which_kind == _ALIKE).any():
        yield rows[which_kind == _ALIKE], columns[which_kind == _ALIKE], torch.cat(odd)


def _split_into_blocks(x: Float[Tensor, "b h n c"], blocks: Blocks, steps: tuple[int, ...]) -> Float[Tensor, "bh m c"]:
    """Rows in the order of their blocks, padded to whole blocks."""
    if steps:  # index_select is many times faster with fewer axes
        return x.flatten(0, 1).index_select(1, blocks.index.flatten().to(x.device))
    missing = blocks.index.numel() - x.shape[2]
    return (pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)


def _get_block_table(request: Request) -> BlockTable:
    return sparsest_table(request.mask, request.q.shape[2], request.k.shape[2], SIZE, positions=request.positions)


def _visited_blocks(table: BlockTable) -> int:
    """Number of blocks that at least one sequence visits."""
    with _disable_current_modes():  # the table holds numbers even if q is a fake tensor
        return table.visited_by_any
