"""Write a worked solution as terminal text, Markdown, LaTeX or HTML."""

from collections.abc import Callable

from regard.base.registry import Registry
from regard.work.writing import html, latex, markdown, text
from regard.work.writing.document import Block

FORMATS: Registry[Callable[[list[Block], int], str]] = Registry("format")
for _module in (text, markdown, latex, html):
    FORMATS.add(_module.__name__.rpartition(".")[2])(_module.write)

SUFFIXES = {".txt": "text", ".md": "markdown", ".tex": "latex", ".html": "html", ".htm": "html"}
