"""Markdown to HTML: CommonMark with tables, and LaTeX formulas between $$ as MathML."""

import re
from functools import cache

from markdown_it import MarkdownIt

from regard.base.formulas import mathml, parse_latex
from regard.base.html import Markup, join_html


def markdown_html(markdown: str) -> Markup:
    """Convert Markdown to HTML. A paragraph $$...$$ is a formula in LaTeX; HTML in the text is escaped.

    All headings become <h3>, because the text is part of a page.

    >>> markdown_html("**bold** and `code`")
    Markup('<p><strong>bold</strong> and <code>code</code></p>\\n')
    """
    parts = re.split(r"^\$\$(.+?)\$\$$", markdown.strip(), flags=re.S | re.M)
    return join_html(  # the parts at odd places are formulas
        Markup(mathml(parse_latex(part.strip()))) if at % 2 else _render(part) for at, part in enumerate(parts)
    )


def _render(markdown: str) -> Markup:
    parser = markdown_parser()
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # text is escaped  # nosec B704


@cache
def markdown_parser() -> MarkdownIt:
    """Return the parser of all Markdown in the package: CommonMark with tables and without HTML."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")
