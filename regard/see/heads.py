"""A table of attention heads: entropy, distance, and mean weight on the previous, the first and the induction token.

The induction token is the token after the previous occurrence of the query's token. Every number is computed from the
weights of single query-key pairs and from statistics of each query, never from the whole matrix of weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import key_positions
from regard.core.input_checks import disable_autocast
from regard.core.kernels.request import STEEP_BETA
from regard.see.record import Record, pair_grid
from regard.see.row_blocks import see_rows

if TYPE_CHECKING:
    from regard.see.record import Seen


@dataclass(frozen=True)
class HeadSummary:
    """Statistics of one attention head, averaged over sequences and queries. A statistic that does not apply is None.

    entropy    entropy of the weights of a query, in nats
    spread     entropy divided by its maximum, the log of the number of visible keys
    distance   distance |i - j| from query position i to key position j, in positions, averaged with the weights. This
               and the next three fields are None if the positions of the queries are unknown
    previous   weight on the key one position before the query
    first      weight on the key at the first position (attention sink), without the query at this position
    induction  weight on the token after the previous occurrence of the query's token
    """

    layer: str
    head: int
    entropy: float
    spread: float
    distance: float | None
    previous: float | None
    first: float | None
    induction: float | None


COLUMNS = tuple(column.name for column in fields(HeadSummary))


@dataclass(frozen=True)
class HeadTable(TextDisplay):
    """A table with one row of statistics for each attention head; it can be printed and sorted."""

    heads: tuple[HeadSummary, ...]

    def sorted(self, column: str, descending: bool = True) -> "HeadTable":
        """Return the table sorted by one column, with NaN at the beginning and None at the end."""
        check_column(column)
        values = [(head, getattr(head, column)) for head in self.heads]
        missing = [head for head, value in values if value is None]
        nan = [head for head, value in values if _is_nan(value)]
        numbers = [(head, value) for head, value in values if value is not None and not _is_nan(value)]
        ordered = [head for head, _ in sorted(numbers, key=lambda pair: pair[1], reverse=descending)]
        return HeadTable((*nan, *ordered, *missing))

    @property
    def nonfinite(self) -> tuple[HeadSummary, ...]:
        """The heads whose entropy is NaN because a query has NaN or infinite scores."""
        return tuple(head for head in self.heads if math.isnan(head.entropy))

    def __iter__(self) -> Iterator[HeadSummary]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, at: int) -> HeadSummary:
        return self.heads[at]

    def __str__(self) -> str:
        rows = [COLUMNS, *(tuple(format_cell(getattr(head, column)) for column in COLUMNS) for head in self.heads)]
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


def format_cell(value: object) -> str:
    """Format a value for a table cell: None as "-", a float with three decimals."""
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def build_head_table(seen: "Seen", tokens: Int[Tensor, "b n"] | None = None) -> HeadTable:
    """Return a table of the statistics of every head of every recorded attention call.

    tokens  token ids of the input, from which the induction score is computed; if None, this score is None
    """
    return HeadTable(tuple(head for record in seen.records for head in measure_heads(record, tokens)))


def check_column(column: str) -> None:
    """Check that the head table has a column of this name, else raise ConfigError."""
    if column not in COLUMNS:
        raise ConfigError(f"there is no column {column!r} to sort by; choose from {', '.join(COLUMNS)}")


def measure_heads(record: Record, tokens: Int[Tensor, "b n"] | None = None) -> list[HeadSummary]:
    """Compute the statistics of every head of one recorded attention call.

    tokens  token ids of the input, from which the induction score is computed; if None, this score is None
    """
    nonempty = record.lse != -math.inf  # True for NaN, so that its mean is NaN
    previous = first = after_repeat = distance = None
    if (distances := record.distance) is not None:
        distance = masked_mean(distances, nonempty)
        previous, first = previous_token(record), first_token(record)
        after_repeat = None if tokens is None else induction(record, tokens)
    numbers = record.heads or tuple(range(record.q.shape[1]))
    columns = [masked_mean(value, nonempty) for value in (record.entropy, spread(record))]
    return [
        HeadSummary(record.name, number, *(float(column[at]) for column in columns), *(
            None if column is None else float(column[at]) for column in (distance, previous, first, after_repeat)
        ))
        for at, number in enumerate(numbers)
    ]  # fmt: skip


def masked_mean(values: Float[Tensor, "b h r"], counted: Bool[Tensor, "#b #h r"]) -> Float[Tensor, "h"]:
    """Return the mean of each head over the sequences and queries where `counted` is True; 0 if there are none."""
    counted = counted.expand(values.shape)
    return values.masked_fill(~counted, 0).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def spread(record: Record) -> Float[Tensor, "b h i"]:
    """Return the entropy of the weights of each query, divided by its maximum: the log of the number of visible keys.

    The spread is 0 for a query that sees one key or none.
    """
    most = count_visible_keys(record).to(record.entropy.dtype).log().clamp(min=0)
    return torch.where(most > 0, record.entropy / most.masked_fill(most <= 0, 1), record.entropy * 0)


def count_visible_keys(record: Record) -> Int[Tensor, "b h i"]:
    """Return the number of visible keys of each query."""
    b, h, i, _ = record.q.shape
    counts = [seen.sum(-1).expand(b, h, -1) for _, seen in iterate_visible(record)]
    return torch.cat(counts, -1) if counts else torch.zeros(b, h, i, dtype=torch.long, device=record.q.device)


def hidden_cells(record: Record, rows: int, columns: int) -> Bool[Tensor, "b h rows columns"]:
    """Return which cells of the pooled map `record.pooled((rows, columns))` contain only hidden query-key pairs."""
    (b, h, i, _), j = record.q.shape, record.k.shape[2]
    counts = torch.zeros(b, h, rows, columns, device=record.q.device)
    row_cell, key_cell = (
        torch.arange(n, device=counts.device) * cells // max(n, 1) for n, cells in ((i, rows), (j, columns))
    )
    inside = torch.nn.functional.one_hot(key_cell, columns).float()
    for some, seen in iterate_visible(record):
        counts.index_add_(2, row_cell[some], (seen.float() @ inside).expand(b, h, -1, -1))
    return counts == 0


def iterate_visible(record: Record) -> Iterator[tuple[Int[Tensor, "r"], Bool[Tensor, "#b #h r j"]]]:
    """Yield chunks of query indices, each with a Boolean tensor of the keys that these queries see."""
    (_, _, i, _), j = record.q.shape, record.k.shape[2]
    for rows in torch.arange(i, device=record.q.device).split(max(1, (1 << 20) // max(1, j))):
        yield rows, see_rows(record.mask, pair_grid(record, rows))


def previous_token(record: Record) -> Float[Tensor, "h"] | None:
    """Return the mean weight of each head on the key one position before the query; None if there is no such key."""
    i, j = record.query_positions, key_positions(record.positions, record.k.shape[2], record.q.device)
    return _mean_weight_at(record, i - 1, j)


def first_token(record: Record) -> Float[Tensor, "h"] | None:
    """Return the mean weight of each head on the first key, over all queries except the one at its position.

    Returns None if there is no key, or no query at another position.
    """
    i, j = record.query_positions, key_positions(record.positions, record.k.shape[2], record.q.device)
    if not len(j):
        return None
    target = torch.where(i == j[0], j.min() - 1, j[0].expand_as(i))
    return _mean_weight_at(record, target, j)


def _mean_weight_at(record: Record, wanted: Int[Tensor, "i"], j: Int[Tensor, "j"]) -> Float[Tensor, "h"] | None:
    """Return the mean weight of each head on one wanted key per query; None if no query has a wanted key.

    wanted  for each query, the position of the wanted key; a query without a key at this position is not counted
    j       positions of the keys
    """
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
    """Return the induction score: the mean weight from a repeated token on the token after its previous occurrence.

    Olsson et al. 2022, arXiv:2209.11895. This score can be computed for any text and counts only the previous
    occurrence of a token. In contrast, `induction_scores` in see/interventions/head_importance.py needs repeated random
    tokens and sums the weights over all earlier copies. Returns None if no token is repeated, or if the keys do not
    correspond to `tokens`.
    """
    b, n = tokens.shape
    if b != record.q.shape[0]:
        raise ShapeError(f"tokens have b={b} (batch), but {record.name} has b={record.q.shape[0]}; pass tokens of each")
    positions = record.query_positions
    keys = key_positions(record.positions, record.k.shape[2], record.q.device)
    if not len(keys) or int(keys.max()) >= n or int(keys.min()) != 0 or len(keys) != int(keys.max()) + 1:
        return None
    if not len(positions) or int(positions.max()) >= n:
        return None
    order = keys.argsort()
    tokens = tokens.to(record.q.device)
    previous = _previous_occurrence(tokens)[:, positions]  # (b i), -1 where the token is new
    target = previous + 1
    valid = (previous >= 0) & (target < len(keys))
    if not bool(valid.any()):
        return None
    rows = torch.arange(len(positions), device=tokens.device).expand(b, -1)
    found = weights_at(record, rows, order[target.clamp(0, len(keys) - 1)])
    return masked_mean(found, valid[:, None])


def _previous_occurrence(tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return the index of the previous occurrence of each token in its sequence; -1 if there is none."""
    order = tokens.argsort(dim=1, stable=True)
    ordered = tokens.gather(1, order)
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    before = torch.where(repeats, order.roll(1, 1), -1)
    return torch.empty_like(before).scatter_(1, order, before)


def weights_at(record: Record, rows: Int[Tensor, "#b p"], columns: Int[Tensor, "#b p"]) -> Float[Tensor, "b h p"]:
    """Return the attention weights of single query-key pairs, exp(score - lse).

    lse is the log-sum-exp of the scores of the query.

    rows     query indices of the pairs
    columns  key indices of the pairs
    """
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
