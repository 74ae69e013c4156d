"""A report in a terminal: the table of heads, and maps as shades. Tokens are text to it, never markup."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.output import show

if TYPE_CHECKING:
    from torch import Tensor

    from regard.see.report import Report

MOST_ROWS = 48  # cells a side, however wide the terminal is


def show_report(report: "Report", most: int) -> None:
    """Print the heads, the chosen map and what the answer owes."""
    from regard.see.report import visible

    width = Console().width
    facts = [f"{name}: {visible(value)}" for name, value in report.facts.items()]
    show(Text(report.title, style="bold"), *(Text(fact) for fact in facts), heads(report, most))
    show(*chosen(report, width))
    for relevance in report.relevance:
        show(Text(), Text(relevance.title, style="bold"), *strip_lines(relevance, width))
    for laid in report.overlays:
        show(
            Text(), Text(f"{laid.title}, 0 to {float(laid.values.max()):.4f}", style="bold"), *grid(laid.values, width)
        )
    for note in report.notes:
        show(Text(), Text(note))


def heads(report: "Report", most: int) -> Table:
    """The first heads of the table."""
    from regard.see.heads import COLUMNS

    some = report.table.heads[:most]
    lines = Table(*COLUMNS, box=box.SIMPLE_HEAD, caption=f"{len(some)} of {len(report.table)} heads")
    for column in lines.columns[1:]:
        column.justify = "right"
    for head in some:
        values = (getattr(head, name) for name in COLUMNS[1:])
        cells = (
            "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values
        )
        lines.add_row(Text(head.layer), *cells)
    return lines


def chosen(report: "Report", width: int) -> list[Text]:
    """The map of the chosen head with the names of its queries."""
    from regard.see.pictures import shades
    from regard.see.report import query_labels, shortened

    record, sides = report.seen[report.layer], report.sides[report.layer]
    labels = query_labels(record, sides)
    margin = max(map(len, labels), default=0)
    values = report.chosen_map(max(1, min(MOST_ROWS, (width - margin - 1) // 2)))
    i, j = record.q.shape[2], record.k.shape[2]
    rows = values.shape[0]
    if rows < i:  # a cell is called by its first query
        labels = [labels[-(-row * i // rows)] for row in range(rows)]
    size = "" if (i, j) == tuple(values.shape) else f", {i} x {j} weights in {rows} x {values.shape[1]} cells"
    top = f"{report.layer}, head {report.head}: 0 to {float(values.max()):.4f}{size}"
    lines = [Text(f"{label:>{margin}} {line}") for label, line in zip(labels, shades(values), strict=True)]
    if sides.queries is not sides.keys:
        lines.append(Text("keys: " + " ".join(shortened(label) for label in sides.keys.labels)))
    return [Text(top, style="bold"), *lines]


def strip_lines(relevance: "object", width: int) -> list[Text]:
    """The tokens that weigh most, with a bar each."""
    from regard.see.report import MOST_RELEVANT, Relevance, shortened

    assert isinstance(relevance, Relevance)
    best = relevance.values.topk(min(MOST_RELEVANT, len(relevance.values)))
    top = float(best.values[0])
    names = [shortened(relevance.words.labels[at]) for at in best.indices.tolist()]
    margin = max(map(len, names))
    room = max(8, min(40, width - margin - 18))
    return [
        Text(f"{at:>6} {name:<{margin}} {value:.4f} {'█' * round(room * value / (top or 1))}")
        for at, name, value in zip(best.indices.tolist(), names, best.values.tolist(), strict=True)
    ]


def grid(values: "Tensor", width: int) -> list[Text]:
    """Numbers over an image as shades."""
    from regard.see.pictures import coarser, shades

    return [Text(line) for line in shades(coarser(values, max(1, min(MOST_ROWS, width // 2))))]
