"""Output of commands: results as text, JSON, files and pictures; progress on stderr."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

from regard.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".svg", ".pdf")


def show(*things: RenderableType) -> None:
    """Print on stdout, at the width of the terminal, or 80 columns without one."""
    console = Console(highlight=False)
    for thing in things:
        console.print(thing)


def show_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def write_text(text: str) -> None:
    """Write to stdout at once, without a line break."""
    print(text, end="", flush=True)


def tell(words: str) -> None:
    """Print a message about progress on stderr."""
    print(words, file=sys.stderr)


def check_folder(path: Path | None) -> None:
    """Check that the folder of an output file exists, before anything is computed."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def check_picture(path: Path | None) -> None:
    """Check the folder and the suffix of a picture file."""
    if path is not None and path.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(f"--picture {path} has no known picture format; end it in {', '.join(PICTURE_FORMATS)}")
    check_folder(path)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
PictureOption = Annotated[
    Path | None, typer.Option("--picture", metavar="PATH", help="Write a picture: .png, .svg or .pdf")
]  # a command calls check_picture first and save_picture at its end


def save_picture(figure: "Figure", path: Path) -> None:
    """Save a matplotlib figure in the format of the suffix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")  # drawn as a box
        write_file(path, lambda: figure.savefig(path))


def write_file(path: Path, write: Callable[[], object]) -> None:
    """Write a file and report its size on stderr."""
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    tell(f"wrote {path}, {path.stat().st_size:,} bytes")
