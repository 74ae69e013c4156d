"""What figures of the lab share: colours that everyone can tell apart, sizes that print well."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind eyes and in grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")


def make_figure(
    columns: int = 1, rows: int = 1, *, width: float = 4.2, height: float = 3.2
) -> "tuple[Figure, list[Axes]]":
    """A figure and its axes in reading order. No window and no global state, so that any thread may draw."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return made, list(axes.flat)


def plot_lines(
    axes: "Axes",
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    over: bool = False,
    legend: bool = True,
    **options: Any,
) -> None:
    """Curves by name, each with its colour and mark.

    over    where curves lie on one another: each has its own dashes, and every other one large open marks
    legend  whether the axes get one; a figure may have it beside them
    """
    for number, (name, y) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": COLOURS[number % 7], "marker": MARKS[number % 7], "markersize": 4}
        if over:
            look["linestyle"] = DASHES[number % 4]
            look |= {"markersize": 8, "markerfacecolor": "none"} if number % 2 == 0 else {}
        axes.plot(x, y, label=name, **look, **options)
    if len(curves) > 1 and legend:
        axes.legend(frameon=False)


def plot_bars(axes: "Axes", values: Mapping[str, float], *, colour: str = COLOURS[0]) -> None:
    """One bar a name, with its number above."""
    drawn = axes.bar(list(values), list(values.values()), color=colour)
    axes.bar_label(drawn, fmt="%.3g")
    axes.margins(y=0.1)


def plot_shares(
    axes: "Axes", values: Mapping[str, float], halves: Sequence[float], *, colours: str | Sequence[str] = COLOURS[0]
) -> None:
    """Shares as bars, with intervals that end where shares do, at 0 and 1, and the number above them."""
    heights = list(values.values())
    below = [min(half, height) for half, height in zip(halves, heights, strict=True)]
    above = [min(half, 1 - height) for half, height in zip(halves, heights, strict=True)]
    drawn = axes.bar(list(values), heights, yerr=[below, above], color=colours, capsize=4)
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.set_ylim(0, 1.2)


def plot_heatmap(
    axes: "Axes", matrix: Sequence[Sequence[float]], *, low: float = 0.0, high: float | None = None
) -> None:
    """A matrix in shades that grow evenly, also in grey."""
    picture = axes.imshow(matrix, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    axes.figure.colorbar(picture, ax=axes, shrink=0.8)
