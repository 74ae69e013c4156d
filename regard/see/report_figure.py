"""An attention report as one matplotlib figure: the chosen head, the overlays on the image, and all heads."""

from collections.abc import Sequence
from typing import Any

from regard.see.colormaps import apply_colormap, mosaic, overlay, root_scale
from regard.see.report import AttentionReport

MOST_CELLS = 32  # a side of one small map


def draw_report(report: AttentionReport) -> Any:
    """Return the matplotlib figure of a report."""
    from matplotlib.figure import Figure

    several = [report.small_maps(name, MOST_CELLS) for name in report.seen]
    cells = max(max(values.shape) for maps in several for values in maps)
    overlays = [] if report.image is None else report.overlays
    figure = Figure(figsize=(5 * (2 + len(overlays)), 6), layout="constrained", dpi=120)
    axes = figure.subplots(1, 2 + len(overlays), squeeze=False)[0]
    _draw_chosen(axes[0], report)
    for ax, each in zip(axes[1:], overlays, strict=False):
        assert report.image is not None
        ax.imshow(overlay(report.image, each.values).numpy())
        _set_title(ax, f"{each.title}\n{float(each.values.min()):.3g} to {float(each.values.max()):.3g}")
        ax.set_axis_off()
    ax = axes[-1]
    ax.imshow(mosaic(several, cells).numpy(), interpolation="nearest")
    _set_title(ax, "every head, each on a square-root scale from 0 to its largest cell")
    _set_ticks(ax.set_xticks, [str(head) for head in range(max(map(len, several)))], cells + 2, cells / 2)
    _set_ticks(ax.set_yticks, list(report.seen), cells + 2, cells / 2)
    ax.set_xlabel("head")
    figure.suptitle(report.title, fontsize=10, parse_math=False)
    return figure


def _draw_chosen(ax: Any, report: AttentionReport) -> None:
    values = report.chosen_map()
    aspect = "equal" if max(values.shape) < 3 * min(values.shape) else "auto"
    ax.imshow(apply_colormap(values, root_scale(values)).numpy(), interpolation="nearest", aspect=aspect)
    _set_title(ax, f"{report.layer}, head {report.head}\n0 to {float(values.max()):.3g}, square-root scale")
    ax.set_xlabel("key position j")
    ax.set_ylabel("query position i")
    queries, keys = report.chosen_labels()
    if queries is not None and keys is not None:
        _set_ticks(ax.set_xticks, keys, rotation=90)
        _set_ticks(ax.set_yticks, queries)


def _set_title(ax: Any, title: str) -> None:
    ax.set_title(title, fontsize=8, parse_math=False)  # a dollar sign in a name is not a formula


def _set_ticks(set_ticks: Any, labels: Sequence[str], step: int = 1, start: float = 0, **style: Any) -> None:
    at = [start + step * number for number in range(len(labels))]
    set_ticks(at, labels, fontsize=max(3.0, min(8.0, 200 / max(len(labels), 1))), parse_math=False, **style)
