"""What is given: inputs and weights, or queries, keys and values, and how they are to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions
from regard.core.masks import as_mask, full
from regard.core.masks.algebra import Mask
from regard.work.exact_numbers import Grid, Value, counted, transposed

Convention = Literal["rows", "columns"]
CONVENTIONS = ("rows", "columns")
ROLES = ("q", "k", "v")
MATRICES = ("inputs", "q", "k", "v", "wq", "wk", "wv", "wo")
BIASES = ("bq", "bk", "bv", "bo")

Heads = tuple[Grid, ...]


@dataclass(frozen=True)
class Projection:
    """Weights, and a bias where there is one, that make a query, key or value of an input."""

    weights: Grid
    bias: tuple[Value, ...] | None = None


@dataclass(frozen=True)
class Head:
    """One head's queries, keys and values: each as it is, or as a projection of the inputs."""

    q: Grid | Projection
    k: Grid | Projection
    v: Grid | Projection

    def role(self, name: str) -> Grid | Projection:
        return {"q": self.q, "k": self.k, "v": self.v}[name]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything a worked solution starts from.

    With convention "rows" a token is a row: Q = X W_Q, scores Q K^T, softmax along rows, output A V.
    With "columns" it is a column: Q = W_Q X, scores K^T Q, softmax down columns, output V A.
    """

    name: str
    heads: tuple[Head, ...]
    inputs: Grid | None = None
    mixing: Projection | None = None  # what turns the joined heads into the result
    convention: Convention = "rows"
    scaled: bool = True
    mask: Mask = field(default_factory=full)
    tokens: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise ConfigError(f"convention is 'rows' (a token is a row) or 'columns', not {self.convention!r}")
        if not self.heads:
            raise ConfigError("a problem has at least one head; give q, k and v, or inputs, wq, wk and wv")
        sizes = {self._sizes(number) for number in range(len(self.heads))}
        if len({(i, j) for i, j, _, _ in sizes}) > 1:
            raise ShapeError("the heads differ in their numbers of tokens; give every head as many rows of q, k and v")
        if self.mixing is not None:
            joined, (rows, _) = (
                sum(self._sizes(number)[3] for number in range(len(self.heads))),
                self._turned("wo", self.mixing.weights),
            )
            if rows != joined:
                raise ShapeError(
                    f"wo takes {self._word(joined)} for the joined heads, but has {rows}; {self._form('wo')}"
                )
            self._check_bias("bo", self.mixing)
        if self.tokens is not None and len(self.tokens) != self.keys:
            raise ShapeError(
                f"tokens names {counted(len(self.tokens), 'token')}, but there are {self.keys}; name each one"
            )
        if (self.mask.batch() or 1) > 1 or (self.mask.heads() or 1) > 1:
            raise ConfigError(f"{self.mask!r} tells sequences or heads apart; a worked solution has one mask for all")

    @property
    def by_rows(self) -> bool:
        return self.convention == "rows"

    @property
    def queries(self) -> int:
        return self._sizes(0)[0]

    @property
    def keys(self) -> int:
        return self._sizes(0)[1]

    def width(self, head: int) -> int:
        """The c of a head: how many numbers a query has."""
        return self._sizes(head)[2]

    @cached_property
    def visible(self) -> tuple[tuple[bool, ...], ...]:
        """Whether query i sees key j; rows are queries, whatever the convention."""
        self.mask.check(Positions.last_rows(self.queries, self.keys), self.queries, self.keys, 1, 1)
        seen = self.mask.dense(self.queries, self.keys)
        return tuple(tuple(row) for row in seen.reshape(self.queries, self.keys).tolist())

    @property
    def hides(self) -> bool:
        return not all(all(row) for row in self.visible)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the keys are called: their words, or their numbers from 1."""
        return self.tokens or tuple(str(number + 1) for number in range(self.keys))

    @property
    def query_labels(self) -> tuple[str, ...]:
        """What the queries are called: they are the last of the keys, where both are tokens of one sequence."""
        if self.queries <= self.keys and (self.tokens is not None or self.queries == self.keys):
            return self.labels[self.keys - self.queries :]
        return tuple(str(number + 1) for number in range(self.queries))

    def _turned(self, name: str, grid: Grid) -> tuple[int, int]:
        """(rows, columns) as the row convention has them."""
        rows, columns = len(grid), len(grid[0])
        return (rows, columns) if self.by_rows else (columns, rows)

    def _word(self, count: int) -> str:
        return f"{count} {'rows' if self.by_rows else 'columns'}"

    def _form(self, name: str) -> str:
        if name in ROLES or name == "inputs":
            return f"with convention={self.convention!r} a token is a {self.convention.removesuffix('s')} of {name}"
        wide = "(width in, width out)" if self.by_rows else "(width out, width in)"
        return f"with convention={self.convention!r} weights are {wide}"

    def _sizes(self, number: int) -> tuple[int, int, int, int]:
        """i, j, c and e of a head, with everything that has to fit checked."""
        counts: dict[str, tuple[int, int]] = {}
        for role in ROLES:
            given = self.heads[number].role(role)
            if isinstance(given, Projection):
                if self.inputs is None:
                    raise ConfigError(f"w{role} makes {role} of the inputs, but there are none; give inputs too")
                tokens, width = self._turned("inputs", self.inputs)
                rows, columns = self._turned(f"w{role}", given.weights)
                if rows != width:
                    raise ShapeError(
                        f"w{role} takes inputs of width {rows}, but they have width {width}; {self._form(f'w{role}')}"
                    )
                self._check_bias(f"b{role}", given)
                counts[role] = (tokens, columns)
            else:
                counts[role] = self._turned(role, given)
        (i, c), (j, other), (values, e) = counts["q"], counts["k"], counts["v"]
        if other != c:
            raise ShapeError(f"k has width {other}, but q has width {c}; a dot product needs one width for both")
        if values != j:
            raise ShapeError(
                f"v has {counted(values, 'token')}, but k has {j}; each key has one value; {self._form('v')}"
            )
        return i, j, c, e

    def _check_bias(self, name: str, given: Projection) -> None:
        out = self._turned(name, given.weights)[1]
        if given.bias is not None and len(given.bias) != out:
            raise ShapeError(f"{name} has {len(given.bias)} numbers, but is added to vectors of width {out}")


def build(
    name: str,
    matrices: Mapping[str, Heads],
    biases: Mapping[str, tuple[tuple[Value, ...], ...]] | None = None,
    *,
    convention: str = "rows",
    scaled: bool = True,
    mask: Mask | None = None,
    heads: int = 1,
    tokens: tuple[str, ...] | None = None,
) -> Problem:
    """The problem meant by named matrices; each is one matrix, or one for every head.

    With heads above 1, one matrix for all of them is cut into that many parts of equal width.
    """
    biases = dict(biases or {})
    heads = check_integer("heads", heads, 1, "heads")
    _check_names(matrices, biases)
    given = {key: several for key, several in matrices.items() if key not in ("inputs", "wo")}
    counts = {len(several) for several in (*given.values(), *biases.values()) if len(several) > 1}
    if len(counts) > 1:
        raise ShapeError(f"matrices are given for {' and '.join(map(str, sorted(counts)))} heads; give all for as many")
    count = max(counts, default=heads)
    if heads not in (1, count):
        raise ConfigError(f"heads={heads}, but matrices are given for {count} heads; leave heads out")
    by_rows = convention != "columns"
    cut = {key: _for_heads(key, several, count, by_rows) for key, several in given.items()}
    cut_biases = {
        key: several if len(several) == count else _cut_row(key, several[0], count)
        for key, several in biases.items()
        if key != "bo"
    }

    def role(letter: str, number: int) -> Grid | Projection:
        if letter in cut:
            return cut[letter][number]
        bias = cut_biases.get(f"b{letter}")
        return Projection(cut[f"w{letter}"][number], bias[number] if bias else None)

    mixing = None
    if "wo" in matrices:
        mixing = Projection(_single("wo", matrices["wo"]), biases["bo"][0] if "bo" in biases else None)
    try:
        return Problem(
            name=name,
            heads=tuple(Head(role("q", n), role("k", n), role("v", n)) for n in range(count)),
            inputs=_single("inputs", matrices["inputs"]) if "inputs" in matrices else None,
            mixing=mixing,
            convention=convention,  # type: ignore[arg-type]  # checked where it is built
            scaled=scaled,
            mask=full() if mask is None else mask,
            tokens=tokens,
        )
    except ShapeError as error:
        shared = [key for key, several in given.items() if len(several) < count]
        if not shared or len(shared) == len(given):
            raise
        raise ShapeError(
            f"{error}; {' and '.join(shared)} came once, to be cut into {count} heads: give one for each head"
        ) from None


def mask_of(rows: tuple[tuple[bool, ...], ...]) -> Mask:
    """The mask that a matrix of zeros and ones spells; 1 is visible."""
    return as_mask(torch.tensor(rows, dtype=torch.bool))


def _check_names(matrices: Mapping[str, Heads], biases: Mapping[str, object]) -> None:
    if not set(matrices) & {*ROLES, "wq", "wk", "wv", "inputs"}:
        raise ConfigError("nothing is given; give q, k and v, or inputs, wq, wk and wv")
    for letter in ROLES:
        direct, made = letter in matrices, f"w{letter}" in matrices
        if direct and made:
            raise ConfigError(f"{letter} and w{letter} are both given; {letter} is either given or made of the inputs")
        if not direct and not made:
            wanted = f"w{letter}" if "inputs" in matrices else letter
            raise ConfigError(f"{wanted} is missing; give q, k and v, or inputs, wq, wk and wv")
        if f"b{letter}" in biases and not made:
            raise ConfigError(f"b{letter} is given without w{letter}, to whose product it is added")
    if "bo" in biases and "wo" not in matrices:
        raise ConfigError("bo is given without wo, to whose product it is added")
    if "inputs" in matrices and not any(f"w{letter}" in matrices for letter in ROLES):
        raise ConfigError("inputs are given, but no weights make anything of them; give wq, wk and wv")


def _single(name: str, several: Heads) -> Grid:
    if len(several) != 1:
        raise ShapeError(f"{name} is given {len(several)} times, but all heads share one")
    return several[0]


def _for_heads(name: str, several: Heads, count: int, by_rows: bool) -> Heads:
    if len(several) == count:
        return several
    tall = transposed(several[0]) if by_rows else several[0]  # widths down, whatever the convention
    if len(tall) % count:
        near = ", ".join(str(n) for n in range(2, len(tall) + 1) if len(tall) % n == 0) or "1"
        raise ConfigError(f"{name} has width {len(tall)}, which {count} heads cannot share; try heads = {near}")
    share = len(tall) // count
    parts = [tall[number * share : (number + 1) * share] for number in range(count)]
    return tuple(transposed(part) if by_rows else part for part in parts)


def _cut_row(name: str, row: tuple[Value, ...], count: int) -> tuple[tuple[Value, ...], ...]:
    if len(row) % count:
        raise ConfigError(f"{name} has {len(row)} numbers, which {count} heads cannot share")
    share = len(row) // count
    return tuple(row[number * share : (number + 1) * share] for number in range(count))
