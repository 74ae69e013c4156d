"""The metrics log is continued when a run is resumed, and loses no complete line."""

import json
import sys
from pathlib import Path

import pytest

from regard.base.errors import ConfigError
from regard.train.log import MetricsLog


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def write(folder: Path, start: int, *added: int) -> None:
    log = MetricsLog(folder, start)
    for step in added:
        log.add(step, {"loss": 1 / step})
    log.sync()
    log.close()


def test_lines_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 5, 10, 15)
    write(tmp_path, 10, 12)
    assert steps(tmp_path) == [1, 5, 10, 12]
    write(tmp_path, 0)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("tail", [b'{"step": 7, "lo', b"\xff\xfe", b"[1]\n", b'{"loss": 1}\n', b"\0" * 9])
def test_an_unfinished_line_is_removed(tail: bytes, tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 5)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(tail)
    write(tmp_path, 9, 10)
    assert steps(tmp_path) == [1, 5, 10]


def test_a_line_is_in_the_file_when_it_is_added(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.add(3, {"loss": 0.1})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "loss": 0.1}
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_failed_write_raises_in_add_and_not_in_close(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log._file.close()
    with Path("/dev/full").open("w") as log._file:
        with pytest.raises(OSError, match="No space left"):
            log.add(1, {"loss": 0.5})
        log.close()


def test_missing_tensorboard_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"--tensorboard needs .*pip install 'regard\[tensorboard\]'"):
        MetricsLog(tmp_path, 0, tensorboard=True)
    assert not (tmp_path / "log.jsonl").exists()


def test_tensorboard_gets_the_same_metrics(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, added in ((0, (1, 5, 9)), (5, (6, 7))):  # the second is resumed from step 5
        log = MetricsLog(tmp_path, start, tensorboard=True)
        for step in added:
            log.add(step, {"loss": step / 16 + start})
        log.close()
    board = events.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    board.Reload()
    assert [(each.step, each.value) for each in board.Scalars("loss")] == [
        (1, 0.0625), (5, 0.3125), (6, 5.375), (7, 5.4375),
    ]  # fmt: skip
