"""One process at a time holds the lock of a folder, and a killed process does not keep it."""

import subprocess
import sys
from pathlib import Path

import pytest

from regard.base.errors import ConfigError
from regard.base.lock import lock_folder

HOLD = """
import pathlib, sys, time
from regard.base.lock import lock_folder
with lock_folder(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_locked_until_the_lock_is_released(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with lock_folder(tmp_path):
        with pytest.raises(ConfigError, match="another process is running in"), lock_folder(tmp_path):
            pass
        with lock_folder(other):
            pass
    with lock_folder(tmp_path):
        pass


def test_a_killed_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="wait until it ends, or choose another folder"), lock_folder(tmp_path):
            pass
        process.kill()
        process.wait()
        with lock_folder(tmp_path):
            pass


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"), lock_folder(tmp_path / "nowhere"):
        pass
