"""Compute the contents of an attention report: maps of heads, labels of positions, a chosen head and relevance.

`regard.see.report_html` renders it as an HTML page, `regard.see.report_figure` draws it with matplotlib.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from regard.base.display import show_page
from regard.base.errors import UnknownNameError
from regard.see.heads import HeadSummary, HeadTable, hidden_cells, measure_heads
from regard.see.record import Record, Seen

LARGE = 128  # largest number of rows and columns of the chosen map
SMALL = 64  # largest number of rows and columns of a small map
SMALL_TOTAL = 1 << 20  # cells of all small maps together
LABELLED = 48  # largest number of positions whose labels are shown beside a map
MOST_RELEVANT = 12  # tokens in a list
MOST_TOKENS = 256  # tokens that are coloured one by one; a longer sequence is summed to this many cells
LONGEST_LABEL = 14
ASCENDING = ("entropy", "spread")  # columns that are sorted with the smallest number first
WHITESPACE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """A sequence of tokens: a label for each position, and the token ids.

    code  name of the Python variable that holds the ids in the code snippets of the report
    """

    labels: tuple[str, ...]
    ids: Int[Tensor, "1 n"] | None = None
    code: str = "None"


class Sides(NamedTuple):
    """The tokens of the queries and of the keys of a layer, with their labels; they differ in cross-attention."""

    queries: TokenLabels
    keys: TokenLabels


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The attention map of one head, pooled to cells; a cell is hidden if the mask hides all its query-key pairs."""

    head: int
    values: Float[Tensor, "rows columns"]
    hidden: Bool[Tensor, "rows columns"]

    @property
    def top(self) -> float:
        """The largest value of a cell; 0 if the map is empty."""
        return float(self.values.nan_to_num(0.0).max()) if self.values.numel() else 0.0


@dataclass(frozen=True, eq=False)
class TokenRelevance:
    """The relevance of each token of a sequence for one output, and the Python code that computes it."""

    title: str
    words: TokenLabels
    values: Float[Tensor, "n"]
    code: str


@dataclass(frozen=True, eq=False)
class Overlay:
    """A grid of numbers to draw on top of the image, and the Python code that computes it."""

    title: str
    values: Float[Tensor, "rows columns"]
    code: str


@dataclass(frozen=True, eq=False)
class AttentionReport:
    """The contents of an attention report; `render_report` converts it to an HTML page, `draw_report` to a figure.

    prompt       the text or image file that the model was given
    setup        Python code that creates `seen`, the recorded attention calls; the other code snippets of the report
                 use its variables
    sides        the labels of queries and keys of each layer, by name of the layer
    table        statistics of the heads, in the order to show them
    layer, head  the layer and index of the chosen head, whose map is shown large
    """

    title: str
    facts: Mapping[str, str]
    prompt: str
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

    def _repr_html_(self) -> str:
        """Return the HTML page that a notebook shows."""
        from regard.see.report_html import render_report  # imports this module

        return show_page(render_report(self))

    def small_maps(self, name: str, most: int) -> list[HeadMap]:
        """Return the map of every head of a layer, pooled to at most `most` rows and columns.

        name  name of the layer
        """
        record = self.seen[name]
        return [head_map(record, head, most) for head in record.heads or range(record.q.shape[1])]

    def chosen_map(self, most: int = LARGE) -> HeadMap:
        """Return the map of the report's chosen head, pooled to at most `most` rows and columns."""
        return head_map(self.seen[self.layer], self.head, most)

    def chosen_labels(self) -> tuple[list[str] | None, list[str] | None]:
        """Return the labels of the rows and the columns of the chosen head's map.

        Returns None for both if there are too many labels to show.
        """
        record, sides = self.seen[self.layer], self.sides[self.layer]
        if max(record.q.shape[2], record.k.shape[2]) > LABELLED:
            return None, None
        return query_labels(record, sides), [shorten(label) for label in sides.keys.labels]

    @property
    def small_cells(self) -> int:
        """The maximum number of rows, and of columns, of a small map; the number is smaller if there are many heads."""
        return max(8, min(SMALL, int((SMALL_TOTAL / max(len(self.table), 1)) ** 0.5)))


def build_labelled_table(seen: Seen, sides: Mapping[str, Sides]) -> HeadTable:
    """Compute the statistics of all heads of all recorded layers.

    Induction scores are included for layers whose queries and keys are the same tokens.
    """
    return HeadTable(tuple(head for name in seen for head in measure_heads(seen[name], _own_tokens(sides[name]).ids)))


def table_code(seen: Seen, sides: Mapping[str, Sides]) -> str:
    """Return Python code, as text for the report, that computes the table of heads."""
    names = {_own_tokens(sides[name]).code for name in seen}
    if len(names) == 1:
        (one,) = names
        return f"table = seen.table({'' if one == 'None' else one})"
    pairs = "".join(f"    ({name!r}, {_own_tokens(sides[name]).code}),\n" for name in seen)
    return (
        "from regard.see.heads import HeadTable, measure_heads\n\n"
        f"layers = [\n{pairs}]\n"
        "table = HeadTable(tuple(head for name, ids in layers for head in measure_heads(seen[name], ids)))"
    )


def _own_tokens(sides: Sides) -> TokenLabels:
    return sides.queries if sides.queries is sides.keys else TokenLabels(())


def rank_heads(table: HeadTable, column: str) -> HeadTable:
    """Sort the heads of a table by a column: smallest first for entropy and spread, largest first for others.

    column  name of the column, as in `HeadSummary`; "layer" keeps the order of the table
    """
    return table if column == "layer" else table.sorted(column, descending=column not in ASCENDING)


def rank_code(column: str) -> str:
    """Return Python code, as text for the report, that sorts the table of heads as `rank_heads` does."""
    return "table" if column == "layer" else f"table.sorted({column!r}, descending={column not in ASCENDING})"


def choose_head(seen: Seen, table: HeadTable, layer: str | None = None, head: int | None = None) -> HeadSummary:
    """Return the head with the smallest spread (entropy divided by its maximum) among the selected ones.

    layer  name or index of a layer; None allows any
    head   index of a head; None allows any
    """
    name = None if layer is None else _resolve_layer(seen, layer)
    there = [each for each in table if name is None or each.layer == name]
    if head is not None and not any(each.head == head for each in there):
        numbers = sorted({each.head for each in there})
        raise UnknownNameError(
            f"{'no layer' if name is None else name} has {'a' if name is None else 'no'} head {head}; "
            f"there are heads {numbers[0]} to {numbers[-1]}"
        )
    matches = [each for each in there if head is None or each.head == head]
    return min(matches, key=lambda each: (math.isnan(each.spread), each.spread))


def _resolve_layer(seen: Seen, layer: str) -> str:
    names = list(seen)
    if layer in seen:
        return layer
    if layer.isdecimal() and int(layer) < len(names):
        return names[int(layer)]
    raise UnknownNameError(
        f"there is no record of layer {layer!r}; give a number from 0 to {len(names) - 1} or a name: {', '.join(names)}"
    )


def head_map(record: Record, head: int, most: int) -> HeadMap:
    """Return the map of one head, averaged over sequences and pooled to at most `most` rows and columns."""
    cells, at = map_cells(record, most), _head_index(record, head)
    values = record.pooled(cells)[:, at].mean(0).cpu()
    return HeadMap(head, values, hidden_cells(record, *cells)[:, at].all(0).cpu())


def head_code(record: Record, head: int, most: int) -> str:
    """Return Python code, as text for the report, that computes the same map as `head_map`."""
    return f"seen[{record.name!r}].pooled({map_cells(record, most)})[:, {_head_index(record, head)}].mean(0)"


def _head_index(record: Record, head: int) -> int:
    return head if record.heads is None else record.heads.index(head)


def map_cells(record: Record, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a pooled map, each at most `most`.

    All cells except the last of a side have the same number of positions; different numbers would be visible as
    stripes.
    """
    down, across = (-(-size // max(1, -(-size // most))) for size in (record.q.shape[2], record.k.shape[2]))
    return down, across


def query_labels(record: Record, sides: Sides) -> list[str]:
    """Return the shortened labels of the recorded queries."""
    labels = sides.queries.labels
    rows = range(len(labels)) if record.rows_kept is None else record.rows_kept
    return [shorten(labels[row]) for row in rows]


def escape_control_characters(text: str) -> str:
    """Replace control characters by escape sequences, so that a terminal does not execute them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shorten(label: str) -> str:
    """Shorten a token label for the axis of a map, and replace whitespace by visible characters."""
    shown = escape_control_characters("".join(WHITESPACE.get(letter, letter) for letter in label))
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def relevance_cells(relevance: TokenRelevance, most: int = MOST_TOKENS) -> tuple[list[str], Float[Tensor, "cells"]]:
    """Return the labels and relevance of the tokens to draw, as at most `most` cells.

    If there are more tokens, neighbouring tokens are grouped into a cell and their relevance is summed.
    """
    labels, values = relevance.words.labels, relevance.values.cpu()
    n = len(values)
    if n <= most:
        return [shorten(label) for label in labels], values
    cell = torch.arange(n) * most // n
    sums = torch.zeros(most, dtype=values.dtype).index_add_(0, cell, values)
    starts = [int((cell == number).nonzero()[0]) for number in range(most)]
    stops = [*starts[1:], n]
    return [f"{start}-{stop - 1}" for start, stop in zip(starts, stops, strict=True)], sums
