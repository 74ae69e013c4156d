"""Checkpoints are loaded as they were saved; every truncated or changed file is detected."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from regard.base.errors import CheckpointError
from regard.train.checkpoint import FORMAT, Checkpoint, CheckpointFolder
from regard.train.process_group import ProcessGroup


@dataclass(frozen=True)
class ShardedGroup(ProcessGroup):
    """One process that writes sharded checkpoints."""

    @property
    def is_sharded(self) -> bool:
        return True


GROUPS = {"file": ProcessGroup(), "folder": ShardedGroup()}


def checkpoint(step: int, score: float | None = None) -> Checkpoint:
    weight = torch.arange(35.0).reshape(5, 7) + step
    tensors = {
        "model/a.weight": weight,
        "model/b.weight": weight.T,  # shares its memory with the first and is not contiguous
        "optimizer/a.weight/step": torch.tensor(float(step)),
        "rng/0/torch": torch.arange(11, dtype=torch.uint8),
    }
    return Checkpoint(step, tensors, {"losses": [[1, 0.1], [step, 1 / 3]], "scaler": None}, score)


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    assert one is not None
    equal = all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    return (
        equal and one.tensors.keys() == other.tensors.keys() and replace(one, tensors={}) == replace(other, tensors={})
    )


@pytest.fixture(params=GROUPS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=3, group=GROUPS[request.param])


def tensors_of(folder: CheckpointFolder, step: int) -> Path:
    """The safetensors file of a checkpoint."""
    path = folder.folder / f"step-{step:08d}"
    return next(path.iterdir()) if path.is_dir() else path.with_suffix(".safetensors")


def test_a_checkpoint_is_loaded_as_it_was_saved(folder: CheckpointFolder) -> None:
    assert folder.load_latest() is None
    folder.save(checkpoint(7, score=0.5))
    assert same(folder.load_latest(), checkpoint(7, score=0.5))
    assert checkpoint(7).section("model").keys() == {"a.weight", "b.weight"}


def test_sharded_and_single_file_checkpoints_can_both_be_loaded_by_either_group(tmp_path: Path) -> None:
    for saved_by, loaded_by in (("file", "folder"), ("folder", "file")):
        CheckpointFolder(tmp_path / saved_by, group=GROUPS[saved_by]).save(checkpoint(3))
        assert same(CheckpointFolder(tmp_path / saved_by, group=GROUPS[loaded_by]).load_latest(), checkpoint(3))


def test_files_with_other_names_are_not_touched(folder: CheckpointFolder) -> None:
    folder.save(checkpoint(7))
    others = [folder.folder / name for name in ("step-abc.json", "step-1.json", "step-notes.txt")]
    for file in others:
        file.write_text("mine")
    folder.remove_unfinished()
    folder.save(checkpoint(8))
    assert folder.steps() == [7, 8]
    assert same(folder.load_latest(), checkpoint(8))
    assert all(file.read_text() == "mine" for file in others)


def flip_bit(data: bytes, position: float) -> bytes:
    """Flip one bit at a relative position."""
    index = int(position * (len(data) - 1))
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


@pytest.mark.parametrize("position", [0.0, 0.02, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("part", ["tensors", "JSON"])
def test_a_flipped_bit_is_detected_and_the_checkpoint_before_is_used(
    part: str, position: float, folder: CheckpointFolder
) -> None:
    messages: list[str] = []
    folder = replace(folder, on_message=messages.append)
    for step in (4, 9):
        folder.save(checkpoint(step))
    file = tensors_of(folder, 9) if part == "tensors" else folder.folder / "step-00000009.json"
    # the line end of a JSON file may be any white space
    content = file.read_bytes().rstrip(b"\n") if part == "JSON" else file.read_bytes()
    file.write_bytes(flip_bit(content, position))
    assert same(folder.load_latest(), checkpoint(4))
    (message,) = messages
    assert re.match(
        rf"{re.escape(str(file))}( is damaged|, line 1, column \d+ is not JSON|.* is not UTF-8 text): ", message
    )
    assert message.endswith("; the one before it is used")


def test_deeply_nested_json_is_damaged(folder: CheckpointFolder) -> None:
    for step in (4, 9):
        folder.save(checkpoint(step))
    (folder.folder / "step-00000009.json").write_text("[" * 200_000)
    assert same(folder.load_latest(), checkpoint(4))


@pytest.mark.parametrize("fraction", [0.0, 0.6, 0.99])
@pytest.mark.parametrize("part", ["tensors", "JSON"])
def test_a_truncated_file_is_detected(part: str, fraction: float, folder: CheckpointFolder) -> None:
    for step in (4, 9):
        folder.save(checkpoint(step))
    file = tensors_of(folder, 9) if part == "tensors" else folder.folder / "step-00000009.json"
    data = file.read_bytes()
    file.write_bytes(data[: int(fraction * len(data))])
    assert same(folder.load_latest(), checkpoint(4))


def test_missing_tensors_and_tensors_of_another_checkpoint_are_detected(folder: CheckpointFolder) -> None:
    for step in (4, 5, 9):
        folder.save(checkpoint(step))
    tensors_of(folder, 9).unlink()
    shutil.copy(tensors_of(folder, 4), tensors_of(folder, 5))
    assert same(folder.load_latest(), checkpoint(4))


def test_a_file_added_to_a_sharded_checkpoint_is_detected(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, group=GROUPS["folder"])
    folder.save(checkpoint(4))
    (tmp_path / "step-00000004" / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="are damaged; start again"):
        folder.load_latest()


def test_another_format_raises_an_error(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    folder.save(checkpoint(4))
    monkeypatch.setattr("regard.train.checkpoint.FORMAT", "regard-run-7")
    with pytest.raises(CheckpointError):
        replace(folder, on_message=messages.append).load_latest()
    assert messages == [f"{folder.folder / 'step-00000004.json'} has the format {FORMAT!r}, not 'regard-run-7'"]


def test_the_best_checkpoint_has_the_highest_score_and_is_the_latest_of_equals(folder: CheckpointFolder) -> None:
    assert folder.load_best() is None
    for step, score in ((1, 0.25), (2, 0.75), (3, None), (4, 0.75), (5, 0.5), (6, None), (7, None), (8, None)):
        folder.save(checkpoint(step, score))
    assert folder.steps() == [4, 6, 7, 8], "the last three, and the best"
    assert same(folder.load_best(), checkpoint(4, 0.75))


def test_unfinished_files_are_removed(folder: CheckpointFolder) -> None:
    folder.save(checkpoint(4))
    before = sorted(each.name for each in folder.folder.iterdir())
    (folder.folder / "step-00000005.safetensors").write_bytes(b"half")
    (folder.folder / ".unfinished-x.safetensors").write_bytes(b"half")
    (folder.folder / ".unfinished-step-00000005").mkdir()
    (folder.folder / ".unfinished-step-00000005" / "shard").write_bytes(b"half")
    folder.remove_unfinished()
    assert sorted(each.name for each in folder.folder.iterdir()) == before
    assert same(folder.load_latest(), checkpoint(4))


def test_a_damaged_checkpoint_is_overwritten(folder: CheckpointFolder) -> None:
    folder.save(checkpoint(4))
    tensors_of(folder, 4).write_bytes(b"")
    folder.save(checkpoint(4))
    assert same(folder.load_latest(), checkpoint(4))


def test_a_checkpoint_has_no_code(folder: CheckpointFolder) -> None:
    """Tensors are safetensors and the rest is JSON, so loading an untrusted checkpoint runs no code."""
    folder.save(checkpoint(4))
    files = [each for each in folder.folder.rglob("*") if each.is_file()]
    assert {each.suffix for each in files} == {".json", ".safetensors"}
    assert (
        json.loads((folder.folder / "step-00000004.json").read_text())["checkpoint"]["metadata"]
        == checkpoint(4).metadata
    )
