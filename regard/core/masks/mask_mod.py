"""FlexAttention's mask_mod and BlockMask as masks of regard.

A mask_mod is called once with symbolic positions, whose operators return masks. So `lambda b, h, q, kv: q >= kv` is
read as `causal()`, and sparse kernels know its blocks. If the call with symbolic positions fails, the mask_mod is
evaluated on every pair instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int8
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import Grid, Positions
from regard.core.masks.algebra import Full, Mask, Not, is_nothing, resolve_positions
from regard.core.masks.block_tables import ALL, NONE, SOME
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.chunks import Chunks
from regard.core.masks.forms.dilated import dilated
from regard.core.masks.forms.documents import DocumentMask
from regard.core.masks.forms.key_padding import KeyPaddingMask
from regard.core.masks.forms.prefix import Prefix
from regard.core.masks.forms.window import Window

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[..., Any]


def from_mask_mod(function: MaskMod, batch: int | None = None, heads: int | None = None) -> Mask:
    """Convert a FlexAttention mask_mod `function(b, h, q, kv)` to a mask. q and kv are absolute positions.

    batch  number of sequences, if the function differs between them
    heads  number of query heads, if the function differs between them
    """
    if not callable(function):
        raise ConfigError(f"a mask_mod is a function of batch, head, query and key index, not {function!r}")
    try:
        return read_mask_mod(function)
    except TruthValueError:
        raise
    except Exception:  # whatever a function does that symbolic positions cannot: it is evaluated on tensors instead
        return MaskModMask(function, batch, heads)


def read_mask_mod(function: MaskMod) -> Mask:
    """Convert a FlexAttention mask_mod to a mask by calling it with symbolic positions.

    Raises an error if that fails.
    """
    seen = function(SymbolicIndex("b"), SymbolicIndex("h"), SymbolicIndex("q"), SymbolicIndex("kv"))
    if not isinstance(seen, SymbolicMask):
        raise NotSymbolicError(f"a mask_mod returned {seen!r}")
    return seen.mask


class NotSymbolicError(Exception):
    """Raised if a FlexAttention mask_mod does something that symbolic positions do not support."""


class TruthValueError(ConfigError):
    """Raised if a FlexAttention mask_mod uses `and`, `or`, `not`, `if` or `a < b < c`, which tensors refuse too."""


class _Symbol:
    """Base class of symbolic values, with which a mask_mod is called. Using one in `if`, `and` or `or` raises an error.

    Otherwise Python would evaluate `a and b` to b alone.
    """

    def __bool__(self) -> bool:
        raise TruthValueError(
            "a mask_mod needs the truth value of a tensor; use & for and, | for or, ~ for not, torch.where for if, "
            "and two comparisons joined by & for a < b < c"
        )


class SymbolicMask(_Symbol):
    """The result of a comparison in a mask_mod that is called with symbolic positions. It holds a mask.

    It has the operators and methods of boolean tensors that mask_mods use.
    """

    device = None

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def to(self, *_: object, **__: object) -> "SymbolicMask":
        return self

    def __and__(self, other: "SymbolicMask") -> "SymbolicMask":
        if isinstance(self.mask, Full):
            return other
        return self if isinstance(other.mask, Full) else SymbolicMask(self.mask & other.mask)

    def __or__(self, other: "SymbolicMask") -> "SymbolicMask":
        if is_nothing(self.mask):
            return other
        return self if is_nothing(other.mask) else SymbolicMask(self.mask | other.mask)

    def __invert__(self) -> "SymbolicMask":
        return self.invert()

    def invert(self) -> "SymbolicMask":
        """Return `~self`. This method exists because the compiler cannot trace the operator `~` of objects."""
        return SymbolicMask(self.mask.part if isinstance(self.mask, Not) else Not(self.mask))


class SymbolicIndex(_Symbol):
    """A symbolic index in a mask_mod: the batch, head, query or key index, plus a constant."""

    device = None

    def __init__(self, kind: str, offset: int = 0) -> None:
        self.kind = kind
        self.offset = offset

    def new_ones(self, *_: object, **__: object) -> SymbolicMask:
        return SymbolicMask(Full())

    def new_zeros(self, *_: object, **__: object) -> SymbolicMask:
        return SymbolicMask(Not(Full()))

    def __add__(self, other: int) -> "SymbolicIndex":
        return SymbolicIndex(self.kind, self.offset + _integer(other))

    __radd__ = __add__

    def __sub__(self, other: "int | SymbolicIndex") -> "SymbolicIndex | SymbolicDistance":
        if isinstance(other, SymbolicIndex):
            return SymbolicDistance(*_index_difference(self, other))
        return SymbolicIndex(self.kind, self.offset - _integer(other))

    def __floordiv__(self, size: int) -> "SymbolicChunk":
        if self.offset:
            raise NotSymbolicError("shifted chunks")
        return SymbolicChunk(self.kind, _integer(size))

    def __le__(self, other: "int | SymbolicIndex") -> SymbolicMask:
        return self < other + 1

    def __lt__(self, other: "int | SymbolicIndex") -> SymbolicMask:
        if isinstance(other, SymbolicIndex):
            return self - other < 0
        if self.kind == "kv":
            return SymbolicMask(Prefix(max(0, _integer(other) - self.offset)))
        if self.kind == "q" and _integer(other) - self.offset <= 0:
            return SymbolicMask(Not(Full()))
        raise NotSymbolicError("a rule about the query alone")

    def __ge__(self, other: "int | SymbolicIndex") -> SymbolicMask:
        return (self < other).invert()

    def __gt__(self, other: "int | SymbolicIndex") -> SymbolicMask:
        return (self <= other).invert()

    def __eq__(self, other: object) -> SymbolicMask:  # type: ignore[override]
        if not isinstance(other, SymbolicIndex):
            raise NotSymbolicError("a rule about one position")
        return abs(SymbolicDistance(*_index_difference(self, other))) <= 0

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "SymbolicLookup":
        if function is not Tensor.__getitem__:
            raise NotSymbolicError(f"{function} of a position")
        data, index = args
        parts = index if isinstance(index, tuple) else (index,)
        kinds = [part.kind if isinstance(part, SymbolicIndex) and not part.offset else "" for part in parts]
        if kinds[:-1] not in ([], ["b"]):
            raise NotSymbolicError("a table by head or by pair")
        return SymbolicLookup(data, kinds[-1], batched=len(kinds) == 2)


class SymbolicDistance(_Symbol):
    """A symbolic distance between query and key in a mask_mod: sign * (q - kv) + offset.

    sign       1 or -1
    offset     an integer constant
    magnitude  whether the distance has |q - kv| in place of q - kv
    """

    def __init__(self, sign: int, offset: int, magnitude: bool = False) -> None:
        self.sign = sign
        self.offset = offset
        self.magnitude = magnitude

    def __abs__(self) -> "SymbolicDistance":
        if self.offset:
            raise NotSymbolicError("the magnitude of a shifted distance")
        return SymbolicDistance(1, 0, magnitude=True)

    abs = __abs__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "SymbolicDistance":
        if function is not torch.abs:
            raise NotSymbolicError(f"{function} of a distance")
        distance: SymbolicDistance = args[0]
        return abs(distance)

    def __add__(self, other: int) -> "SymbolicDistance":
        return SymbolicDistance(self.sign, self.offset + _integer(other), self.magnitude)

    def __sub__(self, other: int) -> "SymbolicDistance":
        return self + -_integer(other)

    def __mod__(self, step: int) -> "SymbolicRemainder":
        if self.offset or self.magnitude:
            raise NotSymbolicError("the remainder of a shifted distance")
        return SymbolicRemainder(_integer(step))

    def __lt__(self, other: int) -> SymbolicMask:
        most = _integer(other) - self.offset - 1  # sign (q - kv) <= most
        if self.magnitude:
            return SymbolicMask(Window(most, most) if most >= 0 else Not(Full()))
        # sign +1: kv >= q - most; sign -1: kv <= q + most
        if self.sign > 0:
            return SymbolicMask(Window(most, None) if most >= 0 else Not(_up_to(-most - 1)))
        return SymbolicMask(_up_to(most))

    def __le__(self, other: int) -> SymbolicMask:
        return self < _integer(other) + 1

    def __ge__(self, other: int) -> SymbolicMask:
        return (self < other).invert()

    def __gt__(self, other: int) -> SymbolicMask:
        return (self <= other).invert()

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> SymbolicMask:  # type: ignore[override]
        return (self <= _integer(other)) & (self >= _integer(other))


@dataclass
class SymbolicRemainder(_Symbol):
    """A symbolic remainder in a mask_mod: (q - kv) % step."""

    step: int

    def __eq__(self, other: object) -> SymbolicMask:  # type: ignore[override]
        if _integer(other) != 0:
            raise NotSymbolicError("a remainder that is not zero")
        return SymbolicMask(dilated(self.step))


class SymbolicChunk(_Symbol):
    """A symbolic chunk index in a mask_mod: q // size or kv // size."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.size = size

    def __eq__(self, other: object) -> SymbolicMask:  # type: ignore[override]
        return SymbolicMask(Chunks(self._pair(other), 0, 0))

    def __le__(self, other: "SymbolicChunk") -> SymbolicMask:
        size = self._pair(other)
        return SymbolicMask(Chunks(size, None, 0) if self.kind == "kv" else Chunks(size, 0, None))

    def __ge__(self, other: "SymbolicChunk") -> SymbolicMask:
        return other <= self

    __hash__ = None  # type: ignore[assignment]

    def _pair(self, other: object) -> int:
        if not isinstance(other, SymbolicChunk) or other.size != self.size or {self.kind, other.kind} != {"q", "kv"}:
            raise NotSymbolicError("chunks of two sizes")
        return self.size


class SymbolicLookup(SymbolicMask):
    """A symbolic lookup in a mask_mod: data[b, q], data[b, kv], data[q] or data[kv], for a tensor `data`.

    kind     the last index, "q" or "kv"
    batched  whether the first index is b
    """

    def __init__(self, data: Tensor, kind: str, *, batched: bool) -> None:
        if data.ndim != 1 + batched or kind not in ("q", "kv"):
            raise NotSymbolicError("a table by head or by pair")
        self.data = data
        self.kind = kind

    @property
    def mask(self) -> Mask:  # type: ignore[override]
        """The padding mask data[b, kv], for a mask_mod that returns the looked-up boolean itself."""
        if self.data.dtype != torch.bool or self.kind != "kv" or self.data.ndim != 2:
            raise NotSymbolicError("a value that is not a boolean for each key")
        return KeyPaddingMask(self.data)

    def __eq__(self, other: object) -> SymbolicMask:  # type: ignore[override]
        if not isinstance(other, SymbolicLookup) or other.data is not self.data or other.kind == self.kind:
            raise NotSymbolicError("two tables")
        if self.data.is_floating_point():
            raise NotSymbolicError("a table of floating-point numbers")
        return SymbolicMask(DocumentMask(self.data.long()))

    __hash__ = None  # type: ignore[assignment]


def _up_to(most: int) -> Mask:
    """Return the mask that shows keys with kv <= q + most."""
    if most == 0:
        return Causal()
    return Window(None, most) if most > 0 else Not(Window(-most - 1, None))


def _index_difference(left: SymbolicIndex, right: SymbolicIndex) -> tuple[int, int]:
    """Return left - right as (sign, offset), meaning sign * (q - kv) + offset. One index is q, the other kv."""
    if {left.kind, right.kind} != {"q", "kv"}:
        raise NotSymbolicError("indices that are not a query and a key")
    return 1 if left.kind == "q" else -1, left.offset - right.offset


def _integer(value: object) -> int:
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    raise NotSymbolicError(f"{value!r} with a position")


@dataclass(frozen=True, eq=False, repr=False)
class MaskModMask(Mask):
    """A FlexAttention mask_mod as a mask. It is evaluated on every pair, with absolute positions as q and kv."""

    function: MaskMod
    batch_size: int | None = None
    head_count: int | None = None

    def see(self, grid: Grid) -> Tensor:
        return _call(self.function, self.batch_size, self.head_count, grid.batch, grid.head, grid.i, grid.j)

    def key(self) -> None:
        """Return None: results are not cached, because values that the function reads may change."""

    def batch(self) -> int | None:
        return self.batch_size

    def heads(self) -> int | None:
        return self.head_count

    def opaque(self) -> bool:
        return True

    def by_pair(self) -> str:
        return "" if self.head_count is None else "a mask_mod that depends on the head"

    def __repr__(self) -> str:
        return f"Mask.from_mask_mod({getattr(self.function, '__name__', 'function')})"


@dataclass(frozen=True, eq=False, repr=False)
class BlockMaskMask(Mask):
    """A FlexAttention BlockMask as a mask, indexed by row and column of the attention call.

    Full blocks are visible. In partial blocks, the BlockMask's mask_mod decides about each pair.

    state     0 none, 1 some, 2 all pairs visible, for each query block q and key block k
    sizes     numbers of positions in a query block and in a key block
    lengths   numbers of queries and of keys
    function  the mask_mod
    """

    state: Int8[Tensor, "b h q k"]
    sizes: tuple[int, int]
    lengths: tuple[int, int]
    function: MaskMod

    def see(self, grid: Grid) -> Tensor:
        b, h = len(self.state), self.state.shape[1]
        batch, head = grid.batch if b > 1 else grid.batch * 0, grid.head if h > 1 else grid.head * 0
        state = self.state.to(grid.row.device)[batch, head, grid.row // self.sizes[0], grid.column // self.sizes[1]]
        inside = _call(self.function, b if b > 1 else None, h if h > 1 else None, batch, head, grid.row, grid.column)
        return (state == ALL) | ((state == SOME) & inside)

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        if (i, j) != self.lengths:
            raise ShapeError(f"the BlockMask was made for (i, j) = {self.lengths}, but this call has ({i}, {j})")
        for letter, own, wanted in (("b", self.batch(), b), ("h", self.heads(), h)):
            if None not in (own, wanted) and own != wanted:
                raise ShapeError(f"the BlockMask was made for {letter}={own}, but q has {letter}={wanted}")

    def key(self) -> None:
        """Return None: results are not cached, because values that the function reads may change."""

    def batch(self) -> int | None:
        return len(self.state) if len(self.state) > 1 else None

    def heads(self) -> int | None:
        return self.state.shape[1] if self.state.shape[1] > 1 else None

    def opaque(self) -> bool:
        return True

    def by_pair(self) -> str:
        return "a BlockMask"

    def __repr__(self) -> str:
        return f"Mask.from_block_mask({' x '.join(map(str, (*self.state.shape[:2], *self.lengths)))})"


def from_block_mask(block_mask: "BlockMask") -> Mask:
    """Convert a FlexAttention BlockMask to a mask."""
    wanted = ("kv_num_blocks", "kv_indices", "mask_mod", "seq_lengths", "BLOCK_SIZE")
    if not all(hasattr(block_mask, name) for name in wanted):
        raise ConfigError(
            f"from_block_mask takes a BlockMask, as create_block_mask returns it, not {type(block_mask).__name__}; "
            "a function goes to Mask.from_mask_mod"
        )
    shape = block_mask.kv_indices.shape
    state = torch.full((1,) * (4 - len(shape)) + tuple(shape), NONE, dtype=torch.int8, device="cpu")
    lists = [(SOME, block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        lists.append((ALL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    for kind, counts, indices in lists:
        listed = torch.arange(shape[-1], device="cpu") < counts.cpu()[..., None]
        indices = indices.cpu().long().clamp(0, shape[-1] - 1)
        hit = torch.zeros(shape, dtype=torch.bool, device="cpu").scatter_(-1, indices, listed)
        state[hit.reshape(state.shape)] = kind
    lengths = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    rows, columns = block_mask.BLOCK_SIZE
    return BlockMaskMask(state, (rows, columns), lengths, block_mask.mask_mod)


def to_block_mask(
    mask: Mask, queries: int, keys: int | None, positions: Positions | None, device: Any, size: int
) -> "BlockMask":
    """Convert a mask to a FlexAttention BlockMask, using its block table instead of evaluating every pair."""
    from regard.core.kernels.flex import block_mask, mask_mod

    device = torch.device(device or "cpu")
    positions, keys = resolve_positions(queries, keys, positions)
    if mask.heads() is not None:
        raise ConfigError(f"{mask!r} differs between heads, which a block table does not know; use create_block_mask")
    table = mask.block_table(queries, keys, size, positions=positions)
    state = table.state if table.state.ndim == 3 else table.state[None]
    return block_mask(state.to(device), mask_mod(mask.to(device), positions, device), queries, keys, size)


def _call(
    function: MaskMod, batch_size: int | None, heads: int | None, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    """Call a mask_mod on every pair and return the boolean result.

    batch_size, heads  None if the mask_mod does not depend on b or h; it is then called with 0 for that index
    """
    b, h = torch.zeros_like(q) if batch_size is None else b, torch.zeros_like(q) if heads is None else h
    if q.ndim == 0:
        return torch.as_tensor(function(b, h, q, kv))  # inside flex_attention, which passes one pair
    axes = torch.broadcast_tensors(b, h, q, kv)
    # a mask_mod is written for single numbers: data[b][q] is correct for these and not for tensors of them
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # imports the compiler

    with TransformGetItemToIndex():
        seen = torch.vmap(function)(*(x.reshape(-1) for x in axes))
    if seen.dtype != torch.bool:
        raise ConfigError(f"a mask_mod must return booleans, True where visible, not {seen.dtype}")
    out: Tensor = seen.reshape(axes[0].shape)
    return out
