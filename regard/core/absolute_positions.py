"""Absolute positions of queries and keys, and grids of query-key pairs."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, DtypeError, ShapeError


@dataclass(frozen=True)
class Positions:
    """The absolute positions of the queries and keys of one attention call. Queries have consecutive positions.

    `cache.extend` returns a `Positions`. By default, `attend` assumes that the keys are at 0, 1, 2 ... and that the
    queries are at the last of these positions.

    queries  position of the first query
    keys     position of the first key, if keys are consecutive, or a tensor with the position of every key
    offsets  one integer per sequence, which is added to the positions of its queries. With offsets, right-padded
             sequences of different lengths can be decoded in one batch without a dense mask

    In the examples, q and k have five positions each. The queries are at positions 5 to 9, then at 3 to 7.

    >>> attend(q, k, v, mask=causal(), positions=Positions(queries=5)).shape
    torch.Size([1, 4, 5, 8])
    >>> attend(q, k, v, mask=causal(), positions=Positions(queries=0, offsets=torch.tensor([3]))).shape
    torch.Size([1, 4, 5, 8])
    """

    queries: int
    keys: int | Int[Tensor, "j"] = 0
    offsets: Int[Tensor, "b"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.queries, bool) or not isinstance(self.queries, int | torch.SymInt):
            raise ConfigError(
                f"Positions.queries takes the first query's position, a whole number, not {self.queries!r}"
            )
        keys, offsets = self.keys, self.offsets
        for name, given_tensor in (("keys", keys), ("offsets", offsets)):
            if isinstance(given_tensor, Tensor) and given_tensor.layout != torch.strided:
                raise DtypeError(f"Positions.{name} is {given_tensor.layout}; call .to_dense() first")
        if offsets is not None and not (isinstance(offsets, Tensor) and offsets.ndim == 1 and _is_integer(offsets)):
            given = f"{offsets.dtype} of shape {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else repr(offsets)
            raise ConfigError(f"Positions.offsets takes a row of whole numbers, one for each sequence, not {given}")
        if isinstance(keys, Tensor):
            if not _is_integer(keys) or keys.ndim != 1:
                raise ConfigError(
                    f"Positions.keys is {keys.dtype} of shape {tuple(keys.shape)}, but takes the first key's position, "
                    "a whole number, or a row of whole numbers, one for each key"
                )
        elif isinstance(keys, bool) or not isinstance(keys, int | torch.SymInt):
            raise ConfigError(
                f"Positions.keys takes the first key's position, or a tensor with one position for each key, "
                f"not {keys!r}"
            )

    @classmethod
    def last_rows(cls, i: int, j: int) -> "Positions":
        """Return the default positions of i queries and j keys: keys at 0 .. j - 1, queries at j - i .. j - 1."""
        return cls(j - i)

    @property
    def consecutive(self) -> bool:
        """Whether the keys have consecutive positions and all sequences have the same positions."""
        return isinstance(self.keys, int) and self.offsets is None

    def query_positions(self, row: Int[Tensor, "i 1"]) -> Int[Tensor, "*b i 1"]:
        """Return the positions of the queries whose indices in q are `row`.

        The shape is (i, 1), or (b, 1, i, 1) if there are offsets.
        """
        at = row + self.queries
        return at if self.offsets is None else at + self.offsets.to(row.device)[:, None, None, None]

    def square(self, i: int, j: int) -> bool:
        """Return whether i equals j and, for every index r, query r and key r have the same position.

        False if `keys` is a tensor, or if there are offsets.
        """
        if not self.consecutive or i != j:
            return False
        # a branch, so that the compiler guards on it: a symbolic boolean could not be returned
        return True if self.keys == self.queries else False  # noqa: SIM210


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_positions(positions: Positions | None, i: int, j: int, b: int | None = None) -> Positions:
    """Return `positions`, or the default if it is None. Raises ShapeError if it does not fit the sizes of a call.

    positions  None means the default: keys at 0 .. j - 1, queries at j - i .. j - 1
    i, j       numbers of queries and of keys
    b          number of sequences; None skips the check of this number
    """
    if positions is None:
        return Positions.last_rows(i, j)
    if not isinstance(positions, Positions):
        raise ConfigError(
            f"positions must be regard.Positions(queries, keys), not {positions!r}; cache.extend returns them"
        )
    if isinstance(positions.keys, Tensor) and positions.keys.shape != (j,):
        raise ShapeError(
            f"positions.keys is {tuple(positions.keys.shape)}, but k has {format_axis('j', j)}; "
            "give one position per key"
        )
    if positions.offsets is not None and b not in (None, len(positions.offsets)):
        raise ShapeError(
            f"positions.offsets is {tuple(positions.offsets.shape)}, but q has {format_axis('b', b or 0)}; "
            "give one offset per sequence"
        )
    return positions


@dataclass(frozen=True)
class Grid:
    """A set of query-key pairs, as integer tensors that broadcast against each other.

    Masks and score terms are elementwise functions of a `Grid`. So one definition of a mask serves for a dense matrix,
    for some blocks of the matrix, and for a fused kernel that asks about one pair at a time. For a dense matrix, `row`
    is (i, 1) and `column` is (1, j).

    batch, head  indices of the sequence and of the head
    row, column  indices of the query in q and of the key in k
    i, j         absolute positions of the query and of the key
    whole        whether `row` covers all of q, and `column` all of k
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    i: Tensor
    j: Tensor
    whole: bool = False  # whether row and column cover all of q and k, so that a full matrix needs no indexing


def key_positions(positions: Positions, j: int, device: torch.device | None) -> Int[Tensor, "j"]:
    """Return the positions of all j keys as a tensor."""
    if isinstance(positions.keys, Tensor):
        return positions.keys.to(device) if device is not None else positions.keys
    return torch.arange(j, device=device) + positions.keys


def whole_grid(positions: Positions, b: int, h: int, i: int, j: int, device: torch.device | None = None) -> Grid:
    """Return the `Grid` of all pairs of i queries and j keys, for b sequences and h heads."""
    row = torch.arange(i, device=device)[:, None]
    column = torch.arange(j, device=device)[None, :]
    return Grid(
        batch=torch.arange(b, device=device)[:, None, None, None],
        head=torch.arange(h, device=device)[:, None, None],
        row=row,
        column=column,
        i=positions.query_positions(row),
        j=key_positions(positions, j, device)[None, :],
        whole=True,
    )
