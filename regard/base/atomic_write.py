"""Atomic file writes: a file is complete or does not exist."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from regard.base.errors import ConfigError

UNFINISHED = ".unfinished-"  # prefix of temporary files and folders


def write_atomically(path: Path, write: Callable[[Path], object], name: Callable[[Path], str] | None = None) -> Path:
    """Write a file atomically: write a temporary file, force it to disk (fsync), rename it. Returns the final path.

    path   the final path; the temporary file is in the same folder
    write  function that is called with the path of the temporary file and writes that file
    name   function that is called with the path of the written temporary file and returns the final file name, for
           example a name with a checksum; None uses the name in `path`
    """
    handle, temporary = tempfile.mkstemp(suffix=path.suffix, prefix=UNFINISHED, dir=path.parent)
    os.close(handle)
    file = Path(temporary)
    try:
        write(file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
        file.chmod(0o666 & ~_umask())  # a temporary file is readable by its owner only
        final = file.replace(path if name is None else path.with_name(name(file)))
        _sync(path.parent)
        return final
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Write an output file that the user named. If writing fails, a file that already existed is kept.

    Raises ConfigError if the file cannot be written, for example because the disk is full.

    path   the final path; a device or a pipe is written directly
    write  function that is called with a path and writes the file there
    """
    try:
        if path.exists() and not path.is_file():
            write(path)
        else:
            write_atomically(Path(os.path.realpath(path)), write)  # resolve() would raise for a loop of links
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    """Return the umask of the process. os.umask can only read it by setting a new umask, so the old one is restored."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    """Force the directory entries of a folder to disk (fsync), if the operating system supports it."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
