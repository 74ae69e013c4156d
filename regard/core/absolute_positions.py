"""Absolute positions of queries and keys, and grids of query-key pairs."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Positions:
    """Absolute positions of a call: that of the first query, and that of the first key or of every key.

    `cache.extend` returns them. By default keys start at 0 and the queries are the last rows.

    >>> attend(q, k, v, mask=causal(), positions=Positions(queries=5)).shape
    torch.Size([1, 4, 5, 8])
    """

    queries: int
    keys: int | Int[Tensor, "j"] = 0

    def __post_init__(self) -> None:
        if isinstance(self.queries, bool) or not isinstance(self.queries, int | torch.SymInt):
            raise ConfigError(
                f"Positions.queries takes the first query's position, a whole number, not {self.queries!r}"
            )
        keys = self.keys
        if isinstance(keys, Tensor):
            if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool or keys.ndim != 1:
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
        return cls(j - i)

    def square(self, i: int, j: int) -> bool:
        """Whether query r and key r have the same position, for every r."""
        if not isinstance(self.keys, int) or i != j:
            return False
        # a branch, so that the compiler guards on it: a symbolic boolean could not be returned
        return True if self.keys == self.queries else False  # noqa: SIM210


def check_positions(positions: Positions | None, i: int, j: int) -> Positions:
    """The positions of i queries and j keys; by default the queries are the last rows."""
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
    return positions


@dataclass(frozen=True)
class Grid:
    """Query-key pairs as integer tensors that broadcast against each other.

    `row` and `column` index q and k; `i` and `j` are the positions of that query and key. So one elementwise definition
    of a mask or a score term serves the dense matrix (row (i, 1), column (1, j)), gathered blocks and the single pairs
    of a fused kernel. `batch` and `head` index values that differ between sequences and heads.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    i: Tensor
    j: Tensor
    whole: bool = False  # whether row and column cover all of q and k, so that a full matrix needs no indexing


def key_positions(positions: Positions, j: int, device: torch.device | None) -> Int[Tensor, "j"]:
    """The position of every key."""
    if isinstance(positions.keys, Tensor):
        return positions.keys.to(device) if device is not None else positions.keys
    return torch.arange(j, device=device) + positions.keys


def whole_grid(positions: Positions, b: int, h: int, i: int, j: int, device: torch.device | None = None) -> Grid:
    """Every pair of i queries and j keys."""
    row = torch.arange(i, device=device)[:, None]
    column = torch.arange(j, device=device)[None, :]
    return Grid(
        batch=torch.arange(b, device=device)[:, None, None, None],
        head=torch.arange(h, device=device)[:, None, None],
        row=row,
        column=column,
        i=row + positions.queries,
        j=key_positions(positions, j, device)[None, :],
        whole=True,
    )
