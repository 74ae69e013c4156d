"""HTML elements and the page template."""

import re

from regard.base.html import Markup, join_html, render_page, tag, void_tag

HOSTILE = """</title></style><script>alert("&")</script>'"""


def test_text_is_escaped_and_markup_is_kept() -> None:
    assert tag("p", "a < b & c", Markup("<br>")) == "<p>a &lt; b &amp; c<br></p>"
    assert join_html(["<", tag("b", ">")]) == "&lt;<b>&gt;</b>"


def test_attributes_are_escaped_and_left_out_when_they_are_none() -> None:
    assert tag("td", class_="a", http_equiv="b", title=None) == '<td class="a" http-equiv="b"></td>'
    assert void_tag("img", alt='"<') == '<img alt="&#34;&lt;">'


def test_a_page_loads_nothing_and_has_one_style_sheet() -> None:
    page = render_page("Title", tag("h1", "Heading"))
    assert page.startswith("<!DOCTYPE html>\n<html")
    assert "default-src 'none'" in page
    assert page.count("<style>") == 1
    assert "prefers-color-scheme: dark" in page
    assert "<h1>Heading</h1>" in page
    assert re.findall(r"https?://|<script|<link|@import|url\(", page) == []


def test_a_hostile_title_or_text_is_escaped_in_a_page() -> None:
    page = render_page(HOSTILE, HOSTILE)
    assert "<script" not in page
    assert page.count("</title>") == page.count("</style>") == 1
