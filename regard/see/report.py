"""What was seen of a model, made ready to be told: names of positions, heads in order, a chosen one, relevance.

`regard.see.report_html` tells it as HTML, `regard.see.report_figure` as one PNG.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.base.errors import UnknownNameError
from regard.see.heads import Head, HeadTable, measure_heads
from regard.see.record import Record, Seen

LARGE = 128  # cells a side of the chosen map at most
SMALL = 64  # and of the small ones
SMALL_TOTAL = 1 << 20  # cells of all small maps together
LABELLED = 48  # positions that still have room for their names
MOST_RELEVANT = 12  # tokens in a list
STRIP = 256  # tokens that are coloured one by one; more are summed in as many cells
LONGEST_LABEL = 14
ASCENDING = ("entropy", "spread")  # the sharpest head first; other columns have their largest first
HIDDEN = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """The positions of a sequence: what each is called, the model's numbers for them, and their name in code."""

    labels: tuple[str, ...]
    ids: Int[Tensor, "1 n"] | None = None
    code: str = "None"


class Sides(NamedTuple):
    """Whose positions the queries of a layer are, and whose its keys."""

    queries: TokenLabels
    keys: TokenLabels


@dataclass(frozen=True, eq=False)
class TokenRelevance:
    """What one output owes to each position of a sequence."""

    title: str
    words: TokenLabels
    values: Float[Tensor, "n"]
    code: str


@dataclass(frozen=True, eq=False)
class Overlay:
    """Numbers on a grid that covers the image."""

    title: str
    values: Float[Tensor, "rows columns"]
    code: str


@dataclass(frozen=True, eq=False)
class AttentionReport:
    """All that a page or a figure tells. `page(report)` and `save_figure(report, path)` make those.

    setup  Python that makes `seen`; all other code goes on from there
    sides  the names of positions, for each layer
    table  heads in the order in which they are to be told
    """

    title: str
    facts: Mapping[str, str]
    asked: str
    setup: str
    seen: Seen
    sides: Mapping[str, Sides]
    table: HeadTable
    table_code: str
    layer: str
    head: int
    relevance: tuple[TokenRelevance, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    image: UInt8[Tensor, "y x channels"] | None = None
    notes: tuple[str, ...] = ()

    def small_maps(self, name: str, most: int) -> list[Float[Tensor, "rows columns"]]:
        """The map of every head of a layer, pooled to at most so many cells a side."""
        record = self.seen[name]
        return list(record.pooled(cells_of(record, most)).mean(0).cpu())

    def chosen_map(self, most: int = LARGE) -> Float[Tensor, "rows columns"]:
        """The map of the chosen head."""
        return head_map(self.seen[self.layer], self.head, most)

    def chosen_labels(self) -> tuple[list[str] | None, list[str] | None]:
        """Names for the rows and the columns of that map; None where there are too many."""
        record, sides = self.seen[self.layer], self.sides[self.layer]
        if max(record.q.shape[2], record.k.shape[2]) > LABELLED:
            return None, None
        return query_labels(record, sides), [shorten(label) for label in sides.keys.labels]

    @property
    def small_cells(self) -> int:
        """Cells a side of the small maps: fewer where there are many heads, so that a page stays small."""
        return max(8, min(SMALL, int((SMALL_TOTAL / max(len(self.table), 1)) ** 0.5)))


def build_labelled_table(seen: Seen, sides: Mapping[str, Sides]) -> HeadTable:
    """Every head; induction where queries and keys are the same tokens."""
    return HeadTable(tuple(head for name in seen for head in measure_heads(seen[name], _own(sides[name]).ids)))


def table_code(seen: Seen, sides: Mapping[str, Sides]) -> str:
    """The Python that makes this table."""
    names = {_own(sides[name]).code for name in seen}
    if len(names) == 1:
        (one,) = names
        return f"table = seen.table({'' if one == 'None' else one})"
    pairs = "".join(f"    ({name!r}, {_own(sides[name]).code}),\n" for name in seen)
    return (
        "from regard.see.heads import HeadTable, measure_heads\n\n"
        f"layers = [\n{pairs}]\n"
        "table = HeadTable(tuple(head for name, ids in layers for head in measure_heads(seen[name], ids)))"
    )


def _own(sides: Sides) -> TokenLabels:
    return sides.queries if sides.queries is sides.keys else TokenLabels(())


def rank_heads(table: HeadTable, column: str) -> HeadTable:
    """Heads by a column, the most telling first: the sharpest, the farthest, the heaviest. `layer` is as they ran."""
    return table if column == "layer" else table.sorted(column, descending=column not in ASCENDING)


def rank_code(column: str) -> str:
    return "table" if column == "layer" else f"table.sorted({column!r}, descending={column not in ASCENDING})"


def choose_head(seen: Seen, table: HeadTable, layer: str | None = None, head: int | None = None) -> Head:
    """The head that was asked for, by the layer's name or number and its own number; the sharpest of those left open.

    The sharpest has the smallest share of the entropy that it could have; NaN is no share.
    """
    name = None if layer is None else _layer(seen, layer)
    there = [each for each in table if name is None or each.layer == name]
    if head is not None and not any(each.head == head for each in there):
        numbers = sorted({each.head for each in there})
        raise UnknownNameError(
            f"{'no layer' if name is None else name} has {'a' if name is None else 'no'} head {head}; "
            f"there are heads {numbers[0]} to {numbers[-1]}"
        )
    left = [each for each in there if head is None or each.head == head]
    return min(left, key=lambda each: (math.isnan(each.spread), each.spread))


def _layer(seen: Seen, layer: str) -> str:
    names = list(seen)
    if layer in seen:
        return layer
    if layer.isdecimal() and int(layer) < len(names):
        return names[int(layer)]
    raise UnknownNameError(
        f"no layer {layer!r} was seen; take a number from 0 to {len(names) - 1} or a name: {', '.join(names)}"
    )


def head_map(record: Record, head: int, most: int) -> Float[Tensor, "rows columns"]:
    """The map of one head, pooled to at most so many cells a side; the mean over sequences where there are several."""
    return record.pooled(cells_of(record, most))[:, _at(record, head)].mean(0).cpu()


def head_code(record: Record, head: int, most: int) -> str:
    """The Python that makes this map."""
    return f"seen[{record.name!r}].pooled({cells_of(record, most)})[:, {_at(record, head)}].mean(0)"


def _at(record: Record, head: int) -> int:
    return head if record.heads is None else record.heads.index(head)


def cells_of(record: Record, most: int) -> tuple[int, int]:
    """Rows and columns of a map with at most so many a side: each cell has as many positions, but for the odd one out,
    because a cell of two beside a cell of one would look like a stripe."""
    down, across = (-(-size // max(1, -(-size // most))) for size in (record.q.shape[2], record.k.shape[2]))
    return down, across


def query_labels(record: Record, sides: Sides) -> list[str]:
    """The names of the queries that were kept."""
    labels = sides.queries.labels
    rows = range(len(labels)) if record.rows_kept is None else record.rows_kept
    return [shorten(labels[row]) for row in rows]


def escape_control_characters(text: str) -> str:
    """The text with control characters spelled out, so that none can act."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shorten(label: str) -> str:
    """A name short enough for a margin, with its blanks to be seen."""
    shown = escape_control_characters("".join(HIDDEN.get(letter, letter) for letter in label))
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def relevance_cells(relevance: TokenRelevance, most: int = STRIP) -> tuple[list[str], Float[Tensor, "cells"]]:
    """Names and numbers of a relevance; where there are too many positions, the sums of neighbours."""
    labels, values = relevance.words.labels, relevance.values.cpu()
    n = len(values)
    if n <= most:
        return [shorten(label) for label in labels], values
    cell = torch.arange(n) * most // n
    sums = torch.zeros(most, dtype=values.dtype).index_add_(0, cell, values)
    starts = [int((cell == number).nonzero()[0]) for number in range(most)]
    stops = [*starts[1:], n]
    return [f"{start}-{stop - 1}" for start, stop in zip(starts, stops, strict=True)], sums
