"""Block-sparse attention: calls a fused kernel on each query block and copies of the key blocks that it sees.

Time and memory are proportional to the number of visible blocks, on the CPU too, with gradients.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.tracing import can_read_values, outside_inference_mode
from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.kernels import compiled, offsets, sdpa
from regard.core.kernels.request import MOST_PREPARED, PreparedCall, Request, sum_terms, visible_keys
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import (
    NONE,
    Blocks,
    BlockTable,
    Spans,
    find_hidden_keys_and_empty_rows,
    sparsest_table,
)
from regard.core.masks.plan_cache import Memo, joint_key

SUMMARY = "gathers the visible key blocks and runs torch's fused attention on them"
RANK = 3
SIZE = 64  # fine enough that a window of 256 wastes little, coarse enough to fill the fused kernel
_ALIKE = 4  # number of patterns that query blocks share; the other blocks have their own mask
_AT_ONCE = 1 << 24  # pairs evaluated at once while planning
_KEEP = 1 << 26  # largest number of pairs of a plan that is cached
_KEEP_BIAS = 1 << 22  # largest number of pairs of a group whose bias is cached
_KEEP_TERMS = 1 << 23  # largest number of scores of a plan whose biases of constant score terms are cached


@dataclass(frozen=True)
class BlockGroup:
    """A group of r query blocks that see the same number m of key blocks, with the mask inside these blocks.

    A block has s positions.

    rows     indices of the r query blocks
    columns  indices of the m key blocks that each query block sees
    visible  for each query block, the boolean mask of its s queries and the l = m * s keys of its key blocks; the first
             axis is 1 if all query blocks have the same mask, the second is 1 if all sequences have the same mask
    """

    rows: Int[Tensor, "r"]
    columns: Int[Tensor, "r m"]
    visible: Bool[Tensor, "#r #b s l"]
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)
    _term_biases: dict[Hashable, Tensor] = field(default_factory=dict)  # the last one

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "#r #b s l"]:
        """Return the mask as an additive mask: 0 where visible, -inf where hidden. A small result is cached.

        For a query that sees no key, all values are 0 if the fused kernel needs a finite score for every query.
        """
        found = self._biases.get(dtype)
        if found is None:
            with outside_inference_mode():
                seen = self.visible if sdpa.takes_empty_rows(self.visible) else self.nonempty
                found = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
            if found.numel() <= _KEEP_BIAS:
                self._biases[dtype] = found
        return found

    @cached_property
    def nonempty(self) -> Bool[Tensor, "#r #b s l"]:
        """The mask `visible`, changed so that a query that sees no key sees all keys.

        Some fused kernels need this mask, because they need a finite score for every query.
        """
        with outside_inference_mode():
            return self.visible | ~self.visible.any(-1, keepdim=True)

    @cached_property
    def sliding(self) -> tuple[int, int] | None:
        """The index of the first query block and the index of its first key block, if the blocks slide; else None.

        The blocks slide if each query block sees the key blocks of the previous query block, shifted by one block, as
        in a sliding window. Then the kernel uses views of q, k and v instead of copies.
        """
        if not self.columns.shape[1]:
            return None
        steps, run = (torch.arange(n, device="cpu") for n in self.columns.shape)
        run = self.columns[0, 0] + steps[:, None] + run
        slides = torch.equal(self.rows, self.rows[0] + steps) and torch.equal(self.columns, run)
        return (int(self.rows[0]), int(self.columns[0, 0])) if slides else None


@dataclass(frozen=True)
class GatherPlan:
    """The blocks to compute for one mask and one size: groups of query blocks, and the key blocks of each group.

    spans   the division of queries and keys into blocks
    groups  the groups, which together have all query blocks
    unseen  keys that no query sees; None if there are none
    blind   queries that see no key; None if there are none
    """

    spans: Spans  # the blocks that rows and columns of the groups index
    groups: tuple[BlockGroup, ...]
    unseen: Bool[Tensor, "#b 1 j 1"] | None  # keys that nobody sees
    blind: Bool[Tensor, "#b 1 i 1"] | None  # queries that see nothing

    @cached_property
    def order(self) -> Int[Tensor, "q"] | None:
        """The index of each query block in the concatenated outputs of all groups.

        None if the concatenated outputs are already in the order of the query blocks.
        """
        with outside_inference_mode():
            order = torch.cat([group.rows for group in self.groups])
            return None if torch.equal(order, torch.arange(len(order), device="cpu")) else order.argsort()

    @cached_property
    def visited(self) -> int:
        """The number of (query block, key block) pairs to compute."""
        return sum(group.columns.numel() for group in self.groups)

    @property
    def pairs(self) -> int:
        """The number of mask entries that all groups of query blocks store."""
        return sum(group.visible.numel() for group in self.groups)


def refusals(request: Request) -> list[str]:
    return sdpa.refusals(request) + own_refusals(request)


def own_refusals(request: Request) -> list[str]:
    """Return the reasons why this kernel cannot compute the attention call, except reasons that apply to `sdpa` too."""
    reasons = []
    if isinstance(request.mask, Full):
        reasons.append("the mask hides nothing, so no block can be skipped")
    if part := request.mask.by_pair():
        reasons.append(f"{part} has no blocks that can be skipped; write the rule with regard's masks")
    if torch.compiler.is_compiling() and not compiled.can_trace(request):
        reasons.append(compiled.LIMITS)
    reasons += offsets.refusals(request)
    if 0 in request.sizes:
        reasons.append("it does not take empty tensors")
    return reasons


def work(request: Request) -> float:
    b, h, _, i, j, _, _ = request.sizes
    if request.positions.offsets is not None:
        groups = offsets.group_by_offset(request.positions)
        least = 2e5 * len(groups)
        if least >= sdpa.work(request):
            return least  # as for a step of generation, which must not wait for block tables
        return sum(work(_request_for_estimate(request, *group)) for group in groups)
    if request.q.device.type != "cpu" and request.mask.tensors():
        return (
            2.0 * b * h * i * j
        )  # a block table would synchronise with the device; assume that nothing can be skipped
    plan = _plans.peek(_plan_key(request))
    visited = _visited_blocks(_get_block_table(request)) if plan is None else plan.visited
    return 1.5 * b * h * visited * SIZE * SIZE + 2e5


def _request_for_estimate(request: Request, positions: Positions, index: Tensor) -> Request:
    """Return an attention call for the n sequences in `index`, from which only the cost may be estimated.

    The call has the masks of these sequences, but q, k and v of the first n sequences of the batch: the estimate reads
    only the shapes of q, k and v, and taking the first sequences needs no copy.
    """
    n = len(index)
    q, k, v = request.q[:n], request.k[:n], request.v[:n]
    return replace(request, q=q, k=k, v=v, mask=request.mask.of_sequences(index), positions=positions)


def memory(request: Request) -> int:
    if request.positions.offsets is not None:
        copied = sum(x.numel() * x.element_size() for x in (request.q, request.k, request.v))
        groups = offsets.group_by_offset(request.positions)
        return copied + max(memory(_request_for_estimate(request, *group)) for group in groups)
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
    if torch.compiler.is_compiling():
        return compiled.masked_attention(request, "blocked")
    if request.positions.offsets is not None:
        parts = offsets.split_by_offset(request)
        return offsets.join_by_offset([run(part) for _, part in parts], parts)
    return _run_plan(request, get_plan(request))


def prepare(request: Request) -> PreparedCall | None:
    """Return a function that computes this attention call again for other q, k and v.

    The call must have no score terms and no dropout. Returns None if the plan has more than MOST_PREPARED mask
    entries, because the cache of these functions would become large.
    """
    plan, mask, beta, positions = get_plan(request), request.mask, request.beta, request.positions
    if plan.pairs > MOST_PREPARED:
        return None
    return lambda q, k, v: _run_plan(Request(q, k, v, mask, (), beta, 0.0, positions), plan)


def _run_plan(request: Request, plan: GatherPlan) -> Float[Tensor, "b h i e"]:
    b, e = request.q.shape[0], request.v.shape[3]
    outs = []
    for group in fused_inputs(request, plan):
        if not group.k.shape[2]:
            # zeros that are connected to q, k and v, so that backward works if the mask hides everything
            nothing = group.q[..., :1].masked_fill(torch.ones((), dtype=torch.bool, device=group.q.device), 0)
            nothing = nothing + group.k.sum() + group.v.sum()  # sums of no numbers
            outs.append(nothing.expand(*group.q.shape[:3], e))
            continue
        out = sdpa.fused_attention(group.q, group.k, group.v, request.beta, request.dropout, added=group.added)
        outs.append(out if group.hidden is None else out.masked_fill(group.hidden, 0))
    return assemble(outs, plan, b)


class FusedInputs(NamedTuple):
    """The inputs of the fused kernel for one group of query blocks.

    The axes are the r query blocks, batch and heads as one axis (bh or bg), the s queries of a block or the l keys that
    it sees, and the width. A row is one query.

    added   additive mask and bias; None if the group sees no key
    hidden  rows in which score terms hide every key; the outputs of these rows are set to 0 afterwards. None if score
            terms hide no keys
    unseen  keys that score terms hide from every row; k and v are already 0 there. None if score terms hide no keys
    """

    q: Float[Tensor, "r bh s c"]
    k: Float[Tensor, "r bg l c"]
    v: Float[Tensor, "r bg l e"]
    added: Float[Tensor, "#r #bh s l"] | None
    hidden: Bool[Tensor, "#r bh s 1"] | None
    unseen: Bool[Tensor, "#r bg l 1"] | None = None


def fused_inputs(request: Request, plan: GatherPlan) -> Iterator[FusedInputs]:
    """Yield the fused kernel's inputs for each group of query blocks.

    Mask and score terms become one bias. An attention sink becomes one more column of this bias.
    """
    b, h, _, _, _, _, _ = request.sizes
    terms = request.bound_terms()
    sink = None if request.sink is None else request.sink.repeat(b)
    constant = _terms_key(request, plan)
    for group, (blocks, keys, values) in zip(plan.groups, gather(request, plan), strict=True):
        if not group.columns.shape[1]:
            yield FusedInputs(blocks, keys, values, None, None)
            continue
        known, unseen = group._term_biases.get(constant), None
        if known is not None:
            yield FusedInputs(blocks, keys, values, known, None)
            continue
        if not request.terms:
            yield FusedInputs(blocks, keys, values, repeat_for_heads(group.bias(blocks.dtype), b, h), None)
            continue
        takes_empty = sdpa.takes_empty_rows(blocks)
        seen_by_mask = group.visible if request.hides_by_score or takes_empty else group.nonempty
        visible, hidden = repeat_for_heads(seen_by_mask, b, h), None
        # where blocks slide, all of them have the same distances: the bias of the first one serves all
        first = slice(1) if _has_equal_biases(request, plan, group) else slice(None)
        grid = _grid(request, plan.spans, group.rows[first], group.columns[first])
        shape = len(group.rows[first]), b, h, SIZE, group.columns.shape[1] * SIZE
        bias = sum_terms(terms, grid, request.q).expand(shape).flatten(1, 2)
        if request.hides_by_score:
            by_terms = request.hidden_by_terms(grid)
            seen = visible if by_terms is None else visible & ~by_terms.expand(shape).flatten(1, 2)
            unseen, hidden = ~visible_keys(seen, keys.shape[1]), ~seen.any(-1, keepdim=True)
            keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
            blocks = blocks.masked_fill(hidden, 0)
            # other fused kernels need finite scores in a row that sees nothing; it is zeroed afterwards
            visible, bias = (seen, bias) if takes_empty else (seen | hidden, bias.masked_fill(hidden, 0))
        added = sdpa.join_bias(blocks, keys.shape[2], visible, bias, sink)
        if constant is not None and added is not None and not added.is_inference():
            group._term_biases.clear()
            group._term_biases[constant] = added
        yield FusedInputs(blocks, keys, values, added, hidden, unseen)


def _terms_key(request: Request, plan: GatherPlan) -> Hashable | None:
    """Return a cache key of the biases that the score terms add in the blocks of a plan.

    None if these biases must not be cached: a term is learned, depends on q or may hide keys, the plan is large, or
    the call is not on the CPU.
    """
    b, h = request.q.shape[:2]
    if not request.terms or request.hides_by_score or b * h * plan.visited * SIZE * SIZE > _KEEP_TERMS:
        return None
    if not request.q.is_cpu or not can_read_values(request.q):
        return None
    terms = [term.key() for term in request.terms]
    return None if None in terms else (*terms, b, h, request.q.dtype)


def gather(request: Request, plan: GatherPlan) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (query blocks, key blocks, value blocks) for each group: its query blocks and the blocks that they see."""
    q, k, v = request.q, request.k, request.v
    if plan.unseen is not None:
        k, v = k.masked_fill(plan.unseen, 0), v.masked_fill(plan.unseen, 0)
    if plan.blind is not None:
        q = q.masked_fill(plan.blind, 0)
    k, v = (_split_into_blocks(x, plan.spans.column_blocks, plan.spans.steps) for x in (k, v))  # (b g) n c
    for group, blocks in zip(plan.groups, gather_rows(q, plan), strict=True):
        yield blocks, _key_blocks(k, group), _key_blocks(v, group)


def gather_rows(q: Float[Tensor, "b h i c"], plan: GatherPlan) -> Iterator[Float[Tensor, "r bh s c"]]:
    """Return an iterator that yields the query blocks of each group, taken from q."""
    q = _split_into_blocks(q, plan.spans.row_blocks, plan.spans.steps)
    return (_query_blocks(q, group) for group in plan.groups)


def gather_gradient(grad: Float[Tensor, "b h i e"], plan: GatherPlan) -> list[Float[Tensor, "r bh s e"]]:
    """Split the gradient of the whole output into gradients of the groups' outputs: the backward pass of `assemble`."""
    if plan.blind is not None:
        grad = grad.masked_fill(plan.blind, 0)
    rows = _split_into_blocks(grad, plan.spans.row_blocks, plan.spans.steps)
    if plan.spans.steps:  # a row that is repeated to fill a block takes no part in the output
        rows = rows.masked_fill(~plan.spans.row_blocks.real.reshape(-1, 1), 0)
    return [_query_blocks(rows, group) for group in plan.groups]


def scatter_keys(
    grads: list[Float[Tensor, "_ bg _ c"]], inputs: list[FusedInputs], plan: GatherPlan, b: int
) -> Float[Tensor, "b g j c"]:
    """Add up the gradients of the key blocks (or value blocks) of all groups to the gradient of k (or v).

    This is the backward pass of `gather` and `fused_inputs`.
    """
    blocks, (bg, c) = plan.spans.column_blocks, (grads[0].shape[1], grads[0].shape[3])
    total = grads[0].new_zeros(bg, blocks.index.numel() // SIZE, SIZE, c)
    for grad, part, group in zip(grads, inputs, plan.groups, strict=True):
        rows, run = group.columns.shape
        grad = grad if part.unseen is None else grad.masked_fill(part.unseen, 0)
        columns = group.columns.to(grad.device)
        for step in range(run):
            piece = grad[:, :, step * SIZE : (step + 1) * SIZE].transpose(0, 1)
            if group.sliding is None:
                total.index_add_(1, columns[:, step], piece)
            else:
                first = group.sliding[1] + step
                total[:, first : first + rows] += piece
    found: Tensor = total.flatten(1, 2)
    if plan.spans.steps:
        index = blocks.index.flatten().to(found.device)
        found = found.new_zeros(bg, plan.spans.j, c).index_add_(1, index, found)
    found = found[:, : plan.spans.j].unflatten(0, (b, -1))
    return found if plan.unseen is None else found.masked_fill(plan.unseen, 0)


def assemble(outs: list[Tensor], plan: GatherPlan, b: int) -> Float[Tensor, "b h i e"]:
    """Join the outputs of the groups to the output of all queries, in the order of the queries.

    outs  for each group, its output with the shape (r bh s e)
    """
    out = torch.cat(outs)
    if plan.order is not None:
        out = out[plan.order.to(out.device)]
    out = out.transpose(0, 1).flatten(1, 2)
    slots = plan.spans.row_blocks.slots if plan.spans.steps else None
    out = out[:, : plan.spans.i] if slots is None else out.index_select(1, slots.to(out.device))
    out = out.reshape(b, -1, *out.shape[1:])
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def repeat_for_heads(visible: Shaped[Tensor, "#r #b s l"], b: int, h: int) -> Shaped[Tensor, "#r #bh s l"]:
    """Repeat each sequence's mask for its h heads, so that axis b becomes b * h.

    A mask with b = 1, which all sequences share, is returned unchanged.
    """
    return visible.expand(-1, b, -1, -1).repeat_interleave(h, 1) if visible.shape[1] > 1 else visible


def _query_blocks(q: Float[Tensor, "bh n c"], group: BlockGroup) -> Float[Tensor, "r bh s c"]:
    blocks = q.reshape(q.shape[0], -1, SIZE, q.shape[2])
    if group.sliding is not None:
        first = group.sliding[0]
        return blocks[:, first : first + len(group.rows)].transpose(0, 1)
    return blocks.index_select(1, group.rows.to(q.device)).transpose(0, 1)


def _key_blocks(k: Float[Tensor, "bg n c"], group: BlockGroup) -> Float[Tensor, "r bg l c"]:
    rows, run = group.columns.shape
    if group.sliding is not None:
        first = group.sliding[1] * SIZE
        part = k[:, first : first + (rows + run - 1) * SIZE]
        return part.unfold(1, run * SIZE, SIZE).permute(1, 0, 3, 2)
    blocks = k.reshape(k.shape[0], -1, SIZE, k.shape[2])
    gathered = blocks.index_select(1, group.columns.reshape(-1).to(k.device))
    return gathered.reshape(k.shape[0], rows, run * SIZE, k.shape[2]).transpose(0, 1)


def _has_equal_biases(request: Request, plan: GatherPlan, group: BlockGroup) -> bool:
    """Return whether the sum of the score terms is known to be the same for all query blocks of a `BlockGroup`."""
    relative = all(term.relative for term in request.terms)
    return relative and group.sliding is not None and not plan.spans.steps and request.positions.consecutive


def _grid(request: Request, spans: Spans, rows: Int[Tensor, "r"], columns: Int[Tensor, "r m"]) -> Grid:
    """Return the `Grid` of the query-key pairs of some query blocks and the key blocks that each of them sees.

    The axes (r, b, h, s, l) of the grid are the query block, the batch, the head, the query in its block, and the key
    in the gathered key blocks.

    rows     indices of the query blocks
    columns  indices of the key blocks of each query block
    """
    b, h, _, _, j, _, _ = request.sizes
    device = request.q.device
    row, column = spans.rows[rows], spans.columns[columns].flatten(1)
    row, column = row.to(device)[:, None, None, :, None], column.to(device)[:, None, None, None, :]
    positions = key_positions(request.positions, j, device)
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.arange(h, device=device)[:, None, None]
    return Grid(batch, head, row, column, row + request.positions.queries, positions[column])


_plans: Memo[GatherPlan] = Memo(16)


def _plan_key(request: Request) -> Hashable | None:
    queries, keys = request.positions.queries, request.positions.keys
    rest = (queries, keys, request.q.shape[2], request.k.shape[2], request.q.device) if isinstance(keys, int) else None
    return joint_key(request.mask, rest)


def get_plan(request: Request) -> GatherPlan:
    """Return the gather plan of an attention call, from the cache if the same mask and sizes occurred before."""
    i, j, device = request.q.shape[2], request.k.shape[2], request.q.device
    make = lambda: _build_plan(request.mask, request.positions, i, j, device)  # noqa: E731 (a name for a long argument)
    return _plans.get(_plan_key(request), request.mask, make, lambda plan: plan.pairs <= _KEEP)


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
    # rows and keys that only fill a block see nothing and are not seen: a NaN that they met would reach gradients
    real = real & spans.row_blocks.real[rows][:, None, :, None]
    seen = mask.see(Grid(batch, torch.zeros(1, dtype=torch.long), row, column, i, j)) & real
    return seen.expand(len(rows), mask.batch() or 1, SIZE, columns.shape[1] * SIZE)


def _group_by_pattern(
    rows: Tensor, columns: Tensor, look: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group query blocks that have equal masks, so that one mask is stored for each group.

    Yields the query blocks, the key blocks and the mask of each group. There are at most _ALIKE such groups. All
    other query blocks form a last group, in which each query block has its own mask. Blocks are evaluated in chunks,
    because the pairs of a long sequence do not fit into memory.

    rows     indices of the query blocks
    columns  indices of the key blocks of each query block
    look     function of query block and key block indices that returns the boolean masks of these blocks
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
    """Reorder the positions of q, k or v by block, and fill up blocks, so that all blocks have the same length.

    Returns a tensor (bh m c): batch and heads are one axis, and m is the number of blocks times their length.

    blocks  the block of each position
    steps   periods of the mask by which positions are sorted; if empty, the order stays and the last block is padded
    """
    if steps:  # index_select is many times faster with fewer axes
        return x.flatten(0, 1).index_select(1, blocks.index.flatten().to(x.device))
    missing = blocks.index.numel() - x.shape[2]
    return (pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)


def _get_block_table(request: Request) -> BlockTable:
    return sparsest_table(request.mask, request.q.shape[2], request.k.shape[2], SIZE, positions=request.positions)


def _visited_blocks(table: BlockTable) -> int:
    """Return the number of blocks in which at least one sequence has a visible pair."""
    with _disable_current_modes():  # the table holds numbers even if q is a fake tensor
        return table.visited_by_any
