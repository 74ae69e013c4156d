"""The loop: batches, losses, steps, evaluations and states on disk, for any model and task."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from regard.base.atomic import write_atomically
from regard.base.config import to_json
from regard.base.errors import CheckpointError, ConfigError, TrainingError
from regard.train import checkpoint
from regard.train.averaging import Averager
from regard.train.checkpoint import State
from regard.train.log import Log
from regard.train.optimiser import Stepper
from regard.train.plan import Plan
from regard.train.task import Task
from regard.train.world import ALONE, World

STATES = "states"
TELL_EVERY = 10  # steps between figures, so that a GPU is seldom waited for


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever shows it."""

    step: int
    steps: int
    loss: float
    rate: float
    records_per_second: float
    seconds_left: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Fitted:
    """A run that has come to its end: the model has the weights that the plan chooses.

    losses   (step, mean loss since the one before)
    figures  (step, figures of an evaluation)
    """

    model: nn.Module
    steps: int
    losses: list[tuple[int, float]]
    figures: list[tuple[int, dict[str, float]]]
    seconds: float

    @property
    def best(self) -> float | None:
        return max((score(figures) for _, figures in self.figures), default=None)


def fit(
    model: nn.Module,
    task: Task,
    plan: Plan,
    *,
    folder: Path | None = None,
    resume: bool = False,
    world: World = ALONE,
    tensorboard: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Fitted:
    """Train the model in place.

    folder  where states and the log are kept; None keeps nothing
    resume  go on from the last whole state in the folder; bit for bit, on one CPU in float32
    tell    hears what a user should know: a damaged state that was passed over, say
    show    hears where the run stands, every few steps
    """
    with ExitStack() as stack:
        run = stack.enter_context(_Run.opened(model, task, plan, folder, resume, world, tensorboard, tell, show))
        return run.to_the_end()


def seeded(seed: int) -> None:
    """Set every generator that a model, a task or a library may draw from."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def score(figures: dict[str, float]) -> float:
    """The first figure is what runs are compared by."""
    return next(iter(figures.values()))


@dataclass
class _Run:
    model: nn.Module
    task: Task
    plan: Plan
    folder: Path | None
    world: World
    tell: Callable[[str], None]
    show: Callable[[Progress], None]
    stepper: Stepper
    averager: Averager | None
    scaler: torch.amp.GradScaler | None
    called: nn.Module  # the model as it is called: compiled, or in parallel
    log: Log | None = None
    step: int = 0
    waited: int = 0  # evaluations since the best one
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    figures: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(
        cls, model: nn.Module, task: Task, plan: Plan, folder: Path | None, resume: bool, world: World,
        tensorboard: bool, tell: Callable[[str], None], show: Callable[[Progress], None],
    ) -> Iterator["_Run"]:  # fmt: skip
        state = _earlier(folder, plan, resume, world, tell)
        seeded(plan.seed + world.rank)
        model.to(world.device).train()
        called = world.wrapped(model)
        run = cls(
            model, task, plan, folder, world, tell, show,
            stepper=Stepper(plan.optimiser, model),
            averager=None if plan.averaging is None else Averager(plan.averaging, model),
            scaler=torch.amp.GradScaler(world.device.type) if plan.precision == "float16" else None,
            called=torch.compile(called) if plan.compile else called,  # type: ignore[arg-type]
        )  # fmt: skip
        if state is not None:
            run.restore(state)
        if folder is not None and world.leads:
            run.log = Log(folder, run.step, tensorboard=tensorboard)
        try:
            yield run
        finally:
            if run.log is not None:
                run.log.close()

    def to_the_end(self) -> Fitted:
        start, before = time.perf_counter(), self.seconds
        sums, counts = self._zeros(), self._zeros()
        since, told = time.perf_counter(), self.step
        with self._batches() as batches:
            while self.step < self.plan.steps and not self._is_out_of_patience():
                share = self.plan.schedule.at(self.step, self.plan.steps)
                total, count = self._one(next(batches), share)
                sums += total
                counts += count
                self.step += 1
                if self.averager is not None:
                    self.averager.update(self.step)
                evaluating, saving = self._due(self.plan.evaluate_every), self._due(self.plan.save_every)
                if evaluating or saving or self._due(TELL_EVERY) or self.step == 1:
                    loss = self._finite((sums / counts).item())
                    sums, counts = self._zeros(), self._zeros()
                    now = time.perf_counter()
                    self.seconds = before + now - start
                    self._told(loss, share, (self.step - told) * self.plan.batch / max(now - since, 1e-9))
                    if evaluating:
                        self._evaluate()
                    if evaluating or saving:
                        self._save()
                    since, told = time.perf_counter(), self.step
        self._choose()
        return Fitted(self.model, self.step, self.losses, self.figures, before + time.perf_counter() - start)

    def _one(self, batch: list[Any], share: float) -> tuple[Tensor, Tensor]:
        """One step on the shares of a batch; the sum of losses and what it is the sum over, of all processes."""
        total, count = self._zeros(), self._zeros()
        for number, records in enumerate(batch):
            last = number == len(batch) - 1
            with self._lowered(), nullcontext() if last else self.world.unsynchronised(self.called):
                loss = self.task.loss(self.called, _moved(records, self.world.device))
                # a batch's worth, so that half precision does not overflow; what it is the mean over comes below
                scaled = loss.total / self.plan.batch
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            total += loss.total.detach()
            count += loss.count
        total, count = self.world.summed(total), self.world.summed(count)
        if self.scaler is not None:
            self.stepper.unscale(self.scaler)
        gradients = [p.grad for p in self.stepper.parameters() if p.grad is not None]
        # processes hand out the mean of their gradients, so their number comes in
        torch._foreach_mul_(gradients, self.plan.batch * self.world.size / count.clamp(min=1))
        if self.plan.clip is not None:
            self.world.clip(self.stepper.parameters(), self.plan.clip)
        self.stepper.step(share, self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        return total, count

    @contextmanager
    def _batches(self) -> Iterator[Iterator[list[Any]]]:
        """The batches of the steps to come, each made while the one before is learned from."""
        shares = self.plan.accumulate * self.world.size

        def made(step: int) -> list[Any]:
            mine = range(self.world.rank * self.plan.accumulate, (self.world.rank + 1) * self.plan.accumulate)
            return [self.task.batch(step, part, shares) for part in mine]

        with ThreadPoolExecutor(1) as worker:

            def stream() -> Iterator[list[Any]]:
                step = self.step
                coming = worker.submit(made, step)
                while True:
                    batch = coming.result()
                    step += 1
                    if step < self.plan.steps:
                        coming = worker.submit(made, step)
                    yield batch

            yield stream()

    @contextmanager
    def _lowered(self) -> Iterator[None]:
        if self.plan.precision == "float32":
            yield
        else:
            with torch.autocast(self.world.device.type, dtype=getattr(torch, self.plan.precision)):
                yield

    def _due(self, every: int | None) -> bool:
        return self.step == self.plan.steps or (every is not None and self.step % every == 0)

    def _told(self, loss: float, share: float, speed: float) -> None:
        self.losses.append((self.step, loss))
        rate = self.stepper.rate(share)
        if self.log is not None:
            self.log.add(self.step, {"loss": loss, "rate": rate, "records_per_second": speed, "seconds": self.seconds})
        left = (self.plan.steps - self.step) * self.plan.batch / max(speed, 1e-9)
        self.show(
            Progress(self.step, self.plan.steps, loss, rate, speed, left, self.figures[-1][1] if self.figures else {})
        )

    def _finite(self, loss: float) -> float:
        if math.isfinite(loss):
            return loss
        kept = "nothing was kept" if self.folder is None else f"the last good state is kept in {self.folder / STATES}"
        raise TrainingError(
            f"the loss is {loss} near step {self.step}, and {kept}; a lower rate, a longer warm-up or a smaller clip "
            "usually helps, and precision='float32' tells whether rounding is to blame"
        )

    def _evaluate(self) -> None:
        with _aside(self.model), nullcontext() if self.averager is None else self.averager.in_place(), self._lowered():
            figures = {name: float(value) for name, value in self.task.evaluate(self.model).items()}
        better = not self.figures or score(figures) > max(score(each) for _, each in self.figures)
        self.waited = 0 if better else self.waited + 1
        self.figures.append((self.step, figures))
        if self.log is not None:
            self.log.add(self.step, figures)

    def _is_out_of_patience(self) -> bool:
        return self.plan.patience is not None and self.waited >= self.plan.patience

    def _save(self) -> None:
        if self.folder is None:
            return
        drawn, drawn_facts = checkpoint.generators()
        parts: dict[str, dict[str, Tensor]] = {
            "model": dict(self.model.state_dict()), "optimiser": self.stepper.tensors(), "generators": drawn,
            "averaging": {} if self.averager is None else self.averager.tensors(),
        }  # fmt: skip
        facts = {
            "generators": drawn_facts, "losses": self.losses, "figures": self.figures, "waited": self.waited,
            "seconds": self.seconds, "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }  # fmt: skip
        tensors = {f"{part}/{name}": t for part, each in parts.items() for name, t in each.items()}
        fresh = self.figures and self.figures[-1][0] == self.step
        state = State(self.step, tensors, facts, score(self.figures[-1][1]) if fresh else None)
        if not self.world.leads:
            return
        try:
            checkpoint.write(self.folder / STATES, state, self.plan.keep)
        except OSError as error:
            raise TrainingError(
                f"the state after step {self.step} could not be written: {error}; the one before it is still whole in "
                f"{self.folder / STATES}: make room there and go on with --resume"
            ) from error

    def restore(self, state: State) -> None:
        try:
            self.model.load_state_dict(state.part("model"))
        except RuntimeError as error:
            raise CheckpointError(f"the state in {self.folder} is of another model: {error}") from None
        self.stepper.load(state.part("optimiser"))
        if self.averager is not None:
            self.averager.load(state.part("averaging"))
        if self.scaler is not None and state.facts["scaler"]:
            self.scaler.load_state_dict(state.facts["scaler"])
        self.step, self.waited, self.seconds = state.step, state.facts["waited"], state.facts["seconds"]
        self.losses = [(step, loss) for step, loss in state.facts["losses"]]
        self.figures = [(step, figures) for step, figures in state.facts["figures"]]
        checkpoint.set_generators(state.part("generators"), state.facts["generators"])

    def _choose(self) -> None:
        """Give the model the weights that the plan wants, in the mean where it averages."""
        if self.plan.choose == "best" and self.folder is not None:
            found = checkpoint.best(self.folder / STATES, self.tell)
            if found is not None and found.step != self.step:
                self.model.load_state_dict(found.part("model"))
                if self.averager is not None:
                    self.averager.load(found.part("averaging"))
        if self.averager is not None:
            self.averager.settle()
        self.model.eval()

    def _zeros(self) -> Tensor:
        return torch.zeros((), device=self.world.device)


def _earlier(folder: Path | None, plan: Plan, resume: bool, world: World, tell: Callable[[str], None]) -> State | None:
    """The state to go on from, if there is one and it is this run's."""
    if folder is None:
        if resume:
            raise ConfigError("there is no folder to resume from; say which with folder=")
        if plan.choose == "best":
            raise ConfigError("choose='best' needs a folder, where the best state is kept")
        return None
    file, wanted = folder / "plan.json", to_json(plan)
    if not resume:
        if checkpoint.exists(folder / STATES):
            raise ConfigError(f"{folder} holds a run already; go on with it by --resume, or choose another folder")
        if world.leads:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda path: path.write_text(json.dumps(wanted, indent=1) + "\n"))
        return None
    if file.is_file():
        kept = json.loads(file.read_text())
        changed = sorted(name for name in {*kept, *wanted} if kept.get(name) != wanted.get(name))
        if changed:
            told = ", ".join(f"{name} was {kept.get(name)!r} and is {wanted.get(name)!r}" for name in changed)
            raise ConfigError(f"the run in {folder} had another plan: {told}; resume it with the same settings")
    return checkpoint.newest(folder / STATES, tell)


@contextmanager
def _aside(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients; no draw made inside is felt outside."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    numbers, arrays = random.getstate(), numpy.random.get_state()
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(numbers)
        numpy.random.set_state(arrays)
        model.train()


def _moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device, in whatever it holds them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    move = partial(_moved, device=device)
    if isinstance(batch, dict):
        return {name: move(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    return type(batch)(map(move, batch)) if isinstance(batch, tuple | list) else batch
