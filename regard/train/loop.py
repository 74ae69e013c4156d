"""The loop: batches, losses, steps, evaluations and states on disk, for any model and task."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.atomic_write import write_atomically
from regard.base.config import to_json
from regard.base.errors import CheckpointError, ConfigError, TrainingError
from regard.base.lock import lock_folder
from regard.train import rng_state
from regard.train.averaging import Averager
from regard.train.checkpoint import CheckpointFolder, TrainingState
from regard.train.log import Log
from regard.train.optimizers import CombinedOptimizer
from regard.train.plan import TrainingPlan
from regard.train.prefetch import Prefetcher, move_to_device
from regard.train.process_group import SINGLE_PROCESS, Processes, local_shard
from regard.train.task import Task

STATES = "states"
PLAN = "plan.json"
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
class TrainingResult:
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
    plan: TrainingPlan,
    *,
    folder: Path | None = None,
    resume: bool = False,
    world: Processes = SINGLE_PROCESS,
    tensorboard: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> TrainingResult:
    """Train the model in place.

    folder  where states and the log are kept; None keeps nothing
    resume  go on from the last whole state in the folder, or begin where there is none; bit for bit, on one CPU in
            float32
    tell    hears what a user should know: a damaged state that was passed over, say
    show    hears where the run stands, every few steps
    """
    _check(plan, folder, resume, world)
    if not world.leads:
        tell, show = _unheard, _unheard
    with ExitStack() as until_the_end:
        if folder is not None:
            world.shared(lambda: _begin(folder, plan, resume, until_the_end))
        run = _Run(model, task, plan, folder, world, tell, show)
        if resume:
            run.restore()
        if folder is not None and world.leads:
            with _writing("the log", folder):
                run.log = Log(folder, run.step, tensorboard=tensorboard)
            until_the_end.callback(run.log.close)
        return run.to_the_end()


def score(figures: dict[str, float]) -> float:
    """The first figure is what runs are compared by."""
    return next(iter(figures.values()))


class _Run:
    def __init__(
        self,
        model: nn.Module,
        task: Task,
        plan: TrainingPlan,
        folder: Path | None,
        world: Processes,
        tell: Callable[[str], None],
        show: Callable[[Progress], None],
    ) -> None:
        rng_state.seed_generators(plan.seed, world.rank)
        self.given, self.task, self.plan, self.folder, self.world = model, task, plan, folder, world
        self.tell, self.show = tell, show
        self.model = world.trained(model)
        self.parameters = dict(self.model.named_parameters())
        called = world.called(self.model)
        self.called: nn.Module = torch.compile(called) if plan.compile else called  # type: ignore[assignment]
        self.optimizer = CombinedOptimizer(plan.optimizer, self.model)
        self.averager = None if plan.averaging is None else Averager(plan.averaging, self.model)
        self.scaler = torch.amp.GradScaler(world.device.type) if plan.precision == "float16" else None
        self.keeper = (
            None
            if folder is None
            else CheckpointFolder(folder / STATES, plan.keep_checkpoints, world, tell, self._like)
        )
        self.log: Log | None = None
        self.step = 0
        self.waited = 0  # evaluations since the best one
        self.seconds = 0.0
        self.losses: list[tuple[int, float]] = []
        self.figures: list[tuple[int, dict[str, float]]] = []

    def to_the_end(self) -> TrainingResult:
        start, before = time.perf_counter(), self.seconds
        sums, counts = self._zero(), self._zero()
        since, told = time.perf_counter(), self.step
        self.model.train()
        with Prefetcher(self._batch, self.step, self.plan.steps) as batches:
            while self.step < self.plan.steps and not self._is_out_of_patience():
                share = self.plan.schedule.lr_factor(self.step, self.plan.steps)
                total, count = self._one(batches.next(), share)
                sums += total
                counts += count
                self.step += 1
                if self.averager is not None:
                    self.averager.update(self.step)
                evaluating, saving = self._due(self.plan.evaluate_every), self._due(self.plan.save_every)
                if evaluating or saving or self._due(TELL_EVERY) or self.step == 1:
                    loss = self._finite(sums.item(), counts.item())
                    sums, counts = self._zero(), self._zero()
                    now = time.perf_counter()
                    self.seconds = before + now - start
                    self._told(loss, share, (self.step - told) * self.plan.batch_size / max(now - since, 1e-9))
                    if evaluating:
                        self._evaluate()
                    if evaluating or saving:
                        self._save()
                    since, told = time.perf_counter(), self.step
        if self.step < self.plan.steps:
            self.tell(f"stopped after step {self.step}: the score was best {self.waited} evaluations ago")
        self._choose()
        return TrainingResult(self.given, self.step, self.losses, self.figures, before + time.perf_counter() - start)

    def _batch(self, step: int) -> list[Any]:
        """The shares of a step's batch that are this process's."""
        each, shares = self.plan.gradient_accumulation_steps, self.plan.gradient_accumulation_steps * self.world.size
        return [self.task.batch(step, self.world.rank * each + number, shares) for number in range(each)]

    def _one(self, batch: list[Any], share: float) -> tuple[Tensor, Tensor]:
        """One step on the shares of a batch; the sum of losses and what it is the sum over, of all processes."""
        total, count = self._zero(), self._zero()
        for number, records in enumerate(batch):
            last = number == len(batch) - 1
            with nullcontext() if last else self.world.unsynchronised(self.called):
                with self._lowered():
                    loss = self.task.loss(self.called, move_to_device(records, self.world.device))
                # a batch's worth, so that half precision does not overflow; what it is the mean over comes below
                scaled = loss.total / self.plan.batch_size
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            total += loss.total.detach()
            count += loss.count
        total, count = self.world.summed(total), self.world.summed(count)
        self._update(self.plan.batch_size / torch.where(count > 0, count, 1), share)
        return total, count

    def _update(self, factor: Tensor, share: float) -> None:
        """Change the weights by the gradients times a factor."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        # processes hand out the mean of their gradients, so their number comes in
        torch._foreach_mul_(self.optimizer.gradients(), (factor * self.world.size).float())
        if self.plan.max_grad_norm is not None:
            self.optimizer.clip_grad_norm(self.plan.max_grad_norm)
        self.optimizer.scale_lr(share)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # type: ignore[arg-type]
            self.scaler.update()
        self.optimizer.zero_grad()

    def _lowered(self) -> AbstractContextManager[Any]:
        """Computing in the precision of the plan."""
        if self.plan.precision == "float32":
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=getattr(torch, self.plan.precision))

    def _due(self, every: int | None) -> bool:
        return self.step == self.plan.steps or (every is not None and self.step % every == 0)

    def _told(self, loss: float, share: float, speed: float) -> None:
        self.losses.append((self.step, loss))
        rate = self.optimizer.lr
        self._log({"loss": loss, "rate": rate, "records_per_second": speed, "seconds": self.seconds})
        left = (self.plan.steps - self.step) * self.plan.batch_size / max(speed, 1e-9)
        figures = self.figures[-1][1] if self.figures else {}
        self.show(Progress(self.step, self.plan.steps, loss, rate, speed, left, figures))

    def _log(self, figures: dict[str, float]) -> None:
        if self.log is not None and self.folder is not None:
            with _writing("the log", self.folder):
                self.log.add(self.step, figures)

    def _finite(self, total: float, count: float) -> float:
        if not count:
            raise TrainingError(f"there was nothing to learn from up to step {self.step}: every Loss has a count of 0")
        if not math.isfinite(total / count):
            raise self._stopped(f"the loss is {total / count} near step {self.step}")
        return total / count

    def _stopped(self, why: str) -> TrainingError:
        there = self.folder is not None and self.keeper is not None and self.keeper.steps()
        kept = f"the last good state is kept in {self.folder}" if there else "no state was kept before"
        return TrainingError(
            f"{why}, and {kept}; begin again in another folder: a lower rate, a longer warm-up or a smaller clip "
            "usually helps, and precision='float32' tells whether rounding is to blame"
        )

    def _evaluate(self) -> None:
        averaged = nullcontext() if self.averager is None else self.averager.in_place()
        with _aside(self.model, self.world.device), averaged, self.world.opened(self.model), self._lowered():
            own = {name: float(value) for name, value in self.task.evaluate(self.model).items()}
        figures = self.world.shared(lambda: own)  # all must stop at the same step
        if not figures:
            if self.plan.patience is not None or self.plan.load_best_at_end:
                raise ConfigError(
                    "patience and load_best_at_end go by a score, but the task's evaluation gives no figures"
                )
            return
        if not math.isfinite(score(figures)):
            raise self._stopped(f"the evaluation after step {self.step} gave {next(iter(figures))}={score(figures)}")
        better = not self.figures or score(figures) > max(score(each) for _, each in self.figures)
        self.waited = 0 if better else self.waited + 1
        self.figures.append((self.step, figures))
        self._log(figures)

    def _is_out_of_patience(self) -> bool:
        return self.plan.patience is not None and self.waited >= self.plan.patience

    def _save(self) -> None:
        if self.keeper is None or self.folder is None:
            return
        drawn = self.world.gathered(lambda: rng_state.save_rng_state(self.world.device))
        parts: dict[str, dict[str, Tensor]] = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "averaging": {} if self.averager is None else self.averager.tensors(),
            **{f"generators/{rank}": tensors for rank, (tensors, _) in enumerate(drawn)},
        }
        self._sound(parts["optimizer"])
        facts = {
            "generators": [facts for _, facts in drawn], "losses": self.losses, "figures": self.figures,
            "waited": self.waited, "seconds": self.seconds,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }  # fmt: skip
        tensors = {f"{part}/{name}": t for part, each in parts.items() for name, t in each.items()}
        fresh = self.figures and self.figures[-1][0] == self.step
        state = TrainingState(self.step, tensors, facts, score(self.figures[-1][1]) if fresh else None)
        with _writing(f"the state after step {self.step}", self.folder):
            if self.log is not None:
                self.log.settle()
            self.keeper.write(state)

    def _sound(self, remembered: dict[str, Tensor]) -> None:
        """A step can spoil the weights after a loss that was still finite."""
        spoilt = [name for name, t in {**self.parameters, **remembered}.items() if not _is_finite(t)]
        found = [name for names in self.world.gathered(lambda: spoilt[:1]) for name in names]
        if found:
            raise self._stopped(f"{found[0]} is not finite any more after step {self.step}")

    def restore(self) -> None:
        """Go on from the last whole state, if there is one."""
        assert self.keeper is not None
        state = self.keeper.newest()
        self.keeper.clear()
        if state is None:
            return
        try:
            self.model.load_state_dict(state.part("model"))
        except RuntimeError as error:
            raise CheckpointError(f"the state in {self.folder} is of another model: {error}") from None
        self.optimizer.load_state_dict(state.part("optimizer"))
        if self.averager is not None:
            self.averager.load(state.part("averaging"))
        if self.scaler is not None:
            self.scaler.load_state_dict(state.facts["scaler"])
        self.step, self.waited, self.seconds = state.step, state.facts["waited"], state.facts["seconds"]
        self.losses = [(step, loss) for step, loss in state.facts["losses"]]
        self.figures = [(step, figures) for step, figures in state.facts["figures"]]
        drawn, rank = state.facts["generators"], self.world.rank
        if len(drawn) == self.world.size:
            rng_state.restore_rng_state(state.part(f"generators/{rank}"), drawn[rank], self.world.device)
            return
        rng_state.seed_generators(self.plan.seed, rank, self.step)
        self.tell(
            f"the state after step {self.step} was written by {len(drawn)} processes and {self.world.size} go on: "
            "what is drawn at random, as in dropout, is drawn anew"
        )

    def _choose(self) -> None:
        """Give the model the weights that the plan wants, in the mean where it averages."""
        if self.plan.load_best_at_end and self.keeper is not None:
            found = self.keeper.best()
            if found is None:
                self.tell("no whole state with a score is left, so the model has its last weights, not its best")
            elif found.step != self.step:
                self.model.load_state_dict(found.part("model"))
                if self.averager is not None:
                    self.averager.load(found.part("averaging"))
        if self.averager is not None:
            self.averager.settle()
        self.world.hand_back(self.model, self.given)
        self.given.eval()

    def _like(self, name: str) -> Tensor | None:
        """The parameter that a tensor of a state belongs to."""
        return next((self.parameters[part] for part in name.split("/") if part in self.parameters), None)

    def _zero(self) -> Tensor:
        # counts of tokens over several steps are beyond what float32 counts exactly
        return torch.zeros((), dtype=torch.float64, device=self.world.device)


def _check(plan: TrainingPlan, folder: Path | None, resume: bool, world: Processes) -> None:
    if folder is None and resume:
        raise ConfigError("there is no folder to resume from; say which with folder=")
    if folder is None and plan.load_best_at_end:
        raise ConfigError("load_best_at_end needs a folder, where the best state is kept")
    plan.micro_batch_size(world.size)


def _begin(folder: Path, plan: TrainingPlan, resume: bool, until_the_end: ExitStack) -> None:
    """Keep the plan in the folder, or see that it is the one kept there; nobody else may train there meanwhile."""
    with convert_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        until_the_end.enter_context(lock_folder(folder))
        for left in folder.glob(".unfinished-*"):  # by a run that was killed
            left.unlink()
        states = CheckpointFolder(folder / STATES).steps()
        if states and not resume:
            raise ConfigError(
                f"{folder} holds a run already; go on with it by resume=True (--resume), or choose another"
            )
        file, wanted = folder / PLAN, to_json(plan)
        if states:
            kept = _kept(file)
            changed = sorted(name for name in {*kept, *wanted} if kept.get(name) != wanted.get(name))
            if changed:
                told = ", ".join(f"{name} was {kept.get(name)!r} and is {wanted.get(name)!r}" for name in changed)
                raise ConfigError(f"the run in {folder} had another plan: {told}; resume it with the same settings")
            return
        write_atomically(file, lambda path: path.write_text(json.dumps(wanted, indent=1) + "\n"))


def _kept(file: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the plan of this run is damaged or gone: {error}; without it a run cannot be resumed"
        ) from None
    return kept


@contextmanager
def convert_os_errors(folder: Path) -> Iterator[None]:
    """Where a run begins: if nothing can be kept in its folder, say so."""
    try:
        yield
    except OSError as error:
        why = "there is a file of that name" if isinstance(error, FileExistsError) else error
        raise TrainingError(
            f"a run cannot be kept in {folder}: {why}; see to that, or choose another folder (--folder)"
        ) from error


@contextmanager
def _writing(what: str, folder: Path) -> Iterator[None]:
    """Where the disk is full or gone, say what that means for the run."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{what} could not be written: {error}; states that were whole in {folder / STATES} still are: make room "
            "there and go on with resume=True (--resume)"
        ) from error


@contextmanager
def _aside(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In eval mode and without gradients; no draw made inside is felt outside."""
    model.eval()
    try:
        with torch.no_grad(), rng_state.preserve_rng_state(device):
            yield
    finally:
        model.train()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(local_shard(tensor).isfinite().all())


def _unheard(said: object) -> None:
    """What only the leader says."""
