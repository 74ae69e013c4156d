"""Pieces of tensors in a folder: a failure to write them is an OSError, as for one file."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.base.errors import CheckpointError
from regard.train import sharded_safetensors
from regard.train.process_group import SINGLE_PROCESS

TENSORS = {"a": torch.arange(15.0).reshape(3, 5), "b": torch.tensor(7)}


def test_a_folder_is_there_when_it_is_whole_and_read_as_it_was_written(tmp_path: Path) -> None:
    digests = sharded_safetensors.write(tmp_path / "state", TENSORS, SINGLE_PROCESS)
    assert sorted(digests) == sorted(f"state/{each.name}" for each in (tmp_path / "state").iterdir())
    read = sharded_safetensors.read(tmp_path / "state", lambda name: None, SINGLE_PROCESS)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_a_full_disk_is_told_as_it_is_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sharded_safetensors.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sharded_safetensors.write(tmp_path / "state", TENSORS, SINGLE_PROCESS)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "state").exists()


def test_a_folder_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    sharded_safetensors.write(tmp_path / "state", TENSORS, SINGLE_PROCESS)
    monkeypatch.setattr(sharded_safetensors.HuggingFaceStorageReader, "read_data", gone)
    with pytest.raises(CheckpointError, match=r"state cannot be read: \[Errno 5\] Input/output error"):
        sharded_safetensors.read(tmp_path / "state", lambda name: None, SINGLE_PROCESS)
