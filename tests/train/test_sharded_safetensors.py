"""Sharded checkpoints: saved and loaded, and errors of the file system."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.base.errors import CheckpointError
from regard.train import sharded_safetensors
from regard.train.process_group import SINGLE_PROCESS

TENSORS = {"a": torch.arange(15.0).reshape(3, 5), "b": torch.tensor(7)}


def test_tensors_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    digests = sharded_safetensors.save_sharded(tmp_path / "step", TENSORS, SINGLE_PROCESS)
    assert sorted(digests) == sorted(f"step/{each.name}" for each in (tmp_path / "step").iterdir())
    loaded = sharded_safetensors.load_sharded(tmp_path / "step", lambda name: None, SINGLE_PROCESS)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_a_full_disk_raises_an_os_error_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sharded_safetensors.HuggingFaceStorageWriter, "write_data", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sharded_safetensors.save_sharded(tmp_path / "step", TENSORS, SINGLE_PROCESS)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "step").exists()


def test_a_read_error_raises_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    sharded_safetensors.save_sharded(tmp_path / "step", TENSORS, SINGLE_PROCESS)
    monkeypatch.setattr(sharded_safetensors.HuggingFaceStorageReader, "read_data", fail)
    with pytest.raises(CheckpointError, match=r"step cannot be read: \[Errno 5\] Input/output error"):
        sharded_safetensors.load_sharded(tmp_path / "step", lambda name: None, SINGLE_PROCESS)
