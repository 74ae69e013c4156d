"""Markdown as HTML."""

from regard.base.markdown import markdown_html


def test_headings_paragraphs_lists_tables_and_code() -> None:
    text = (
        "## Why\n\nA `code` and **bold** *use* < 3.\n\n1. one\n   more\n2. two\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```\na\n\n b\n```"
    )
    html = markdown_html(text).replace("\n", "")
    assert html.startswith("<h3>Why</h3><p>A <code>code</code> and <strong>bold</strong> <em>use</em> &lt; 3.</p>")
    assert "<ol><li>onemore</li><li>two</li></ol>" in html
    assert "<tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr>" in html
    assert markdown_html(text).endswith("<pre><code>a\n\n b\n</code></pre>\n")


def test_a_paragraph_between_dollars_is_a_formula() -> None:
    html = markdown_html("before\n\n$$\nx_i < y\n$$\n\nafter")
    assert html.startswith("<p>before</p>\n<math")
    assert "<msub><mi>x</mi>" in html
    assert html.endswith("</math><p>after</p>\n")


def test_html_in_the_text_is_shown_as_text() -> None:
    assert markdown_html("<script>alert(1)</script>") == "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>\n"
