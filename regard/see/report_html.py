"""An attention report as one HTML page without scripts or remote files. Tokens of a model are escaped."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regard.base.html import Markup, join_html, render_page, tag, void_tag
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
    escape_control_characters,
    head_code,
    map_cells,
    relevance_cells,
    shorten,
)

TABLED = 32  # most positions a side whose weights are shown as numbers

MEANINGS = {
    "entropy": "mean of -sum w log w over the queries, in nats",
    "spread": "entropy divided by its maximum, the log of the number of visible keys",
    "distance": "mean of |i - j| under the weights, in positions",
    "previous": "mean weight on the position before the query",
    "first": "mean weight on the first position",
    "induction": "mean weight on the token after the previous occurrence of the same token; - if no token is repeated",
}


def render_report(report: AttentionReport) -> str:
    """Return the report as one HTML page."""
    sections = [_header(report), _heads(report), _chosen(report)]
    sections += [_relevance(report)] if report.relevance else []
    sections += [_overlays(report)] if report.overlays and report.image is not None else []
    sections += [_every_head(report), _columns()]
    return render_page(f"{escape_control_characters(report.title)}: attention", *sections)


def _code(text: str) -> Markup:
    return tag("pre", tag("code", text), class_="call")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", class_: str = "") -> Markup:
    """A table whose first column is a header of each row."""
    header = tag("tr", *(tag("th", name, scope="col", title=MEANINGS.get(name)) for name in columns))
    lines = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    parts = [tag("caption", caption)] if caption else []
    return tag("table", *parts, tag("thead", header), tag("tbody", *lines), class_=class_ or None)


def _header(report: AttentionReport) -> Markup:
    facts = [
        part
        for name, value in report.facts.items()
        for part in (tag("dt", name), tag("dd", escape_control_characters(value)))
    ]
    lines = [escape_control_characters(line) for line in report.prompt.splitlines()]
    return tag(
        "header",
        tag("h1", escape_control_characters(report.title)),
        tag("dl", *facts),
        tag("h2", "Input"),
        tag("pre", "\n".join(lines), class_="prompt"),
        *(tag("p", note, class_="note") for note in report.notes),
        tag("p", "This page was computed by the following code, continued under each table and picture:"),
        _code(report.setup),
    )


def _heads(report: AttentionReport) -> Markup:
    rows = [[head.layer, *(format_number(getattr(head, name)) for name in COLUMNS[1:])] for head in report.table]
    caption = f"{len(report.table)} heads of {len(report.seen)} attention layers"
    table = _table(COLUMNS, rows, caption, class_="heads")
    return tag("section", tag("h2", "The heads"), tag("div", table, class_="scroll"), _code(report.table_code))


def format_number(value: object) -> str:
    """A number as shown on the page."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _chosen(report: AttentionReport) -> Markup:
    record = report.seen[report.layer]
    values = report.chosen_map()
    rows, columns = report.chosen_labels()
    what = f"{report.layer}, head {report.head}"
    several = f" The mean over {record.q.shape[0]} sequences." if record.q.shape[0] > 1 else ""
    words = f"Rows are queries, columns are keys. {_describe_cells(record, values)}{several}"
    drawing = _map_svg(values, rows, columns, f"Attention map of {what}")
    table = (
        [] if rows is None or columns is None or max(values.shape) > TABLED else [_weights_table(values, rows, columns)]
    )
    return tag(
        "section",
        tag("h2", f"Chosen head: {what}"),
        tag("p", repr(record), class_="route"),
        *([tag("p", record.note, class_="note")] if record.note else []),
        tag("figure", drawing, tag("figcaption", words, " ", _scale(root_scale(values)))),
        *table,
        _code(head_code(record, report.head, LARGE)),
    )


def _describe_cells(record: Record, values: Tensor) -> str:
    i, j = record.q.shape[2], record.k.shape[2]
    if tuple(values.shape) == (i, j):
        return "Every cell is one weight."
    rows, columns = values.shape
    return f"{i} x {j} weights pooled in {rows} x {columns} cells."


def _scale(scale: ColourScale) -> Markup:
    """A colour bar with the numbers at both ends, and in the middle if the scale is not linear."""
    ramp = data_uri(map_png(torch.linspace(0, 1, 64)[None], ColourScale(0, 1)))
    middle = scale.low + (scale.top - scale.low) * 0.5 ** (1 / scale.power)
    return tag(
        "span",
        f"{scale.low:.4f} ",
        void_tag("img", src=ramp, alt="from dark blue to bright yellow", class_="ramp"),
        f" {scale.top:.4f}",
        "" if scale.power == 1 else f", {middle:.4f} in the middle (square-root scale)",
        class_="scale",
    )


def _map_svg(values: Tensor, rows: list[str] | None, columns: list[str] | None, alt: str) -> Markup:
    """A map as SVG, with the labels of its positions if they fit."""
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


def _weights_table(values: Tensor, rows: list[str], columns: list[str]) -> Markup:
    lines = [[label, *(f"{value:.4f}" for value in row)] for label, row in zip(rows, values.tolist(), strict=True)]
    table = _table(["query \\ key", *columns], lines, class_="weights")
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
        style = f"background:{background};color:{text}"
        tokens.append(tag("span", label, style=style, title=f"{label}: {value:.4f}"))
    count = min(MOST_RELEVANT, len(relevance.values))
    best = relevance.values.topk(count)
    names = relevance.words.labels
    rows = [
        [str(at), shorten(names[at]), f"{value:.4f}"]
        for at, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    table = _table(("position", "token", "relevance"), rows, f"The {count} largest", class_="heads")
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
    parts: list[Markup] = [_picture(pixels_png(plain.contiguous()), "The input image", "the input of the model")]
    for each in report.overlays:
        rows, columns = each.values.shape
        words = join_html([f"{each.title}; {rows} x {columns} cells. ", _scale(linear_scale(each.values))])
        picture = pixels_png(overlay(report.image, each.values))
        parts.append(tag("div", _picture(picture, each.title, words), _code(each.code)))
    return tag("section", tag("h2", "Overlays on the image"), tag("div", *parts, class_="pictures"))


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
        code = f"seen[{name!r}].pooled({map_cells(record, report.small_cells)}).mean(0)  # (head, query cell, key cell)"
        parts += [tag("h3", name), tag("div", *figures, class_="maps"), _code(code)]
    words = "Each map has its own scale from 0 to its largest cell, shown after the number of the head."
    return tag("section", tag("h2", "Every head"), tag("p", words), *parts)


def _columns() -> Markup:
    terms = [part for name, words in MEANINGS.items() for part in (tag("dt", name), tag("dd", words))]
    return tag("section", tag("h2", "Columns"), tag("dl", *terms))
