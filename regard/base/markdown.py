"""Convert Markdown to HTML: CommonMark with tables, LaTeX formulas between $$, and symbols such as W_q in sentences."""

import re
from functools import cache

from markdown_it import MarkdownIt

from regard.base.formulas import mathml, parse_latex
from regard.base.html import Markup, join_html, tag

GREEK = dict(
    zip(["alpha", "beta", "gamma", "delta", "epsilon", "eps", "mu", "sigma", "Omega"], "αβγδεεμσΩ", strict=True)
)
_GREEK = re.compile(rf"\b(?:{'|'.join(GREEK)})(?=\b|_)")
# an index or a power, and a symbol that has some: one letter, a sum, a covariance, a number or a closing bracket
_MARK = r"[_^](?:\{[^}]*\}|-?[A-Za-z0-9]+(?:\.\d+)?)"
MARK = re.compile(f"({_MARK})")
SYMBOL = re.compile(rf"((?:(?<!\w)(?:[^\W\d_]|sum|Cov|\d+)|[)|])(?:{_MARK}(?![A-Za-z0-9]))+)")


def markdown_html(markdown: str) -> Markup:
    """Convert Markdown to HTML. A paragraph between $$ and $$ consists of LaTeX formulas.

    HTML in the text is escaped. All headings become <h3>, because the text is part of a larger page.

    >>> markdown_html("**bold** and `code`")
    Markup('<p><strong>bold</strong> and <code>code</code></p>\\n')
    """
    parts = re.split(r"^\$\$(.+?)\$\$$", markdown.strip(), flags=re.S | re.M)
    return join_html(  # the parts at odd places are formulas
        _formulas(part) if at % 2 else _render(part) for at, part in enumerate(parts)
    )


def typeset_symbols(words: str) -> Markup:
    """Convert symbols in a sentence to HTML: names of Greek letters, and indices and powers such as W_q^i or n^2."""
    parts: list[str] = []
    for at, piece in enumerate(SYMBOL.split(_GREEK.sub(lambda name: GREEK[name[0]], words))):
        # the pieces at odd places are symbols with indices
        base, *marks = MARK.split(piece) if at % 2 else [piece]
        parts += [base, *(tag("sub" if mark[0] == "_" else "sup", mark[1:].strip("{}")) for mark in marks if mark)]
    return join_html(parts)


def _formulas(latex: str) -> Markup:
    r"""Convert LaTeX formulas separated by \quad to MathML, side by side (one below the other on a narrow page)."""
    return tag("div", *(Markup(mathml(parse_latex(each.strip()))) for each in latex.split(r"\quad")), class_="formulas")


def _render(markdown: str) -> Markup:
    parser = markdown_parser()
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
        for child in token.children or []:
            if child.type == "text":
                child.type, child.content = "html_inline", str(typeset_symbols(child.content))
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # text is escaped  # nosec B704


@cache
def markdown_parser() -> MarkdownIt:
    """Return the parser of all Markdown in the package: CommonMark with tables and without HTML."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")
