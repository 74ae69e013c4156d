"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from regard.base.atomic_write import write_output
from regard.base.errors import ConfigError


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_output(path, lambda file: file.write_text("old"))

    def fill_the_disk(file: Path) -> None:
        file.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"out.txt cannot be written: No space left on device"):
        write_output(path, fill_the_disk)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_directly_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    write_output(Path("/dev/null"), lambda file: file.write_text("text"))
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ConfigError, match=r"missing/out.txt cannot be written: No such file or directory"):
        write_output(tmp_path / "missing" / "out.txt", lambda file: file.write_text("text"))
