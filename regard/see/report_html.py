"""Write an attention report as one HTML page without scripts or remote files.

The tokens of a model are escaped, so that they cannot act as HTML.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from regard.base.html import Markup, join_html, render_page, tag, void_tag
from regard.see.heads import COLUMNS
from regard.see.record import Record
from regard.see.report import (
    LARGE,
    MOST_RELEVANT,
    AttentionReport,
    HeadMap,
    TokenRelevance,
    escape_control_characters,
    head_code,
    map_cells,
    relevance_cells,
    shorten,
)
from regard.see.report_figure import COLORMAP, encode_png, head_figure, layer_figure, overlay_figure

TABLED = 32  # largest number of rows and columns of a map that is shown as numbers

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
    """Return an HTML table; the first column is the header of each row.

    columns  names of the columns
    """
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
    """Format a value for the page: "-" for None, four decimals for a float."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _chosen(report: AttentionReport) -> Markup:
    record, drawn = report.seen[report.layer], report.chosen_map()
    rows, columns = report.chosen_labels()
    what = f"{report.layer}, head {report.head}"
    several = f" The mean over {record.q.shape[0]} sequences." if record.q.shape[0] > 1 else ""
    words = f"Rows are queries, columns are keys. {_describe_cells(record, drawn)}{several}"
    tabled = rows is not None and columns is not None and max(drawn.values.shape) <= TABLED
    return tag(
        "section",
        tag("h2", f"Chosen head: {what}"),
        tag("p", repr(record), class_="route"),
        *([tag("p", record.note, class_="note")] if record.note else []),
        _picture(head_figure(report), f"Attention map of {what}", words),
        *([_weights_table(drawn, rows or [], columns or [])] if tabled else []),
        _code(head_code(record, report.head, LARGE)),
    )


def _describe_cells(record: Record, drawn: HeadMap) -> str:
    (i, j), (rows, columns) = (record.q.shape[2], record.k.shape[2]), drawn.values.shape
    return (
        "Every cell is one weight." if (rows, columns) == (i, j) else f"{i} x {j} weights in {rows} x {columns} cells."
    )


def _picture(figure: Figure, alt: str, caption: str) -> Markup:
    source = f"data:image/png;base64,{b64encode(encode_png(figure)).decode('ascii')}"
    return tag("figure", void_tag("img", src=source, alt=alt, class_="plot"), tag("figcaption", caption))


def _weights_table(drawn: HeadMap, rows: list[str], columns: list[str]) -> Markup:
    numbers = zip(rows, drawn.values.tolist(), strict=True)
    lines = [[label, *(f"{value:.4f}" for value in row)] for label, row in numbers]
    table = _table(["query \\ key", *columns], lines, class_="weights")
    return tag("details", tag("summary", "These weights as numbers"), tag("div", table, class_="scroll"))


def _relevance(report: AttentionReport) -> Markup:
    parts = [part for each in report.relevance for part in _one_relevance(each)]
    return tag("section", tag("h2", "Relevance"), *parts)


def _one_relevance(relevance: TokenRelevance) -> list[Markup]:
    labels, values = relevance_cells(relevance)
    top = float(values.max()) or 1.0
    tokens = [
        tag("span", label, style=_token_style(value / top), title=f"{label}: {value:.4f}")
        for label, value in zip(labels, values.tolist(), strict=True)
    ]
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
        tag("p", f"From dark blue for 0 to bright yellow for {float(values.max()):.4f}."),
        table,
        _code(relevance.code),
    ]


def _token_style(share: float) -> str:
    """Return the CSS style of a token: a background colour for a fraction from 0 to 1, and black or white text."""
    red, green, blue, _ = colour = COLORMAP(share)
    text = "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#fff"
    return f"background:{to_hex(colour)};color:{text}"


def _overlays(report: AttentionReport) -> Markup:
    parts = []
    for each in report.overlays:
        rows, columns = each.values.shape
        words = f"{each.title}; {rows} x {columns} cells"
        parts.append(tag("div", _picture(overlay_figure(report, each), each.title, words), _code(each.code)))
    return tag("section", tag("h2", "Overlays on the image"), tag("div", *parts, class_="pictures"))


def _every_head(report: AttentionReport) -> Markup:
    parts = []
    for name in report.seen:
        cells = map_cells(report.seen[name], report.small_cells)
        figure = layer_figure(report, name, report.small_cells)
        code = f"seen[{name!r}].pooled({cells}).mean(0)  # (head, query cell, key cell)"
        parts += [
            tag("h3", name),
            _picture(figure, f"maps of {name}", "Rows are queries, columns are keys."),
            _code(code),
        ]
    words = "Each map has its own square-root scale, from 0 to its largest cell. Hidden pairs are grey."
    return tag("section", tag("h2", "Every head"), tag("p", words), *parts)


def _columns() -> Markup:
    terms = [part for name, words in MEANINGS.items() for part in (tag("dt", name), tag("dd", words))]
    return tag("section", tag("h2", "Columns"), tag("dl", *terms))
