"""States of a run on disk: tensors in safetensors, all else in JSON beside them with the checksum of the tensors.

The JSON is written last and in one step, so a state without it was never finished. Whatever was truncated or altered
since does not have the checksum it should have, and the state before it is used.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.base.atomic import write_atomically
from regard.base.errors import CheckpointError

FORMAT = "regard-run-1"


@dataclass(frozen=True)
class State:
    """A run after some steps.

    tensors  weights, what the optimiser and the averaging remember, and states of generators, by name
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


def write(folder: Path, state: State, keep: int) -> Path:
    """Add a state; of the older ones only the last `keep` stay, and the best."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors.items()}
    file = folder / f"step-{state.step:08d}.safetensors"
    write_atomically(file, lambda path: save_file(tensors, path))
    about = {
        "format": FORMAT, "step": state.step, "score": state.score, "sha256": _digest(file), "facts": state.facts,
    }  # fmt: skip
    text = json.dumps(about) + "\n"
    write_atomically(file.with_suffix(".json"), lambda path: path.write_text(text))
    _tidy(folder, keep)
    return file


def newest(folder: Path, tell: Callable[[str], None]) -> State | None:
    """The last state that is whole; `tell` hears of those that are not."""
    for file in reversed(_finished(folder)):
        try:
            return read(file)
        except CheckpointError as error:
            tell(f"{error}; the one before it is used")
    return None


def best(folder: Path, tell: Callable[[str], None]) -> State | None:
    """The whole state with the highest score, the later of equals."""
    for file in sorted(_finished(folder), key=lambda each: (_score(each), each.name), reverse=True):
        if _score(file) == float("-inf"):
            return None
        try:
            return read(file)
        except CheckpointError as error:
            tell(f"{error}; the next best is used")
    return None


def read(file: Path) -> State:
    """One state, checked; `file` is its JSON."""
    try:
        about = json.loads(file.read_text())
        if about["format"] != FORMAT:
            raise CheckpointError(f"{file} is of the form {about['format']!r}, not {FORMAT!r}")
        tensors_file = file.with_suffix(".safetensors")
        if not tensors_file.is_file() or _digest(tensors_file) != about["sha256"]:
            raise CheckpointError(f"{tensors_file} is damaged: it is not what was written")
        return State(about["step"], load_file(tensors_file), about["facts"], about["score"])
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None


def exists(folder: Path) -> bool:
    return bool(_finished(folder))


def generators() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of torch's, numpy's and Python's own generators, as tensors and as JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, "int64"))
    version, numbers, following = random.getstate()
    return tensors, {"numpy": [kind, position, has_gauss, gauss], "python": [version, list(numbers), following]}


def set_generators(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, position, has_gauss, gauss = facts["numpy"]
    numpy.random.set_state((kind, tensors["numpy"].numpy().astype("uint32"), position, has_gauss, gauss))
    version, numbers, following = facts["python"]
    random.setstate((version, tuple(numbers), following))


def _finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.json"))


def _score(file: Path) -> float:
    try:
        score = json.loads(file.read_text())["score"]
    except (ValueError, KeyError, TypeError, OSError):
        return float("-inf")
    return float("-inf") if score is None else float(score)


def _tidy(folder: Path, keep: int) -> None:
    finished = _finished(folder)
    stay = set(finished[-keep:])
    leading = max(finished, key=lambda each: (_score(each), each.name))
    if _score(leading) > float("-inf"):
        stay.add(leading)
    for file in finished:
        if file not in stay:
            file.unlink()
            file.with_suffix(".safetensors").unlink(missing_ok=True)
    for file in folder.glob("step-*.safetensors"):  # left by a run that was killed between the two files
        if not file.with_suffix(".json").is_file():
            file.unlink()


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
