"""Display of objects in a notebook: text in a fixed-width font, a grid as SVG, a page in a frame."""

from collections.abc import Iterable, Sequence


class TextDisplay:
    """An object that a notebook shows as its text, in a fixed-width font and without wrapping."""

    def _repr_html_(self) -> str:
        return show_text(str(self))


def _escape(text: str) -> str:
    from html import escape  # takes as long to import as this package's masks

    return escape(text)


def show_text(text: str) -> str:
    """Text as an HTML element."""
    return f"<pre>{_escape(text)}</pre>"


def show_page(page: str, height: int = 480, scripts: bool = False) -> str:
    """A complete HTML page inside a sandboxed frame, so that neither its style nor its script reaches the notebook.

    scripts  whether the scripts of the page run; they cannot see the notebook, and may offer files to save
    """
    style = f"width:100%;height:{height}px;border:0"
    allowed = "allow-scripts allow-downloads" if scripts else ""
    return f'<iframe sandbox="{allowed}" style="{style}" srcdoc="{_escape(page)}"></iframe>'


def show_grids(grids: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Grids of CSS colours next to each other, each as an SVG with its title. Rows go down, columns to the right."""
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
