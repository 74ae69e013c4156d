"""An attention problem: inputs and weights, or queries, keys and values, and the convention they are written in."""

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
from regard.work.exact_numbers import Matrix, Value, format_count, transpose

Convention = Literal["rows", "columns"]
CONVENTIONS = ("rows", "columns")
ROLES = ("q", "k", "v")
MATRICES = ("inputs", "q", "k", "v", "wq", "wk", "wv", "wo")
BIASES = ("bq", "bk", "bv", "bo")

MatrixPerHead = tuple[Matrix, ...]
BiasPerHead = tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class LinearProjection:
    """The weights and the optional bias of a linear projection to queries, keys, values or the final output."""

    weights: Matrix
    bias: tuple[Value, ...] | None = None


@dataclass(frozen=True)
class HeadMatrices:
    """The queries, keys and values of one head; each is stated as a matrix or as a projection of the inputs."""

    q: Matrix | LinearProjection
    k: Matrix | LinearProjection
    v: Matrix | LinearProjection

    def role(self, name: str) -> Matrix | LinearProjection:
        """Return the matrix or projection of "q", "k" or "v"."""
        return {"q": self.q, "k": self.k, "v": self.v}[name]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An attention problem to be solved step by step: matrices, mask and conventions.

    With convention "rows" a token is a row: Q = X W_Q, scores Q K^T, softmax along rows, output A V.
    With convention "columns" a token is a column: Q = W_Q X, scores K^T Q, softmax down columns, output V A.

    inputs             X; None if every head states its q, k and v
    output_projection  applied to the concatenated heads; None for no projection
    scaled             whether scores are divided by the square root of the head width
    mask               which keys each query sees
    tokens             the words of the tokens, used as their labels; None for the labels 1, 2, ...
    """

    name: str
    heads: tuple[HeadMatrices, ...]
    inputs: Matrix | None = None
    output_projection: LinearProjection | None = None
    convention: Convention = "rows"
    scaled: bool = True
    mask: Mask = field(default_factory=full)
    tokens: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise ConfigError(f"convention is 'rows' (a token is a row) or 'columns', not {self.convention!r}")
        if not self.heads:
            raise ConfigError("a problem has at least one head; give q, k and v, or inputs, wq, wk and wv")
        sizes = [self._sizes(index) for index in range(len(self.heads))]
        if len({(i, j) for i, j, _, _ in sizes}) > 1:
            raise ShapeError("the heads have different numbers of tokens; give every head as many rows of q, k and v")
        if self.output_projection is not None:
            width = sum(e for _, _, _, e in sizes)
            rows, _ = self._row_shape(self.output_projection.weights)
            if rows != width:
                axis = "rows" if self.by_rows else "columns"
                raise ShapeError(
                    f"wo needs {width} {axis} for the concatenated heads, but has {rows}; {self._describe_layout('wo')}"
                )
            self._check_bias("bo", self.output_projection)
        if self.tokens is not None and len(self.tokens) != self.keys:
            raise ShapeError(
                f"tokens names {format_count(len(self.tokens), 'token')}, but there are {self.keys}; name each one"
            )
        if (self.mask.batch() or 1) > 1 or (self.mask.heads() or 1) > 1:
            raise ConfigError(f"{self.mask!r} differs between sequences or heads; a worked solution has one mask")

    @property
    def by_rows(self) -> bool:
        """Whether tokens are rows of the matrices; otherwise they are columns."""
        return self.convention == "rows"

    @property
    def token_axis(self) -> str:
        """The axis of a matrix that holds a token, as a word: "row" or "column"."""
        return self.convention.removesuffix("s")

    @property
    def queries(self) -> int:
        return self._sizes(0)[0]

    @property
    def keys(self) -> int:
        return self._sizes(0)[1]

    def width(self, head: int) -> int:
        """Return the width c of queries and keys in head number `head`, counted from 0."""
        return self._sizes(head)[2]

    @cached_property
    def visible(self) -> tuple[tuple[bool, ...], ...]:
        """The mask: visible[i][j] is whether query i sees key j, in either convention."""
        self.mask.check(Positions.last_rows(self.queries, self.keys), self.queries, self.keys, 1, 1)
        seen = self.mask.dense(self.queries, self.keys)
        return tuple(tuple(row) for row in seen.reshape(self.queries, self.keys).tolist())

    @property
    def is_masked(self) -> bool:
        """Whether the mask hides at least one pair."""
        return not all(all(row) for row in self.visible)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the keys: the words of the tokens, or numbers from 1."""
        return self.tokens or tuple(str(number + 1) for number in range(self.keys))

    @property
    def query_labels(self) -> tuple[str, ...]:
        """The names of the queries: those of the last keys, or numbers from 1.

        The names of the last keys are used if there are as many queries as keys, or if there are fewer queries and the
        tokens have words.
        """
        if self.queries <= self.keys and (self.tokens is not None or self.queries == self.keys):
            return self.labels[self.keys - self.queries :]
        return tuple(str(number + 1) for number in range(self.queries))

    def _row_shape(self, matrix: Matrix) -> tuple[int, int]:
        """Return the (rows, columns) of a matrix, or of its transpose if tokens are columns in the problem."""
        rows, columns = len(matrix), len(matrix[0])
        return (rows, columns) if self.by_rows else (columns, rows)

    def _describe_layout(self, name: str) -> str:
        if name in ROLES:
            return f"with convention={self.convention!r} a token is a {self.token_axis} of {name}"
        shape = "(width in, width out)" if self.by_rows else "(width out, width in)"
        return f"with convention={self.convention!r} weights are {shape}"

    def _sizes(self, index: int) -> tuple[int, int, int, int]:
        """Check the shapes of a head and return its sizes (i, j, c, e), else raise ShapeError or ConfigError.

        The sizes are i queries, j keys, the width c of queries and keys, and the width e of values.

        index  number of the head, counted from 0
        """
        counts: dict[str, tuple[int, int]] = {}
        for role in ROLES:
            source = self.heads[index].role(role)
            if isinstance(source, LinearProjection):
                if self.inputs is None:
                    raise ConfigError(f"w{role} computes {role} from the inputs, but there are none; give inputs too")
                tokens, width = self._row_shape(self.inputs)
                rows, columns = self._row_shape(source.weights)
                if rows != width:
                    raise ShapeError(
                        f"w{role} needs inputs of width {rows}, but they have width {width}; "
                        f"{self._describe_layout(f'w{role}')}"
                    )
                self._check_bias(f"b{role}", source)
                counts[role] = (tokens, columns)
            else:
                counts[role] = self._row_shape(source)
        (i, c), (j, other), (values, e) = counts["q"], counts["k"], counts["v"]
        if other != c:
            raise ShapeError(f"k has width {other}, but q has width {c}; a dot product needs the same width for both")
        if values != j:
            raise ShapeError(
                f"v has {format_count(values, 'token')}, but k has {j}; each key has one value; "
                f"{self._describe_layout('v')}"
            )
        return i, j, c, e

    def _check_bias(self, name: str, projection: LinearProjection) -> None:
        width = self._row_shape(projection.weights)[1]
        if projection.bias is not None and len(projection.bias) != width:
            raise ShapeError(f"{name} has {len(projection.bias)} numbers, but is added to vectors of width {width}")


def build_problem(
    name: str,
    matrices: Mapping[str, MatrixPerHead],
    biases: Mapping[str, BiasPerHead] | None = None,
    *,
    convention: str = "rows",
    scaled: bool = True,
    mask: Mask | None = None,
    heads: int = 1,
    tokens: tuple[str, ...] | None = None,
) -> Problem:
    """Build an attention problem from matrices by name. The arguments not listed are those of `Problem`.

    matrices  q, k and v, or inputs, wq, wk and wv, and optionally wo; each is one matrix or one per head
    biases    optional biases bq, bk, bv and bo
    heads     number of heads; above 1, a matrix that is given once is split into this number of equal parts
    """
    biases = dict(biases or {})
    heads = check_integer("heads", heads, 1, "heads")
    _check_names(matrices, biases)
    given = {key: several for key, several in matrices.items() if key not in ("inputs", "wo")}
    counts = {len(several) for several in (*given.values(), *biases.values()) if len(several) > 1}
    if len(counts) > 1:
        raise ShapeError(
            f"matrices are given for {' and '.join(map(str, sorted(counts)))} heads; give the same number for all"
        )
    count = max(counts, default=heads)
    if heads not in (1, count):
        raise ConfigError(f"heads={heads}, but matrices are given for {count} heads; leave heads out")
    by_rows = convention != "columns"
    split = {key: _split_matrix(key, several, count, by_rows) for key, several in given.items()}
    split_biases = {key: _split_bias(key, several, count) for key, several in biases.items() if key != "bo"}

    def role(letter: str, index: int) -> Matrix | LinearProjection:
        if letter in split:
            return split[letter][index]
        bias = split_biases.get(f"b{letter}")
        return LinearProjection(split[f"w{letter}"][index], bias[index] if bias else None)

    output_projection = None
    if "wo" in matrices:
        bias = biases["bo"][0] if "bo" in biases else None
        output_projection = LinearProjection(_single_matrix("wo", matrices["wo"]), bias)
    try:
        return Problem(
            name=name,
            heads=tuple(HeadMatrices(role("q", n), role("k", n), role("v", n)) for n in range(count)),
            inputs=_single_matrix("inputs", matrices["inputs"]) if "inputs" in matrices else None,
            output_projection=output_projection,
            convention=convention,  # type: ignore[arg-type]  # checked in Problem
            scaled=scaled,
            mask=full() if mask is None else mask,
            tokens=tokens,
        )
    except ShapeError as error:
        shared = [key for key, several in given.items() if len(several) < count]
        if not shared or len(shared) == len(given):
            raise
        were = "was" if len(shared) == 1 else "were"
        raise ShapeError(
            f"{error}; {' and '.join(shared)} came once and {were} split into {count} heads: give one for each head"
        ) from None


def mask_from_rows(rows: tuple[tuple[bool, ...], ...]) -> Mask:
    """Return a mask from Boolean rows, one per query; True means visible."""
    return as_mask(torch.tensor(rows, dtype=torch.bool))


def _check_names(matrices: Mapping[str, MatrixPerHead], biases: Mapping[str, object]) -> None:
    needed = "give q, k and v, or inputs, wq, wk and wv"
    if not set(matrices) & {*ROLES, "wq", "wk", "wv", "inputs"}:
        raise ConfigError(f"no matrices are given; {needed}")
    for letter in ROLES:
        direct, projected = letter in matrices, f"w{letter}" in matrices
        if direct and projected:
            raise ConfigError(f"{letter} and w{letter} are both given; give {letter}, or w{letter} and inputs")
        if not direct and not projected:
            raise ConfigError(f"{f'w{letter}' if 'inputs' in matrices else letter} is missing; {needed}")
        if f"b{letter}" in biases and not projected:
            raise ConfigError(f"b{letter} is given without w{letter}")
    if "bo" in biases and "wo" not in matrices:
        raise ConfigError("bo is given without wo")
    if "inputs" in matrices and not any(f"w{letter}" in matrices for letter in ROLES):
        raise ConfigError("inputs are given, but no weights use them; give wq, wk and wv")


def _single_matrix(name: str, several: MatrixPerHead) -> Matrix:
    if len(several) != 1:
        raise ShapeError(f"{name} is given {len(several)} times, but all heads share one")
    return several[0]


def _split_matrix(name: str, several: MatrixPerHead, count: int, by_rows: bool) -> MatrixPerHead:
    if len(several) == count:
        return several
    tall = transpose(several[0]) if by_rows else several[0]  # one row per channel
    if len(tall) % count:
        near = ", ".join(str(n) for n in range(2, len(tall) + 1) if len(tall) % n == 0) or "1"
        raise ConfigError(f"{name} has width {len(tall)}, which cannot be split into {count} heads; try heads = {near}")
    share = len(tall) // count
    parts = [tall[index * share : (index + 1) * share] for index in range(count)]
    return tuple(transpose(part) if by_rows else part for part in parts)


def _split_bias(name: str, several: BiasPerHead, count: int) -> BiasPerHead:
    if len(several) == count:
        return several
    (row,) = several
    if len(row) % count:
        raise ConfigError(f"{name} has {len(row)} numbers, which cannot be split into {count} heads")
    share = len(row) // count
    return tuple(row[index * share : (index + 1) * share] for index in range(count))
