"""Listing of files and folders, without hidden files and files of the operating system."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from regard.base.errors import DataError

DESCRIPTIONS = {".txt", ".md", ".html", ".json", ".yaml", ".py", ".md5", ".sha1", ".sha256"}  # files about a data set
SYSTEM_FILES = {"thumbs.db", "desktop.ini", "__macosx"}


def check_all_read(read: Collection[Path], files: Iterable[Path], expected: str) -> None:
    """Raise DataError if a folder has files that are not read, such as an unfinished download.

    Descriptions of the data set, such as a README, need not be read.

    read      files that are read as data
    files     all files of the folder
    expected  what files were expected, for the error message
    """
    for file in files:
        about = file.suffix.lower() in DESCRIPTIONS or file.stem.upper() in ("README", "LICENSE")
        if not about and file not in read:
            raise DataError(f"{file} would not be read; expected {expected}; convert it, move it or remove it")


def is_system_file(name: str) -> bool:
    """Return whether a file or folder is hidden or was made by the operating system."""
    return name.startswith(".") or name.lower() in SYSTEM_FILES


def list_entries(folder: Path) -> list[Path]:
    """Return the files and folders directly in a folder, sorted by name, without system files."""
    try:
        return sorted(entry for entry in folder.iterdir() if not is_system_file(entry.name))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from None


def list_files(folder: Path) -> list[Path]:
    """Return the files directly in a folder, sorted by name, without system files."""
    return [entry for entry in list_entries(folder) if not entry.is_dir()]


def list_folders(folder: Path) -> list[Path]:
    """Return the folders directly in a folder, sorted by name, without system folders."""
    return [entry for entry in list_entries(folder) if entry.is_dir()]


def walk_files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and in all its subfolders, without system files.

    above  folders that contain `folder`, as absolute paths without links. A link to one of them would be a cycle, so
           it raises DataError
    """
    own = folder.resolve()
    if own in above:
        raise DataError(f"{folder} is a link to a folder that contains it; remove the link")
    for entry in list_entries(folder):
        if entry.is_dir():
            yield from walk_files(entry, above | {own})
        else:
            yield entry
