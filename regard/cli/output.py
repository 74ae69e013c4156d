"""Output of commands: results as text, JSON, files and pictures; progress on stderr."""

import json
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".svg", ".pdf")


def show(*things: RenderableType) -> None:
    """Print objects on stdout with rich, at the width of the terminal, or at 80 columns without a terminal."""
    console = Console(highlight=False)
    for thing in things:
        console.print(thing)


def show_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def write_text(text: str) -> None:
    """Write a text to stdout and flush it, without a line break at its end."""
    print(text, end="", flush=True)


def print_message(words: str) -> None:
    """Print a message about progress on stderr."""
    print(words, file=sys.stderr)


def check_folder(path: Path | None) -> None:
    """Check that the folder of an output file exists, else raise ConfigError. Called before anything is computed."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def check_picture(path: Path | None) -> None:
    """Check the suffix and the folder of a picture file, else raise ConfigError."""
    if path is not None and path.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(f"--picture {path} has no known picture format; end it in {', '.join(PICTURE_FORMATS)}")
    check_folder(path)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
PictureOption = Annotated[
    Path | None, typer.Option("--picture", metavar="<path>", help="Write a picture: .png, .svg or .pdf")
]  # a command calls check_picture first and save_picture at its end


def save_picture(figure: "Figure", path: Path) -> None:
    """Save a matplotlib figure in the format of the file's suffix.

    Characters that matplotlib's font lacks, such as Chinese ones, are drawn in another installed font. Without
    such a font they are drawn as boxes, and a message says so. In SVG files text stays text, so the viewer
    chooses the font.
    """
    import matplotlib

    text = "".join(each.get_text() for each in figure.findobj(matplotlib.text.Text))
    missing = set(text) - _characters(matplotlib.font_manager.findfont("DejaVu Sans")) - {"\n"}
    if missing and path.suffix != ".svg":
        found = find_font(missing)
        if found is None:
            shown = "".join(sorted(missing)[:9])
            print_message(
                f"no installed font has {shown}: these are drawn as boxes; install Noto Sans CJK, or use .svg"
            )
        else:
            for each in figure.findobj(matplotlib.text.Text):
                each.set_fontfamily(["DejaVu Sans", found])
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        write_file(path, figure.savefig)


def find_font(characters: set[str]) -> str | None:
    """Return the name of an installed font that has all these characters; None if there is none."""
    from matplotlib import font_manager

    # this font draws every character as a box
    fonts = [font for font in font_manager.fontManager.ttflist if "Last Resort" not in font.name]
    wide = sorted(fonts, key=lambda font: "CJK" not in font.name)
    return next((font.name for font in wide if characters <= _characters(font.fname)), None)


@cache
def _characters(path: str) -> frozenset[str]:
    """Return the set of characters for which a font file has glyphs."""
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(path).get_charmap()))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file with the function `write`, and print its name and size on stderr.

    write  function that writes to a path
    """
    write_output(path, write)
    print_message(f"wrote {path}, {path.stat().st_size:,} bytes")
