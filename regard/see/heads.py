"""The heads of a model side by side: how spread, how far, and whether they look at the token before, the first token
or what followed the same token earlier. Every number comes from single pairs and row sums, never from a matrix."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import key_positions
from regard.core.input_checks import disable_autocast
from regard.core.kernels.request import STEEP_BETA
from regard.see.record import Record, pair_grid

if TYPE_CHECKING:
    from regard.see.record import Seen


@dataclass(frozen=True)
class Head:
    """One head, on average over sequences and queries. None where the number does not apply.

    entropy    of its rows, in nats
    spread     the entropy as a share of the largest possible, the log of the keys that a row can see
    distance   the mean of |i - j|; None, as the next three, where it is not known where the queries stand
    previous   the weight that a query gives to the position before its own
    first      the weight that a query gives to the first position, the query there left out: a sink of attention
    induction  the weight that a token gives to the token after its own latest earlier occurrence
    """

    layer: str
    head: int
    entropy: float
    spread: float
    distance: float | None
    previous: float | None
    first: float | None
    induction: float | None


COLUMNS = tuple(column.name for column in fields(Head))


@dataclass(frozen=True)
class HeadTable:
    """Heads in rows, printed as text, ranked by any column."""

    heads: tuple[Head, ...]

    def sorted(self, column: str, descending: bool = True) -> "HeadTable":
        """The same rows in the order of one column: NaN first, so that it is seen, those without a number last."""
        check_column(column)
        told = [head for head in self.heads if getattr(head, column) is not None]
        silent = [head for head in self.heads if getattr(head, column) is None]
        broken = [head for head in told if _is_nan(getattr(head, column))]
        whole = [head for head in told if not _is_nan(getattr(head, column))]
        ordered = sorted(whole, key=lambda head: getattr(head, column), reverse=descending)
        return HeadTable((*broken, *ordered, *silent))

    @property
    def broken(self) -> tuple[Head, ...]:
        """The heads whose scores are NaN or inf in some row."""
        return tuple(head for head in self.heads if math.isnan(head.entropy))

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, at: int) -> Head:
        return self.heads[at]

    def __str__(self) -> str:
        rows = [COLUMNS, *(tuple(_shown(getattr(head, column)) for column in COLUMNS) for head in self.heads)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
        lines = []
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def build_head_table(seen: "Seen", tokens: Int[Tensor, "b n"] | None = None) -> HeadTable:
    """Every head of every call that was recorded."""
    return HeadTable(tuple(head for record in seen.records for head in measure_heads(record, tokens)))


def check_column(column: str) -> None:
    """Refuse a name that no column has."""
    if column not in COLUMNS:
        raise ConfigError(f"there is no column {column!r} to sort by; take one of {', '.join(COLUMNS)}")


def measure_heads(record: Record, tokens: Int[Tensor, "b n"] | None = None) -> list[Head]:
    """Every head of one call."""
    awake = record.lse != -math.inf  # NaN counts, so that a mean over it is NaN
    previous = first = follows = distance = None
    if (far := record.distance) is not None:
        distance = masked_mean(far, awake)
        previous, first = previous_token(record), first_token(record)
        follows = None if tokens is None else induction(record, tokens)
    numbers = record.heads or tuple(range(record.q.shape[1]))
    columns = [masked_mean(value, awake) for value in (record.entropy, spread(record))]
    return [
        Head(record.name, number, *(float(column[at]) for column in columns), *(
            None if column is None else float(column[at]) for column in (distance, previous, first, follows)
        ))
        for at, number in enumerate(numbers)
    ]  # fmt: skip


def masked_mean(values: Float[Tensor, "b h r"], counted: Bool[Tensor, "#b #h r"]) -> Float[Tensor, "h"]:
    """The mean over sequences and queries of those that count, 0 where none does."""
    counted = counted.expand(values.shape)
    return values.masked_fill(~counted, 0).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def spread(record: Record) -> Float[Tensor, "b h i"]:
    """The entropy of each row as a share of the largest, the log of the keys it sees. 0 where that is one key."""
    most = visible_keys(record).to(record.entropy.dtype).log().clamp(min=0)
    return torch.where(most > 0, record.entropy / most.masked_fill(most <= 0, 1), record.entropy * 0)


def visible_keys(record: Record) -> Int[Tensor, "b h i"]:
    """How many keys each row sees, counted some rows at a time."""
    b, h, i, _ = record.q.shape
    j = record.k.shape[2]
    device = record.q.device
    counts = []
    for rows in torch.arange(i, device=device).split(max(1, (1 << 22) // max(1, b * h * j))):
        seen = record.mask.see(pair_grid(record, rows))
        counts.append(seen.expand(b, h, len(rows), j).sum(-1))
    return torch.cat(counts, -1) if counts else torch.zeros(b, h, 0, dtype=torch.long, device=device)


def previous_token(record: Record) -> Float[Tensor, "h"] | None:
    """The mean weight on the key that stands one before the query; None where no query has such a key."""
    i, j = record.query_positions, key_positions(record.positions, record.k.shape[2], record.q.device)
    return _at_positions(record, i - 1, j)


def first_token(record: Record) -> Float[Tensor, "h"] | None:
    """The mean weight on the first key, over the queries that do not stand there."""
    i, j = record.query_positions, key_positions(record.positions, record.k.shape[2], record.q.device)
    if not len(j):
        return None
    target = torch.where(i == j[0], j.min() - 1, j[0].expand_as(i))
    return _at_positions(record, target, j)


def _at_positions(record: Record, wanted: Int[Tensor, "i"], j: Int[Tensor, "j"]) -> Float[Tensor, "h"] | None:
    """The mean weight of each query on the key that stands at the wanted position, over those that have one."""
    order = j.argsort()
    at = torch.searchsorted(j[order], wanted).clamp(max=max(len(j) - 1, 0))
    column = order[at] if len(j) else at
    there = j[column] == wanted if len(j) else torch.zeros_like(wanted, dtype=torch.bool)
    if not bool(there.any()):
        return None
    rows = there.nonzero()[:, 0]
    found = weights_at(record, rows[None], column[rows][None])
    return masked_mean(found, (record.lse != -math.inf)[:, :, rows])


def induction(record: Record, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "h"] | None:
    """The mean weight of a repeated token on the token that followed its latest earlier occurrence.

    Olsson et al. 2022, arXiv:2209.11895. None where no token is repeated, or where keys are not these tokens.
    """
    b, n = tokens.shape
    if b != record.q.shape[0]:
        raise ShapeError(f"tokens have b={b} (batch), but {record.name} has b={record.q.shape[0]}; give one row each")
    positions = record.query_positions
    keys = key_positions(record.positions, record.k.shape[2], record.q.device)
    if not len(keys) or int(keys.max()) >= n or int(keys.min()) != 0 or len(keys) != int(keys.max()) + 1:
        return None
    if not len(positions) or int(positions.max()) >= n:
        return None
    order = keys.argsort()
    tokens = tokens.to(record.q.device)
    latest = _latest_before(tokens)[:, positions]  # (b i), -1 where the token is new
    target = latest + 1
    valid = (latest >= 0) & (target < len(keys))
    if not bool(valid.any()):
        return None
    rows = torch.arange(len(positions), device=tokens.device).expand(b, -1)
    found = weights_at(record, rows, order[target.clamp(0, len(keys) - 1)])
    return masked_mean(found, valid[:, None])


def _latest_before(tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Where each token stood the last time before, -1 where it is new: equal tokens are neighbours once sorted."""
    order = tokens.argsort(dim=1, stable=True)
    ordered = tokens.gather(1, order)
    alike = torch.zeros_like(ordered, dtype=torch.bool)
    alike[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    before = torch.where(alike, order.roll(1, 1), -1)
    return torch.empty_like(before).scatter_(1, order, before)


def weights_at(record: Record, rows: Int[Tensor, "#b p"], columns: Int[Tensor, "#b p"]) -> Float[Tensor, "b h p"]:
    """The weights of single pairs, exp(score - lse): queries and keys by their numbers in the record."""
    b, h, _, c = record.q.shape
    g = record.k.shape[1]
    if abs(record.beta) > STEEP_BETA:
        return record.weights()[
            torch.arange(b)[:, None, None], torch.arange(h)[:, None], rows[:, None], columns[:, None]
        ]
    exact = torch.promote_types(record.q.dtype, torch.float32)
    rows, columns = rows.expand(b, -1), columns.expand(b, -1)
    q = record.q.gather(2, rows[:, None, :, None].expand(b, h, -1, c)).to(exact)
    k = record.k.gather(2, columns[:, None, :, None].expand(b, g, -1, c)).to(exact)
    with torch.no_grad(), disable_autocast(q):
        scores = torch.einsum("bgrpc,bgpc->bgrp", q.unflatten(1, (g, h // g)), k).flatten(1, 2) * record.beta
        grid = pair_grid(record, rows[:, None], columns[:, None])
        for term in record.terms:
            scores = term.bind(record.q.to(exact), record.beta)(scores, grid)
        seen = record.mask.see(grid)
        lse = record.lse.gather(2, rows[:, None].expand(b, h, -1))
        return torch.where(seen & (lse != -math.inf), (scores - lse).exp(), 0.0)
