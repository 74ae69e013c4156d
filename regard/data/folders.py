"""What lies in a folder, without what systems leave there."""

from collections.abc import Iterator
from pathlib import Path

from regard.base.errors import DataError

BY_SYSTEMS = {"thumbs.db", "desktop.ini", "__macosx"}


def left_by_system(name: str) -> bool:
    """Whether a file or folder is of no concern to a reader: hidden, or made by a system for itself."""
    return name.startswith(".") or name.lower() in BY_SYSTEMS


def entries(place: Path) -> list[Path]:
    """All that lies in a folder itself, in the order of names."""
    try:
        return sorted(entry for entry in place.iterdir() if not left_by_system(entry.name))
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror}") from None


def files(place: Path) -> list[Path]:
    """The files that lie in a folder itself."""
    return [entry for entry in entries(place) if not entry.is_dir()]


def folders(place: Path) -> list[Path]:
    """The folders that lie in a folder itself."""
    return [entry for entry in entries(place) if entry.is_dir()]


def files_below(place: Path) -> Iterator[Path]:
    """The files of a folder and of all folders in it."""
    for entry in entries(place):
        if entry.is_dir():
            yield from files_below(entry)
        else:
            yield entry
