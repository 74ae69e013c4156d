"""The attention map as a picture: shades for a terminal, an inline drawing for a page, an image file."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.work.exact_numbers import floats
from regard.work.solution import Solution

IMAGES = (".png", ".svg", ".pdf")
_SHADES = " ░▒▓█"
_CELL = 48  # of the drawing, in pixels
_INK = (33, 82, 139)


@dataclass(frozen=True)
class Map:
    """The weights of one head as they stand in the solution, with the names of their rows and columns."""

    title: str
    weights: tuple[tuple[float, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    down: str  # what a row is: query, or key where tokens are columns
    across: str


def maps(solution: Solution) -> list[Map]:
    """The map of every head."""
    problem = solution.problem
    found = []
    for number in range(len(problem.heads)):
        title = f"Head {number + 1}" if len(problem.heads) > 1 else "Attention map"
        weights = tuple(map(tuple, floats(solution.step("weights", number + 1).values)))
        names, words = (problem.query_labels, problem.labels), ("query", "key")
        if not problem.by_rows:
            names, words = names[::-1], words[::-1]
        found.append(Map(title, weights, names[0], names[1], words[0], words[1]))
    return found


def shades(drawn: Map) -> str:
    """For a terminal: a shade for each weight, with the weight beside it."""
    width = max(9, *(len(name) + 2 for name in drawn.columns))
    edge = max(len(name) for name in (*drawn.rows, drawn.down))
    lines = [f"{drawn.down.rjust(edge)} \\ {drawn.across}"]
    lines.append(" " * (edge + 1) + "".join(name.center(width) for name in drawn.columns))
    for name, row in zip(drawn.rows, drawn.weights, strict=True):
        cells = "".join(f"{shade(weight) * 2} {weight:.2f}".center(width) for weight in row)
        lines.append(f"{name.rjust(edge)} {cells}")
    return "\n".join(line.rstrip() for line in lines)


def shade(weight: float) -> str:
    """One of five, from nothing to everything; only an exact 1 or what rounds to it is solid."""
    return _SHADES[min(4, max(0, int(weight * 4 + 0.5)))]


def svg(drawn: Map) -> str:
    """An inline drawing with each weight written in its cell and told in words to whoever cannot see it."""
    left = 14 + 9 * max(len(name) for name in (*drawn.rows, drawn.down))
    top = 44
    width, height = left + _CELL * len(drawn.columns) + 4, top + _CELL * len(drawn.rows) + 4
    spoken = f"{drawn.title}: rows are {_many(drawn.down)}, columns are {_many(drawn.across)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{html.escape(spoken)}</title>',
        f'<text x="{left - 8}" y="{top - 10}" text-anchor="end">{drawn.down}</text>',
        f'<text x="{left}" y="14">{drawn.across}</text>',
    ]
    for c, name in enumerate(drawn.columns):
        parts.append(_label(left + (c + 0.5) * _CELL, top - 10, "middle", name))
    for r, (name, row) in enumerate(zip(drawn.rows, drawn.weights, strict=True)):
        y = top + r * _CELL
        parts.append(_label(left - 8, y + _CELL * 0.6, "end", name))
        for c, weight in enumerate(row):
            x = left + c * _CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour(weight)}" stroke="#999"/>'
                f'<text x="{x + _CELL / 2:g}" y="{y + _CELL * 0.6:g}" text-anchor="middle" '
                f'fill="{"#fff" if weight > 0.5 else "#000"}">{weight:.2f}</text>'
            )
    return "".join([*parts, "</svg>"])


def colour(weight: float) -> str:
    """White for nothing, dark blue for everything."""
    share = min(1.0, max(0.0, weight))
    return "#" + "".join(f"{round(255 + (ink - 255) * share):02x}" for ink in _INK)


def draw(drawn: Map, ax: Any) -> None:
    """The map on a matplotlib axis."""
    ax.imshow(drawn.weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks(range(len(drawn.columns)), drawn.columns, parse_math=False)
    ax.set_yticks(range(len(drawn.rows)), drawn.rows, parse_math=False)
    ax.set_xlabel(drawn.across)
    ax.set_ylabel(drawn.down)
    ax.set_title(drawn.title, parse_math=False)
    for r, row in enumerate(drawn.weights):
        for c, weight in enumerate(row):
            ax.text(c, r, f"{weight:.2f}", ha="center", va="center", color="white" if weight > 0.5 else "black")


def save(drawn: Sequence[Map], path: Path) -> None:
    """Write all maps as one image: .png, .svg or .pdf."""
    from matplotlib.figure import Figure

    if path.suffix.lower() not in IMAGES:
        raise ConfigError(f"cannot save {path}: end it in {', '.join(IMAGES)}")
    rows, columns = len(drawn[0].rows), len(drawn[0].columns)
    figure = Figure(figsize=(len(drawn) * (1.5 + 0.7 * columns), 1.5 + 0.7 * rows), layout="constrained")
    for ax, each in zip(figure.subplots(1, len(drawn), squeeze=False).flat, drawn, strict=True):
        draw(each, ax)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot save {path}: {error}") from None


def _many(word: str) -> str:
    return {"query": "queries", "key": "keys"}[word]


def _label(x: float, y: float, anchor: str, name: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(name)}</text>'
