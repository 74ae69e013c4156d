"""Plain text: UTF-8 files, packed or not, and where exactly a file is none."""

import gzip
import os
import zlib
from pathlib import Path

from regard.base.errors import DataError
from regard.data.folders import files_below

PACKED = {".bz2", ".xz", ".zst", ".zip", ".z", ".lz4", ".7z"}


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, or of all .txt files of a folder in the order of their names, each ending its last line."""
    place = Path(path)
    if not place.is_dir():
        return text_of(place)
    files = sorted(file for file in files_below(place) if _is_text(file))
    if not files:
        raise DataError(f"{place} has no .txt files; give a file, or a folder that has some")
    texts = [text_of(file) for file in files]
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts[:-1]) + texts[-1]


def _is_text(file: Path) -> bool:
    """Whether a file is one to read; raises where it is text packed in a way that is not."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-2:-1] == [".txt"] and suffixes[-1] in PACKED:
        raise DataError(f"{file} is packed, and only .gz is unpacked; unpack it, or pack it with gzip")
    return suffixes[-1:] == [".txt"] or suffixes[-2:] == [".txt", ".gz"]


def text_of(file: Path) -> str:
    """The text of one file, unpacked where its name ends in .gz; lines end in \\n, however the file ends them."""
    text = decode_text(file, read_bytes(file)).replace("\r\n", "\n")
    if not text:
        raise DataError(f"{file} is empty; expected text in UTF-8")
    return text


def lines_of(file: Path) -> list[str]:
    """The lines of one file. Only \\n ends a line: other separators may stand inside a sentence."""
    lines = text_of(file).split("\n")
    return lines[:-1] if not lines[-1] else lines


def read_bytes(file: Path) -> bytes:
    """The bytes of a file, unpacked where its name ends in .gz."""
    try:
        packed = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    if file.suffix.lower() != ".gz":
        return packed
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged and cannot be unpacked: {error}") from None


def decode_text(file: Path | str, some: bytes) -> str:
    """Bytes of a file as text. A mark of byte order at its start is no part of it."""
    try:
        return some.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = error.object  # without the mark, if there was one
        place = error.start + len(some) - len(found)
        line = found.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}, line {line}, byte {place}: 0x{found[error.start]:02X} is not UTF-8 ({error.reason}); "
            "convert it to UTF-8"
        ) from None
