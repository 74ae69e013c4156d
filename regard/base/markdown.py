"""Markdown to HTML: CommonMark with tables, LaTeX formulas between $$ as MathML, and indices as subscripts."""

import re
from functools import cache

from markdown_it import MarkdownIt

from regard.base.formulas import mathml, parse_latex
from regard.base.html import Markup, join_html, tag

# an index or a power, and a symbol that has some: one letter, a Greek letter, a number or a closing bracket
_MARK = r"[_^](?:\{[^}]*\}|-?[A-Za-z0-9]+(?:\.\d+)?)"
MARK = re.compile(f"({_MARK})")
SYMBOL = re.compile(
    rf"((?:(?<!\w)(?:[A-Za-z]|alpha|beta|gamma|delta|eps|mu|sigma|\d+)|[)|])(?:{_MARK}(?![A-Za-z0-9]))+)"
)


def markdown_html(markdown: str) -> Markup:
    """Convert Markdown to HTML. A paragraph $$...$$ has formulas in LaTeX; HTML in the text is escaped.

    All headings become <h3>, because the text is part of a page.

    >>> markdown_html("**bold** and `code`")
    Markup('<p><strong>bold</strong> and <code>code</code></p>\\n')
    """
    parts = re.split(r"^\$\$(.+?)\$\$$", markdown.strip(), flags=re.S | re.M)
    return join_html(  # the parts at odd places are formulas
        _formulas(part) if at % 2 else _render(part) for at, part in enumerate(parts)
    )


def typeset_indices(words: str) -> Markup:
    """Convert the indices and powers of a sentence, such as W_q^i, n^2 or p_{i,2k}, to subscripts and superscripts."""
    parts: list[str] = []
    for at, piece in enumerate(SYMBOL.split(words)):
        # the pieces at odd places are symbols with indices
        base, *marks = MARK.split(piece) if at % 2 else [piece]
        parts += [base, *(tag("sub" if mark[0] == "_" else "sup", mark[1:].strip("{}")) for mark in marks if mark)]
    return join_html(parts)


def _formulas(latex: str) -> Markup:
    """Convert formulas beside each other, of which a narrow page puts some on the next line."""
    return tag("div", *(Markup(mathml(parse_latex(each.strip()))) for each in latex.split(r"\quad")), class_="formulas")


def _render(markdown: str) -> Markup:
    parser = markdown_parser()
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
        for child in token.children or []:
            if child.type == "text":
                child.type, child.content = "html_inline", str(typeset_indices(child.content))
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # text is escaped  # nosec B704


@cache
def markdown_parser() -> MarkdownIt:
    """Return the parser of all Markdown in the package: CommonMark with tables and without HTML."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")
