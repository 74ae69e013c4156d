"""Progress bars for loops over heads."""

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def show_progress(items: Sequence[Item], title: str, shown: bool) -> Iterator[Item]:
    """Yield the items; show a progress bar on stderr if `shown` is True and stderr is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, title, console=Console(stderr=True), transient=True)
