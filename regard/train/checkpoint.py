"""Checkpoints of a training run: save one, resume from the latest, load the best.

A checkpoint is a safetensors file, or a folder of them, and a JSON file with the SHA-256 checksums of all its files.
The JSON file is written last and atomically, so a checkpoint without a JSON file is unfinished. If a file was truncated
or changed, the checksum of the file does not match, and the previous checkpoint is used.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.base.atomic_write import UNFINISHED, write_atomically
from regard.base.config import to_json
from regard.base.errors import CheckpointError, ConfigError, TrainingError
from regard.base.files import file_digest, read_json
from regard.train import rng_state
from regard.train.plan import TrainingPlan
from regard.train.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from regard.train.loop import Trainer

FORMAT = "regard-checkpoint-2"
CHECKPOINTS = "checkpoints"
PLAN = "plan.json"
RESUMABLE = {
    "steps",
    "evaluate_every",
    "save_every",
    "keep_checkpoints",
    "patience",
    "cuda_graphs",
}  # settings that may change when a run is resumed
THEN_RESUME = ", then --resume continues from the last checkpoint"
NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run after a step.

    tensors   model weights, optimizer state, averaged weights and RNG states, by name
    metadata  everything else, as JSON values
    score     the validation score after this step; None if there was no validation
    """

    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    score: float | None = None

    def section(self, name: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `name/`, by their names without this prefix.

        For example, section("optimizer") is the state dict of the optimizer.
        """
        return {key.removeprefix(f"{name}/"): t for key, t in self.tensors.items() if key.startswith(f"{name}/")}


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in the folder of a run; the latest ones and the best one are kept.

    keep        number of latest checkpoints to keep
    group       the processes of the run, which save and load together
    on_message  called with a message about each damaged checkpoint
    like        with FSDP: function that takes the name of a tensor in a checkpoint and returns a tensor of the model;
                the loaded tensor is sharded in the same way. None loads it unsharded
    """

    folder: Path
    keep: int = 2
    group: ProcessGroup = SINGLE_PROCESS
    on_message: Callable[[str], None] = lambda text: None
    like: Callable[[str], Tensor | None] = lambda name: None

    def steps(self) -> list[int]:
        """Return the step numbers of all finished checkpoints, damaged ones included."""
        return self.group.run_on_main(lambda: [_step(file) for file in _list_finished(self.folder)])

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove old ones. If writing fails, existing checkpoints stay valid."""
        path = self.folder / f"step-{checkpoint.step:08d}"
        if self.group.is_sharded:
            from regard.train import sharded_safetensors  # imports much of torch.distributed

            digests = sharded_safetensors.save_sharded(path, checkpoint.tensors, self.group)
            self.group.run_on_main(lambda: self._finish(checkpoint, digests))
        else:
            file = path.with_suffix(".safetensors")
            self.group.run_on_main(lambda: self._finish(checkpoint, _save_tensors(file, checkpoint.tensors)))

    def load_latest(self) -> Checkpoint | None:
        """Return the latest valid checkpoint; None if there are no checkpoints.

        Raise CheckpointError if all of them are damaged.
        """
        files = self.group.run_on_main(lambda: _list_finished(self.folder)[::-1])
        found = self._load_first_valid(files, "the one before it is used")
        if files and found is None:
            raise CheckpointError(f"all checkpoints in {self.folder} are damaged; start again in another folder")
        return found

    def load_best(self) -> Checkpoint | None:
        """Return the valid checkpoint with the highest validation score, the latest if scores are equal.

        Returns None if no valid checkpoint has a score.
        """
        return self._load_first_valid(self.group.run_on_main(lambda: _by_score(self.folder)), "the next best is used")

    def remove_unfinished(self) -> None:
        """Remove the files of checkpoints that were not finished because a run was killed."""
        self.group.run_on_main(lambda: _remove_unfinished(self.folder))

    def _load_first_valid(self, files: Sequence[Path], otherwise: str) -> Checkpoint | None:
        for remaining, file in zip(reversed(range(len(files))), files, strict=True):
            try:
                return self.load(file)
            except CheckpointError as error:
                self.on_message(f"{error}; {otherwise}" if remaining else str(error))
        return None

    def load(self, file: Path) -> Checkpoint:
        """Load the checkpoint that a JSON file describes. Raises CheckpointError if it is damaged."""
        if self.group.is_sharded:
            return self._load(self.group, file)
        return self.group.run_on_main(lambda: self._load(SINGLE_PROCESS, file))  # other machines may not have the file

    def _load(self, group: ProcessGroup, file: Path) -> Checkpoint:
        about = group.all_gather(lambda: _verify(file, group))[0]
        path = file.with_suffix("")
        if path.is_dir():
            from regard.train import sharded_safetensors

            tensors = sharded_safetensors.load_sharded(path, self.like, group)
        else:
            # cloned, so that the tensors do not depend on the memory-mapped file
            loaded = {name: tensor.clone() for name, tensor in load_file(path.with_suffix(".safetensors")).items()}
            tensors = {name: group.shard_like(tensor, self.like(name)) for name, tensor in loaded.items()}
        return Checkpoint(about["step"], tensors, about["metadata"], about["score"])

    def _finish(self, checkpoint: Checkpoint, digests: dict[str, str]) -> None:
        """Write the JSON file, which makes the checkpoint valid, and remove old checkpoints.

        digests  checksum of each tensor file, by name
        """
        about = {
            "format": FORMAT, "step": checkpoint.step, "score": checkpoint.score, "sha256": digests,
            "metadata": checkpoint.metadata,
        }  # fmt: skip
        text = json.dumps({"sha256": _json_digest(about), "checkpoint": about}) + "\n"
        write_atomically(self.folder / f"step-{checkpoint.step:08d}.json", lambda path: path.write_text(text))
        _remove_old(self.folder, checkpoint.step, self.keep)


def prepare_run_folder(folder: Path, resume: bool) -> None:
    """Remove temporary files of a killed run.

    Raises ConfigError if the folder has checkpoints of a run and `resume` is False.
    """
    for file in folder.glob(f"{UNFINISHED}*"):  # left by a killed run
        file.unlink()
    begun = CheckpointFolder(folder / CHECKPOINTS).steps()
    if begun and not resume:
        raise ConfigError(
            f"{folder} already has a run; resume it with resume=True (--resume), or choose another folder"
        )


def write_plan(folder: Path, plan: TrainingPlan) -> None:
    """Write the training plan of a run to plan.json, for people to read. Resuming uses the plan in the checkpoint."""
    text = json.dumps(to_json(plan), indent=1) + "\n"
    write_atomically(folder / PLAN, lambda path: path.write_text(text))


def _check_plan(folder: Path, saved: dict[str, Any], wanted: dict[str, Any], step: int) -> None:
    """Raise ConfigError if a run cannot be resumed with the plan `wanted`, because it was begun with the plan `saved`.

    The settings in `RESUMABLE` may differ, but `wanted` must have at least the `step` steps that are already done.
    """
    changed = sorted(name for name in {*saved, *wanted} - RESUMABLE if saved.get(name) != wanted.get(name))
    if changed:
        changes = ", ".join(f"{name} was {saved.get(name)!r} and is {wanted.get(name)!r}" for name in changed)
        allowed = ", ".join(sorted(RESUMABLE))
        raise ConfigError(f"the run in {folder} has another plan: {changes}; only {allowed} may change")
    if wanted["steps"] < step:
        raise ConfigError(f"steps={wanted['steps']}, but the run in {folder} has done {step} steps already")


def capture(trainer: "Trainer") -> Checkpoint:
    """Return a checkpoint of the current step, with all that is needed to resume the training run bit for bit."""
    rng_states = trainer.group.all_gather(lambda: rng_state.save_rng_state(trainer.group.device))
    sections: dict[str, dict[str, Tensor]] = {
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "averaging": {} if trainer.averager is None else trainer.averager.state_dict(),
        **{f"rng/{rank}": tensors for rank, (tensors, _) in enumerate(rng_states)},
    }
    metadata = {
        "rng": [values for _, values in rng_states], "losses": trainer.losses, "metrics": trainer.metrics,
        "stale_evaluations": trainer.stale_evaluations, "seconds": trainer.seconds,
        "unreported": [trainer.total.item(), trainer.count.item()], "plan": to_json(trainer.plan),
        "scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
    }  # fmt: skip
    tensors = {f"{section}/{name}": t for section, each in sections.items() for name, t in each.items()}
    return Checkpoint(trainer.step, tensors, metadata, trainer.current_score())


def resume(trainer: "Trainer", checkpoints: CheckpointFolder) -> None:
    """Resume a run from its latest valid checkpoint, if there is one.

    A checkpoint can be resumed on a different number of processes; random numbers then come from new seeds.
    """
    checkpoint = checkpoints.load_latest()
    checkpoints.remove_unfinished()
    if checkpoint is None:
        return
    try:
        trainer.model.load_state_dict(checkpoint.section("model"))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint in {checkpoints.folder} is of another model: {error}") from None
    trainer.optimizer.load_state_dict(checkpoint.section("optimizer"))
    if trainer.averager is not None:
        trainer.averager.load_state_dict(checkpoint.section("averaging"))
    metadata, group = checkpoint.metadata, trainer.group
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(metadata["scaler"])
    _check_plan(checkpoints.folder.parent, metadata["plan"], to_json(trainer.plan), checkpoint.step)
    trainer.step, trainer.seconds = checkpoint.step, metadata["seconds"]
    for name, value in zip(("total", "count"), metadata["unreported"], strict=True):
        getattr(trainer, name).fill_(value)
    trainer.stale_evaluations = metadata["stale_evaluations"]
    trainer.losses = [(step, loss) for step, loss in metadata["losses"]]
    trainer.metrics = [(step, metrics) for step, metrics in metadata["metrics"]]
    saved = metadata["rng"]
    if len(saved) == group.world_size:
        rng_state.restore_rng_state(checkpoint.section(f"rng/{group.rank}"), saved[group.rank], group.device)
        return
    rng_state.seed_generators(trainer.plan.seed, group.rank, trainer.step)
    checkpoints.on_message(
        f"the checkpoint of step {trainer.step} was saved by {len(saved)} processes and is resumed on "
        f"{group.world_size}: random numbers, as in dropout, come from new seeds"
    )


@contextmanager
def convert_os_errors(folder: Path, what: str = "the run", fix: str = " or choose another --folder") -> Iterator[None]:
    """Context manager: raise TrainingError instead of OSError if a file cannot be written, such as on a full disk.

    what  what was to be saved, for the error message
    fix   further advice, for the error message
    """
    try:
        yield
    except OSError as error:
        why = "there is a file of that name" if isinstance(error, FileExistsError) else error
        raise TrainingError(f"{what} cannot be saved in {folder}: {why}; fix this{fix}") from error


def _save_tensors(file: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write all tensors to one file, and return {file name: checksum}."""
    file.parent.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        write_atomically(file, lambda path: save_file(copies, path))
    except SafetensorError as error:  # raised when the disk is full
        raise OSError(str(error)) from error
    return {file.name: file_digest(file)}


def _verify(file: Path, group: ProcessGroup) -> dict[str, Any]:
    """Verify a checkpoint and return the content of its JSON file. Raises CheckpointError if it is damaged.

    The files are divided among the processes; each process verifies the checksums of its own files.
    """
    about = _read_json(file)
    path, names = file.with_suffix(""), sorted(about["sha256"])
    if path.is_dir() and sorted(f"{path.name}/{each.name}" for each in path.iterdir()) != names:
        raise CheckpointError(f"{path} is damaged: files were added or removed")
    for name in names[group.rank :: group.world_size]:
        part = file.parent / name
        if not part.is_file() or file_digest(part) != about["sha256"][name]:
            raise CheckpointError(f"{part} is damaged: its checksum does not match")
    return about


def _read_json(file: Path) -> dict[str, Any]:
    found = read_json(file, CheckpointError, "sha256", "checkpoint")
    about: Any = found["checkpoint"]
    if not isinstance(about, dict) or found["sha256"] != _json_digest(about):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{file} has the format {about.get('format')!r}, not {FORMAT!r}")
    return about


def _list_finished(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("step-*.json") if NAME.fullmatch(file.stem))


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _by_score(folder: Path) -> list[Path]:
    """Return the JSON files of checkpoints with a validation score, best first; if scores are equal, latest first."""
    scored: list[tuple[float, Path]] = []
    for file in _list_finished(folder):
        try:
            score = _read_json(file)["score"]
        except CheckpointError:
            continue
        if score is not None:
            scored.append((score, file))
    return [file for _, file in sorted(scored, reverse=True)]


def _remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove old checkpoints: of those up to `step`, the `keep` latest ones and the one with the best score are kept.

    Checkpoints of later steps are removed too: they were damaged, and the run was resumed from an earlier checkpoint.
    """
    past = [file for file in _list_finished(folder) if _step(file) <= step]
    kept = {*past[-keep:], *[file for file in _by_score(folder) if file in past][:1]}
    for file in _list_finished(folder):
        if file not in kept:
            file.unlink()
    _remove_unfinished(folder)


def _remove_unfinished(folder: Path) -> None:
    """Remove temporary files, and tensor files that have no JSON file."""
    written = [each for each in folder.glob("step-*") if NAME.fullmatch(each.stem)]
    for each in [*written, *folder.glob(f"{UNFINISHED}*")]:
        if each.name.startswith(UNFINISHED) or not each.with_suffix(".json").is_file():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def _json_digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
