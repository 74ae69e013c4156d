"""One worker process of the tests of regard.train.distributed, started by torchrun or by `start_workers`.

workers.py train OUT          train every plan with DDP and FSDP; rank 0 writes losses and weights
workers.py train OUT FROM     train two plans; resume the checkpoints of another group, and save them again
workers.py die OUT            rank 1 kills itself once during a run
workers.py threads OUT        rank 0 writes the number of gloo threads during a run and after it
workers.py memory OUT         rank 0 writes the bytes of each part of a run and the peak of a step
"""

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from regard.models.gpt import GPTConfig
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.recipes.language import NextTokenTask
from regard.train.checkpoint import CheckpointFolder
from regard.train.distributed import DDPGroup, join_process_group
from regard.train.loop import Trainer, TrainingResult, fit
from regard.train.plan import TrainingPlan
from regard.train.process_group import ProcessGroup, local_shard
from regard.train.task import Loss
from tests.train.allocator import peak_allocated_bytes
from tests.train.tiny import PLANS, Points, Tiny

AVERAGED = ("accumulated", "last")  # plans with weight averaging
STOP = 9  # the step at which interrupted runs end; their last checkpoint is of step 8


class StoppedError(Exception):
    """Ends a run that another group resumes."""


class Stopping(Points):
    """The task, which stops the run at a step."""

    def batch(self, step: int, part: int, of: int) -> Any:
        if step == STOP:
            raise StoppedError
        return super().batch(step, part, of)


class Deadly(Points):
    """The task, which kills the process of rank 1 once."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if model.module.calls == STOP and os.environ["RANK"] == "1" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def write_result(group: ProcessGroup, out: Path, name: str, fitted: TrainingResult) -> None:
    if group.is_main:
        save_file({k: v.clone() for k, v in fitted.model.state_dict().items()}, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps({"losses": fitted.losses, "metrics": fitted.metrics}))


def both() -> Iterator[tuple[str, ProcessGroup]]:
    """The DDP and the FSDP group of the same processes."""
    with join_process_group("fsdp", device="cpu") as group:
        yield "ddp", DDPGroup(group.rank, group.world_size, group.device)
        yield "fsdp", group


def train(out: Path, others: Path | None = None) -> None:
    for parallel, group in both():
        for name in PLANS if others is None else AVERAGED:
            # the initial weights of rank 0 are used
            fitted = fit(Tiny(seed=3 + group.rank), Points(), PLANS[name], group=group)
            write_result(group, out, f"{parallel}-{name}", fitted)
        if others is not None:
            resume(out, others, parallel, group)
            continue
        model, task, settings = gpt_run()
        write_result(group, out, f"{parallel}-fused", fit(model, replace(task, fused=True), settings, group=group))
        with suppress(StoppedError):
            fit(Tiny(), Stopping(), PLANS["last"], folder=out / parallel, group=group)


def resume(out: Path, others: Path, parallel: str, group: ProcessGroup) -> None:
    for folder in sorted(each for each in others.iterdir() if each.is_dir()):
        name, messages = f"{parallel}-from-{folder.name}", list[str]()
        checkpoints = Trainer(Tiny(), Points(), PLANS["last"], folder, group).checkpoints
        assert checkpoints is not None
        checkpoint = checkpoints.load_latest()
        assert checkpoint is not None
        CheckpointFolder(out / f"{name}-again", group=group).save(checkpoint)
        group.run_on_main(partial(shutil.copytree, folder, out / name))
        fitted = fit(
            Tiny(), Points(), PLANS["last"], folder=out / name, resume=True, group=group, on_message=messages.append
        )  # fmt: skip
        write_result(group, out, name, fitted)
        if group.is_main:
            (out / f"{name}.txt").write_text("\n".join(messages))


def die(out: Path) -> None:
    with join_process_group("ddp", device="cpu") as group:
        task = Deadly(out / "died")
        write_result(group, out, "died", fit(Tiny(), task, PLANS["last"], folder=out / "run", resume=True, group=group))


def threads(out: Path) -> None:
    gc.disable()  # so that the cycle is not collected by chance
    with join_process_group("ddp", device="cpu") as group:
        fit(Tiny(), Points(), PLANS["last"], group=group)
        during = gloo_threads()
    if group.is_main:
        (out / "threads.json").write_text(json.dumps([during, gloo_threads()]))


def gloo_threads() -> int:
    return sum("gloo" in each.read_text() for each in Path("/proc/self/task").glob("*/comm"))


def memory(out: Path) -> None:
    """Write the bytes of parameters, optimizer state, averages and gradients, and the peak of a step."""
    with join_process_group("fsdp", device="cpu") as group:
        for name in AVERAGED:
            trainer = Trainer(Tiny(), Points(), PLANS[name], None, group)
            trainer.run()
            trainer.task.loss(trainer.wrapped, trainer.load_batch(0)[0]).total.backward()
            assert trainer.averager is not None
            parts = {
                "parameters": [*trainer.model.parameters(), *trainer.model.buffers()],
                "optimizer": trainer.optimizer.state_dict().values(),
                "averaging": trainer.averager.state_dict().values(),
                "gradients": trainer.optimizer.gradients(),
            }
            sizes = {part: sum(local_shard(tensor).nbytes for tensor in tensors) for part, tensors in parts.items()}
            if group.is_main:
                (out / f"parts-{name}.json").write_text(json.dumps(sizes))
    for parallel, group in both():
        for accumulation in (1, 2):
            trainer = Trainer(*gpt_run(accumulation), None, group)
            batch = trainer.load_batch(0)
            for _ in range(2):  # DDP rebuilds its buckets after the first step
                trainer.train_step(batch, 0.0)
            # the number of blocks that FSDP prefetches at the peak varies
            peak = min(peak_allocated_bytes(partial(trainer.train_step, batch, 0.0)) for _ in range(3))
            if group.is_main:
                (out / f"peak-{parallel}-{accumulation}.json").write_text(json.dumps(peak))


def gpt_run(accumulation: int = 1) -> tuple[Model, NextTokenTask, TrainingPlan]:
    """A GPT, its task and plan, with as many bytes of weights as of activations."""
    config = GPTConfig(vocab=301, context=33, width=96, depth=3, heads=3, dropout=0.0, attention_dropout=0.0)
    tokens = torch.randint(301, (997,), generator=torch.Generator().manual_seed(3))
    return (
        build_from_config(config),
        NextTokenTask(tokens, tokens, 997, 33, 8, 5),
        TrainingPlan(steps=7, batch_size=8, gradient_accumulation_steps=accumulation),
    )


def worker(rank: int, size: int, port: int, *args: str) -> None:
    """Set the environment of torchrun and run `main`."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    main(*args)


def main(action: str, *paths: str) -> None:
    torch.set_num_threads(1)
    {"train": train, "die": die, "threads": threads, "memory": memory}[action](*map(Path, paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
