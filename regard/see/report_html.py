"""A report as one HTML page that needs nothing else: no script, no network, no second file. Whatever a model's tokens
are, they are text to it."""

import torch
from torch import Tensor

from regard.base.html import Markup, join_html, tag, void_tag
from regard.see.colormaps import (
    ColourScale,
    cell_colours,
    data_uri,
    linear_scale,
    map_png,
    overlay,
    pixels_png,
    root_scale,
)
from regard.see.heads import COLUMNS
from regard.see.record import Record
from regard.see.report import (
    LARGE,
    MOST_RELEVANT,
    AttentionReport,
    TokenRelevance,
    cells_of,
    escape_control_characters,
    head_code,
    relevance_cells,
    shorten,
)

TABLED = 32  # positions a side of which all weights are written out as numbers

MEANINGS = {
    "entropy": "mean of -sum w log w over the queries, in nats",
    "spread": "the entropy as a share of the largest possible, the log of the keys in sight",
    "distance": "mean of |i - j| under the weights, in positions",
    "previous": "mean weight on the position before the query",
    "first": "mean weight on the first position",
    "induction": "mean weight on what followed the same token earlier; - where no token is repeated",
}


def render_report(report: AttentionReport) -> str:
    """The report as one HTML page that needs nothing else: no script, no network, no second file."""
    sections = [_opening(report), _heads(report), _chosen(report)]
    sections += [_relevance(report)] if report.relevance else []
    sections += [_overlays(report)] if report.overlays and report.image is not None else []
    sections += [_every_head(report), _reading()]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = tag(
        "head",
        void_tag("meta", charset="utf-8"),
        void_tag("meta", http_equiv="Content-Security-Policy", content=policy),
        void_tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{escape_control_characters(report.title)}: where it looks"),
        tag("style", Markup(STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *sections)), lang='en')}\n"


def _code(text: str) -> Markup:
    return tag("pre", tag("code", text), class_="call")


def _opening(report: AttentionReport) -> Markup:
    facts = [
        part
        for name, value in report.facts.items()
        for part in (tag("dt", name), tag("dd", escape_control_characters(value)))
    ]
    lines = [escape_control_characters(line) for line in report.asked.splitlines()]
    return tag(
        "header",
        tag("h1", escape_control_characters(report.title)),
        tag("dl", *facts),
        tag("h2", "What it was given"),
        tag("pre", "\n".join(lines), class_="asked"),
        *(tag("p", note, class_="note") for note in report.notes),
        tag("p", "All that follows was computed by these lines, and by those under each table and picture:"),
        _code(report.setup),
    )


def _heads(report: AttentionReport) -> Markup:
    header = tag("tr", *(tag("th", name, scope="col", title=MEANINGS.get(name)) for name in COLUMNS))
    rows = [
        tag(
            "tr", tag("th", head.layer, scope="row"), *(tag("td", written(getattr(head, name))) for name in COLUMNS[1:])
        )
        for head in report.table
    ]
    caption = tag("caption", f"{len(report.table)} heads of {len(report.seen)} attention layers")
    table = tag("table", caption, tag("thead", header), tag("tbody", *rows), class_="heads")
    return tag("section", tag("h2", "The heads"), tag("div", table, class_="scroll"), _code(report.table_code))


def written(value: object) -> str:
    """A number as the page has it."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _chosen(report: AttentionReport) -> Markup:
    record = report.seen[report.layer]
    values = report.chosen_map()
    rows, columns = report.chosen_labels()
    what = f"{report.layer}, head {report.head}"
    several = f" The mean over {record.q.shape[0]} sequences." if record.q.shape[0] > 1 else ""
    words = f"Rows are queries, columns are keys. {_whole(record, values)}{several}"
    drawn = _labelled(values, rows, columns, f"Attention map of {what}")
    table = [] if rows is None or columns is None or max(values.shape) > TABLED else [_numbers(values, rows, columns)]
    return tag(
        "section",
        tag("h2", f"A closer look: {what}"),
        tag("p", repr(record), class_="route"),
        *([tag("p", record.note, class_="note")] if record.note else []),
        tag("figure", drawn, tag("figcaption", words, " ", _scale(root_scale(values)))),
        *table,
        _code(head_code(record, report.head, LARGE)),
    )


def _whole(record: Record, values: Tensor) -> str:
    i, j = record.q.shape[2], record.k.shape[2]
    if tuple(values.shape) == (i, j):
        return "Every cell is one weight."
    rows, columns = values.shape
    return f"{i} x {j} weights in {rows} x {columns} cells: what the queries of a cell give to its keys."


def _scale(scale: ColourScale) -> Markup:
    """The colours with the numbers at both ends, and in the middle where they do not grow evenly."""
    ramp = data_uri(map_png(torch.linspace(0, 1, 64)[None], ColourScale(0, 1)))
    middle = scale.low + (scale.top - scale.low) * 0.5 ** (1 / scale.power)
    return tag(
        "span",
        f"{scale.low:.4f} ",
        void_tag("img", src=ramp, alt="from dark blue to bright yellow", class_="ramp"),
        f" {scale.top:.4f}",
        "" if scale.power == 1 else f", with {middle:.4f} in the middle: colours grow by the square root",
        class_="scale",
    )


def _labelled(values: Tensor, rows: list[str] | None, columns: list[str] | None, alt: str) -> Markup:
    """A map as a drawing, with the names of its positions where they fit."""
    down, across = values.shape
    cell = 16 if rows is not None else max(4, 512 // max(down, across))
    left = 8 * max(map(len, rows)) + 8 if rows else 0
    top = 8 * max(map(len, columns)) + 8 if columns else 0
    width, height = left + cell * across, top + cell * down
    picture = void_tag(
        "image",
        href=data_uri(map_png(values, root_scale(values))),
        x=str(left),
        y=str(top),
        width=str(cell * across),
        height=str(cell * down),
        preserveAspectRatio="none",
        class_="crisp",
    )
    names = [
        tag("text", label, x=str(left - 4), y=str(top + cell * (at + 0.75)), text_anchor="end")
        for at, label in enumerate(rows or [])
    ]
    for at, label in enumerate(columns or []):
        x, y = left + cell * (at + 0.75), top - 4
        names.append(tag("text", label, transform=f"translate({x} {y}) rotate(-90)"))
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    return tag("svg", tag("title", alt), picture, *names, role="img", **size)


def _numbers(values: Tensor, rows: list[str], columns: list[str]) -> Markup:
    header = tag("tr", tag("th", "query \\ key", scope="col"), *(tag("th", label, scope="col") for label in columns))
    lines = [
        tag("tr", tag("th", label, scope="row"), *(tag("td", f"{value:.4f}") for value in row))
        for label, row in zip(rows, values.tolist(), strict=True)
    ]
    table = tag("table", tag("thead", header), tag("tbody", *lines), class_="weights")
    return tag("details", tag("summary", "These weights as numbers"), tag("div", table, class_="scroll"))


def _relevance(report: AttentionReport) -> Markup:
    parts = [part for each in report.relevance for part in _one_relevance(each)]
    return tag("section", tag("h2", "Relevance"), *parts)


def _one_relevance(relevance: TokenRelevance) -> list[Markup]:
    labels, values = relevance_cells(relevance)
    scale = ColourScale(0.0, float(values.max()))
    tokens = []
    for label, value in zip(labels, values.tolist(), strict=True):
        background, text = cell_colours(value, scale)
        look = f"background:{background};color:{text}"
        tokens.append(tag("span", label, style=look, title=f"{label}: {value:.4f}"))
    count = min(MOST_RELEVANT, len(relevance.values))
    best = relevance.values.topk(count)
    names = relevance.words.labels
    rows = [
        tag("tr", tag("td", str(at)), tag("th", shorten(names[at]), scope="row"), tag("td", f"{value:.4f}"))
        for at, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    header = tag("tr", *(tag("th", name, scope="col") for name in ("position", "token", "relevance")))
    table = tag("table", tag("caption", f"The {count} largest"), tag("thead", header), tag("tbody", *rows))
    return [
        tag("h3", relevance.title),
        tag("p", join_html(tokens), class_="tokens"),
        tag("p", _scale(scale)),
        table,
        _code(relevance.code),
    ]


def _overlays(report: AttentionReport) -> Markup:
    assert report.image is not None
    plain = report.image if report.image.shape[-1] == 3 else report.image.expand(-1, -1, 3)
    parts: list[Markup] = [
        _picture(pixels_png(plain.contiguous()), "The image as the model got it", "as the model got it")
    ]
    for each in report.overlays:
        rows, columns = each.values.shape
        words = join_html([f"{each.title}; {rows} x {columns} cells. ", _scale(linear_scale(each.values))])
        laid = pixels_png(overlay(report.image, each.values))
        parts.append(tag("div", _picture(laid, each.title, words), _code(each.code)))
    return tag("section", tag("h2", "On the image"), tag("div", *parts, class_="pictures"))


def _picture(png: bytes, alt: str, caption: str) -> Markup:
    image = void_tag("img", src=data_uri(png), alt=alt, class_="crisp photo")
    return tag("figure", image, tag("figcaption", caption))


def _every_head(report: AttentionReport) -> Markup:
    parts = []
    for name in report.seen:
        record = report.seen[name]
        numbers = range(record.q.shape[1]) if record.heads is None else record.heads
        figures = []
        for number, values in zip(numbers, report.small_maps(name, report.small_cells), strict=True):
            address = data_uri(map_png(values, root_scale(values)))
            picture = void_tag("img", src=address, alt=f"map of {name}, head {number}", class_="crisp", loading="lazy")
            figures.append(tag("figure", picture, tag("figcaption", f"{number}: to {float(values.max()):.4f}")))
        code = f"seen[{name!r}].pooled({cells_of(record, report.small_cells)}).mean(0)  # (head, query cell, key cell)"
        parts += [tag("h3", name), tag("div", *figures, class_="maps"), _code(code)]
    words = "Each from 0 to its own largest cell, which is written below it after the number of the head."
    return tag("section", tag("h2", "Every head"), tag("p", words), *parts)


def _reading() -> Markup:
    terms = [part for name, words in MEANINGS.items() for part in (tag("dt", name), tag("dd", words))]
    return tag("section", tag("h2", "What the columns mean"), tag("dl", *terms))


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; margin: 0; }
main { max-width: 70rem; margin: auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: #f4f4f4; padding: .5rem .75rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
pre.call { border-left: 3px solid #00224d; }
.note { border-left: 3px solid #a5862e; padding-left: .75rem; }
.scroll { overflow: auto; max-height: 30rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
caption { text-align: left; color: #444; }
th, td { padding: .1rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th[scope=row] { text-align: left; font-weight: 400; }
thead th { position: sticky; top: 0; background: #fff; }
figure { margin: .5rem 0; } figcaption { font-size: 13px; color: #333; }
svg { max-width: 100%; height: auto; font: 12px ui-monospace, monospace; }
.crisp { image-rendering: pixelated; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: .5rem; }
.maps img { width: 100%; aspect-ratio: 1; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; } .pictures > * { width: 22rem; }
.photo { width: 100%; }
.tokens { line-height: 2; }
.tokens span { padding: .1rem .3rem; margin-right: 1px; font-family: ui-monospace, monospace; }
.ramp { width: 8rem; height: .8rem; vertical-align: middle; }
span, img, image, svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print { .scroll { max-height: none; overflow: visible; } thead th { position: static; } }
"""
