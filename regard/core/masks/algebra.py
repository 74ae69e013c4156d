"""The mask algebra: what a mask is, and how masks combine. True means visible.

Every form is written once elementwise on positions (`see`) and once on ranges of positions (`box`). The first gives
the dense matrix, gathered blocks and the predicate of a fused kernel; the second tells without any matrix that a
whole range is visible or hidden, which is what block tables, caches and streams need.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Grid, Positions, check_positions, whole_grid

if TYPE_CHECKING:
    from regard.core.masks.block_tables import BlockTable, Spans

Flag = bool | Tensor
Position = int | Tensor
FAR = 1 << 40  # farther than any position


class BoxVisibility(NamedTuple):
    """What is known of a range of queries against a range of keys: surely nothing visible, surely everything."""

    none: Flag
    all: Flag


UNKNOWN = BoxVisibility(False, False)


class Mask:
    """A rule that says which keys a query may see. Combine rules with `&`, `|` and `~`."""

    def see(self, grid: Grid) -> Bool[Tensor, "..."]:
        """Whether each pair of the grid is visible."""
        raise NotImplementedError(f"{type(self).__name__} says nothing about pairs")

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        """What queries first..last see of keys start..stop, both ends included; may be cautious, never wrong."""
        return UNKNOWN

    def table(self, spans: "Spans") -> BoxVisibility:
        """`box` for every pair of blocks."""
        return self.box(spans.first, spans.last, spans.start, spans.stop)

    def check(self, positions: Positions, i: int, j: int, b: int | None = None, h: int | None = None) -> None:
        """Raise where the mask was made for another number of sequences or positions."""
        for child in self.children():
            child.check(positions, i, j, b, h)
        own = self.batch()
        for size in [child.batch() for child in self.children()]:
            if size is not None and size != own:
                raise ShapeError(
                    f"{self!r} joins masks for b={own} and b={size} (batch); make its parts for the same batch"
                )

    def children(self) -> tuple["Mask", ...]:
        return ()

    def rebuilt(self, change: Callable[["Mask"], "Mask"]) -> "Mask":
        """The same combination of changed children."""
        return self

    def to(self, device: torch.device) -> "Mask":
        """The same mask with its data, if it has any, on that device."""
        return self.rebuilt(lambda child: child.to(device)) if self.tensors() else self

    def tensors(self) -> tuple[Tensor, ...]:
        """The data this mask depends on: none for masks that are rules alone."""
        return tuple(tensor for child in self.children() for tensor in child.tensors())

    def batch(self) -> int | None:
        """The number of sequences told apart, or None where all are treated alike."""
        return _first([child.batch() for child in self.children()])

    def heads(self) -> int | None:
        """The number of heads told apart, or None where all are treated alike."""
        return _first([child.heads() for child in self.children()])

    def opaque(self) -> bool:
        """Whether some part is a predicate or a matrix, of which only evaluation tells."""
        return any(child.opaque() for child in self.children())

    def key(self) -> Hashable | None:
        """What to remember work under: rules compare by structure, data by identity and version.

        Comparing contents would wait for the device. Whoever remembers must keep the mask too, so that no other
        tensor takes over the identity. None where nothing may be remembered.
        """
        if not self.tensors() and not self.opaque():
            return self
        keys = [child.key() for child in self.children()]
        return None if None in keys else (type(self), *keys)

    @staticmethod
    def of(name: str, fn: Callable[[Tensor, Tensor], Tensor]) -> "Mask":
        """A rule of one's own: `fn(i, j)` on integer tensors of query and key positions gives True where visible."""
        if not callable(fn):
            raise ConfigError(f"Mask.of takes a function of query and key positions, not {fn!r}")
        return Predicate(name, fn)

    def dense(
        self,
        queries: int,
        keys: int | None = None,
        *,
        positions: Positions | None = None,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "*b i j"]:
        """The matrix: (i, j), or (b, 1, i, j) where sequences differ. Queries are the last rows unless placed."""
        positions, keys = settle(queries, keys, positions)
        self.check(positions, queries, keys)
        device = torch.device(device or "cpu")
        seen = self.to(device).see(whole_grid(positions, self.batch() or 1, 1, queries, keys, device))
        return seen.expand(*seen.shape[:-2], queries, keys)

    def count(self, queries: int, keys: int | None = None, *, positions: Positions | None = None) -> int:
        """How many pairs are visible, exactly, over all the sequences that the mask tells apart."""
        from regard.core.masks.counts import count  # built from masks, so it cannot be imported above

        return count(self, queries, keys, positions)

    def block_table(
        self, queries: int, keys: int | None = None, size: int = 128, *, positions: Positions | None = None
    ) -> "BlockTable":
        """For each block of queries and each block of keys: nothing, something or everything is visible."""
        from regard.core.masks.block_tables import block_table

        return block_table(self, queries, keys, size, positions=positions)

    def draw(
        self, queries: int = 16, keys: int | None = None, *, positions: Positions | None = None, ax: Any = None
    ) -> str:
        """The matrix as text, and on a matplotlib axis if one is given."""
        from regard.core.masks.drawing import draw

        return draw(self, queries, keys, positions=positions, ax=ax)

    def within(self, first: int, last: int, start: int, stop: int) -> "Mask":
        """A simpler mask, if there is one, that agrees with this one on queries first..last and keys start..stop."""
        none, everything = self.box(first, last, start, stop)
        return Full() if everything is True else NOTHING if none is True else self

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        return And(_flat(And, self, _as_mask(other)))

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        return Or(_flat(Or, self, _as_mask(other)))

    # reached where the other operand is a boolean tensor
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
    """Every key."""

    def see(self, grid: Grid) -> Tensor:
        return grid.column >= 0

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return BoxVisibility(none=False, all=True)

    def __repr__(self) -> str:
        return "full()"


@dataclass(frozen=True, repr=False)
class And(Mask):
    """Visible to all parts."""

    parts: tuple[Mask, ...]

    def children(self) -> tuple[Mask, ...]:
        return self.parts

    def rebuilt(self, change: Callable[[Mask], Mask]) -> Mask:
        return And(tuple(change(part) for part in self.parts))

    def see(self, grid: Grid) -> Tensor:
        seen = self.parts[0].see(grid)
        for part in self.parts[1:]:
            seen = seen & part.see(grid)
        return seen

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return meet([part.box(first, last, start, stop) for part in self.parts])

    def table(self, spans: "Spans") -> BoxVisibility:
        return meet([part.table(spans) for part in self.parts])

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        parts = [part.within(first, last, start, stop) for part in self.parts]
        if any(is_nothing(part) for part in parts):
            return NOTHING
        kept = tuple(part for part in parts if not isinstance(part, Full))
        return And(kept) if len(kept) > 1 else kept[0] if kept else Full()

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """Visible to any part."""

    parts: tuple[Mask, ...]

    def children(self) -> tuple[Mask, ...]:
        return self.parts

    def rebuilt(self, change: Callable[[Mask], Mask]) -> Mask:
        return Or(tuple(change(part) for part in self.parts))

    def see(self, grid: Grid) -> Tensor:
        seen = self.parts[0].see(grid)
        for part in self.parts[1:]:
            seen = seen | part.see(grid)
        return seen

    def box(self, first: Position, last: Position, start: Position, stop: Position) -> BoxVisibility:
        return join([part.box(first, last, start, stop) for part in self.parts])

    def table(self, spans: "Spans") -> BoxVisibility:
        return join([part.table(spans) for part in self.parts])

    def within(self, first: int, last: int, start: int, stop: int) -> Mask:
        parts = [part.within(first, last, start, stop) for part in self.parts]
        if any(isinstance(part, Full) for part in parts):
            return Full()
        kept = tuple(part for part in parts if not is_nothing(part))
        return Or(kept) if len(kept) > 1 else kept[0] if kept else NOTHING

    def __repr__(self) -> str:
        return " | ".join(repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Visible where the part is not."""

    part: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def rebuilt(self, change: Callable[[Mask], Mask]) -> Mask:
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
        return inner.part if isinstance(inner, Not) else Not(inner)  # spelled out: the compiler cannot trace ~ here

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})" if isinstance(self.part, And | Or) else f"~{self.part!r}"


@dataclass(frozen=True, repr=False)
class Predicate(Mask):
    """A rule of one's own, known only by its answers."""

    name: str
    fn: Callable[[Tensor, Tensor], Tensor]

    def see(self, grid: Grid) -> Tensor:
        seen = self.fn(grid.i, grid.j)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            came = seen.dtype if isinstance(seen, Tensor) else repr(seen)
            raise ConfigError(f"{self!r} must give a boolean tensor, True where visible, but gave {came}")
        return seen.expand(torch.broadcast_shapes(seen.shape, grid.i.shape, grid.j.shape))

    def key(self) -> None:
        """What the function reads may change unseen, so nothing is remembered about it."""

    def table(self, spans: "Spans") -> BoxVisibility:
        return spans.swept(self)

    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Mask.of({self.name!r})"


NOTHING = Not(Full())


def is_nothing(mask: Mask) -> bool:
    return isinstance(mask, Not) and isinstance(mask.part, Full)


def meet(verdicts: list[BoxVisibility]) -> BoxVisibility:
    none, everything = verdicts[0]
    for verdict in verdicts[1:]:
        none, everything = none | verdict.none, everything & verdict.all
    return BoxVisibility(none, everything)


def join(verdicts: list[BoxVisibility]) -> BoxVisibility:
    none, everything = verdicts[0]
    for verdict in verdicts[1:]:
        none, everything = none & verdict.none, everything | verdict.all
    return BoxVisibility(none, everything)


def settle(queries: int, keys: int | None, positions: Positions | None) -> tuple[Positions, int]:
    """The places and the number of keys meant by a call that leaves them out."""
    queries = check_integer("queries", queries, 0)
    keys = queries if keys is None else check_integer("keys", keys, 0)
    return check_positions(positions, queries, keys), keys


def _first(sizes: list[int | None]) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _as_mask(other: Mask | Tensor) -> Mask:
    if isinstance(other, Mask):
        return other
    from regard.core.masks import as_mask  # the functions that make masks are built from this file

    if other is None:
        raise DtypeError("a mask combines with masks and boolean tensors, not with None; leave it out, or write full()")
    return as_mask(other)


def _flat(kind: type[And] | type[Or], *masks: Mask) -> tuple[Mask, ...]:
    return tuple(part for mask in masks for part in (mask.parts if isinstance(mask, kind) else (mask,)))
