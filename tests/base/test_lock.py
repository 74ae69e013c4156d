"""One process at a time works in a folder, and one that was killed has left it."""

import subprocess
import sys
from pathlib import Path

import pytest

from regard.base.errors import ConfigError
from regard.base.lock import only_one_in

HOLDS = """
import pathlib, sys, time
from regard.base.lock import only_one_in
with only_one_in(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_another_s_until_that_one_leaves(tmp_path: Path) -> None:
    with only_one_in(tmp_path):
        with pytest.raises(ConfigError, match="another process is at work in"), only_one_in(tmp_path):
            pass
        with only_one_in(_made(tmp_path / "other")):  # folders are apart
            pass
    with only_one_in(tmp_path):
        pass


def test_a_process_that_was_killed_has_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(ConfigError, match="wait for its end, or choose another folder"), only_one_in(tmp_path):
            pass
        other.kill()
        other.wait()
        with only_one_in(tmp_path):
            pass


def test_a_folder_that_is_not_there_is_an_error_of_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be made"), only_one_in(tmp_path / "nowhere"):
        pass


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
