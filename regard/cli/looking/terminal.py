"""A report in a terminal: the table of heads, and maps as shades. Tokens are text to it, never markup."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.output import show

if TYPE_CHECKING:
    from regard.see.report import AttentionReport, Overlay, TokenRelevance

MOST_CELLS = 64  # a side, however wide the terminal is


def show_report(report: "AttentionReport", most: int) -> None:
    """Print the heads, the chosen map and what the answer owes."""
    from regard.see.report import escape_control_characters

    width = Console().width
    facts = [f"{name}: {escape_control_characters(value)}" for name, value in report.facts.items()]
    show(
        Text(escape_control_characters(report.title), style="bold"),
        *map(Text, facts),
        Text(),
        heads(report, most),
        Text(),
    )
    show(*chosen(report, width))
    for relevance in report.relevance:
        show(Text(), *strip(relevance, width))
    for laid in report.overlays:
        show(Text(), *grid(laid, width))
    for note in report.notes:
        show(Text(), Text(note))


def heads(report: "AttentionReport", most: int) -> Table:
    """The first heads of the table."""
    from regard.see.heads import COLUMNS

    some = report.table.heads[:most]
    caption = f"{len(some)} of {len(report.table)} heads"
    lines = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=caption)
    lines.columns[0].overflow = "fold"
    for column in lines.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for head in some:
        values = (getattr(head, name) for name in COLUMNS[1:])
        told = (
            "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values
        )
        lines.add_row(Text(head.layer), *told)
    return lines


def chosen(report: "AttentionReport", width: int) -> list[Text]:
    """The map of the chosen head with the names of its queries."""
    from regard.see.colormaps import root_scale, shades
    from regard.see.report import query_labels, shorten

    record, sides = report.seen[report.layer], report.sides[report.layer]
    labels = query_labels(record, sides)
    margin = max(map(len, labels), default=0)
    room = max(2, width - margin - 1)
    i, j = record.q.shape[2], record.k.shape[2]
    # two characters make a square; one is enough before weights have to be pooled
    wide = 1 if room // 2 < max(i, j) <= min(room, MOST_CELLS) else 2
    values = report.chosen_map(min(MOST_CELLS, room // wide))
    rows, columns = values.shape
    if rows < i:  # a cell is called by its first query
        labels = [labels[-(-row * i // rows)] for row in range(rows)]
    size = "" if (i, j) == (rows, columns) else f", {i} x {j} weights in {rows} x {columns} cells"
    drawn = shades(values, root_scale(values), wide)
    lines = [Text(f"{label:>{margin}} {line}") for label, line in zip(labels, drawn, strict=True)]
    if sides.queries is not sides.keys:
        lines.append(Text("keys: " + " ".join(shorten(label) for label in sides.keys.labels)))
    top = root_scale(values).top
    parts = " ".join(f"{shade} from {top * step * step / 25:.3f}" for step, shade in enumerate("·░▒▓█"))
    return [Text(f"{report.layer}, head {report.head}{size}", style="bold"), *lines, Text(f"{parts} to {top:.3f}")]


def strip(relevance: "TokenRelevance", width: int) -> list[Text]:
    """The tokens that weigh most, with a bar each."""
    from regard.see.report import MOST_RELEVANT, shorten

    best = relevance.values.topk(min(MOST_RELEVANT, len(relevance.values)))
    top = float(best.values[0])
    names = [shorten(relevance.words.labels[at]) for at in best.indices.tolist()]
    margin = max(map(len, names))
    room = max(8, min(40, width - margin - 18))
    return [
        Text(relevance.title, style="bold"),
        *(
            Text(f"{at:>6} {name:<{margin}} {value:.4f} {'█' * round(room * value / (top or 1))}")
            for at, name, value in zip(best.indices.tolist(), names, best.values.tolist(), strict=True)
        ),
    ]


def grid(laid: "Overlay", width: int) -> list[Text]:
    """Numbers over an image as shades."""
    from regard.see.colormaps import downsample, linear_scale, shades

    values = downsample(laid.values, max(1, min(MOST_CELLS, width // 2)))
    scale = linear_scale(values)
    title = f"{laid.title}, {scale.low:.4f} to {scale.top:.4f}"
    return [Text(title, style="bold"), *map(Text, shades(values, scale))]
