"""A file lock on a folder, so that one process at a time writes to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from regard.base.errors import ConfigError

LOCK_FILE = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the `with` block. Raises ConfigError at once if the lock is already held.

    The operating system releases the lock when the process ends, even if the process is killed.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    # is_singleton and thread_local are off, so that two runs of one process exclude each other too
    lock = FileLock(folder / LOCK_FILE, timeout=0, thread_local=False, is_singleton=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"another process is running in {folder}; wait until it ends, or choose another folder (--folder)"
        ) from None
    try:
        yield
    finally:
        lock.release()
