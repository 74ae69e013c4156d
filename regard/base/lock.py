"""A folder that one process at a time works in."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from regard.base.errors import ConfigError

FILE = ".lock"


@contextmanager
def only_one_in(folder: Path) -> Iterator[None]:
    """Refuse where another process is in here; one that dies has left, however it died.

    SQLite's locks do that on every system.
    """
    try:
        lock = sqlite3.connect(folder / FILE, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise OSError(f"{folder / FILE} cannot be made: {error}") from None
    with closing(lock):
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise ConfigError(
                    f"another process is at work in {folder}; wait for its end, or choose another folder (--folder)"
                ) from None
            raise OSError(f"{folder / FILE} cannot be locked: {error}") from None
        yield
