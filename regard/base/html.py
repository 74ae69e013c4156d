"""HTML: escaped elements, and the one page template that every HTML page of the package uses."""

from collections.abc import Iterable
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

__all__ = ["Markup", "join_html", "render_page", "tag", "void_tag"]

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
    autoescape=jinja2.select_autoescape(("html",)),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def render_page(title: str, *body: str) -> str:
    """Return a complete HTML page that works offline: no script, no remote file, light and dark colours.

    title  the text of the browser tab
    body   the contents of <main>; a `Markup` is inserted as HTML, any other text is escaped

    >>> render_page("Weights", tag("h1", "a < b"))[:15]
    '<!DOCTYPE html>'
    """
    return _TEMPLATES.get_template("page.html").render(title=title, body=join_html(body)) + "\n"


def tag(name: str, /, *inside: str, **attributes: str | None) -> Markup:
    """Return an HTML element. Text that is not a `Markup` is escaped.

    name        name of the element, such as "p"
    inside      contents of the element
    attributes  attributes by name: `class_` is written as class, `http_equiv` as http-equiv; an attribute that is None
                is left out

    >>> tag("p", "a < b", class_="note")
    Markup('<p class="note">a &lt; b</p>')
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{join_html(inside)}</{name}>")  # attributes and children are escaped  # nosec B704


def void_tag(name: str, /, **attributes: str | None) -> Markup:
    """Return an HTML element without contents and without an end tag, such as <img>."""
    return tag(name, **attributes).removesuffix(f"</{name}>")


def join_html(parts: Iterable[str]) -> Markup:
    """Concatenate strings of HTML. A string that is not a `Markup` is escaped."""
    return Markup("").join(parts)
