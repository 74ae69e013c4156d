"""Mask algebra: the base class of masks and the combinations `&`, `|` and `~`. True means visible.

Every class of masks defines the method `see`, which computes elementwise whether a query-key pair is visible. All
kernels use this method, for the whole matrix, for some blocks of it or for single pairs. The other methods are optional
and make a mask faster.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid, Positions, check_positions, whole_grid

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.core.masks.block_tables import BlockTable, Spans

Flag = bool | Tensor
Position = int | Tensor
Bounds = tuple[Position | None, Position | None]
FAR = 1 << 40  # farther than any position


class BoxVisibility(NamedTuple):
    """What is known about all pairs of a range of queries and a range of keys: a box of the matrix.

    none  True if no pair is visible; False may also mean unknown
    all   True if every pair is visible; False may also mean unknown
    """

    none: Flag
    all: Flag


UNKNOWN = BoxVisibility(False, False)


class RowPieces(NamedTuple):
    """The ranges of query positions i in which the bounds of `Mask.key_range` are linear functions of i.

    period  the bounds need to be linear only along query positions that are `period` apart: i, i + period, ...
    breaks  query positions at which another linear function begins
    """

    period: int = 1
    breaks: tuple[int, ...] = ()


class Mask:
    """A rule that says which keys each query may see. Combine masks with `&`, `|` and `~`.

    A subclass must define `see`. All other methods are optional and make the mask faster:

        box, table                       let sparse kernels and caches skip hidden keys; `table` is more exact
        key_range, labels, listed_keys   let `count` count pairs without the matrix; one of the three is enough
        row_pieces                       lets `count` count the pairs of `key_range` by a formula
        steps, as_window, sees_itself    let kernels choose a faster algorithm

    The first example counts the visible pairs of a million queries and keys. In the second, visible pairs are dark.

    >>> (causal() & window(before=2) | global_tokens(1)).count(1_000_000)
    4999993
    >>> print((~causal()).draw(3))
     ·████
     · ·██
     · · ·
    """

    def see(self, grid: Grid) -> Bool[Tensor, "..."]:
        """Return a boolean tensor: for each query-key pair of the grid, whether the key is visible."""
        raise NotImplementedError(f"{type(self).__name__} does not define see(grid)")

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        """Return two flags for the queries first..last and keys start..stop: no pair is visible, all are visible.

        Both ends of the ranges are included. A flag of False may also mean unknown.
        """
        return UNKNOWN

    def table(self, spans: "Spans") -> BoxVisibility:
        """Return two flags for each pair of a query block and a key block: no pair is visible, all pairs are visible.

        If a mask does not define `box`, every query-key pair is evaluated.

        spans  the blocks into which queries and keys are divided
        """
        if type(self).box is Mask.box:
            return spans.evaluate(self)
        return self.box(spans.first, spans.last, spans.start, spans.stop)

    def key_range(self, i: Int[Tensor, "i"], sequence: int) -> Bounds | None:
        """Return the visible keys of each query as a range: the first key, and the key after the last one.

        None for masks in which a query may see more than one range. A bound of None means no limit. Used to count
        visible pairs.

        i         positions of the queries
        sequence  index of the sequence in the batch
        """
        return None

    def row_pieces(self) -> RowPieces | None:
        """Return the ranges of queries in which the bounds of `key_range` are linear in i. None if none are known.

        Used to count the pairs of very long sequences by a formula.
        """
        return None

    def labels(self, i: Int[Tensor, "i"], j: Int[Tensor, "j"], sequence: int) -> tuple[Tensor, Tensor] | None:
        """Return a label for each query and each key, if exactly the pairs with equal labels are visible.

        For `documents` the label is the document id. None for masks without labels. Used to count visible pairs.

        i, j      positions of the queries and of the keys
        sequence  index of the sequence in the batch
        """
        return None

    def listed_keys(self, i: Int[Tensor, "i"]) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Return an iterator over the visible keys of each query, for masks with few visible keys, else None.

        Step n of the iterator yields two tensors with one entry for each query: the position of its n-th key, and
        whether the query has an n-th key. No key is listed twice for a query. Used to count visible pairs.

        i  positions of the queries
        """
        return None

    def steps(self) -> tuple[int, ...]:
        """Return the periods of the pattern, such as `step` of dilated(step). Empty if the pattern is not periodic.

        Sparse kernels may sort positions by their remainder modulo the period. Positions that see each other are then
        side by side, so that more blocks are entirely visible or hidden.
        """
        return tuple(sorted({step for child in self.children() for step in child.steps()}))

    def as_window(self) -> tuple[int | None, int | None] | None:
        """Return (before, after) if this mask equals `window(before, after)`, else None. (None, 0) is causal."""
        return None

    def sees_itself(self) -> bool:
        """Return whether every query is known to see the key at its own position, and so at least one key.

        False may also mean unknown. Used in compiled code, which cannot evaluate the mask.
        """
        return False

    def visible_keys(self, j: Tensor, batch: Tensor) -> Tensor | None:
        """Return whether the key at position j of sequence `batch` is visible, for masks that depend on the key only.

        None for other masks, in which queries of one sequence see different keys.
        """
        return None

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        """Raise ShapeError if the mask does not fit these positions, i queries, j keys, b sequences and h heads."""
        for child in self.children():
            child.check(positions, i, j, b, h)
        own = self.batch()
        for size in [child.batch() for child in self.children()]:
            if size is not None and size != own:
                raise ShapeError(
                    f"{self!r} combines masks for b={own} and b={size} (batch); make its parts for the same batch"
                )

    def children(self) -> tuple["Mask", ...]:
        """Return the masks that this mask combines. Empty for a mask that combines none."""
        return ()

    def map_children(self, change: Callable[["Mask"], "Mask"]) -> "Mask":
        """Return the same combination with each child mask replaced by `change(child)`."""
        return self

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Mask":
        """Return the same mask with each of its tensors replaced by `change(tensor)`."""
        return self.map_children(lambda child: child.map_tensors(change))

    def of_sequences(self, index: Int[Tensor, "n"]) -> "Mask":
        """Return the mask for a batch that consists of the sequences with the indices `index`."""
        return self.map_children(lambda child: child.of_sequences(index)) if self.tensors() else self

    def to(self, device: torch.device) -> "Mask":
        """Return the same mask with its tensors moved to a device."""
        return self.map_children(lambda child: child.to(device)) if self.tensors() else self

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that this mask stores. Masks that depend on positions only have none."""
        found: tuple[Tensor, ...] = ()
        for child in self.children():
            found += child.tensors()
        return found

    def batch(self) -> int | None:
        """Return the number of sequences if each has its own pattern, or None if the pattern is the same for all."""
        return _first([child.batch() for child in self.children()])

    def heads(self) -> int | None:
        """Return the number of heads if each has its own pattern, or None if the pattern is the same for all."""
        return _first([child.heads() for child in self.children()])

    def length(self) -> int | None:
        """Return the number of positions that the tensors of this mask cover, or None if the mask fits any length."""
        return _first([child.length() for child in self.children()])

    def required_keys(self) -> int:
        """Return the number of keys that an attention call without a cache must have. 0 if the mask fits any number."""
        required = 0
        for child in self.children():  # a plain loop, which torch.compile can trace
            required = max(required, child.required_keys())
        return required

    def opaque(self) -> bool:
        """Return whether a user's function or a matrix is part of the mask.

        The pattern of such a mask is known only by evaluating every pair.
        """
        return any(child.opaque() for child in self.children())

    def by_pair(self) -> str:
        """Return the part of the mask that depends on row and column indices or on heads, such as "a boolean matrix".

        The text is part of error messages; "" means that the mask depends on positions only. The `blocked` and `flex`
        kernels refuse a mask that depends on indices or heads. Such a mask cannot be moved to other positions.
        """
        for child in self.children():  # a plain loop, which torch.compile can trace on every version of Python
            name = child.by_pair()
            if name:
                return name
        return ""

    def key(self) -> Hashable | None:
        """Return a hashable key under which results for this mask are cached. None if they must not be cached.

        Masks without tensors have equal keys if their settings are equal. The key of a mask with a CPU tensor contains
        the values of the tensor. For other devices, where reading values would synchronise, the key contains the id
        and the version of the tensor. A cache must then keep a reference to the mask, because the id of a freed tensor
        may be used again for another tensor.
        """
        if not self.tensors() and not self.opaque():
            return self
        keys = [child.key() for child in self.children()]
        return None if None in keys else (type(self), *keys)

    @staticmethod
    def of(name: str, fn: Callable[[Tensor, Tensor], Tensor]) -> "Mask":
        """Make a mask from a function `fn(i, j)` of query and key positions that returns True where visible.

        name  name of the mask when it is printed
        fn    gets integer tensors that broadcast against each other and returns a boolean tensor

        The example counts the visible pairs of four queries and keys.

        >>> Mask.of("same parity", lambda i, j: (i - j) % 2 == 0).count(4)
        8
        """
        if not callable(fn):
            raise ConfigError(f"Mask.of takes a function of query and key positions, not {fn!r}")
        return Predicate(name, fn)

    @staticmethod
    def from_mask_mod(mask_mod: Callable[..., Any], *, batch: int | None = None, heads: int | None = None) -> "Mask":
        """Convert FlexAttention's mask_mod, a function of batch, head, query and key index, to a mask.

        The query and key index are absolute positions here. Common rules are recognised, so that sparse kernels can
        skip blocks. Any other function is evaluated on every pair.

        batch  number of sequences, if the function differs between them
        heads  number of query heads, if the function differs between them

        >>> Mask.from_mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv <= 255))
        causal() & window(before=255, after=None)
        """
        from regard.core.masks.mask_mod import from_mask_mod  # imports this module

        return from_mask_mod(mask_mod, batch, heads)

    @staticmethod
    def from_block_mask(block_mask: "BlockMask") -> "Mask":
        """Convert a FlexAttention BlockMask to a mask, for calls with the same lengths as the BlockMask.

        >>> Mask.from_block_mask(create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 5, 5, device="cpu")).count(5)
        15
        """
        from regard.core.masks.mask_mod import from_block_mask

        return from_block_mask(block_mask)

    @property
    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The mask as FlexAttention's mask_mod: a function of batch, head, query and key index.

        Query r is at position r. To continue a KV cache, use `to_block_mask` with positions instead.

        >>> create_block_mask(causal().mask_mod, None, None, 256, 256, device="cpu").shape
        (1, 1, 256, 256)
        """
        return lambda b, h, q, kv: self.see(Grid(b, h, q, kv, q, kv))

    def to_block_mask(
        self,
        queries: int,
        keys: int | None = None,
        *,
        positions: Positions | None = None,
        device: torch.device | str | None = None,
        size: int = 128,
    ) -> "BlockMask":
        """Convert the mask to a FlexAttention BlockMask.

        The BlockMask is made from the block table, without evaluating every pair.

        queries    number of query positions
        keys       number of key positions; default `queries`
        positions  absolute positions; by default keys are at 0, 1, 2 ... and queries at the last of these positions
        device     device of the BlockMask; default the CPU
        size       number of positions in a block

        >>> causal().to_block_mask(256).shape
        (1, 1, 256, 256)
        """
        from regard.core.masks.mask_mod import to_block_mask

        return to_block_mask(self, queries, keys, positions, device, size)

    def dense(
        self,
        queries: int,
        keys: int | None = None,
        *,
        positions: Positions | None = None,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "*b i j"]:
        """Return the mask as a dense boolean matrix (i, j), or (b, 1, i, j) if sequences differ. True means visible.

        queries    number of query positions
        keys       number of key positions; default `queries`
        positions  absolute positions; by default keys are at 0, 1, 2 ... and queries at the last of these positions
        device     device on which the matrix is built; default the CPU
        """
        positions, keys = resolve_positions(queries, keys, positions)
        self.check(positions, queries, keys)
        device = torch.device(device or "cpu")
        seen = self.to(device).see(whole_grid(positions, self.batch() or 1, self.heads() or 1, queries, keys, device))
        return seen.expand(*seen.shape[:-2], queries, keys)

    def count(self, queries: int, keys: int | None = None, *, positions: Positions | None = None) -> int:
        """Return the exact number of visible query-key pairs, summed over the sequences if they differ.

        queries    number of query positions
        keys       number of key positions; default `queries`
        positions  absolute positions; by default keys are at 0, 1, 2 ... and queries at the last of these positions
        """
        from regard.core.masks.counts import count  # imports this module

        return count(self, queries, keys, positions)

    def block_table(
        self, queries: int, keys: int | None = None, size: int = 128, *, positions: Positions | None = None
    ) -> "BlockTable":
        """Return the block table: which blocks of queries see none, some or all of which blocks of keys.

        queries    number of query positions
        keys       number of key positions; default `queries`
        size       number of positions in a block
        positions  absolute positions; by default keys are at 0, 1, 2 ... and queries at the last of these positions
        """
        from regard.core.masks.block_tables import block_table

        return block_table(self, queries, keys, size, positions=positions)

    def draw(
        self, queries: int = 16, keys: int | None = None, *, positions: Positions | None = None, ax: Any = None
    ) -> str:
        """Draw the mask as text: rows are queries, columns are keys. The first three arguments are those of `dense`.

        ax  matplotlib axis on which the mask is drawn too; None draws text only
        """
        from regard.core.masks.drawing import draw

        return draw(self, queries, keys, positions=positions, ax=ax)

    def _repr_html_(self) -> str:
        """Return the picture that a notebook shows."""
        from regard.core.masks.drawing import draw_html

        return draw_html(self)

    def within(self, first: int, last: int, start: int, stop: int) -> "Mask":
        """Return a mask that equals this one for queries first..last and keys start..stop. Both ends are included.

        The mask is simplified if possible, for example to `full()` if all these pairs are visible.
        """
        none, everything = self.box(first, last, start, stop)
        return Full() if everything is True else NOTHING if none is True else self

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        return And(_flatten(And, self, _as_mask(other)))

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        return Or(_flatten(Or, self, _as_mask(other)))

    # called if the left operand is a boolean tensor
    def __rand__(self, other: Tensor) -> "Mask":
        return _as_mask(other) & self

    def __ror__(self, other: Tensor) -> "Mask":
        return _as_mask(other) | self

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~ instead of and, or, not")


@dataclass(frozen=True, repr=False)
class Full(Mask):
    """The mask in which every key is visible."""

    def see(self, grid: Grid) -> Tensor:
        return grid.column >= 0

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=False, all=True)

    def key_range(self, i: Tensor, sequence: int) -> Bounds:
        return None, None

    def as_window(self) -> tuple[None, None]:
        return None, None

    def sees_itself(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "full()"


@dataclass(frozen=True, repr=False)
class Combination(Mask):
    """Base class of And and Or: several masks combined into one."""

    parts: tuple[Mask, ...]

    @staticmethod
    def combine_boxes(boxes: list[BoxVisibility]) -> BoxVisibility:
        """Return the result of `box` for the combination, computed from the results of `box` for the combined masks."""
        raise NotImplementedError

    def children(self) -> tuple[Mask, ...]:
        return self.parts

    def map_children(self, change: Callable[[Mask], Mask]) -> Mask:
        return type(self)(tuple(change(part) for part in self.parts))

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return self.combine_boxes([part.box(first, last, start, stop) for part in self.parts])

    def table(self, spans: "Spans") -> BoxVisibility:
        return self.combine_boxes([part.table(spans) for part in self.parts])


@dataclass(frozen=True, repr=False)
class And(Combination):
    """The mask `a & b`: a pair is visible if it is visible in all combined masks."""

    def see(self, grid: Grid) -> Tensor:
        seen = self.parts[0].see(grid)
        for part in self.parts[1:]:
            seen = seen & part.see(grid)
        return seen

    @staticmethod
    def combine_boxes(boxes: list[BoxVisibility]) -> BoxVisibility:
        none, everything = boxes[0]
        for box in boxes[1:]:
            none, everything = none | box.none, everything & box.all
        return BoxVisibility(none, everything)

    def as_window(self) -> tuple[int | None, int | None] | None:
        before: int | None = None
        after: int | None = None
        for part in self.parts:  # a plain loop, which torch.compile can trace
            window = part.as_window()
            if window is None:
                return None
            before, after = _smaller(before, window[0]), _smaller(after, window[1])
        return before, after

    def sees_itself(self) -> bool:
        return False not in [part.sees_itself() for part in self.parts]

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        parts = [part.within(first, last, start, stop) for part in self.parts]
        if any(is_nothing(part) for part in parts):
            return NOTHING
        needed = tuple(part for part in parts if not isinstance(part, Full))
        return And(needed) if len(needed) > 1 else needed[0] if needed else Full()

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Or(Combination):
    """The mask `a | b`: a pair is visible if it is visible in at least one of the combined masks."""

    def see(self, grid: Grid) -> Tensor:
        seen = self.parts[0].see(grid)
        for part in self.parts[1:]:
            seen = seen | part.see(grid)
        return seen

    @staticmethod
    def combine_boxes(boxes: list[BoxVisibility]) -> BoxVisibility:
        none, everything = boxes[0]
        for box in boxes[1:]:
            none, everything = none & box.none, everything | box.all
        return BoxVisibility(none, everything)

    def sees_itself(self) -> bool:
        return True in [part.sees_itself() for part in self.parts]

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        parts = [part.within(first, last, start, stop) for part in self.parts]
        if any(isinstance(part, Full) for part in parts):
            return Full()
        needed = tuple(part for part in parts if not is_nothing(part))
        return Or(needed) if len(needed) > 1 else needed[0] if needed else NOTHING

    def __repr__(self) -> str:
        return " | ".join(repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """The mask `~a`: a pair is visible if the mask `a` hides it."""

    part: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def map_children(self, change: Callable[[Mask], Mask]) -> Mask:
        return Not(change(self.part))

    def see(self, grid: Grid) -> Tensor:
        return ~self.part.see(grid)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        none, everything = self.part.box(first, last, start, stop)
        return BoxVisibility(none=everything, all=none)

    def table(self, spans: "Spans") -> BoxVisibility:
        none, everything = self.part.table(spans)
        return BoxVisibility(none=everything, all=none)

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        inner = self.part.within(first, last, start, stop)
        return inner.part if isinstance(inner, Not) else Not(inner)  # not `~inner`: the compiler cannot trace it here

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})" if isinstance(self.part, Combination) else f"~{self.part!r}"


@dataclass(frozen=True, repr=False)
class Predicate(Mask):
    """A mask from a user's function of query and key positions; see `Mask.of`."""

    name: str
    fn: Callable[[Tensor, Tensor], Tensor]

    def see(self, grid: Grid) -> Tensor:
        seen = self.fn(grid.i, grid.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            returned = seen.dtype if isinstance(seen, Tensor) else repr(seen)
            raise ConfigError(f"{self!r} must return a boolean tensor, True where visible, but returned {returned}")
        shape = torch.broadcast_shapes(grid.i.shape, grid.j.shape)
        if seen.ndim > len(shape) or any(
            own not in (1, size) for own, size in zip(seen.shape[::-1], shape[::-1], strict=False)
        ):
            raise ShapeError(
                f"{self!r} returned shape {tuple(seen.shape)} for positions i of shape {tuple(grid.i.shape)} and j of "
                f"shape {tuple(grid.j.shape)}; return one value for each pair, such as i - j < 3"
            )
        return seen.expand(shape)

    def key(self) -> None:
        """Return None: results are not cached, because values that the user's function reads may change."""

    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Mask.of({self.name!r})"


class CompoundMask(Mask):
    """A named mask that is defined as a combination of other masks. Subclasses define `expand` and `__repr__`."""

    def expand(self) -> Mask:
        """Return the same mask as a combination of simpler masks."""
        raise NotImplementedError(f"{type(self).__name__} does not define expand()")

    def see(self, grid: Grid) -> Tensor:
        return self.expand().see(grid)

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return self.expand().box(first, last, start, stop)

    def table(self, spans: "Spans") -> BoxVisibility:
        return self.expand().table(spans)

    def steps(self) -> tuple[int, ...]:
        return self.expand().steps()

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        simpler = self.expand().within(first, last, start, stop)
        return self if isinstance(simpler, Combination) else simpler


NOTHING = Not(Full())


def is_nothing(mask: Mask) -> bool:
    """Return whether the mask is `~full()`, which hides every key."""
    return isinstance(mask, Not) and isinstance(mask.part, Full)


def resolve_positions(queries: int, keys: int | None, positions: Positions | None) -> tuple[Positions, int]:
    """Return the positions and the number of keys, with defaults filled in for None."""
    queries = check_integer("queries", queries, 0)
    keys = queries if keys is None else check_integer("keys", keys, 0)
    return check_positions(positions, queries, keys), keys


def _smaller(a: int | None, b: int | None) -> int | None:
    """Return the smaller of two limits, where None means no limit."""
    return b if a is None else a if b is None else min(a, b)


def _first(sizes: list[int | None]) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _as_mask(other: Mask | Tensor) -> Mask:
    if isinstance(other, Mask):
        return other
    from regard.core.masks import as_mask  # imports this module

    if other is None:
        raise DtypeError("a mask combines with masks and boolean tensors, not with None; leave it out, or write full()")
    return as_mask(other)


def _flatten(kind: type[Combination], *masks: Mask) -> tuple[Mask, ...]:
    return tuple(part for mask in masks for part in (mask.parts if isinstance(mask, kind) else (mask,)))
