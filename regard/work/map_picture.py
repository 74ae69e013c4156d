"""Draw attention maps: shaded text for a terminal, a table for a web page, an image file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from regard.base.html import Markup, tag
from regard.base.shading import shade
from regard.work.exact_numbers import to_floats
from regard.work.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DARK_BLUE = (33, 82, 139)


@dataclass(frozen=True)
class AttentionMap:
    """The attention weights of one head as a labelled matrix.

    rows, columns          names of the rows and columns
    row_kind, column_kind  "query" or "key"; rows are keys if tokens are columns in the problem
    """

    title: str
    weights: tuple[tuple[float, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_kind: str  # "query", or "key" if tokens are columns in the problem
    column_kind: str


def attention_maps(solution: Solution) -> list[AttentionMap]:
    """Return the attention map of every head of a worked solution."""
    problem = solution.problem
    axes = [("query", problem.query_labels), ("key", problem.labels)]
    (row_kind, rows), (column_kind, columns) = axes if problem.by_rows else axes[::-1]
    found = []
    for head in range(1, len(problem.heads) + 1):
        title = f"Head {head}" if len(problem.heads) > 1 else "Attention map"
        weights = tuple(map(tuple, to_floats(solution.step("weights", head).values)))
        found.append(AttentionMap(title, weights, rows, columns, row_kind, column_kind))
    return found


def render_text(attention_map: AttentionMap) -> str:
    """Return the attention map as text for a terminal: a shade character and a number for each weight."""
    width = max(9, *(cell_len(name) + 2 for name in attention_map.columns))
    edge = max(cell_len(name) for name in (*attention_map.rows, attention_map.row_kind))

    def center(name: str) -> str:
        """Centre a name by its width in a terminal, where Chinese and Japanese characters take two columns."""
        return name.center(width - cell_len(name) + len(name))

    lines = [f"{attention_map.row_kind.rjust(edge)} \\ {attention_map.column_kind}"]
    lines.append(" " * (edge + 1) + "".join(map(center, attention_map.columns)))
    for name, row in zip(attention_map.rows, attention_map.weights, strict=True):
        cells = "".join(f"{shade(round(weight, 2)) * 2} {weight:.2f}".center(width) for weight in row)
        lines.append(f"{' ' * (edge - cell_len(name))}{name} {cells}")
    return "\n".join(line.rstrip() for line in lines)


def render_table(attention_map: AttentionMap) -> Markup:
    """Return the attention map as an HTML table with shaded cells."""
    corner = tag("th", f"{attention_map.row_kind} \\ {attention_map.column_kind}")
    header = tag("tr", corner, *(tag("th", name) for name in attention_map.columns))
    rows = (
        tag("tr", tag("th", name), *(tag("td", f"{weight:.2f}", style=_cell_style(weight)) for weight in row))
        for name, row in zip(attention_map.rows, attention_map.weights, strict=True)
    )
    return tag("table", tag("caption", attention_map.title), header, *rows, class_="weights")


def _cell_style(weight: float) -> str:
    """Return the CSS style of a cell: from white for a weight of 0 to dark blue for 1."""
    share = min(1.0, max(0.0, weight))
    background = "".join(f"{round(255 + (dark - 255) * share):02x}" for dark in _DARK_BLUE)
    return f"background:#{background};color:{'#fff' if weight > 0.5 else '#000'}"


def _draw_map(attention_map: AttentionMap, ax: Any) -> None:
    """Draw the attention map on a matplotlib Axes."""
    ax.imshow(attention_map.weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks(range(len(attention_map.columns)), attention_map.columns, parse_math=False)
    ax.set_yticks(range(len(attention_map.rows)), attention_map.rows, parse_math=False)
    ax.set_xlabel(attention_map.column_kind)
    ax.set_ylabel(attention_map.row_kind)
    ax.set_title(attention_map.title, parse_math=False)
    for r, row in enumerate(attention_map.weights):
        for c, weight in enumerate(row):
            ax.text(c, r, f"{weight:.2f}", ha="center", va="center", color="white" if weight > 0.5 else "black")


def draw_maps(maps: Sequence[AttentionMap]) -> "Figure":
    """Draw attention maps side by side in one matplotlib figure and return it."""
    from matplotlib.figure import Figure

    rows, columns = len(maps[0].rows), len(maps[0].columns)
    figure = Figure(figsize=(len(maps) * (1.5 + 0.7 * columns), 1.5 + 0.7 * rows), layout="constrained")
    for ax, each in zip(figure.subplots(1, len(maps), squeeze=False).flat, maps, strict=True):
        _draw_map(each, ax)
    return figure
