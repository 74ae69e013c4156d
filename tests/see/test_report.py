"""Attention reports: the code on a page reproduces its numbers and pictures, and tokens are escaped."""

import warnings
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from regard.base.errors import ConfigError, UnknownNameError
from regard.cli.output import save_picture
from regard.core.attend import attend
from regard.core.masks import causal
from regard.see.heads import COLUMNS
from regard.see.images import normalise_pixels, read_image
from regard.see.record import Seen
from regard.see.report import (
    AttentionReport,
    Overlay,
    Sides,
    TokenLabels,
    TokenRelevance,
    build_labelled_table,
    choose_head,
    escape_control_characters,
    head_map,
    map_cells,
    rank_code,
    rank_heads,
    relevance_cells,
    shorten,
    table_code,
)
from regard.see.report_figure import (
    COLORMAP,
    HIDDEN_COLOUR,
    draw_report,
    head_figure,
    layer_figure,
    overlay_figure,
    root_norm,
)
from regard.see.report_html import format_number, render_report
from regard.see.watch import watch

VOID = {"meta", "img", "image"}
HOSTILE = ["</script>", "<img src=x onerror=alert(1)>", '"quoted"', "a&b", "\x1b[31m", "]]>", "$x_1$"]


class Reader(HTMLParser):
    """A parsed page: checks that elements nest, and collects images, code and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: set[str] = set()
        self.sources: list[str] = []
        self.without_alt = 0
        self.code: list[str] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(name)
        attributes_of_tag = dict(attributes)
        self.sources += [value for key in ("src", "href") if (value := attributes_of_tag.get(key)) is not None]
        self.without_alt += name == "img" and not attributes_of_tag.get("alt")
        assert not any(key.startswith("on") for key in attributes_of_tag)
        if name not in VOID:
            self.open.append(name)
        if name == "code":
            self.code.append("")
        if name == "tr":
            self.rows.append([])
        if name in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.words += text
        if "code" in self.open:
            self.code[-1] += text
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += text


def seen_of(n: int = 7, layers: int = 2, b: int = 1) -> Seen:
    q, k, v = torch.randn(b, 6, n, 8), torch.randn(b, 2, n, 8), torch.randn(b, 2, n, 5)
    with watch() as seen:
        for _ in range(layers):
            attend(q * 3, k, v, mask=causal())
    return seen


def reported(seen: Seen, labels: list[str], **more: Any) -> AttentionReport:
    words = TokenLabels(tuple(labels))
    sides = {name: Sides(words, words) for name in seen}
    table = build_labelled_table(seen, sides)
    head = choose_head(seen, table)
    settings: dict[str, Any] = {
        "title": "a model",
        "facts": {"weights": "random"},
        "prompt": "".join(labels),
        "setup": "seen = given",
        "seen": seen,
        "sides": sides,
        "table": rank_heads(table, "spread"),
        "table_code": f"{table_code(seen, sides)}\n{rank_code('spread')}",
        "layer": head.layer,
        "head": head.head,
    }
    return AttentionReport(**{**settings, **more})


def value_of(code: str, namespace: dict[str, Any]) -> Any:
    """Run code and return the value of its last line."""
    *before, last = code.rstrip().split("\n")
    exec("\n".join(before), namespace)
    return eval(last, namespace)


def test_the_code_on_the_page_reproduces_its_numbers_and_pictures() -> None:
    seen = seen_of(7)
    report = reported(seen, list("abcdefg"))
    reader = Reader(render_report(report))
    space: dict[str, Any] = {"given": seen}
    exec(reader.code[0], space)
    table = value_of(reader.code[1], space)
    lines = [[head.layer, *(format_number(getattr(head, name)) for name in COLUMNS[1:])] for head in table]
    assert reader.rows[1 : 1 + len(lines)] == lines
    assert len(lines) == 12
    closer = value_of(reader.code[2], space)
    torch.testing.assert_close(closer, seen[report.layer].weights()[0, report.head])
    weights = reader.rows[2 + len(lines) : 2 + len(lines) + 7]
    assert weights == [
        [letter, *(f"{w:.4f}" for w in row)] for letter, row in zip("abcdefg", closer.tolist(), strict=True)
    ]
    maps = [values for code in reader.code[-2:] for values in value_of(code.partition("  #")[0], space)]
    drawn = [each for name in seen for each in report.small_maps(name, report.small_cells)]
    for values, each in zip(maps, drawn, strict=True):
        assert torch.equal(values, each.values)


def test_the_page_is_self_contained_and_has_alt_texts() -> None:
    reader = Reader(render_report(reported(seen_of(), list("abcdefg"))))
    assert reader.sources
    assert all(source.startswith("data:image/png;base64,") for source in reader.sources)
    assert not reader.names & {"script", "link", "iframe", "object", "base", "form"}
    assert reader.without_alt == 0
    text = render_report(reported(seen_of(), list("abcdefg")))
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "default-src 'none'; img-src data:" in text
    assert '<html lang="en">' in text


def test_tokens_are_escaped() -> None:
    seen = seen_of(len(HOSTILE))
    words = TokenLabels(tuple(HOSTILE))
    relevance = (TokenRelevance("to <b>last</b>", words, torch.rand(len(HOSTILE)), "x = '</code><script>'"),)
    text = render_report(
        reported(seen, HOSTILE, title="</title><script>", facts={"<i>": "<u>"}, notes=("<s>",), relevance=relevance)
    )
    reader = Reader(text)
    assert not reader.names & {"script", "i", "u", "s", "b"}
    assert "\x1b" not in text
    assert "</title><script>: attention" in reader.words
    for label in ("</script>", '"quoted"', "a&b", "\\x1b[31m", "<img␣src=x␣on…"):
        assert any(label in row for row in reader.rows), label
    assert "</code><script>" in reader.code[-3]


def test_the_size_of_a_page_is_bounded() -> None:
    n = 512
    seen = seen_of(n, layers=4)
    words = TokenLabels(tuple(f"t{number}" for number in range(n)))
    relevance = (TokenRelevance("long", words, torch.rand(n), "1"),)
    text = render_report(reported(seen, list(words.labels), relevance=relevance))
    assert len(text) < 600_000  # 24 maps of 64 x 64 and one of 128 x 128


def test_many_heads_have_smaller_maps() -> None:
    report = reported(seen_of(7), list("abcdefg"))
    many = replace(report, table=type(report.table)(report.table.heads * 400))
    assert many.small_cells == 14
    assert many.small_cells**2 * len(many.table) <= 1 << 20


def test_cells_of_a_pooled_map_have_equally_many_positions() -> None:
    record = seen_of(43)["attention"]
    assert map_cells(record, 32) == (22, 22)
    assert map_cells(record, 43) == (43, 43)
    assert map_cells(record, 128) == (43, 43)
    weights = record.weights()[0, 4]
    cell = torch.arange(43) * 22 // 43
    assert cell.bincount().tolist().count(2) == 21
    truth = torch.stack([weights[cell == row].mean(0) for row in range(22)])
    truth = torch.stack([truth[:, cell == column].sum(1) for column in range(22)], 1)
    torch.testing.assert_close(head_map(record, 4, 32).values, truth)


def test_several_sequences_are_averaged() -> None:
    seen = seen_of(5, b=3)
    record = seen["attention"]
    torch.testing.assert_close(head_map(record, 1, 128).values, record.weights()[:, 1].mean(0))
    assert "The mean over 3 sequences." in Reader(render_report(reported(seen, list("abcde")))).words


def test_heads_are_sorted_by_a_column() -> None:
    seen = seen_of()
    table = reported(seen, list("abcdefg")).table
    spreads = [head.spread for head in rank_heads(table, "spread")]
    assert spreads == sorted(spreads)
    far = [head.distance for head in rank_heads(table, "distance")]
    assert far == sorted(far, reverse=True)
    assert rank_heads(table, "layer") is table
    with pytest.raises(ConfigError, match="no column 'sharp' to sort by; choose from layer, head"):
        rank_heads(table, "sharp")


def test_choose_head() -> None:
    seen = seen_of()
    table = reported(seen, list("abcdefg")).table
    assert choose_head(seen, table).spread == min(head.spread for head in table)
    assert (choose_head(seen, table, "1", 3).layer, choose_head(seen, table, "1", 3).head) == ("attention:2", 3)
    assert choose_head(seen, table, "attention:2").layer == "attention:2"
    assert choose_head(seen, table, head=5).head == 5
    with pytest.raises(
        UnknownNameError, match=r"there is no record of layer '2'; give a number from 0 to 1 or a name: attention, "
    ):
        choose_head(seen, table, "2")
    with pytest.raises(UnknownNameError, match=r"attention:2 has no head 6; there are heads 0 to 5"):
        choose_head(seen, table, "1", 6)
    with pytest.raises(UnknownNameError, match=r"no layer has a head -1; there are heads 0 to 5"):
        choose_head(seen, table, head=-1)


def test_recorded_rows_have_their_labels() -> None:
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    with watch(rows=[6, 2]) as seen:
        attend(q, k, k, mask=causal())
    report = reported(seen, list("abcdefghi"))
    assert report.chosen_labels() == (["g", "c"], list("abcdefghi"))
    assert report.chosen_map().values.shape == (2, 9)
    Reader(render_report(report))


def test_induction_uses_the_tokens_of_the_layer() -> None:
    seen = seen_of(7, layers=2)
    source, other = (
        TokenLabels(tuple("abcabca"), torch.tensor([[1, 2, 3, 1, 2, 3, 1]]), "source"),
        TokenLabels(tuple("hijklmn")),
    )
    sides = {"attention": Sides(source, source), "attention:2": Sides(other, source)}
    table = build_labelled_table(seen, sides)
    assert [head.induction is None for head in table] == [False] * 6 + [True] * 6
    space = {"seen": seen, "source": source.ids}
    exec(table_code(seen, sides), space)
    assert space["table"] == table
    assert table_code(seen, dict.fromkeys(seen, Sides(source, source))) == "table = seen.table(source)"


def test_a_long_relevance_is_summed_in_cells() -> None:
    values = torch.rand(11)
    words = TokenLabels(tuple("abcdefghijk"))
    labels, sums = relevance_cells(TokenRelevance("r", words, values, "1"), most=4)
    assert labels == ["0-2", "3-5", "6-8", "9-10"]
    torch.testing.assert_close(
        sums, torch.stack([values[:3].sum(), values[3:6].sum(), values[6:9].sum(), values[9:].sum()])
    )
    labels, same = relevance_cells(TokenRelevance("r", words, values, "1"), most=11)
    assert (labels, torch.equal(same, values)) == (list("abcdefghijk"), True)


def test_labels_show_whitespace_and_escape_control_characters() -> None:
    assert shorten(" a\n\t") == "␣a↵⇥"
    assert shorten("\x1b]0;x\x07") == "\\x1b]0;x\\x07"
    assert shorten("a" * 20) == "a" * 13 + "…"
    assert escape_control_characters("a b\u202e") == "a b\\u202e"


def test_the_colours_grow_brighter_on_a_square_root_scale() -> None:
    norm = root_norm(4.0)
    assert [round(float(norm(value)), 3) for value in (0.0, 0.25, 1.0, 4.0)] == [0.0, 0.25, 0.5, 1.0]
    assert float(root_norm(0.0)(0.0)) == 0.0
    grey = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue, _ in COLORMAP(range(256))]
    assert all(a <= b + 0.006 for a, b in pairwise(grey)), "brightness must grow, for print"


def test_a_map_has_axes_in_positions_a_colour_bar_and_grey_hidden_pairs() -> None:
    report = reported(seen_of(301), [f"t{number}" for number in range(301)])
    figure = head_figure(report)
    ax, bar = figure.axes
    (image,) = ax.images
    values = report.chosen_map()
    assert values.values.shape == (101, 101)
    assert np.array_equal(image.get_array().filled(-1.0), values.values.masked_fill(values.hidden, -1.0).numpy())
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 300.5), (300.5, -0.5))
    assert max(tick for tick in ax.get_xticks() if tick < 301) >= 250
    assert bar.get_ylabel().startswith("weight, sum over keys")
    hidden = values.hidden.numpy()
    assert hidden[0, 1:].all()
    assert not hidden[100].any()
    colours = image.to_rgba(image.get_array())
    assert (colours[hidden][:, :3] == np.array(to_rgb(HIDDEN_COLOUR))).all()
    assert np.abs(colours[~hidden][:, :3] - np.array(to_rgb(HIDDEN_COLOUR))).max(1).min() > 0.05


def test_a_visible_weight_of_zero_differs_from_a_hidden_pair() -> None:
    q = torch.tensor([[[[0.0], [300.0], [0.0]]]])
    with watch() as seen:
        attend(q, torch.tensor([[[[-1.0], [1.0], [0.0]]]]), torch.ones(1, 1, 3, 2), mask=causal(), beta=1.0)
    drawn = reported(seen, list("abc")).chosen_map()
    assert drawn.values[1].tolist() == [0.0, 1.0, 0.0]
    assert drawn.hidden[1].tolist() == [False, False, True]


def test_queries_of_a_cache_are_at_their_positions() -> None:
    with watch() as seen:
        attend(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8), mask=causal())
    report = reported(seen, [f"t{number}" for number in range(90)])
    assert head_figure(report).axes[0].get_ylim() == (89.5, 86.5)


def test_small_maps_are_those_of_every_head() -> None:
    report = reported(seen_of(5), list("abcde"))
    (sheet,) = layer_figure(report, "attention", 32).axes[0].images
    maps = report.small_maps("attention", 32)
    assert sheet.get_array().shape == (5, 6 * 7 - 2, 4)
    third = maps[2]
    colours = COLORMAP(root_norm(third.top)(third.values.numpy()))
    shown = sheet.get_array()[:, 14:19]
    assert np.allclose(shown[~third.hidden.numpy()], colours[~third.hidden.numpy()])
    assert [each.get_text() for each in layer_figure(report, "attention", 32).axes[0].get_xticklabels()] == list(
        "012345"
    )


def test_an_image_is_read_upright_resized_and_scaled(tmp_path: Path) -> None:
    image = Image.new("RGB", (10, 6), (10, 20, 30))
    image.putpixel((9, 0), (255, 0, 0))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter, clockwise
    image.save(tmp_path / "turned.png", exif=turned)
    upright = read_image(tmp_path / "turned.png", 60, resample=Image.Resampling.NEAREST)
    assert upright.shape == (60, 60, 3)
    assert upright[59, 59].tolist() == [255, 0, 0]
    assert upright[0, 0].tolist() == [10, 20, 30]
    scaled = normalise_pixels(upright, (0.0, 0.5, 0.5), (1.0, 0.5, 0.25))
    assert scaled.shape == (1, 3, 60, 60)
    torch.testing.assert_close(scaled[0, :, 0, 0], torch.tensor([10 / 255, 20 / 127.5 - 1, (30 / 255 - 0.5) * 4]))
    assert read_image(tmp_path / "turned.png", 7, channels=1).shape == (7, 7, 1)


def test_errors_of_read_image(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.png cannot be read: No such file or directory"):
        read_image(tmp_path / "none.png", 8)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(
        ConfigError, match=r"text\.png cannot be read as an image: its 8 bytes are truncated or of an unknown"
    ):
        read_image(tmp_path / "text.png", 8)
    Image.effect_noise((64, 64), 50).save(tmp_path / "half.png")
    whole = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"half\.png cannot be read as an image: "):
        read_image(tmp_path / "half.png", 8)
    with pytest.raises(ConfigError, match=r"1 channel \(grey\) or 3 \(red, green, blue\), not 4"):
        read_image(tmp_path / "half.png", 8, channels=4)


def test_an_overlay_covers_the_image() -> None:
    image = torch.randint(0, 255, (12, 8, 3), dtype=torch.uint8)
    values = torch.rand(3, 4)
    over = (Overlay("relevance", values, "code"),)
    report = reported(seen_of(), list("abcdefg"), image=image, overlays=over)
    reader = Reader(render_report(report))
    assert len(reader.sources) == 4  # the chosen head, the overlay, two layers
    assert "code" in reader.code
    below, above = overlay_figure(report, over[0]).axes[0].images
    assert below.get_extent() == above.get_extent() == [-0.5, 7.5, 11.5, -0.5]
    assert np.array_equal(above.get_array(), values.numpy())
    assert np.allclose(below.get_array(), image.float().mean(-1).numpy())


def test_the_figure_has_every_part(tmp_path: Path) -> None:
    image = torch.randint(0, 255, (12, 12, 1), dtype=torch.uint8)
    over = (Overlay("a $title_", torch.rand(3, 4), "code"),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_picture(draw_report(reported(seen_of(), [*HOSTILE])), tmp_path / "plain.png")
        save_picture(
            draw_report(reported(seen_of(5), list("a漢c💡e"), image=image, overlays=over)), tmp_path / "over.png"
        )
    with Image.open(tmp_path / "plain.png") as plain, Image.open(tmp_path / "over.png") as laid:
        assert plain.format == laid.format == "PNG"
        assert laid.width > plain.width
        assert len(set(plain.convert("RGB").get_flattened_data())) > 100
    save_picture(draw_report(reported(seen_of(), [*HOSTILE])), tmp_path / "plain.svg")
    text = (tmp_path / "plain.svg").read_text()
    assert "<svg" in text
    assert "<script>" not in text
