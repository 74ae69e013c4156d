"""States of a run on disk: tensors in safetensors, all else in JSON beside them with the checksums of both.

The JSON is written last and in one step, so a state without it was never finished. Whatever was truncated or altered
since does not have the checksum it should have, and the state before it is used.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.base.atomic_write import write_atomically
from regard.base.errors import CheckpointError
from regard.train.process_group import SINGLE_PROCESS, Processes

FORMAT = "regard-run-1"
NO_SCORE = float("-inf")
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class TrainingState:
    """A run after some steps.

    tensors  weights, what the optimizer and the averaging remember, and states of generators, by name
    facts    the rest, as JSON has it
    score    what the evaluation after this step gave, where there was one
    """

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    score: float | None = None

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors under a name, without it."""
        return {key.removeprefix(f"{name}/"): t for key, t in self.tensors.items() if key.startswith(f"{name}/")}


@dataclass(frozen=True)
class CheckpointFolder:
    """The states in a folder: the last `keep` of them, and the best.

    tell  hears of states that are damaged
    like  the tensor of this run that one of a state, by name, is to lie like: in pieces or whole
    """

    folder: Path
    keep: int = 2
    world: Processes = SINGLE_PROCESS
    tell: Callable[[str], None] = lambda text: None
    like: Callable[[str], Tensor | None] = lambda name: None

    def steps(self) -> list[int]:
        """After which steps there are states, whole or not."""
        return self.world.shared(lambda: [_step(file) for file in _finished(self.folder)])

    def write(self, state: TrainingState) -> None:
        """Add a state. Whatever goes wrong, the states that were there stay whole."""
        place = self.folder / f"step-{state.step:08d}"
        if self.world.sharded:
            from regard.train import sharded_safetensors  # which loads much of torch.distributed

            digests = sharded_safetensors.write(place, state.tensors, self.world)
            self.world.shared(lambda: self._finish(state, digests))
        else:
            self.world.shared(lambda: self._finish(state, _write(place.with_suffix(".safetensors"), state.tensors)))

    def newest(self) -> TrainingState | None:
        """The last state that is whole."""
        files = self.world.shared(lambda: _finished(self.folder)[::-1])
        found = self._first_whole(files, "the one before it is used")
        if files and found is None:
            raise CheckpointError(f"no state in {self.folder} is whole; begin anew in another folder")
        return found

    def best(self) -> TrainingState | None:
        """The whole state with the highest score, the later of equals."""
        return self._first_whole(self.world.shared(lambda: _by_score(self.folder)), "the next best is used")

    def clear(self) -> None:
        """Remove what a killed run left unfinished."""
        self.world.shared(lambda: _clear(self.folder))

    def _first_whole(self, files: Sequence[Path], instead: str) -> TrainingState | None:
        for left, file in zip(reversed(range(len(files))), files, strict=True):
            try:
                return self._read(file)
            except CheckpointError as error:
                self.tell(f"{error}; {instead}" if left else str(error))
        return None

    def _read(self, file: Path) -> TrainingState:
        if self.world.sharded:
            return self._read_by(self.world, file)
        return self.world.shared(lambda: self._read_by(SINGLE_PROCESS, file))  # machines need not share their files

    def _read_by(self, readers: Processes, file: Path) -> TrainingState:
        """One state, whose files these processes check between them."""
        about = readers.gathered(lambda: _checked(file, readers))[0]
        place = file.with_suffix("")
        if place.is_dir():
            from regard.train import sharded_safetensors

            tensors = sharded_safetensors.read(place, self.like, readers)
        else:
            # copied, so that nothing depends on the file any more
            loaded = {name: tensor.clone() for name, tensor in load_file(place.with_suffix(".safetensors")).items()}
            tensors = {name: readers.laid(tensor, self.like(name)) for name, tensor in loaded.items()}
        return TrainingState(about["step"], tensors, about["facts"], about["score"])

    def _finish(self, state: TrainingState, digests: dict[str, str]) -> None:
        about = {
            "format": FORMAT, "step": state.step, "score": state.score, "sha256": digests, "facts": state.facts,
        }  # fmt: skip
        text = json.dumps({"sha256": _digest_of(about), "state": about}) + "\n"
        write_atomically(self.folder / f"step-{state.step:08d}.json", lambda path: path.write_text(text))
        _tidy(self.folder, state.step, self.keep)


def _write(file: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write all tensors as one file; its checksum by its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        write_atomically(file, lambda path: save_file(apart, path))
    except SafetensorError as error:  # a full disk, in its own words
        raise OSError(str(error)) from error
    return {file.name: _digest(file)}


def _checked(file: Path, readers: Processes) -> dict[str, Any]:
    """What the JSON of a state says, if that and this process's share of the files beside it are as written."""
    about = _about(file)
    place, names = file.with_suffix(""), sorted(about["sha256"])
    if place.is_dir() and sorted(f"{place.name}/{each.name}" for each in place.iterdir()) != names:
        raise CheckpointError(f"{place} is damaged: files were added to it or taken away")
    for name in names[readers.rank :: readers.size]:
        part = file.parent / name
        if not part.is_file() or _digest(part) != about["sha256"][name]:
            raise CheckpointError(f"{part} is damaged: it is not what was written")
    return about


def _about(file: Path) -> dict[str, Any]:
    """What the JSON of a state says."""
    try:
        text: dict[str, Any] = json.loads(file.read_text())
        about: dict[str, Any] = text["state"]
        whole = text["sha256"] == _digest_of(about)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if not whole:
        raise CheckpointError(f"{file} is damaged: it is not what was written")
    if about["format"] != FORMAT:
        raise CheckpointError(f"{file} is of the form {about['format']!r}, not {FORMAT!r}")
    return about


def _finished(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("step-*.json") if NAME.fullmatch(file.stem))


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _score(file: Path) -> float:
    try:
        score = _about(file)["score"]
    except CheckpointError:
        return NO_SCORE
    return NO_SCORE if score is None else float(score)


def _by_score(folder: Path) -> list[Path]:
    """States that have a score, the best first and the later of equals."""
    scored = [(score, file) for file in _finished(folder) if (score := _score(file)) > NO_SCORE]
    return [file for _, file in sorted(scored, reverse=True)]


def _tidy(folder: Path, step: int, keep: int) -> None:
    """Leave the last states up to a step and the best; later ones are of a future that was given up as damaged."""
    past = [file for file in _finished(folder) if _step(file) <= step]
    stay = {*past[-keep:], *[file for file in _by_score(folder) if file in past][:1]}
    for file in _finished(folder):
        if file not in stay:
            file.unlink()
    _clear(folder)


def _clear(folder: Path) -> None:
    """Remove what was never finished, and tensors that no JSON speaks of."""
    written = [each for each in folder.glob("step-*") if NAME.fullmatch(each.stem)]
    for each in [*written, *folder.glob(f"{UNFINISHED}*")]:
        if each.name.startswith(UNFINISHED) or not each.with_suffix(".json").is_file():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
