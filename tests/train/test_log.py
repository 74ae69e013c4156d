"""The log goes on where its run goes on, and never loses what was whole."""

import json
import sys
from pathlib import Path

import pytest

from regard.base.errors import ConfigError
from regard.train.log import Log


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def written(folder: Path, start: int, *added: int) -> None:
    log = Log(folder, start)
    for step in added:
        log.add(step, {"loss": 1 / step})
    log.settle()
    log.close()


def test_lines_after_the_state_that_a_run_goes_on_from_are_dropped(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 5, 10, 15)
    written(tmp_path, 10, 12)
    assert steps(tmp_path) == [1, 5, 10, 12]
    written(tmp_path, 0)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("tail", [b'{"step": 7, "lo', b"\xff\xfe", b"[1]\n", b'{"loss": 1}\n', b"\0" * 9])
def test_a_line_that_was_left_unfinished_is_dropped(tail: bytes, tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 5)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(tail)
    written(tmp_path, 9, 10)
    assert steps(tmp_path) == [1, 5, 10]


def test_a_line_is_on_disk_when_it_is_added(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    log.add(3, {"loss": 0.1})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "loss": 0.1}
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_what_could_not_be_written_is_told_when_it_is_added_and_not_again(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    log._file.close()
    with Path("/dev/full").open("w") as log._file:
        with pytest.raises(OSError, match="No space left"):
            log.add(1, {"loss": 0.5})
        log.close()


def test_tensorboard_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="TensorBoard is not installed: pip install tensorboard, or go on without"):
        Log(tmp_path, 0, tensorboard=True)
    assert not (tmp_path / "log.jsonl").exists()


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, added in ((0, (1, 5, 9)), (5, (6, 7))):  # the second goes on from step 5
        log = Log(tmp_path, start, tensorboard=True)
        for step in added:
            log.add(step, {"loss": step / 16 + start})
        log.close()
    board = events.EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    board.Reload()
    assert [(each.step, each.value) for each in board.Scalars("loss")] == [
        (1, 0.0625), (5, 0.3125), (6, 5.375), (7, 5.4375),
    ]  # fmt: skip
