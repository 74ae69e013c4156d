"""HTML by elements: what is not meant as markup is escaped."""

import html
from collections.abc import Sequence


class Markup(str):
    """HTML that is meant as such; any other text is escaped."""


def tag(name: str, /, *inside: str, **attributes: str | None) -> Markup:
    """An element. A trailing underscore of an attribute is dropped, inner ones become hyphens."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{join_html(inside)}</{name}>")


def void_tag(name: str, /, **attributes: str | None) -> Markup:
    """An element that holds nothing, such as an image."""
    return Markup(str(tag(name, **attributes)).removesuffix(f"</{name}>"))


def join_html(parts: Sequence[str]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))
