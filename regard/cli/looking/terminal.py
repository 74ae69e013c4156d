"""An attention report in a terminal: the table of heads, and maps as shade characters. Tokens are escaped."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.shading import SHADES, shade
from regard.cli.output import show

if TYPE_CHECKING:
    from torch import Tensor

    from regard.see.report import AttentionReport, Overlay, TokenRelevance

MOST_CELLS = 64  # largest side of a map, in cells


def show_report(report: "AttentionReport", most: int) -> None:
    """Print an attention report: the table of heads, the map of the chosen head and the relevance.

    most  maximum number of heads to print
    """
    from regard.see.report import escape_control_characters as escape

    width = Console().width
    facts = [f"{name}: {escape(value)}" for name, value in report.facts.items()]
    show(Text(escape(report.title), style="bold"), *map(Text, facts), Text(), heads_table(report, most), Text())
    show(*chosen_map(report, width))
    for relevance in report.relevance:
        show(Text(), *relevance_bars(relevance, width))
    for overlay in report.overlays:
        show(Text(), *overlay_shades(overlay, width))
    for note in report.notes:
        show(Text(), Text(note))


def heads_table(report: "AttentionReport", most: int) -> Table:
    """Return a table of the first `most` heads."""
    from regard.see.heads import COLUMNS, format_cell

    some = report.table.heads[:most]
    caption = f"{len(some)} of {len(report.table)} heads"
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=caption)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for head in some:
        table.add_row(Text(head.layer), *(format_cell(getattr(head, name)) for name in COLUMNS[1:]))
    return table


def chosen_map(report: "AttentionReport", width: int) -> list[Text]:
    """Draw the attention map of the chosen head as text, with the labels of its queries and a legend.

    width  width of the terminal in characters
    """
    from regard.see.report import query_labels, shorten

    record, sides = report.seen[report.layer], report.sides[report.layer]
    labels = query_labels(record, sides)
    margin = max(map(len, labels), default=0)
    room = max(2, width - margin - 1)
    i, j = record.q.shape[2], record.k.shape[2]
    # two characters make a square; one is used before weights have to be pooled
    wide = 1 if room // 2 < max(i, j) <= min(room, MOST_CELLS) else 2
    drawn = report.chosen_map(min(MOST_CELLS, room // wide))
    rows, columns = drawn.values.shape
    if rows < i:  # a cell has the label of its first query
        labels = [labels[-(-row * i // rows)] for row in range(rows)]
    size = "" if (i, j) == (rows, columns) else f", {i} x {j} weights in {rows} x {columns} cells"
    shares = (drawn.values / (drawn.top or 1.0)) ** 0.5  # a square-root scale, as in the pictures
    lines = [Text(f"{label:>{margin}} {line}") for label, line in zip(labels, shade_rows(shares, wide), strict=True)]
    if sides.queries is not sides.keys:
        lines.append(Text("keys: " + " ".join(shorten(label) for label in sides.keys.labels)))
    legend = " ".join(f"{shade} from {drawn.top * (step / 3) ** 2:.3f}" for step, shade in enumerate(SHADES[1:]))
    return [Text(f"{report.layer}, head {report.head}{size}", style="bold"), *lines, Text(legend)]


def relevance_bars(relevance: "TokenRelevance", width: int) -> list[Text]:
    """Draw the most relevant tokens as text, with a bar for each."""
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


def overlay_shades(overlay: "Overlay", width: int) -> list[Text]:
    """Draw a map over the image as shade characters. Neighbouring values are averaged to fit the terminal.

    width  width of the terminal in characters
    """
    from torch.nn.functional import adaptive_avg_pool2d

    rows, columns = (min(size, MOST_CELLS, max(1, width // 2)) for size in overlay.values.shape)
    values = adaptive_avg_pool2d(overlay.values[None], (rows, columns))[0]
    low, top = float(values.min()), float(values.max())
    title = f"{overlay.title}, {low:.4f} to {top:.4f}"
    return [Text(title, style="bold"), *map(Text, shade_rows((values - low) / ((top - low) or 1.0), 2))]


def shade_rows(shares: "Tensor", wide: int) -> list[str]:
    """Convert each row of numbers from 0 to 1 to one line of shade characters.

    wide  number of characters for each number
    """
    return ["".join(shade(share) * wide for share in row) for row in shares.tolist()]
