"""Draw attention maps: shaded text for a terminal, a table for a web page, an image file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.html import Markup, tag
from regard.work.exact_numbers import to_floats
from regard.work.solution import Solution

IMAGES = (".png", ".svg", ".pdf")
_SHADES = " ░▒▓█"
_DARK_BLUE = (33, 82, 139)


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one head as the solution shows them, with the names of rows and columns."""

    title: str
    weights: tuple[tuple[float, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_kind: str  # "query", or "key" if tokens are columns
    column_kind: str


def attention_maps(solution: Solution) -> list[AttentionMap]:
    """The attention map of every head."""
    problem = solution.problem
    axes = [("query", problem.query_labels), ("key", problem.labels)]
    (row_kind, rows), (column_kind, columns) = axes if problem.by_rows else axes[::-1]
    found = []
    for head in range(1, len(problem.heads) + 1):
        title = f"Head {head}" if len(problem.heads) > 1 else "Attention map"
        weights = tuple(map(tuple, to_floats(solution.step("weights", head).values)))
        found.append(AttentionMap(title, weights, rows, columns, row_kind, column_kind))
    return found


def render_text(drawn: AttentionMap) -> str:
    """The map for a terminal: a shade for each weight and the weight itself."""
    width = max(9, *(len(name) + 2 for name in drawn.columns))
    edge = max(len(name) for name in (*drawn.rows, drawn.row_kind))
    lines = [f"{drawn.row_kind.rjust(edge)} \\ {drawn.column_kind}"]
    lines.append(" " * (edge + 1) + "".join(name.center(width) for name in drawn.columns))
    for name, row in zip(drawn.rows, drawn.weights, strict=True):
        cells = "".join(f"{shade(weight) * 2} {weight:.2f}".center(width) for weight in row)
        lines.append(f"{name.rjust(edge)} {cells}")
    return "\n".join(line.rstrip() for line in lines)


def shade(weight: float) -> str:
    """One of five shades; the darkest is a weight that rounds to 1."""
    return _SHADES[min(4, max(0, int(weight * 4 + 0.5)))]


def render_table(drawn: AttentionMap) -> Markup:
    """The map as an HTML table with shaded cells."""
    header = tag(
        "tr", tag("th", f"{drawn.row_kind} \\ {drawn.column_kind}"), *(tag("th", each) for each in drawn.columns)
    )
    rows = (
        tag("tr", tag("th", name), *(tag("td", f"{weight:.2f}", style=_cell_style(weight)) for weight in row))
        for name, row in zip(drawn.rows, drawn.weights, strict=True)
    )
    return tag("table", tag("caption", drawn.title), header, *rows, class_="weights")


def _cell_style(weight: float) -> str:
    """White for a weight of 0, dark blue for 1."""
    share = min(1.0, max(0.0, weight))
    background = "".join(f"{round(255 + (dark - 255) * share):02x}" for dark in _DARK_BLUE)
    return f"background:#{background};color:{'#fff' if weight > 0.5 else '#000'}"


def draw_map(drawn: AttentionMap, ax: Any) -> None:
    """Draw the map on a matplotlib axis."""
    ax.imshow(drawn.weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks(range(len(drawn.columns)), drawn.columns, parse_math=False)
    ax.set_yticks(range(len(drawn.rows)), drawn.rows, parse_math=False)
    ax.set_xlabel(drawn.column_kind)
    ax.set_ylabel(drawn.row_kind)
    ax.set_title(drawn.title, parse_math=False)
    for r, row in enumerate(drawn.weights):
        for c, weight in enumerate(row):
            ax.text(c, r, f"{weight:.2f}", ha="center", va="center", color="white" if weight > 0.5 else "black")


def save_maps(drawn: Sequence[AttentionMap], path: Path) -> None:
    """Write all maps as one image: .png, .svg or .pdf."""
    from matplotlib.figure import Figure

    if path.suffix.lower() not in IMAGES:
        raise ConfigError(f"cannot save {path}: end it in {', '.join(IMAGES)}")
    rows, columns = len(drawn[0].rows), len(drawn[0].columns)
    figure = Figure(figsize=(len(drawn) * (1.5 + 0.7 * columns), 1.5 + 0.7 * rows), layout="constrained")
    for ax, each in zip(figure.subplots(1, len(drawn), squeeze=False).flat, drawn, strict=True):
        draw_map(each, ax)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot save {path}: {error}") from None
