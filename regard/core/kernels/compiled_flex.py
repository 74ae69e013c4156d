"""FlexAttention in compiled code: flex_attention is traced, and an operator computes its block mask when it runs.

torch.compile cannot trace the block table of a mask, which depends on the lengths. The operators `regard::block_lists`
receive the mask as text and its tensors as a list: one graph serves all lengths.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.base.tracing import assume_constant_result, is_exporting, is_symbol
from regard.core.absolute_positions import Positions
from regard.core.kernels.compiled import is_expression, parse_text, write_text
from regard.core.kernels.operators import define_operator, register_once
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import Request
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.block_tables import ALL, SOME, BlockTable, block_table, find_hidden_keys_and_empty_rows
from regard.core.masks.plan_cache import Memo, joint_key

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LIMITS = "in compiled code it takes regard's own masks, with consecutive positions, and cannot be exported"
WHOLE = 1 << 30  # flex's block size if there is one block
_NOMINAL = 8192  # positions for which block sizes are chosen if lengths are symbols


def can_trace(request: Request) -> bool:
    """Return whether torch.compile can trace FlexAttention for this call. LIMITS lists what prevents it."""
    return not is_exporting() and request.positions.consecutive and is_expression(request.mask)


def traced_density(request: Request, size: int) -> float:
    """Return the fraction of blocks with visible pairs, as a constant for torch.compile.

    If a length is symbolic, the fraction is that of the same mask for 8,192 queries and keys.

    size  number of positions in a block
    """
    at = request.positions
    lengths: Any = (request.q.shape[2], request.k.shape[2], at.queries, at.keys)  # keys are consecutive
    for length in lengths:  # a plain loop, which torch.compile can trace
        if is_symbol(length):
            lengths = (_NOMINAL, _NOMINAL, 0, 0)
            break
    return _density(write_text(request.mask), size, *lengths)


@assume_constant_result
def _density(mask: str, size: int, i: int, j: int, queries: int, keys: int) -> float:
    return block_table(parse_text(mask), i, j, size, positions=Positions(queries, keys)).density


def may_hide_rows(request: Request) -> bool:
    """Return whether a query may see no key, or a key may be hidden from all queries. Only the mask is considered.

    False means that there is no such query and no such key. True may also mean unknown.
    """
    if isinstance(request.mask, Full):
        return False
    window, at = request.mask.as_window(), request.positions
    j = request.k.shape[2]
    if window is not None and window[0] is None and window[1] is not None and window[1] >= 0:
        # the first query sees the first key, and the last query all keys
        return not (at.queries >= at.keys and at.queries + request.q.shape[2] >= at.keys + j)
    return not (at.square(request.q.shape[2], j) and request.mask.sees_itself())


def trace_block_mask(
    request: Request, size: int, training: bool, mask_mod: Callable[..., Tensor]
) -> "tuple[BlockMask, Tensor | None, Tensor | None]":
    """Return the BlockMask of an attention call in compiled code, the hidden keys and the empty query rows.

    The second result is True at keys that no query sees. The third result is True at queries that see no key. Both are
    None if `may_hide_rows` is False.

    size      number of positions in a block
    training  whether the BlockMask also lists the query blocks of each key block, which the backward pass needs
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask, at, q = request.mask, request.positions, request.q
    i, j = q.shape[2], request.k.shape[2]
    hides, whole = may_hide_rows(request), isinstance(mask, Full)
    data = [x.detach() for x in mask.tensors()]
    operator = torch.ops.regard.block_lists_of_data if len(data) > 0 else torch.ops.regard.block_lists
    # one number of q: each layer has its own call, which is recorded
    token = q.detach()[:1, :1, :1, :1]
    settings = (WHOLE if whole else size, training, hides)
    lists = operator(token, data, write_text(mask), at.queries, at.keys, i, j, mask.batch() or 1, *settings)
    own = [*lists[:4], *(lists[4:8] if training else (None,) * 4)]
    if whole:
        own = [*lists[:2], None, None, *(lists[2:4] if training else (None, None)), None, None]
    make: Any = BlockMask  # mypy cannot count the tensors of `own`
    blocks = make((i, j), *own, (settings[0], settings[0]), mask_mod)
    return (blocks, lists[-2], lists[-1]) if hides else (blocks, None, None)


def list_blocks(state: Tensor) -> list[Tensor]:
    """Return the lists of a BlockMask for a block table (b q k): counts and indices of its partial and full blocks.

    The four tensors are kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices. They list, for each query
    block q, its key blocks k.
    """
    lists = []
    for kind in (SOME, ALL):
        hit = (state == kind)[:, None]
        order = hit.int().argsort(dim=-1, descending=True, stable=True)
        lists += [hit.sum(-1, dtype=torch.int32), order.int()]
    return lists


_lists: Memo[list[Tensor]] = Memo(64)
_captured: dict[int, list[Tensor]] = {}  # a CUDA graph reads them at each replay


def _compute(
    token: Tensor, data: list[Tensor], text: str, queries: int, keys: int, i: int, j: int, b: int, size: int,
    training: bool, hides: bool,
) -> list[Tensor]:  # fmt: skip
    record_kernel("flex")
    rest: tuple[Hashable, ...] = (text, queries, keys, i, j, size, training, hides, token.device)
    kept = None if len(data) > 0 else _lists.peek(rest)  # spares a mask by position its parsing
    if kept is None:
        tensors = iter(data)
        mask, positions = parse_text(text).map_tensors(lambda stand_in: next(tensors)), Positions(queries, keys)
        key = joint_key(mask, rest) if len(data) > 0 else rest
        kept = _lists.get(key, mask, lambda: _build(mask, positions, i, j, size, training, hides, token.device))
    if token.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[id(kept)] = kept
    # copies, because compiled code may reuse the memory of what an operator returns; one kernel copies all integers
    fresh = [torch.empty_like(x) for x in kept]
    integers = len(kept) - (2 if hides else 0)
    torch._foreach_copy_(fresh[:integers], kept[:integers])
    for own, x in zip(fresh[integers:], kept[integers:], strict=True):
        own.copy_(x)
    return fresh


def _build(
    mask: Mask, positions: Positions, i: int, j: int, size: int, training: bool, hides: bool, device: torch.device
) -> list[Tensor]:
    if isinstance(mask, Full):  # one block, which flex evaluates pair by pair
        one, nothing = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        return [x.to(device) for x in ((one, nothing) * (2 if training else 1))]
    table = block_table(mask, i, j, size, positions=positions)
    state = table.state if table.state.ndim == 3 else table.state[None]
    made = list_blocks(state) + (list_blocks(state.mT) if training else [])
    made = [x.contiguous().to(device) for x in made]  # as the fake results are: compiled code checks their strides
    return [*made, *_hidden_rows(mask, positions, i, j, table, device)] if hides else made


def _hidden_rows(
    mask: Mask, positions: Positions, i: int, j: int, table: BlockTable, device: torch.device
) -> list[Tensor]:
    """Return two boolean tensors: which keys no query sees, and which queries see no key.

    The shapes are (b 1 j 1) and (b 1 i 1).

    table  the block table of the mask
    """
    b = mask.batch() or 1
    flags = find_hidden_keys_and_empty_rows(mask, positions, i, j, table)
    found = [
        torch.zeros(b, n, dtype=torch.bool) if x is None else x.expand(b, n) for x, n in zip(flags, (j, i), strict=True)
    ]
    return [x[:, None, :, None].contiguous().to(device) for x in found]


def _fake(
    token: Tensor, data: list[Tensor], text: str, queries: int, keys: int, i: int, j: int, b: int, size: int,
    training: bool, hides: bool,
) -> list[Tensor]:  # fmt: skip
    if size == WHOLE:
        pair = [(1, 1, 1), (1, 1, 1, 1)]
        return [token.new_empty(shape, dtype=torch.int32) for shape in pair * (2 if training else 1)]
    rows, columns = -(-i // size), -(-j // size)
    shapes = [(b, 1, rows), (b, 1, rows, columns)] * 2
    shapes += [(b, 1, columns), (b, 1, columns, rows)] * 2 if training else []
    made = [token.new_empty(shape, dtype=torch.int32) for shape in shapes]
    return made + ([token.new_empty((b, 1, n, 1), dtype=torch.bool) for n in (j, i)] if hides else [])


@register_once("block_library")
def _register(library: torch.library.Library) -> None:
    settings = "SymInt queries, SymInt keys, SymInt i, SymInt j, SymInt b, int size, bool training, bool hides"
    # a table of data is read on the CPU, which a CUDA graph cannot repeat
    tags: dict[str, Any] = {"block_lists": (), "block_lists_of_data": (torch.Tag.cudagraph_unsafe,)}
    for name, own in tags.items():
        schema = f"{name}(Tensor token, Tensor[] data, str mask, {settings}) -> Tensor[]"
        define_operator(library, schema, _compute, _fake, tags=own)
