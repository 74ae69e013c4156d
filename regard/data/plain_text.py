"""Text files: UTF-8, optionally compressed with gzip, with errors that name the line and byte."""

import os
from pathlib import Path

from regard.base import files
from regard.base.errors import DataError
from regard.data.folders import walk_files

UNSUPPORTED_COMPRESSION = {".bz2", ".xz", ".zst", ".zip", ".z", ".lz4", ".7z"}


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file, or all .txt and .txt.gz files of a folder and its subfolders, in the order of their paths.

    A line break is added after a file that does not end in one, if another file follows.

    >>> _ = Path("a.txt").write_text("words")
    >>> read_text("a.txt")
    'words'
    """
    place = Path(path)
    if not files.is_folder(place):
        return read_text_file(place)
    found = sorted(file for file in walk_files(place) if _is_text_file(file))
    if not found:
        raise DataError(f"{place} has no .txt files; pass a file, or a folder that has some")
    texts = [read_text_file(file) for file in found]
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts[:-1]) + texts[-1]


def _is_text_file(file: Path) -> bool:
    """Return whether a file is named .txt or .txt.gz. Raises DataError for other compressions of .txt."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-2:-1] == [".txt"] and suffixes[-1] in UNSUPPORTED_COMPRESSION:
        raise DataError(f"{file} has an unsupported compression; decompress it, or compress it with gzip")
    return suffixes[-1:] == [".txt"] or suffixes[-2:] == [".txt", ".gz"]


def read_text_file(file: Path) -> str:
    """Read one text file, decompressed if its name ends in .gz; \\r\\n becomes \\n."""
    text = decode_text(file, read_bytes(file)).replace("\r\n", "\n")
    if not text:
        raise DataError(f"{file} is empty; expected text in UTF-8")
    return text


def read_lines(file: Path) -> list[str]:
    """Read the lines of a text file. Only \\n or \\r\\n ends a line: other separators can be part of a sentence."""
    lines = read_text_file(file).split("\n")
    return lines[:-1] if not lines[-1] else lines


def read_bytes(file: Path) -> bytes:
    """Read a file, decompressed if its name ends in .gz."""
    data = files.read_bytes(file)
    return files.decompress(file, data) if file.suffix.lower() == ".gz" else data


def check_utf8(text: str) -> str:
    """Return a text unchanged, or raise DataError if UTF-8 cannot encode it because it has lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}, which UTF-8 "
            "cannot encode; read the text with errors='replace'"
        ) from None
    return text


def decode_text(file: Path | str, data: bytes) -> str:
    """Decode UTF-8 and remove a byte order mark.

    Raise DataError, which names the line and byte, if the data are not UTF-8.

    file  name of the source, for error messages
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = error.object  # without the byte order mark
        byte = error.start + len(data) - len(found)
        line = found.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}, line {line}, byte {byte}: 0x{found[error.start]:02X} is not UTF-8 ({error.reason}); "
            "convert it to UTF-8"
        ) from None
