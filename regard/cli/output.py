"""Where results go: text and JSON on stdout, words about the work on stderr."""

import json
import sys

from rich.console import Console, RenderableType


def show(*things: RenderableType) -> None:
    """Print on stdout, at the width of the terminal or 80 columns where there is none."""
    console = Console(highlight=False)
    for thing in things:
        console.print(thing)


def show_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def tell(words: str) -> None:
    """Say something about the work that is not its result."""
    print(words, file=sys.stderr)
