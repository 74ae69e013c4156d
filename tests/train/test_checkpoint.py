"""A state is read as it was written, or not at all: whatever was cut or altered in it is found."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from regard.base.errors import CheckpointError
from regard.train.checkpoint import FORMAT, CheckpointFolder, TrainingState
from regard.train.process_group import Processes


@dataclass(frozen=True)
class InPieces(Processes):
    """One process that writes as several would."""

    @property
    def sharded(self) -> bool:
        return True


WORLDS = {"file": Processes(), "folder": InPieces()}


def state(step: int, score: float | None = None) -> TrainingState:
    weight = torch.arange(35.0).reshape(5, 7) + step
    tensors = {
        "model/a.weight": weight,
        "model/b.weight": weight.T,  # shares its memory with the first and is not contiguous
        "optimizer/a.weight/step": torch.tensor(float(step)),
        "generators/0/torch": torch.arange(11, dtype=torch.uint8),
    }
    return TrainingState(step, tensors, {"losses": [[1, 0.1], [step, 1 / 3]], "scaler": None}, score)


def same(one: TrainingState | None, other: TrainingState) -> bool:
    assert one is not None
    equal = all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    return (
        equal and one.tensors.keys() == other.tensors.keys() and replace(one, tensors={}) == replace(other, tensors={})
    )


@pytest.fixture(params=WORLDS)
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "states", keep=3, world=WORLDS[request.param])


def tensors_of(keeper: CheckpointFolder, step: int) -> Path:
    """The file that holds the tensors."""
    place = keeper.folder / f"step-{step:08d}"
    return next(place.iterdir()) if place.is_dir() else place.with_suffix(".safetensors")


def test_a_state_is_read_as_it_was_written(keeper: CheckpointFolder) -> None:
    assert keeper.newest() is None
    keeper.write(state(7, score=0.5))
    assert same(keeper.newest(), state(7, score=0.5))
    assert state(7).part("model").keys() == {"a.weight", "b.weight"}


def test_one_process_reads_what_several_wrote_and_the_other_way_round(tmp_path: Path) -> None:
    for wrote, reads in (("file", "folder"), ("folder", "file")):
        CheckpointFolder(tmp_path / wrote, world=WORLDS[wrote]).write(state(3))
        assert same(CheckpointFolder(tmp_path / wrote, world=WORLDS[reads]).newest(), state(3))


def test_files_of_other_names_are_left_alone(keeper: CheckpointFolder) -> None:
    keeper.write(state(7))
    strangers = [keeper.folder / name for name in ("step-abc.json", "step-1.json", "step-notes.txt")]
    for file in strangers:
        file.write_text("mine")
    keeper.clear()
    keeper.write(state(8))
    assert keeper.steps() == [7, 8]
    assert same(keeper.newest(), state(8))
    assert all(file.read_text() == "mine" for file in strangers)


def altered(data: bytes, place: float) -> bytes:
    """One bit changed, some way into a file."""
    index = int(place * (len(data) - 1))
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


@pytest.mark.parametrize("place", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("part", ["tensors", "JSON"])
def test_one_altered_bit_anywhere_is_found_told_and_the_state_before_is_used(
    part: str, place: float, keeper: CheckpointFolder
) -> None:
    heard: list[str] = []
    keeper = replace(keeper, tell=heard.append)
    for step in (4, 9):
        keeper.write(state(step))
    file = tensors_of(keeper, 9) if part == "tensors" else keeper.folder / "step-00000009.json"
    # the very last byte of a JSON file is its end of line, which may be another blank
    cut = file.read_bytes().rstrip(b"\n") if part == "JSON" else file.read_bytes()
    file.write_bytes(altered(cut, place))
    assert same(keeper.newest(), state(4))
    assert len(heard) == 1
    assert heard[0].startswith(f"{file} is damaged: ")
    assert heard[0].endswith("; the one before it is used")


def test_json_without_end_is_damaged_too(keeper: CheckpointFolder) -> None:
    for step in (4, 9):
        keeper.write(state(step))
    (keeper.folder / "step-00000009.json").write_text("[" * 200_000)
    assert same(keeper.newest(), state(4))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.99])
@pytest.mark.parametrize("part", ["tensors", "JSON"])
def test_a_truncated_file_is_found(part: str, share: float, keeper: CheckpointFolder) -> None:
    for step in (4, 9):
        keeper.write(state(step))
    file = tensors_of(keeper, 9) if part == "tensors" else keeper.folder / "step-00000009.json"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    assert same(keeper.newest(), state(4))


def test_tensors_that_are_gone_or_of_another_state_are_found(keeper: CheckpointFolder) -> None:
    for step in (4, 5, 9):
        keeper.write(state(step))
    tensors_of(keeper, 9).unlink()
    shutil.copy(tensors_of(keeper, 4), tensors_of(keeper, 5))
    assert same(keeper.newest(), state(4))


def test_a_file_added_to_a_folder_is_found(tmp_path: Path) -> None:
    keeper = CheckpointFolder(tmp_path, world=WORLDS["folder"])
    keeper.write(state(4))
    (tmp_path / "step-00000004" / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is whole; begin anew"):
        keeper.newest()


def test_a_state_of_another_form_says_so(keeper: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    keeper.write(state(4))
    monkeypatch.setattr("regard.train.checkpoint.FORMAT", "regard-run-7")
    with pytest.raises(CheckpointError):
        replace(keeper, tell=heard.append).newest()
    assert heard == [f"{keeper.folder / 'step-00000004.json'} is of the form {FORMAT!r}, not 'regard-run-7'"]


def test_the_best_is_the_highest_score_and_the_later_of_equals(keeper: CheckpointFolder) -> None:
    assert keeper.best() is None
    for step, score in ((1, 0.25), (2, 0.75), (3, None), (4, 0.75), (5, 0.5), (6, None), (7, None), (8, None)):
        keeper.write(state(step, score))
    assert keeper.steps() == [4, 6, 7, 8], "the last three, and the best"
    assert same(keeper.best(), state(4, 0.75))


def test_what_was_left_unfinished_is_removed(keeper: CheckpointFolder) -> None:
    keeper.write(state(4))
    there = sorted(each.name for each in keeper.folder.iterdir())
    (keeper.folder / "step-00000005.safetensors").write_bytes(b"half")
    (keeper.folder / ".unfinished-x.safetensors").write_bytes(b"half")
    (keeper.folder / ".unfinished-step-00000005").mkdir()
    (keeper.folder / ".unfinished-step-00000005" / "shard").write_bytes(b"half")
    keeper.clear()
    assert sorted(each.name for each in keeper.folder.iterdir()) == there
    assert same(keeper.newest(), state(4))


def test_a_state_is_written_over_a_damaged_one_of_its_step(keeper: CheckpointFolder) -> None:
    keeper.write(state(4))
    tensors_of(keeper, 4).write_bytes(b"")
    keeper.write(state(4))
    assert same(keeper.newest(), state(4))


def test_a_state_holds_no_code(keeper: CheckpointFolder) -> None:
    """Tensors are safetensors and the rest is JSON, so that reading a stranger's state runs nothing."""
    keeper.write(state(4))
    files = [each for each in keeper.folder.rglob("*") if each.is_file()]
    assert {each.suffix for each in files} == {".json", ".safetensors"}
    assert json.loads((keeper.folder / "step-00000004.json").read_text())["state"]["facts"] == state(4).facts
