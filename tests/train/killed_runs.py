"""Runs in a child process that kills itself with SIGKILL at a chosen moment."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.train import checkpoint, log
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.loop import fit
from regard.train.optimizers import AdamW, Muon
from regard.train.task import Loss
from tests.train.subprocesses import start
from tests.train.tiny import Points, Tiny, plan

PLANS = {
    "adamw": plan(gradient_accumulation_steps=2, averaging=ExponentialAverage(decay=0.8), save_every=3),
    "muon": plan(
        gradient_accumulation_steps=3,
        averaging=LastKAverage(count=2, every=3),
        save_every=3,
        optimizer=Muon(adamw=AdamW(lr=0.02)),
    ),
}
DROPOUT = 0.2


def model() -> Tiny:
    return Tiny(dropout=DROPOUT)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(count: int, act: Callable[..., Any], *, dying: Callable[..., Any] = lambda *args: die()) -> Callable[..., Any]:
    """Return a function that calls `act`, and `dying` at its `count`-th call."""
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (dying if calls[0] == count else act)(*args, **kwargs)

    return counted


def half_of_tensors(tensors: Any, path: Path) -> None:
    original_save(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    die()


def half_of_a_line(self: log.MetricsLog, step: int, metrics: dict[str, float]) -> None:
    self._file.write('{"step": 1, "lo')
    self._file.flush()
    die()


def half_of_json(path: Path, write: Callable[[Path], object]) -> Path:
    if path.suffix != ".json":
        return original_write(path, write)

    def half(file: Path) -> None:
        write(file)
        os.truncate(file, file.stat().st_size // 2)
        die()

    return original_write(path, half)


original_save, original_write = checkpoint.save_file, checkpoint.write_atomically

# where a child dies, and at which call
INSTANTS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "a batch": (Points, "batch", lambda *args: die(), 8),
    "a first loss": (Points, "loss", lambda *args: die(), 1),
    "a loss": (Points, "loss", lambda *args: die(), 17),
    "a validation": (Points, "evaluate", lambda *args: die(), 2),
    "half of the first tensors": (checkpoint, "save_file", half_of_tensors, 1),
    "half of the tensors": (checkpoint, "save_file", half_of_tensors, 3),
    "between the files of a checkpoint": (checkpoint.CheckpointFolder, "_finish", lambda *args: die(), 2),
    "half of the JSON": (checkpoint, "write_atomically", half_of_json, 7),
    "before old checkpoints are removed": (checkpoint, "_remove_old", lambda *args: die(), 3),
    "while old checkpoints are removed": (checkpoint, "_remove_unfinished", lambda *args: die(), 4),
    "half of a line": (log.MetricsLog, "add", half_of_a_line, 5),
    "half of the last line": (log.MetricsLog, "add", half_of_a_line, 7),
}


class Slow(Points):
    """The task, slowed down so that it can be killed from outside."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        time.sleep(0.01)
        return super().loss(model, batch)


def run(folder: Path, name: str, instant: str | None, resume: bool) -> None:
    """Train in the child process."""
    torch.set_num_threads(1)
    if instant is not None:
        owner, attribute, dying, count = INSTANTS[instant]
        setattr(owner, attribute, at(count, getattr(owner, attribute), dying=dying))
    fit(model(), Slow() if instant is None else Points(), PLANS[name], folder=folder, resume=resume)


def run_killed(folder: Path, name: str, instant: str, resume: bool = False) -> None:
    """Start a run that kills itself at that moment, and wait for its end."""
    process = start(run, folder, name, instant, resume)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, f"the child ended with {process.exitcode}"
