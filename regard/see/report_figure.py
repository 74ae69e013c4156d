"""A report as one matplotlib figure: the chosen head with its tokens, what lies over the image, and all heads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.see.colormaps import apply_colormap, mosaic, overlay, root_scale
from regard.see.report import AttentionReport

MOST_CELLS = 32  # a side of one small map


def draw_report(report: AttentionReport) -> Any:
    """One matplotlib figure: the chosen head with its tokens, what was laid over the image, and all heads."""
    from matplotlib.figure import Figure

    several = [report.small_maps(name, MOST_CELLS) for name in report.seen]
    cells = max(max(values.shape) for maps in several for values in maps)
    over = [] if report.image is None else report.overlays
    drawn = Figure(figsize=(5 * (2 + len(over)), 6), layout="constrained", dpi=120)
    axes = drawn.subplots(1, 2 + len(over), squeeze=False)[0]
    _draw_chosen(axes[0], report)
    for ax, laid in zip(axes[1:], over, strict=False):
        assert report.image is not None
        ax.imshow(overlay(report.image, laid.values).numpy())
        _title(ax, f"{laid.title}\n{float(laid.values.min()):.3g} to {float(laid.values.max()):.3g}")
        ax.set_axis_off()
    ax = axes[-1]
    ax.imshow(mosaic(several, cells).numpy(), interpolation="nearest")
    _title(ax, "every head, each from 0 to its largest by the root")
    _ticks(ax.set_xticks, [str(head) for head in range(max(map(len, several)))], cells + 2, cells / 2)
    _ticks(ax.set_yticks, list(report.seen), cells + 2, cells / 2)
    ax.set_xlabel("head")
    drawn.suptitle(report.title, fontsize=10, parse_math=False)
    return drawn


def _draw_chosen(ax: Any, report: AttentionReport) -> None:
    values = report.chosen_map()
    ax.imshow(apply_colormap(values, root_scale(values)).numpy(), interpolation="nearest", aspect=_aspect(values))
    _title(ax, f"{report.layer}, head {report.head}\n0 to {float(values.max()):.3g}, by the root")
    ax.set_xlabel("key position j")
    ax.set_ylabel("query position i")
    queries, keys = report.chosen_labels()
    if queries is not None and keys is not None:
        _ticks(ax.set_xticks, keys, rotation=90)
        _ticks(ax.set_yticks, queries)


def _aspect(values: Tensor) -> str:
    return "equal" if max(values.shape) < 3 * min(values.shape) else "auto"


def _title(ax: Any, words: str) -> None:
    ax.set_title(words, fontsize=8, parse_math=False)  # a dollar sign in a name is no formula


def _ticks(put: Any, labels: Sequence[str], step: int = 1, start: float = 0, **look: Any) -> None:
    at = [start + step * number for number in range(len(labels))]
    put(at, labels, fontsize=max(3.0, min(8.0, 200 / max(len(labels), 1))), parse_math=False, **look)
