"""Bounded file readers: bytes, text, gzip and JSON.

The readers accept regular files only. They limit the number of bytes, the nesting depth of JSON and the digits of a
number. For a damaged file they raise the exception class passed as `error`, with a message that names the file.
"""

import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from regard.base.errors import DataError, RegardError

MAX_BYTES = 1 << 34  # maximum size of a file
MAX_JSON_BYTES = 1 << 28
BLOCK = 1 << 20  # bytes that are read at once for a checksum
MAX_DEPTH = 100  # lists and objects inside each other, in JSON
MAX_DIGITS = 1000  # characters of a number, in JSON
MAX_EXPANSION = 200, 1 << 24  # a compressed file may become this many times as large, plus these bytes
Error = type[RegardError]


def read_bytes(path: Path, error: Error = DataError, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes. Folders, devices, pipes and larger files raise `error`.

    error  class of the exception that is raised if the file cannot be read
    """
    try:
        status, data = _read_regular(path, most)
    except IsADirectoryError:
        raise error(f"{path} is a folder; pass a file") from None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from None
    except ValueError as failure:  # a null character in the path
        raise error(f"{str(path)!r} cannot be read: {failure}") from None
    except MemoryError:
        raise error(f"{path} does not fit into memory") from None
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is a device or a pipe; pass a file")
    if status.st_size > most or len(data) > most:
        raise error(f"{path} has more than {most:,} bytes, which is too large")
    return data


def _read_regular(path: Path, most: int) -> tuple[os.stat_result, bytes]:
    """Return the status (os.stat_result) of a file, and at most `most` + 1 bytes of its content.

    If `most` + 1 bytes are returned, the file is too large. The content is empty if the file is not a regular file, or
    if the size in its status is more than `most` bytes.
    """
    with _open_without_waiting(path) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return status, b""
        return status, _read_block(opened, most + 1)


def _read_block(opened: IO[bytes], size: int) -> bytes:
    data: bytes | None = opened.read(size)
    if data is None:  # a file of the kernel, such as /proc/kmsg, that would wait for data
        raise OSError("it has no data yet")
    return data


def _open_without_waiting(path: Path) -> IO[bytes]:
    """Open a file for reading in non-blocking mode, because opening a pipe may wait for another process forever."""

    def open_handle(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    return open(path, "rb", opener=open_handle)


def is_file(path: Path, error: Error = DataError) -> bool:
    """Return whether a path is a regular file. Raises `error` if this cannot be checked, as `exists` explains."""
    return stat.S_ISREG(_mode(path, error))


def is_folder(path: Path, error: Error = DataError) -> bool:
    """Return whether a path is a folder. Raises `error` if this cannot be checked, as `exists` explains."""
    return stat.S_ISDIR(_mode(path, error))


def exists(path: Path, error: Error = DataError) -> bool:
    """Return whether a path exists. Raises `error` if the path cannot be checked.

    For example, the name may be too long, or the user may have no permission to open the folder.
    """
    return _mode(path, error) != 0


def _mode(path: Path, error: Error) -> int:
    """Return the mode bits of a path (file type and permissions); 0 if the path does not exist."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character in the path
        return 0
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from None


def read_text(path: Path, error: Error = DataError, most: int = MAX_BYTES) -> str:
    """Read a UTF-8 text file of at most `most` bytes. A byte order mark is removed.

    error  class of the exception that is raised if the file cannot be read
    """
    data = read_bytes(path, error, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{path} is not UTF-8 text: {describe(failure)}") from None


def max_expanded(size: int) -> int:
    """Return the maximum size in bytes of the decompressed data of a file with `size` compressed bytes."""
    return MAX_EXPANSION[0] * size + MAX_EXPANSION[1]


def decompress(where: Path | str, data: bytes) -> bytes:
    """Decompress gzip data. Raises DataError if the data is damaged or expands beyond `max_expanded`.

    where  name of the file in error messages
    """
    most = max_expanded(len(data))
    try:
        with gzip.open(io.BytesIO(data)) as opened:
            found = opened.read(most + 1)
    except (OSError, EOFError, zlib.error) as failure:
        raise DataError(f"{where} is damaged and cannot be decompressed: {describe(failure)}") from None
    if len(found) > most:
        raise DataError(f"{where} decompresses to more than {MAX_EXPANSION[0]} times its size, which is refused")
    return found


def read_json(path: Path, error: Error = DataError, *fields: str, **hooks: Callable[[Any], Any]) -> Any:
    """Read a JSON file.

    error   class of the exception that is raised if the file cannot be read
    fields  keys that the file must contain; if there are any, the file must be a JSON object
    hooks   the keyword arguments `number` and `object_hook`, which are passed to `parse_json`
    """
    found = parse_json(path, read_text(path, error, MAX_JSON_BYTES), error, **hooks)
    if fields and not isinstance(found, dict):
        raise error(f"{path} is damaged: it is not a JSON object")
    for name in fields:
        if name not in found:
            raise error(f"{path} is damaged: {name} is missing")
    return found


def parse_json(
    where: Path | str,
    text: str,
    error: Error = DataError,
    *,
    number: Callable[[str], Any] | None = None,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Parse JSON text.

    where        the source of the text, for error messages
    error        class of the exception that is raised if the text is not valid JSON
    number       function that converts the digits of each number; None converts to int or float
    object_hook  function that converts each JSON object, as in `json.loads`
    """

    def convert(digits: str, kind: Callable[[str], Any]) -> Any:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"a number has {len(digits):,} characters, more than {MAX_DIGITS:,}")
        return (number or kind)(digits)

    try:
        found = json.loads(
            text,
            parse_int=lambda digits: convert(digits, int),
            parse_float=lambda digits: convert(digits, float),
            parse_constant=lambda word: convert(word, float),
            object_hook=object_hook,
        )
        _check_depth(found)
    except json.JSONDecodeError as failure:
        at = f"line {failure.lineno}, column {failure.colno}"
        raise error(f"{where}, {at} is not JSON: {failure.msg}") from None
    except (ValueError, RecursionError) as failure:
        why = f"it is nested more than {MAX_DEPTH} deep" if isinstance(failure, RecursionError) else describe(failure)
        raise error(f"{where} is not valid JSON: {why}") from None
    return found


def file_digest(file: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a regular file in hexadecimal digits. Raises OSError if it is a folder, device or pipe."""
    with _open_without_waiting(file) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError("it is a device or a pipe")
        found = hashlib.new(algorithm)
        while block := _read_block(opened, BLOCK):
            found.update(block)
        return found.hexdigest()


def describe(failure: BaseException) -> str:
    """Return the message of an exception, at most 200 characters, or the name of its class if it has no message."""
    return str(failure)[:200] or type(failure).__name__


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    raise RecursionError
