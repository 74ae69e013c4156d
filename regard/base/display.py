"""Display objects in a notebook: text in a fixed-width font, coloured grids as SVG, an HTML page in a frame."""

from collections.abc import Iterable, Sequence


class TextDisplay:
    """Base class of objects that a notebook shows as `str(self)`, in a fixed-width font and without wrapping."""

    def _repr_html_(self) -> str:
        return show_text(str(self))


def _escape(text: str) -> str:
    from html import escape  # takes as long to import as this package's masks

    return escape(text)


def show_text(text: str) -> str:
    """Return text as an HTML <pre> element. Special characters are escaped."""
    return f"<pre>{_escape(text)}</pre>"


def show_page(page: str, height: int = 480, scripts: bool = False) -> str:
    """Return an HTML <iframe> with a complete page.

    The iframe is sandboxed: the page cannot change the notebook.

    page     the HTML of the page
    height   height of the frame in pixels
    scripts  whether scripts of the page may run and offer downloads; they cannot read the notebook
    """
    style = f"width:100%;height:{height}px;border:0"
    allowed = "allow-scripts allow-downloads" if scripts else ""
    return f'<iframe sandbox="{allowed}" style="{style}" srcdoc="{_escape(page)}"></iframe>'


def show_grids(grids: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Return HTML that shows grids of coloured cells next to each other, each as an SVG with its title.

    grids  pairs of a title and the rows of the grid; each cell is a CSS colour
    """
    figures = []
    for title, colours in grids:
        size = max(4, min(14, 280 // max(1, len(colours), len(colours[0]) if colours else 1)))
        cells = "".join(
            f'<rect x="{x * size}" y="{y * size}" width="{size}" height="{size}" fill="{colour}"/>'
            for y, row in enumerate(colours)
            for x, colour in enumerate(row)
        )
        width, height = size * (len(colours[0]) if colours else 0), size * len(colours)
        svg = (
            f'<svg width="{width}" height="{height}" role="img" aria-label="{_escape(title)}" '
            f'stroke="#8884" stroke-width="0.5">{cells}</svg>'
        )
        figures.append(
            f'<figure style="display:inline-block;margin:4px 12px 4px 0">{svg}'
            f"<figcaption><code>{_escape(title)}</code></figcaption></figure>"
        )
    return "".join(figures)
