"""Block tables: whether each block of queries sees none, some or all of each block of keys."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid, Positions, key_positions
from regard.core.masks.algebra import BoxVisibility, Mask, resolve_positions
from regard.core.masks.plan_cache import Memo, joint_key

NONE, SOME, ALL = 0, 1, 2
_PAIRS_AT_ONCE = 1 << 22  # pairs evaluated at once
_BLOCKS_MOVED_PER_VISIT = 4  # gathering the rows of this many blocks takes about as long as computing one


@dataclass(frozen=True)
class Blocks:
    """The assignment of n rows (queries or keys) to m blocks. A block has s slots, each for one row.

    index  the index of the row in each slot; a block with fewer than s rows repeats its last row
    real   False where a slot repeats a row
    """

    index: Int[Tensor, "m s"]
    real: Bool[Tensor, "m s"]  # false where a row is repeated

    @cached_property
    def slots(self) -> Int[Tensor, "n"]:
        """The slot of each row. Slots are numbered from 0 to m * s - 1 through all blocks."""
        slots = self.real.flatten().nonzero()[:, 0]
        return torch.empty_like(slots).scatter_(0, self.index[self.real], slots)


@dataclass(frozen=True)
class Spans:
    """The blocks of `size` positions into which i queries and j keys are divided.

    steps  periods of the mask, see `Mask.steps`. Queries and keys are sorted by the remainders of their positions
           modulo each period before they are cut into blocks, so that more blocks of a periodic mask are entirely
           visible or hidden. Empty keeps their order
    """

    positions: Positions
    i: int
    j: int
    size: int
    steps: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The number of blocks of queries and of keys."""
        return len(self.rows), len(self.columns)

    @cached_property
    def row_blocks(self) -> Blocks:
        """The blocks of queries: the row indices in each block, and the slot of each row."""
        return _cut_into_blocks(torch.arange(self.i) + self.positions.queries, self.size, self.steps)

    @cached_property
    def column_blocks(self) -> Blocks:
        """The blocks of keys: the column indices in each block, and the slot of each column."""
        return _cut_into_blocks(key_positions(self.positions, self.j, torch.device("cpu")), self.size, self.steps)

    @property
    def rows(self) -> Int[Tensor, "q s"]:
        """The row indices of each block of queries."""
        return self.row_blocks.index

    @property
    def columns(self) -> Int[Tensor, "k s"]:
        """The column indices of each block of keys."""
        return self.column_blocks.index

    def query_positions(self) -> Int[Tensor, "q s"]:
        """Return the positions of the queries in each block."""
        return self.rows + self.positions.queries

    def key_positions(self) -> Int[Tensor, "k s"]:
        """Return the positions of the keys in each block."""
        return key_positions(self.positions, self.j, torch.device("cpu"))[self.columns]

    @cached_property
    def first(self) -> Int[Tensor, "q 1"]:
        """The smallest query position in each block."""
        return self.query_positions().amin(1)[:, None]

    @cached_property
    def last(self) -> Int[Tensor, "q 1"]:
        """The largest query position in each block."""
        return self.query_positions().amax(1)[:, None]

    @cached_property
    def start(self) -> Int[Tensor, "1 k"]:
        """The smallest key position in each block."""
        return self.key_positions().amin(1)[None, :]

    @cached_property
    def stop(self) -> Int[Tensor, "1 k"]:
        """The largest key position in each block."""
        return self.key_positions().amax(1)[None, :]

    def evaluate(self, mask: Mask) -> BoxVisibility:
        """Compute the block table of a mask by evaluating every pair, one block of queries at a time."""
        queries, keys = self.shape
        mask = mask.to(torch.device("cpu"))
        b, h = mask.batch() or 1, mask.heads() or 1
        some, every = torch.zeros(2, b, queries, keys, dtype=torch.bool)
        batch, head = torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None]
        j = self.key_positions().reshape(1, -1)
        for block, (row, i) in enumerate(zip(self.rows, self.query_positions(), strict=True)):
            grid = Grid(batch, head, row[:, None], self.columns.reshape(1, -1), i[:, None], j)
            seen = mask.see(grid).expand(b, h, self.size, keys * self.size).unflatten(-1, (keys, self.size))
            some[:, block], every[:, block] = seen.any(-1).any(2).any(1), seen.all(-1).all(2).all(1)
        return BoxVisibility(~some, every) if mask.batch() else BoxVisibility(~some[0], every[0])

    def equal_labels(self, rows: Int[Tensor, "*b q s"], columns: Int[Tensor, "*b k s"]) -> BoxVisibility:
        """Return the block table of a mask in which exactly the pairs with equal labels are visible.

        rows     labels of the queries in each block
        columns  labels of the keys in each block
        """
        low_row, high_row = rows.amin(-1)[..., :, None], rows.amax(-1)[..., :, None]
        low_column, high_column = columns.amin(-1)[..., None, :], columns.amax(-1)[..., None, :]
        same = (low_row == high_row) & (low_column == high_column) & (low_row == low_column)
        return BoxVisibility(none=(high_row < low_column) | (high_column < low_row), all=same)


@dataclass(frozen=True)
class BlockTable:
    """The state of every pair of a query block (q) and a key block (k): 0 none, 1 some, 2 all pairs visible.

    The state 1 may also mean unknown. A block with this state is evaluated pair by pair.

    size   number of positions in a block
    state  the states, with an axis b in front if sequences differ
    steps  periods of the mask by which positions were sorted before they were cut into blocks; empty if not sorted
    """

    size: int
    state: Int8[Tensor, "*b q k"]
    steps: tuple[int, ...] = ()  # the order of rows and columns, as in Spans

    @cached_property
    def visited(self) -> int:
        """The number of blocks of the matrix that have visible pairs, summed over the sequences if they differ."""
        return int((self.state != NONE).sum())

    @cached_property
    def visited_by_any(self) -> int:
        """The number of blocks that have visible pairs in at least one sequence."""
        return int((self.union() != NONE).sum())

    @property
    def density(self) -> float:
        """The fraction of blocks with visible pairs."""
        return self.visited / max(self.state.numel(), 1)

    def union(self) -> Int8[Tensor, "q k"]:
        """Return one table for all sequences: 0 where all sequences have 0, 2 where all have 2, otherwise 1."""
        if self.state.ndim == 2:
            return self.state
        low, high = self.state.amin(0), self.state.amax(0)
        return torch.where(low == high, low, SOME).to(torch.int8)


_tables: Memo[BlockTable] = Memo(64)


def block_table(
    mask: Mask, queries: int, keys: int | None = None, size: int = 128, *, positions: Positions | None = None
) -> BlockTable:
    """Return the block table of a mask, from a cache if possible; see `Mask.block_table`."""
    positions, keys = resolve_positions(queries, keys, positions)
    size = check_integer("block_table(size)", size, 1, "the positions of a block")
    if positions.offsets is not None:
        raise ConfigError("a block table is one for all sequences, but Positions.offsets differ between them")
    mask.check(positions, queries, keys)
    rest = (queries, keys, size, positions) if isinstance(positions.keys, int) else None
    return _tables.get(joint_key(mask, rest), mask, lambda: _build_table(mask, Spans(positions, queries, keys, size)))


def sparsest_table(mask: Mask, queries: int, keys: int, size: int, *, positions: Positions) -> BlockTable:
    """Return the block table with the lowest cost (see `_cost`), for positions in order or for sorted positions.

    Sorted positions are ordered by their remainders modulo the periods of the mask. Sorting may reduce the number of
    blocks with visible pairs. A table of sorted positions is returned only if it saves more time than sorting takes.
    """
    # a longer period puts no two keys together; an opaque mask would be evaluated pair by pair in every order
    steps = () if mask.opaque() else tuple(step for step in mask.steps() if 1 < step <= keys)
    if not steps:
        return block_table(mask, queries, keys, size, positions=positions)

    def make() -> BlockTable:
        orders = {steps, *((step,) for step in steps)}
        tables = [_build_table(mask, Spans(positions, queries, keys, size, order)) for order in sorted(orders)]
        return min([block_table(mask, queries, keys, size, positions=positions), *tables], key=_cost)

    rest = ("sparsest", queries, keys, size, positions) if isinstance(positions.keys, int) else None
    return _tables.get(joint_key(mask, rest), mask, make)


def _cost(table: BlockTable) -> float:
    """Return the estimated cost of attention with a block table, in units of the cost of one block.

    The cost is the number of blocks with visible pairs. If the table is for sorted positions, the cost of sorting
    queries and keys is added.
    """
    return table.visited_by_any + (sum(table.state.shape[-2:]) / _BLOCKS_MOVED_PER_VISIT if table.steps else 0)


def _build_table(mask: Mask, spans: Spans) -> BlockTable:
    none, everything = (torch.as_tensor(flag) for flag in mask.table(spans))
    shape = torch.broadcast_shapes(none.shape, everything.shape, spans.shape)
    nothing, some, every = torch.tensor([NONE, SOME, ALL], dtype=torch.int8)  # one byte per block
    state = torch.where(none, nothing, torch.where(everything, every, some))
    return BlockTable(spans.size, state.expand(shape).contiguous(), spans.steps)


def find_hidden_keys_and_empty_rows(
    mask: Mask, positions: Positions, i: int, j: int, table: BlockTable
) -> tuple[Bool[Tensor, "b j"] | None, Bool[Tensor, "b i"] | None]:
    """Return which keys no query sees and which queries see no key. Each is None if there are none.

    In a fully visible block, every key is seen and every query sees a key. A partly visible block is evaluated pair by
    pair, unless its queries and its keys are also in fully visible blocks.

    table  the block table of the mask
    """
    spans = Spans(positions, i, j, table.size, table.steps)
    state = table.state if table.state.ndim == 3 else table.state[None]
    settled_keys, settled_rows = (state == ALL).any(1), (state == ALL).any(2)
    seen = settled_keys[..., None].repeat(1, 1, table.size)
    awake = settled_rows[..., None].repeat(1, 1, table.size)
    doubtful = (state == SOME) & ~(settled_keys[:, None, :] & settled_rows[:, :, None])
    mask = mask.to(torch.device("cpu"))
    real_rows, real_keys = spans.row_blocks.real, spans.column_blocks.real
    for pairs in doubtful.nonzero().split(max(1, _PAIRS_AT_ONCE // table.size**2)):
        batch, row, column = pairs.T
        grid = Grid(
            batch[:, None, None],
            torch.zeros((), dtype=torch.long),
            spans.rows[row][:, :, None],
            spans.columns[column][:, None, :],
            spans.query_positions()[row][:, :, None],
            spans.key_positions()[column][:, None, :],
        )
        visible = mask.see(grid) & real_rows[row][:, :, None] & real_keys[column][:, None, :]
        seen |= _any_at(seen, batch, column, visible.any(1))
        awake |= _any_at(awake, batch, row, visible.any(2))
    unseen = ~seen.flatten(1)[:, spans.column_blocks.slots]
    blind = ~awake.flatten(1)[:, spans.row_blocks.slots]
    return unseen if unseen.any() else None, blind if blind.any() else None


def _any_at(like: Tensor, batch: Tensor, block: Tensor, hit: Tensor) -> Tensor:
    """Combine boolean rows by a logical or: all rows of `hit` that belong to the same sequence and the same block.

    Returns a boolean tensor (b blocks slots).

    like          a tensor with the shape of the result
    batch, block  for each row of `hit`, the indices of the sequence and the block to which the row belongs
    hit           boolean, (rows slots): one value for each slot of a block
    """
    flat = torch.zeros(like.shape[0] * like.shape[1], like.shape[2], dtype=torch.int32)
    return (flat.index_add_(0, batch * like.shape[1] + block, hit.int()) > 0).view(like.shape)


def _cut_into_blocks(positions: Int[Tensor, "n"], size: int, steps: tuple[int, ...]) -> Blocks:
    """Assign rows (queries or keys) with these positions to blocks of `size` slots.

    steps  periods of the mask. Rows are first sorted by the remainders of their positions modulo each period. Empty
           keeps the order of the rows
    """
    n = len(positions)
    if not steps:
        slots = torch.arange(-(-n // size) * size).view(-1, size)
        return Blocks(slots.clamp(max=max(n - 1, 0)), slots < n)
    order = positions.argsort(stable=True)
    for step in reversed(steps):  # the last sort has precedence
        order = order[(positions[order] % step).argsort(stable=True)]
    slots = _slots(torch.stack([positions[order] % step for step in steps]), size)
    real = torch.zeros(-(-(int(slots[-1]) + 1) // size) * size if n else 0, dtype=torch.bool)
    real[slots] = True
    return Blocks(order[real.cumsum(0) - 1].view(-1, size), real.view(-1, size))


def _slots(remainders: Int[Tensor, "steps n"], size: int) -> Int[Tensor, "n"]:
    """Return the slot of each row (query or key). Slots are numbered through all blocks; some stay empty.

    The rows must be sorted by their remainders. Rows with the same remainders go into the current block if all of them
    fit there, else they start a new block.

    remainders  for each period of the mask, the remainders of the positions of the rows
    size        number of slots in a block
    """
    counts = torch.unique_consecutive(remainders, dim=1, return_counts=True)[1]
    gaps, end = [], 0
    for count in counts.tolist():
        room = -end % size
        gaps.append(room if count > room else 0)
        end += gaps[-1] + count
    return torch.arange(remainders.shape[1]) + torch.tensor(gaps, dtype=torch.long).cumsum(0).repeat_interleave(counts)
