"""Files that are there as a whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object], name: Callable[[Path], str] | None = None) -> Path:
    """A file that is there as a whole or not at all: written beside, forced to disk, then renamed.

    name  makes the final name from the written file; None keeps that of the path
    """
    handle, temporary = tempfile.mkstemp(suffix=path.suffix, prefix=".unfinished-", dir=path.parent)
    os.close(handle)
    file = Path(temporary)
    try:
        write(file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
        file.chmod(0o666 & ~_umask())  # a temporary file is its owner's alone
        final = file.replace(path if name is None else path.with_name(name(file)))
        _sync(path.parent)
        return final
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Which rights a new file is not given. Asking is only possible by setting."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    """Force the names in a folder to disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
