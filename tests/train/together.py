"""What one of several processes does in the tests of regard.train.distributed.

It is started by torchrun, or by `start` as torchrun would:

together.py learn OUT        every plan both ways; the leader writes losses and weights
together.py learn OUT FROM   two plans; and go on from the states that others wrote, and write them anew
together.py die OUT          one process kills itself once, in the middle of a run
together.py part OUT         the leader writes how many threads gloo has within a run, and after it
together.py hold OUT         the leader writes how many bytes it holds of each part of a run, and takes in a step
"""

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from bench.planning import allocated
from regard.models.gpt import GPTConfig
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.recipes.language import NextToken
from regard.train.checkpoint import CheckpointFolder
from regard.train.distributed import DataParallel, join_process_group
from regard.train.loop import TrainingResult, _Run, fit
from regard.train.plan import TrainingPlan
from regard.train.process_group import Processes, local_shard
from regard.train.task import Loss
from tests.train.tiny import PLANS, Points, Tiny

HELD = ("accumulated", "last")  # plans that average
STOP = 9  # the step before which interrupted runs end: their last state is after 8


class StoppedError(Exception):
    """The end of a run that others go on with."""


class Stopping(Points):
    """The task, until a step."""

    def batch(self, step: int, part: int, of: int) -> Any:
        if step == STOP:
            raise StoppedError
        return super().batch(step, part, of)


class Deadly(Points):
    """The task, which kills its process once."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if model.module.calls == STOP and os.environ["RANK"] == "1" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def told(world: Processes, out: Path, name: str, fitted: TrainingResult) -> None:
    if world.leads:
        save_file({k: v.clone() for k, v in fitted.model.state_dict().items()}, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps({"losses": fitted.losses, "figures": fitted.figures}))


def both() -> Iterator[tuple[str, Processes]]:
    """Both ways, of the same processes."""
    with join_process_group("sharded", device="cpu") as world:
        yield "data", DataParallel(world.rank, world.size, world.device)
        yield "sharded", world


def learn(out: Path, others: Path | None = None) -> None:
    for way, world in both():
        for name in [name for name in PLANS if others is None or name in ("accumulated", "last")]:
            # only the leader's first weights count
            told(world, out, f"{way}-{name}", fit(Tiny(seed=3 + world.rank), Points(), PLANS[name], world=world))
        if others is not None:
            resume(out, others, way, world)
            continue
        with suppress(StoppedError):
            fit(Tiny(), Stopping(), PLANS["last"], folder=out / way, world=world)


def resume(out: Path, others: Path, way: str, world: Processes) -> None:
    for folder in sorted(each for each in others.iterdir() if each.is_dir()):
        name, heard = f"{way}-from-{folder.name}", list[str]()
        kept = _Run(Tiny(), Points(), PLANS["last"], folder, world, print, print).keeper
        assert kept is not None
        state = kept.newest()
        assert state is not None
        CheckpointFolder(out / f"{name}-again", world=world).write(state)
        world.shared(partial(shutil.copytree, folder, out / name))
        told(
            world, out, name,
            fit(Tiny(), Points(), PLANS["last"], folder=out / name, resume=True, world=world, tell=heard.append),
        )  # fmt: skip
        if world.leads:
            (out / f"{name}.txt").write_text("\n".join(heard))


def die(out: Path) -> None:
    with join_process_group("data", device="cpu") as world:
        task = Deadly(out / "died")
        told(world, out, "died", fit(Tiny(), task, PLANS["last"], folder=out / "run", resume=True, world=world))


def part(out: Path) -> None:
    gc.disable()  # so that nothing is collected by chance
    with join_process_group("data", device="cpu") as world:
        fit(Tiny(), Points(), PLANS["last"], world=world)
        within = gloo_threads()
    if world.leads:
        (out / "threads.json").write_text(json.dumps([within, gloo_threads()]))


def gloo_threads() -> int:
    return sum("gloo" in each.read_text() for each in Path("/proc/self/task").glob("*/comm"))


def hold(out: Path) -> None:
    """Bytes of parameters and buffers, of what the optimizer and the averaging remember, and of gradients."""
    with join_process_group("sharded", device="cpu") as world:
        for name in HELD:
            run = _Run(Tiny(), Points(), PLANS[name], None, world, print, print)
            run.to_the_end()
            run.task.loss(run.called, run._batch(0)[0]).total.backward()
            assert run.averager is not None
            parts = {
                "parameters": [*run.model.parameters(), *run.model.buffers()],
                "optimizer": run.optimizer.state_dict().values(),
                "averaging": run.averager.tensors().values(),
                "gradients": run.optimizer.gradients(),
            }
            sizes = {part: sum(local_shard(tensor).nbytes for tensor in tensors) for part, tensors in parts.items()}
            if world.leads:
                (out / f"held-{name}.json").write_text(json.dumps(sizes))
    for way, each in both():
        for shares in (1, 2):
            run = _Run(*written(shares), None, each, print, print)
            batch = run._batch(0)
            for _ in range(2):  # buckets are laid out anew after the first
                run._one(batch, 0.0)
            # now and then a step has more blocks on their way than usual: that is luck
            taken = min(allocated(partial(run._one, batch, 0.0)) for _ in range(3))
            if each.leads:
                (out / f"taken-{way}-{shares}.json").write_text(json.dumps(taken))


def written(shares: int = 1) -> tuple[Model, NextToken, TrainingPlan]:
    """A GPT, what it reads and how, with as many bytes of weights as of activations."""
    config = GPTConfig(vocab=301, context=33, width=96, depth=3, heads=3, dropout=0.0, attention_dropout=0.0)
    tokens = torch.randint(301, (997,), generator=torch.Generator().manual_seed(3))
    return (
        build_from_config(config),
        NextToken(tokens, tokens, 997, 33, 8, 5),
        TrainingPlan(steps=7, batch_size=8, gradient_accumulation_steps=shares),
    )


def worker(rank: int, size: int, port: int, *args: str) -> None:
    """One process with what torchrun would have told it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    main(*args)


def main(what: str, *paths: str) -> None:
    torch.set_num_threads(1)
    {"learn": learn, "die": die, "part": part, "hold": hold}[what](*map(Path, paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
