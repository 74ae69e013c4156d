"""The training loop: batches, gradient accumulation, optimizer steps, validation, early stopping, checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError, TrainingError
from regard.base.lock import lock_folder
from regard.train import rng_state
from regard.train.averaging import Averager
from regard.train.checkpoint import (
    CHECKPOINTS,
    THEN_RESUME,
    CheckpointFolder,
    capture,
    convert_os_errors,
    prepare_run_folder,
    resume as resume_trainer,
    write_plan,
)
from regard.train.interrupts import SignalRecorder, TrainingInterruptedError
from regard.train.log import MetricsLog
from regard.train.optimizers import CombinedOptimizer
from regard.train.plan import TrainingPlan
from regard.train.prefetch import Prefetcher, move_to_device, pin
from regard.train.process_group import SINGLE_PROCESS, ProcessGroup, local_shard
from regard.train.step_graphs import StepGraphs
from regard.train.task import Task

LOG_EVERY = 10  # steps between log lines; reading the loss makes the CPU wait for the GPU
TIMED_STEPS = (4, 16, 64)  # steps after which the time of a run is estimated; reading the time waits for a GPU
TIMED_SECONDS = 2.0  # since the first step, after which the time of a run is estimated
MEASURED_SAMPLES = 8  # number of samples from which the time of a step is estimated before a run


@dataclass(frozen=True)
class Progress:
    """The progress of a training run, which is passed to `on_progress`.

    metrics  metrics of the latest validation; {} before the first one
    """

    step: int
    steps: int
    loss: float
    lr: float
    samples_per_second: float
    seconds_left: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Timing:
    """Measured times of a run, passed to `on_timing`.

    step              seconds of a training step
    steps_left        number of training steps that remain
    validation        seconds of a validation and the checkpoint after it; None before the first validation
    validations_left  number of validations that remain
    """

    step: float
    steps_left: int
    validation: float | None
    validations_left: int


@dataclass(frozen=True)
class TrainingResult:
    """The result of `fit`.

    model    the trained model, with the last, the best or the averaged weights, as the plan says
    losses   pairs (step, mean loss over the steps since the previous pair)
    metrics  pairs (step, validation metrics)
    """

    model: nn.Module
    steps: int
    losses: list[tuple[int, float]]
    metrics: list[tuple[int, dict[str, float]]]
    seconds: float


def fit(
    model: nn.Module,
    task: Task,
    plan: TrainingPlan,
    *,
    folder: Path | None = None,
    resume: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
    tensorboard: bool = False,
    on_message: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_timing: Callable[[Timing], None] = lambda timing: None,
) -> TrainingResult:
    """Train a model in place and return the result.

    model        any module that the task can call
    task         gives the batches, the loss and the validation metrics
    plan         the hyperparameters
    folder       where checkpoints and the log are written; None writes nothing
    resume       resume from the latest valid checkpoint in the folder, or start if there is none. On one CPU in
                 float32 the result equals that of an uninterrupted run bit for bit
    group        the processes that train together, from `join_process_group`
    tensorboard  write events for TensorBoard to the folder
    on_message   called with messages for the user, such as a damaged checkpoint
    on_progress  called every few steps
    on_timing    called after the first steps and after the first validation; not in a very short run

    Ctrl-C and SIGTERM save a checkpoint after the current step, if there is a folder and only one process. Then the run
    stops with TrainingInterruptedError, a KeyboardInterrupt. A second signal stops the run at once. If the signal also
    ends a process that the step needs, such as a C++ compiler started by torch.compile, the step fails: the run stops
    in the same way, and resuming continues from the previous checkpoint.

    See `docs/training.md` for an example.
    """
    if folder is None and resume:
        raise ConfigError("resume=True needs a folder; pass folder=")
    if folder is None and plan.load_best_at_end:
        raise ConfigError("load_best_at_end needs a folder for checkpoints; pass folder=")
    plan.micro_batch_size(group.world_size)
    if not group.is_main:
        on_message, on_progress, on_timing = _ignore, _ignore, _ignore
    with ExitStack() as stack:
        if folder is not None:
            group.run_on_main(lambda: _open_folder(folder, resume, stack))
        trainer = Trainer(model, task, plan, folder, group, on_message, on_progress, on_timing)
        if resume and trainer.checkpoints is not None:
            resume_trainer(trainer, trainer.checkpoints)
        if folder is not None and group.is_main:
            with convert_os_errors(folder, "the log", THEN_RESUME):
                write_plan(folder, plan)
                trainer.log = MetricsLog(folder, trainer.step, tensorboard=tensorboard)
            stack.callback(trainer.log.close)
        return trainer.run()


def score(metrics: dict[str, float]) -> float:
    """Return the validation score, which is the first of the metrics. Larger is better."""
    return next(iter(metrics.values()))


def count_validations(plan: TrainingPlan, done: int = 0) -> int:
    """Return the number of validations that remain after `done` steps of a run."""
    every = plan.evaluate_every or plan.steps
    return 0 if done >= plan.steps else plan.steps // every - done // every + (plan.steps % every > 0)


def measure_step_seconds(model: nn.Module, task: Task, plan: TrainingPlan) -> float:
    """Estimate the seconds of a training step on the CPU by computing gradients of a few samples.

    The model is not changed.
    """
    few = next(
        size
        for size in range(min(MEASURED_SAMPLES, plan.batch_size), plan.batch_size + 1)
        if plan.batch_size % size == 0
    )
    batch, copy = task.batch(0, 0, plan.batch_size // few), deepcopy(model).train()
    with rng_state.preserve_rng_state(torch.device("cpu")):
        for _ in range(2):  # the first time is slower
            start = time.perf_counter()
            with autocast(plan, "cpu"):
                loss = task.loss(copy, batch)
            loss.total.backward()
    return (time.perf_counter() - start) * plan.batch_size / few


def autocast(plan: TrainingPlan, device: str) -> AbstractContextManager[Any]:
    """Return an autocast context manager for the precision of the training plan. For float32 it does nothing."""
    return nullcontext() if plan.precision == "float32" else torch.autocast(device, getattr(torch, plan.precision))


class Trainer:
    """One training run: its model, optimizer, random number generators and history."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        plan: TrainingPlan,
        folder: Path | None = None,
        group: ProcessGroup = SINGLE_PROCESS,
        on_message: Callable[[str], None] = lambda text: None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_timing: Callable[[Timing], None] = lambda timing: None,
    ) -> None:
        rng_state.seed_generators(plan.seed, group.rank)
        self.original, self.task, self.plan, self.folder, self.group = model, task, plan, folder, group
        self.on_message, self.on_progress, self.on_timing = on_message, on_progress, on_timing
        self.model = group.prepare(model)
        self.parameters = dict(self.model.named_parameters())
        wrapped = group.wrap(self.model)
        self.wrapped: nn.Module = torch.compile(wrapped) if plan.compile else wrapped  # type: ignore[assignment]
        self.optimizer = CombinedOptimizer(plan.optimizer, self.model)
        self.averager = None if plan.averaging is None else Averager(plan.averaging, self.model)
        self.scaler = torch.amp.GradScaler(group.device.type) if plan.precision == "float16" else None
        self.checkpoints = (
            None
            if folder is None
            else CheckpointFolder(
                folder / CHECKPOINTS, plan.keep_checkpoints, group, on_message, self._matching_parameter
            )
        )
        # GradScaler reads on the host whether gradients overflowed; several processes synchronize
        alone = group.device.type == "cuda" and group.world_size == 1 and self.scaler is None
        self.graphs = (
            StepGraphs(self._compute_step, group.device, self.optimizer.zero_grad, on_message)
            if alone and plan.cuda_graphs
            else None
        )
        self.log: MetricsLog | None = None
        self.step = 0
        self.stale_evaluations = 0  # validations since the best one
        self.seconds = 0.0
        self.total, self.count = self._zero(), self._zero()  # sum and count of the losses since the last report
        self.losses: list[tuple[int, float]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def run(self) -> TrainingResult:
        """Run the training loop until the last step, early stopping or a signal, and return the result."""
        with nullcontext() if self.graphs is None else self.graphs.stream():
            return self._run()

    def _run(self) -> TrainingResult:
        start, before, first = time.perf_counter(), self.seconds, self.step
        timer = _StepTimer(self)
        last_time, last_step = start, self.step
        self.model.train()
        # several processes would have to agree on the step to stop at
        signals = SignalRecorder(enabled=self.group.world_size == 1)
        with signals, signals.convert_errors(), Prefetcher(self.load_batch, self.step, self.plan.steps) as batches:
            while self.step < self.plan.steps and not self._should_stop_early():
                if signals.received is not None:
                    break
                step_total, step_count = self.train_step(
                    batches.next(), self.plan.schedule.lr_factor(self.step, self.plan.steps)
                )
                self.total += step_total
                self.count += step_count
                self.step += 1
                if self.averager is not None:
                    self.averager.update(self.step)
                timer.after_step()
                evaluate, save = self._is_due(self.plan.evaluate_every), self._is_due(self.plan.save_every)
                if not (evaluate or save or self._is_due(LOG_EVERY) or self.step == 1):
                    continue
                loss = self._mean_loss(self.total.item(), self.count.item())
                self.total, self.count = self._zero(), self._zero()
                now = time.perf_counter()
                self.seconds = before + now - start
                samples = (self.step - last_step) * self.plan.batch_size
                self._report(loss, samples / max(now - last_time, 1e-9))
                if evaluate:
                    with timer.validation():
                        self._evaluate()
                        self._save()
                elif save:
                    self._save()
                last_time, last_step = time.perf_counter(), self.step
        if signals.received is not None:
            self.seconds = before + time.perf_counter() - start
            if self.step > first:
                self._save()
            raise TrainingInterruptedError(signals.received)
        if self.step < self.plan.steps:
            self.on_message(
                f"early stopping after step {self.step}: the score was best {self.stale_evaluations} validations ago"
            )
        self._load_final_weights()
        return TrainingResult(self.original, self.step, self.losses, self.metrics, before + time.perf_counter() - start)

    def load_batch(self, step: int) -> list[Any]:
        """Return the micro-batches of a training step for this process."""
        count = self.plan.gradient_accumulation_steps
        first, of = self.group.rank * count, self.group.world_size * count
        micro_batches = [self.task.batch(step, first + number, of) for number in range(count)]
        return pin(micro_batches) if self.group.device.type == "cuda" else micro_batches

    def train_step(self, micro_batches: list[Any], lr_factor: float) -> tuple[Tensor, Tensor]:
        """Do one optimizer step; return the sum of the losses and the number of targets, over all processes.

        The result must be used before the next step, which can overwrite it.

        micro_batches  the micro-batches of this step, from `load_batch`
        lr_factor      factor by which the initial learning rates are multiplied for this step
        """
        self.optimizer.scale_lr(lr_factor)
        return self._compute_step(micro_batches) if self.graphs is None else self.graphs.run(micro_batches)

    def _compute_step(self, micro_batches: list[Any]) -> tuple[Tensor, Tensor]:
        total, count = self._zero(), self._zero()
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with nullcontext() if last else self.group.no_sync(self.wrapped):
                with self._autocast():
                    loss = self.task.loss(self.wrapped, move_to_device(batch, self.group.device))
                # divided by the batch size so that float16 does not overflow; `_update` corrects for the count
                scaled = loss.total / self.plan.batch_size
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            total += loss.total.detach()
            count += loss.count
        total, count = self.group.all_reduce(total), self.group.all_reduce(count)
        self._update(self.plan.batch_size / torch.where(count > 0, count, 1))
        return total, count

    def _update(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor, clip them and do the optimizer step.

        With the factor, they become the gradients of the mean loss over all targets of the batch.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        # DDP and FSDP average gradients over processes, and the loss is a sum
        self.optimizer.scale_gradients((factor * self.group.world_size).float(), self.plan.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # type: ignore[arg-type]
            self.scaler.update()
        self.optimizer.zero_grad()

    def current_score(self) -> float | None:
        """Return the validation score after the current step; None if the model was not validated at this step."""
        evaluated = self.metrics and self.metrics[-1][0] == self.step
        return score(self.metrics[-1][1]) if evaluated else None

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.plan, self.group.device.type)

    def _is_due(self, every: int | None) -> bool:
        return self.step == self.plan.steps or (every is not None and self.step % every == 0)

    def _should_stop_early(self) -> bool:
        return self.plan.patience is not None and self.stale_evaluations >= self.plan.patience

    def _mean_loss(self, total: float, count: float) -> float:
        if not count:
            raise TrainingError(f"the batches up to step {self.step} have no targets: every Loss has a count of 0")
        if not math.isfinite(total / count):
            raise self._not_finite(f"the loss is {total / count} near step {self.step}")
        return total / count

    def _not_finite(self, what: str) -> TrainingError:
        has_checkpoint = self.checkpoints is not None and self.checkpoints.steps()
        saved = f"the last checkpoint is in {self.folder}" if has_checkpoint else "there is no checkpoint"
        return TrainingError(
            f"{what}; {saved}. Start again in another folder with a lower learning rate, a longer warmup or a smaller "
            "max_grad_norm; try precision='float32' to see whether rounding is the cause"
        )

    def _report(self, loss: float, samples_per_second: float) -> None:
        """Write the loss to the log and call `on_progress`."""
        self.losses.append((self.step, loss))
        lr = self.optimizer.lr
        self._log({"loss": loss, "lr": lr, "samples_per_second": samples_per_second, "seconds": self.seconds})
        left = (self.plan.steps - self.step) * self.plan.batch_size / max(samples_per_second, 1e-9)
        metrics = self.metrics[-1][1] if self.metrics else {}
        self.on_progress(Progress(self.step, self.plan.steps, loss, lr, samples_per_second, left, metrics))

    def _log(self, metrics: dict[str, float]) -> None:
        if self.log is not None and self.folder is not None:
            with convert_os_errors(self.folder, "the log", THEN_RESUME):
                self.log.add(self.step, metrics)

    def _evaluate(self) -> None:
        """Validate the model and record the metrics. Averaged weights are used if the plan has weight averaging."""
        averaged = nullcontext() if self.averager is None else self.averager.applied()
        unsharded = self.group.unsharded(self.model)
        with evaluation_mode(self.model, self.group.device), averaged, unsharded, self._autocast():
            own = {name: float(value) for name, value in self.task.evaluate(self.model).items()}
        metrics = self.group.run_on_main(lambda: own)  # all processes must stop at the same step
        if not metrics:
            if self.plan.patience is not None or self.plan.load_best_at_end:
                raise ConfigError("patience and load_best_at_end need a score, but the task's evaluate returns {}")
            return
        if not math.isfinite(score(metrics)):
            raise self._not_finite(
                f"{next(iter(metrics))} is {score(metrics)} in the validation after step {self.step}"
            )
        improved = all(score(metrics) > score(earlier) for _, earlier in self.metrics)
        self.stale_evaluations = 0 if improved else self.stale_evaluations + 1
        self.metrics.append((self.step, metrics))
        self._log(metrics)

    def _save(self) -> None:
        """Save a checkpoint. Raise TrainingError if a weight or the optimizer state is not finite."""
        if self.checkpoints is None or self.folder is None:
            return
        # a step can produce NaN although its loss was finite
        tensors = {**self.parameters, **self.optimizer.state_dict()}
        bad = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
        found = [name for names in self.group.all_gather(lambda: bad[:1]) for name in names]
        if found:
            raise self._not_finite(f"{found[0]} is not finite after step {self.step}")
        checkpoint = capture(self)
        with convert_os_errors(self.folder, f"the checkpoint of step {self.step}", THEN_RESUME):
            if self.log is not None:
                self.log.sync()
            self.checkpoints.save(checkpoint)

    def _load_final_weights(self) -> None:
        """Load the final weights into the original model: the last, the best or the averaged ones, as the plan says."""
        if self.plan.load_best_at_end and self.checkpoints is not None:
            best = self.checkpoints.load_best()
            if best is None:
                self.on_message("no valid checkpoint has a score, so the model has its last weights, not its best")
            elif best.step != self.step:
                self.model.load_state_dict(best.section("model"))
                if self.averager is not None:
                    self.averager.load_state_dict(best.section("averaging"))
        if self.averager is not None:
            self.averager.apply()
        self.group.copy_weights(self.model, self.original)
        self.original.eval()

    def _matching_parameter(self, name: str) -> Tensor | None:
        """Return the parameter to which a tensor of a checkpoint belongs; None if there is none.

        For example, the optimizer state of a parameter belongs to it. With FSDP, the tensor is sharded like it.

        name  name of the tensor in the checkpoint
        """
        return next((self.parameters[part] for part in name.split("/") if part in self.parameters), None)

    def _zero(self) -> Tensor:
        # float32 cannot count the tokens of several steps exactly
        return torch.zeros((), dtype=torch.float64, device=self.group.device)


class _StepTimer:
    """Measures the time of steps and of the first validation, and calls `on_timing`.

    The first step is not measured, because it is slower than the others.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.first = trainer, trainer.step
        self.paused, self.reported = 0.0, False
        self.validation_seconds: float | None = None

    def after_step(self) -> None:
        done = self.trainer.step - self.first
        if done != 1 and (self.reported or done not in TIMED_STEPS):
            return
        if self.trainer.group.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.group.device)
        now = time.perf_counter()
        if done == 1:
            self.start = now
        elif now - self.start - self.paused >= TIMED_SECONDS or done == TIMED_STEPS[-1]:
            self._report(now)

    @contextmanager
    def validation(self) -> Iterator[None]:
        start = time.perf_counter()  # the loss was read, so that all steps are done
        yield
        seconds = time.perf_counter() - start
        if self.validation_seconds is None:
            self.validation_seconds = seconds
            if self.trainer.step - self.first > 1:
                self._report(start)
        self.paused += seconds

    def _report(self, now: float) -> None:
        trainer, self.reported = self.trainer, True
        step = (now - self.start - self.paused) / (trainer.step - self.first - 1)
        left = trainer.plan.steps - trainer.step
        validations = count_validations(trainer.plan, trainer.step)
        trainer.on_timing(Timing(step, left, self.validation_seconds, validations))


def _open_folder(folder: Path, resume: bool, stack: ExitStack) -> None:
    """Create and lock the folder of a run, and check that the folder has no run yet unless `resume` is True.

    The lock is released when `stack` is closed.
    """
    with convert_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_folder(folder))
        prepare_run_folder(folder, resume)


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: set eval mode and disable gradients; on exit, set training mode and restore the RNG state."""
    model.eval()
    try:
        with torch.no_grad(), rng_state.preserve_rng_state(device):
            yield
    finally:
        model.train()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(local_shard(tensor).isfinite().all())


def _ignore(*values: object) -> None:
    """Do nothing; replaces the callbacks in all processes except rank 0."""
