"""Drawing helpers of the lab: figures, line plots, bar charts and heat maps with colours for colour-blind readers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is imported only when something is drawn
    Axes = Figure = Any

# the palette of Okabe and Ito
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", ":", "-.")


def make_figure(
    columns: int = 1, rows: int = 1, *, width: float = 4.2, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """Create a matplotlib figure; returns it with its axes in row-major order.

    columns, rows  number of panels per row, and number of rows
    width, height  size of one panel in inches
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def plot_lines(
    axes: Axes,
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    overlapping: bool = False,
    legend: bool = True,
    **options: Any,
) -> None:
    """Plot named curves over `x`, each with its own colour and marker.

    overlapping  whether to use different dashes and open markers, so that overlapping curves can be distinguished
    legend       whether to draw a legend if there are several curves
    options      passed to `Axes.plot`
    """
    for number, (name, y) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": COLOURS[number % 7], "marker": MARKERS[number % 7], "markersize": 4}
        if overlapping:
            look["linestyle"] = LINE_STYLES[number % 4]
            look |= {"markersize": 8, "markerfacecolor": "none"} if number % 2 == 0 else {}
        axes.plot(x, y, label=name, **look, **options)
    if len(curves) > 1 and legend:
        axes.legend(frameon=False)


def line_figure(x: Sequence[float], curves: Mapping[str, Sequence[float]], **labels: Any) -> Figure:
    """Return a figure with one panel of curves; `labels` are passed to `Axes.set`."""
    figure, (axes,) = make_figure()
    plot_lines(axes, x, curves)
    axes.set(**labels)
    return figure


def bar_figure(values: Mapping[str, float], **labels: Any) -> Figure:
    """Return a figure with one panel of bars; `labels` are passed to `Axes.set`."""
    figure, (axes,) = make_figure(width=max(4.2, 1.35 * len(values)))
    plot_bars(axes, values)
    axes.set(**labels)
    return figure


def plot_intervals(
    axes: Axes, x: Sequence[float], means: Mapping[str, Sequence[float]], halves: Mapping[str, Sequence[float]]
) -> None:
    """Plot named curves of means with error bars.

    means   the means over seeds
    halves  half the length of the error bar of each mean: half the width of its confidence interval
    """
    for number, name in enumerate(means):
        look: dict[str, Any] = {"color": COLOURS[number % 7], "marker": MARKERS[number % 7], "capsize": 3}
        axes.errorbar(x, means[name], halves[name], label=name, **look)
    axes.legend(frameon=False, fontsize="small")


def mark_level(axes: Axes, value: float, label: str) -> None:
    """Draw a dashed horizontal line at `value`, such as the accuracy of guessing, with a label in the legend."""
    axes.axhline(value, color="#000000", linestyle="--", linewidth=1, label=label)
    axes.legend(frameon=False)


def draw_steps(axes: Axes, steps: Sequence[str]) -> None:
    """Draw the steps of a calculation as a diagram: one box per step from top to bottom, with arrows between."""
    for at, words in enumerate(steps):
        arrow = {"arrowstyle": "<-"} if at else None
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": COLOURS[0]}
        above = (0.5, 1 - at / len(steps)) if at else (0.5, 1 - 0.5 / len(steps))
        axes.annotate(
            words,
            xy=above,
            xytext=(0.5, 1 - (at + 0.5) / len(steps)),
            ha="center",
            va="center",
            fontsize="small",
            bbox=box,
            arrowprops=arrow,
        )
    axes.set(xticks=[], yticks=[])


def plot_bars(axes: Axes, values: Mapping[str, float], *, fmt: str = "%.3g") -> None:
    """Draw one bar per name, with its value above it in the printf format `fmt`."""
    axes.bar_label(axes.bar(list(values), list(values.values()), color=COLOURS[0]), fmt=fmt)
    axes.margins(y=0.1)


def plot_shares(axes: Axes, values: Mapping[str, float], halves: Sequence[float]) -> None:
    """Draw named fractions between 0 and 1 as bars with error bars.

    halves  half the length of each error bar; error bars are clipped to the range from 0 to 1
    """
    heights = list(values.values())
    below = [min(half, height) for half, height in zip(halves, heights, strict=True)]
    above = [min(half, 1 - height) for half, height in zip(halves, heights, strict=True)]
    bars = axes.bar(list(values), heights, yerr=[below, above], color=COLOURS[0], capsize=4)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_ylim(0, 1.2)


def plot_heatmap(axes: Axes, matrix: Sequence[Sequence[float]], *, low: float = 0.0, high: float | None = None) -> None:
    """Draw a matrix as a heat map with a colour bar.

    low, high  values of the ends of the colour bar; None for `high` is the largest entry
    """
    image = axes.imshow(matrix, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
