"""Draw the figures of an attention report: maps of heads with a colour bar, and overlays on the image.

The colormap is cividis, which is readable with colour blindness and in grey print. Attention maps use a square-root
scale from zero to the largest weight. The first query of a causal map has weight 1 on the only key that it sees, and a
linear scale would leave all other cells dark. Hidden pairs are grey, which distinguishes them from visible pairs with a
weight of zero.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from regard.see.record import Record
from regard.see.report import AttentionReport, HeadMap, Overlay

HIDDEN_COLOUR = "#d4d4d4"
COLORMAP = colormaps["cividis"].with_extremes(bad=HIDDEN_COLOUR)
MOST_CELLS = 32  # largest number of rows and columns of a small map
GAP = 2  # cells between two small maps
OVERLAY_OPACITY = 0.6


def draw_report(report: AttentionReport) -> Figure:
    """Return a figure with the chosen head, the overlays on the image, and small maps of all heads."""
    rows = [report.small_maps(name, MOST_CELLS) for name in report.seen]
    overlays = () if report.image is None else report.overlays
    shape = min(max(max(map(len, rows)) / len(rows), 0.5), 3.0)  # width divided by height of all maps together
    ratios = [1.0] * (1 + len(overlays)) + [shape]
    figure = Figure(figsize=(6 * sum(ratios), 6), layout="constrained", dpi=120)
    chosen, *middle, last = figure.subplots(1, len(ratios), width_ratios=ratios)
    draw_head(chosen, report)
    for ax, each in zip(middle, overlays, strict=True):
        draw_overlay(ax, report, each)
    draw_small_maps(last, rows, list(report.seen))
    last.set_title("every head", fontsize=9)
    figure.suptitle(report.title, fontsize=10, parse_math=False)
    return figure


def head_figure(report: AttentionReport) -> Figure:
    """Return the figure of the report's chosen head."""
    figure = Figure(figsize=(7, 6), layout="constrained", dpi=100)
    draw_head(figure.subplots(), report)
    return figure


def layer_figure(report: AttentionReport, name: str, most: int) -> Figure:
    """Return a figure with the maps of all heads of a layer, in rows of eight.

    most  maximum number of rows, and of columns, in a map; larger maps are pooled
    """
    maps = report.small_maps(name, most)
    rows = [maps[start : start + 8] for start in range(0, len(maps), 8)]
    figure = Figure(figsize=(1.1 * len(rows[0]) + 1.4, 1.2 * len(rows) + 0.5), layout="constrained", dpi=100)
    draw_small_maps(figure.subplots(), rows, [f"from {8 * at}" for at in range(len(rows))])
    return figure


def overlay_figure(report: AttentionReport, overlay: Overlay) -> Figure:
    """Return a figure of the image with one overlay."""
    figure = Figure(figsize=(5, 4.5), layout="constrained", dpi=100)
    draw_overlay(figure.subplots(), report, overlay)
    return figure


def draw_head(ax: Any, report: AttentionReport) -> None:
    """Draw the map of the chosen head with a colour bar. Hidden pairs are grey.

    The axes show the labels of queries and keys, such as tokens, or their positions if there are too many labels.
    """
    record, drawn = report.seen[report.layer], report.chosen_map()
    low, high = _query_limits(record)
    j = record.k.shape[2]
    image = ax.imshow(
        np.ma.array(drawn.values.numpy(), mask=drawn.hidden.numpy()),
        cmap=COLORMAP,
        norm=root_norm(drawn.top),
        interpolation="nearest",
        extent=(-0.5, j - 0.5, high, low),
        aspect="equal" if max(drawn.values.shape) < 3 * min(drawn.values.shape) else "auto",
    )
    pooled = "" if drawn.values.shape == (record.q.shape[2], j) else ", sum over keys, mean over queries of a cell"
    ax.figure.colorbar(image, ax=ax, shrink=0.8).set_label(f"weight{pooled} (square-root scale)", fontsize=8)
    _set_title(ax, f"{report.layer}, head {report.head}")
    what = "channel" if record.over_channels else "position"
    ax.set_xlabel(f"key {what}")
    ax.set_ylabel(f"query {what}")
    queries, keys = report.chosen_labels()
    if queries is not None and keys is not None:
        _set_ticks(ax.set_xticks, range(j), keys, rotation=90)
        _set_ticks(ax.set_yticks, [low + 0.5 + row for row in range(len(queries))], queries)
    else:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    if bool(drawn.hidden.any()):
        ax.legend(handles=[Patch(color=HIDDEN_COLOUR, label="hidden by the mask")], loc="upper right", fontsize=7)


def draw_small_maps(ax: Any, rows: Sequence[Sequence[HeadMap]], names: Sequence[str]) -> None:
    """Draw the maps of heads in rows; the colours of each map are scaled from zero to its own largest cell.

    names  labels of the rows
    """
    side = max(max(each.values.shape) for row in rows for each in row)
    step = side + GAP
    sheet = np.ones((len(rows) * step - GAP, max(map(len, rows)) * step - GAP, 4))
    for row, maps in enumerate(rows):
        for column, each in enumerate(maps):
            target = sheet[row * step : row * step + side, column * step : column * step + side]
            target[:] = _enlarge(each, side)
    ax.imshow(sheet, interpolation="nearest")
    bar = ScalarMappable(root_norm(1.0), COLORMAP)
    ax.figure.colorbar(bar, ax=ax, shrink=0.8).set_label("weight divided by the largest of the head", fontsize=8)
    numbers = [str(each.head) for each in max(rows, key=len)]
    _set_ticks(ax.set_xticks, [side / 2 + step * at for at in range(len(numbers))], numbers)
    _set_ticks(ax.set_yticks, [side / 2 + step * at for at in range(len(names))], names)
    ax.set_xlabel("head")


def _enlarge(drawn: HeadMap, side: int) -> NDArray[np.float64]:
    """Return a head's map as RGBA colours of `side` x `side` pixels; each cell of the map fills a block of pixels."""
    values = np.ma.array(drawn.values.numpy(), mask=drawn.hidden.numpy())
    colours = COLORMAP(root_norm(drawn.top)(values))
    down, across = (np.arange(side) * size // side for size in values.shape)
    found: NDArray[np.float64] = colours[down[:, None], across[None]]
    return found


def draw_overlay(ax: Any, report: AttentionReport, overlay: Overlay) -> None:
    """Draw an overlay on the grey version of the image, without interpolation between cells."""
    assert report.image is not None
    y, x, _ = report.image.shape
    place = {"extent": (-0.5, x - 0.5, y - 0.5, -0.5), "interpolation": "nearest"}
    ax.imshow(report.image.float().mean(-1).cpu().numpy(), cmap="gray", vmin=0, vmax=255, **place)
    image = ax.imshow(overlay.values.numpy(), cmap=COLORMAP, alpha=OVERLAY_OPACITY, **place)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    _set_title(ax, overlay.title)
    ax.set_xlabel("pixel")


def root_norm(top: float) -> PowerNorm:
    """Return a matplotlib norm with a square-root scale from zero to `top`, the largest weight."""
    return PowerNorm(0.5, 0.0, top if top > 0 else 1.0, clip=True)


def encode_png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _query_limits(record: Record) -> tuple[float, float]:
    """Return the axis limits of the queries in a figure: positions if they are known, else indices."""
    start = record.positions.queries if record.positions_known and record.rows_kept is None else 0
    return start - 0.5, start + record.q.shape[2] - 0.5


def _set_title(ax: Any, title: str) -> None:
    ax.set_title(title, fontsize=9, parse_math=False)  # a dollar sign in a name is not a formula


def _set_ticks(set_ticks: Any, at: Sequence[float], labels: Sequence[str], **style: Any) -> None:
    set_ticks(at, labels, fontsize=max(3.0, min(8.0, 200 / max(len(labels), 1))), parse_math=False, **style)
