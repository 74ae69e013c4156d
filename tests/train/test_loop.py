"""The training loop: a run that is killed at any moment and resumed ends bit for bit as the uninterrupted one."""

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import CheckpointError, ConfigError, TrainingError
from regard.train import checkpoint, loop
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from regard.train.interrupts import TrainingInterruptedError
from regard.train.log import MetricsLog
from regard.train.loop import Progress, Timing, TrainingResult, count_validations, fit, measure_step_seconds
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.process_group import ProcessGroup
from regard.train.schedule import Constant
from regard.train.task import Loss
from tests.train import killed_runs as killed
from tests.train.subprocesses import start
from tests.train.tiny import BATCH, Points, Tiny, plan

TIMES = ("seconds", "samples_per_second")


def lines(folder: Path) -> list[dict[str, float]]:
    """The log without times."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name not in TIMES} for each in entries]


def same(one: TrainingResult, other: TrainingResult) -> bool:
    weights = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in weights)
    return equal and (one.losses, one.metrics, one.steps) == (other.losses, other.metrics, other.steps)


def load(folder: Path, step: int) -> Checkpoint:
    return CheckpointFolder(folder / CHECKPOINTS).load(folder / CHECKPOINTS / f"step-{step:08d}.json")


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints of a run, after a check that each is valid and has no NaN."""
    steps = CheckpointFolder(folder / CHECKPOINTS).steps()
    for step in steps:
        assert not any(t.is_floating_point() and t.isnan().any() for t in load(folder, step).tensors.values())
    return steps


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrainingResult, Path]]:
    """Each plan run to its end, and its folder."""
    folders = {name: tmp_path_factory.mktemp(name) for name in killed.PLANS}
    return {name: (fit(killed.model(), Points(), killed.PLANS[name], folder=f), f) for name, f in folders.items()}


@pytest.mark.parametrize("name", killed.PLANS)
@pytest.mark.parametrize("instant", killed.INSTANTS)
def test_a_run_killed_at_any_moment_and_resumed_ends_as_the_uninterrupted_one(
    name: str, instant: str, uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted[name]
    killed.run_killed(tmp_path, name, instant)
    checkpoint_steps(tmp_path)
    resumed = fit(killed.model(), Points(), killed.PLANS[name], folder=tmp_path, resume=True)
    assert same(resumed, truth)
    assert lines(tmp_path) == lines(folder)
    assert files(tmp_path) == files(folder), "the resumed run leaves no further files"


def test_a_run_killed_several_times_ends_as_the_uninterrupted_one(
    uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted["adamw"]
    for instant in (
        "half of the tensors",
        "half of the first tensors",
        "between the files of a checkpoint",
        "a first loss",
    ):
        killed.run_killed(tmp_path, "adamw", instant, resume=True)
    assert same(fit(killed.model(), Points(), killed.PLANS["adamw"], folder=tmp_path, resume=True), truth)
    assert lines(tmp_path) == lines(folder)


def test_a_run_killed_from_outside_ends_as_the_uninterrupted_one(
    uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted["adamw"]
    draw = random.Random(5)
    for _ in range(6):
        process = start(killed.run, tmp_path, "adamw", None, True)
        time.sleep(draw.uniform(0.05, 0.5))
        process.kill()
        process.join(60)
        checkpoint_steps(tmp_path)
    assert same(fit(killed.model(), Points(), killed.PLANS["adamw"], folder=tmp_path, resume=True), truth)
    assert lines(tmp_path) == lines(folder)


def test_resuming_a_finished_run_gives_the_same_result(
    uninterrupted: dict[str, tuple[TrainingResult, Path]],
) -> None:
    truth, folder = uninterrupted["muon"]
    before = (folder / "log.jsonl").read_bytes()
    assert same(fit(killed.model(), Points(), killed.PLANS["muon"], folder=folder, resume=True), truth)
    assert (folder / "log.jsonl").read_bytes() == before


def test_two_runs_of_a_plan_are_equal_and_another_seed_gives_another_result() -> None:
    one = fit(Tiny(dropout=0.2), Points(), plan())
    torch.rand(5), random.random(), numpy.random.rand()  # earlier random numbers have no effect
    assert same(fit(Tiny(dropout=0.2), Points(), plan()), one)
    assert not same(fit(Tiny(dropout=0.2), Points(), plan(seed=1)), one)


def test_writing_checkpoints_does_not_change_the_result(tmp_path: Path) -> None:
    assert same(fit(Tiny(dropout=0.2), Points(), plan()), fit(Tiny(dropout=0.2), Points(), plan(), folder=tmp_path))


def test_random_numbers_drawn_in_a_validation_have_no_effect_on_training() -> None:
    class Drawing(Points):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            torch.rand(7), random.random(), numpy.random.rand(3)
            assert not model.training
            assert not torch.is_grad_enabled()
            return super().evaluate(model)

    drawing, still = (fit(Tiny(dropout=0.2), task, plan()) for task in (Drawing(), Points()))
    assert drawing.losses == still.losses
    assert torch.equal(drawing.model.head.weight, still.model.head.weight)


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_gradient_accumulation_gives_the_loss_of_the_whole_batch(steps: int) -> None:
    one, cut = (fit(Tiny(), Points(), plan(gradient_accumulation_steps=each)) for each in (1, steps))
    for (step, loss), (other, again) in zip(one.losses, cut.losses, strict=True):
        assert step == other
        assert again == pytest.approx(loss, rel=1e-6)


def test_steps_are_equal_to_a_plain_pytorch_loop() -> None:
    task, given, mine = Points(), Tiny(), Tiny()
    made = TrainingPlan(
        steps=3,
        batch_size=BATCH,
        max_grad_norm=0.1,
        schedule=Constant(),
        optimizer=AdamW(lr=0.02, betas=(0.8, 0.9), weight_decay=0.3),
    )
    fitted = fit(given, task, made)
    matrices, vectors = ([p for p in mine.parameters() if (p.ndim > 1) == flag] for flag in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9))
    losses = []
    for step in range(3):
        x, y = task.batch(step, 0, 1)
        loss = nn.functional.cross_entropy(mine(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert fitted.losses[0] == (1, pytest.approx(losses[0], rel=1e-6))
    for name, weight in mine.named_parameters():
        torch.testing.assert_close(given.get_parameter(name), weight)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", [AdamW(lr=0.02), Muon(adamw=AdamW(lr=0.02))], ids=["adamw", "muon"])
def test_half_precision_gives_nearly_the_same_loss(precision: str, optimizer: AdamW | Muon) -> None:
    seen = set[torch.dtype]()

    class Seen(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.add(out.dtype)
            return out

    full, half = (
        fit(Seen(), Points(), plan(optimizer=optimizer, precision=each, max_grad_norm=1.0))
        for each in ("float32", precision)
    )
    assert seen == {torch.float32, getattr(torch, precision)}
    assert all(p.dtype == torch.float32 for p in half.model.parameters())
    assert half.losses[-1][1] == pytest.approx(full.losses[-1][1], rel=0.1)
    assert half.losses[-1][1] < half.losses[0][1]


class Overflowing(Points):
    """The task with an infinite gradient at the fourth call."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        if model.calls == 4:  # of one parameter only: the others must not be updated either
            model.embed.bias.register_hook(lambda grad: grad * torch.inf)
        return found


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.02), Muon(adamw=AdamW(lr=0.02))], ids=["adamw", "muon"])
def test_an_infinite_gradient_in_float16_skips_the_step_for_all_parameters(
    optimizer: AdamW | Muon, tmp_path: Path
) -> None:
    made = plan(
        steps=4, precision="float16", optimizer=optimizer, save_every=1, evaluate_every=None, keep_checkpoints=4
    )
    model = Tiny()
    fit(model, Overflowing(), made, folder=tmp_path)
    before, after = load(tmp_path, 3), load(tmp_path, 4)
    for name, _ in model.named_parameters():
        assert torch.equal(before.section("model")[name], after.section("model")[name])
    assert after.metadata["scaler"]["scale"] == before.metadata["scaler"]["scale"] / 2
    checkpoint_steps(tmp_path)


def test_a_float16_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    made = plan(precision="float16", averaging=ExponentialAverage(decay=0.8))
    truth = fit(Tiny(), Points(), made)
    with pytest.raises(Unreadable):
        fit(Tiny(), Failing(9), made, folder=tmp_path)
    assert same(fit(Tiny(), Points(), made, folder=tmp_path, resume=True), truth)


class Unreadable(OSError):  # noqa: N818 (named like an OSError)
    """The error of a task that cannot read its data."""


class Failing(Points):
    """The task with data that cannot be read from a step on."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.step, self.error = step, error or Unreadable("people.tsv, line 7: 2 columns, not 3")

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        if step >= self.step:
            raise self.error
        return super().batch(step, part, of)


@pytest.mark.parametrize("error", [None, ValueError("a row is short"), StopIteration("no more")])
def test_an_error_of_the_data_stops_the_run_and_the_last_checkpoint_is_kept(
    error: Exception | None, tmp_path: Path
) -> None:
    task = Failing(9, error)
    with pytest.raises(type(task.error)) as caught:
        fit(Tiny(), task, plan(), folder=tmp_path)
    assert caught.value is task.error
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")]
    assert checkpoint_steps(tmp_path) == [6, 8], "the steps before the bad one are done"


class NotFinite(Points):
    """The task with a loss that is not finite at some call."""

    def __init__(self, call: int, value: float) -> None:
        super().__init__()
        self.call, self.value = call, value

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        if model.calls != self.call:
            return found
        return Loss(found.total + model.head.weight.sum() * self.value, found.count)


@pytest.mark.parametrize(("call", "value"), [(7, "nan"), (8, "inf"), (9, "-inf"), (12, "nan")])
def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_checkpoint_is_kept(
    call: int, value: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"^the loss is -?(nan|inf) near step \d+; the last checkpoint is in"):
        fit(Tiny(), NotFinite(call, float(value)), plan(), folder=tmp_path)
    assert checkpoint_steps(tmp_path) == ([4, 6] if call < 9 else [6, 8])


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    class NaNGradient(NotFinite):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            found = Points.loss(self, model, batch)
            if model.calls == self.call:
                model.head.weight.register_hook(lambda grad: grad * torch.nan)
            return found

    with pytest.raises(TrainingError, match=r"^\S+ is not finite after step 8; the last checkpoint is in"):
        fit(Tiny(), NaNGradient(8, 0.0), plan(), folder=tmp_path)
    assert checkpoint_steps(tmp_path) == [4, 6]


def test_without_a_folder_the_error_says_that_there_is_no_checkpoint() -> None:
    with pytest.raises(TrainingError, match="there is no checkpoint"):
        fit(Tiny(), NotFinite(2, float("nan")), plan())


def test_a_score_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class NaNScore(Points):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"accuracy": float("nan")}

    with pytest.raises(TrainingError, match="accuracy is nan in the validation after step 6; the last checkpoint"):
        fit(Tiny(), NaNScore(), plan(), folder=tmp_path)
    assert checkpoint_steps(tmp_path) == [4]


class NoValidation(Points):
    """The task without validation data."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def test_a_task_without_metrics_can_be_trained_but_has_no_best_weights(tmp_path: Path) -> None:
    fitted = fit(Tiny(), NoValidation(), plan(), folder=tmp_path / "last")
    assert fitted.metrics == []
    for more in ({"patience": 2}, {"load_best_at_end": True}):
        with pytest.raises(
            ConfigError, match="patience and load_best_at_end need a score, but the task's evaluate returns"
        ):
            fit(Tiny(), NoValidation(), plan(**more), folder=tmp_path / next(iter(more)))


def test_batches_without_targets_raise_an_error() -> None:
    class Empty(Points):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return Loss(model(batch[0]).sum() * 0, 0)

    with pytest.raises(TrainingError, match="the batches up to step 1 have no targets: every Loss has a count of 0"):
        fit(Tiny(), Empty(), plan())


def disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (checkpoint, "save_file", "the checkpoint of step 8"),
        (MetricsLog, "add", "the log"),
        (MetricsLog, "sync", "the checkpoint of"),
    ],
    ids=["checkpoint", "log", "sync"],
)
def test_a_full_disk_stops_the_run_and_existing_checkpoints_stay_valid(
    owner: Any, name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = {"save_file": 3, "add": 5, "sync": 3}[name]
    monkeypatch.setattr(owner, name, killed.at(count, getattr(owner, name), dying=disk_full))
    with pytest.raises(
        TrainingError, match=f"{what}.* cannot be saved in .*No space left on device; fix this, then --resume"
    ):
        fit(Tiny(), Points(), plan(), folder=tmp_path)
    assert checkpoint_steps(tmp_path) == [4, 6]
    assert not [name for name in files(tmp_path) if "unfinished" in name]
    monkeypatch.undo()
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))


def test_a_folder_that_cannot_be_created_raises_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in (
        ("file", "there is a file of that name"),
        ("file/run", r".*Not a directory.*"),
        ("x" * 300, ".*"),
    ):
        with pytest.raises(TrainingError, match=f"the run cannot be saved in .*{folder}: {why}; fix this or choose"):
            fit(Tiny(), Failing(1), plan(), folder=tmp_path / folder)


def test_a_write_that_the_file_system_refuses_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules imported meanwhile, which would be truncated
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the largest file size
    try:
        with pytest.raises(TrainingError, match="the checkpoint of step 4 cannot be saved"):
            fit(Tiny(), Points(), plan(), folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert files(tmp_path) == {".lock", "plan.json", "log.jsonl"}


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    errors: list[str] = []

    def second(now: Progress) -> None:
        before = files(tmp_path)
        with pytest.raises(ConfigError, match="another process is running in"):
            fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True)
        errors.append("locked")
        assert files(tmp_path) == before

    fit(Tiny(), Points(), plan(), folder=tmp_path, on_progress=second)
    assert errors
    assert checkpoint_steps(tmp_path)[-1] == plan().steps


@pytest.mark.parametrize("where", ["loss", "evaluate", "save"])
def test_a_second_interrupt_leaves_a_valid_checkpoint_and_no_unfinished_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        if where == "save":
            Path(args[1]).write_bytes(b"half")
        for _ in range(2):  # the second one stops at once
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    owner, name, count = {"loss": (Points, "loss", 11), "evaluate": (Points, "evaluate", 2)}.get(
        where, (checkpoint, "save_file", 4)
    )
    monkeypatch.setattr(owner, name, killed.at(count, getattr(owner, name), dying=interrupt))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(Tiny(), Points(), plan(), folder=tmp_path)
    finally:
        signal.signal(signal.SIGINT, previous)
    monkeypatch.undo()
    assert checkpoint_steps(tmp_path) == [6, 8]
    assert not [name for name in files(tmp_path) if "unfinished" in name]
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))


class Scored(Points):
    """The task with given scores; records the weights that were evaluated."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores, self.evaluated = scores, list[Tensor]()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluated.append(model.head.weight.detach().clone())
        return {"score": self.scores[len(self.evaluated) - 1]}


@pytest.mark.parametrize("averaging", [None, ExponentialAverage(decay=0.8), LastKAverage(count=2, every=5)], ids=str)
def test_the_best_weights_are_loaded_at_the_end(
    averaging: ExponentialAverage | LastKAverage | None, tmp_path: Path
) -> None:
    task = Scored(1.0, 5.0, 2.0, 3.0)
    made = plan(load_best_at_end=True, evaluate_every=3, save_every=2, keep_checkpoints=1, averaging=averaging)
    fitted = fit(Tiny(), task, made, folder=tmp_path)
    assert torch.equal(fitted.model.head.weight, task.evaluated[1])
    assert checkpoint_steps(tmp_path) == [6, 12], "the best and the last"


def test_if_the_best_checkpoint_is_damaged_the_next_best_is_used(tmp_path: Path) -> None:
    task, messages = Scored(1.0, 5.0, 4.0, 3.0), list[str]()

    def damage(progress: Progress) -> None:
        if progress.step == 10:
            file = tmp_path / CHECKPOINTS / "step-00000006.safetensors"
            file.write_bytes(file.read_bytes()[:-1])

    made = plan(load_best_at_end=True, evaluate_every=3, keep_checkpoints=9)
    fitted = fit(Tiny(), task, made, folder=tmp_path, on_message=messages.append, on_progress=damage)
    assert torch.equal(fitted.model.head.weight, task.evaluated[2])
    (message,) = messages
    assert message.endswith("step-00000006.safetensors is damaged: its checksum does not match; the next best is used")


def test_early_stopping_counts_validations_across_a_resumed_run(tmp_path: Path) -> None:
    made = plan(steps=30, evaluate_every=2, save_every=2, patience=3)
    scores = [1.0, 3.0, 2.0, 3.0, 1.0, 9.0]
    fitted = fit(Tiny(), Scored(*scores), made, folder=tmp_path / "whole")
    assert fitted.steps == 10, "the third validation that is no better than the second"

    class Stopping(Failing):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"score": scores[int(model.calls) // 2 - 1]}

    with pytest.raises(Unreadable):
        fit(Tiny(), Stopping(7), made, folder=tmp_path / "cut")
    again = fit(Tiny(), Stopping(99), made, folder=tmp_path / "cut", resume=True)
    assert (again.steps, again.losses) == (10, fitted.losses)


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [10, 12]), (4, [6, 8, 10, 12]), (99, [2, 4, 6, 8, 10, 12])])
def test_the_latest_checkpoints_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    fit(Tiny(), NoValidation(), plan(save_every=2, evaluate_every=None, keep_checkpoints=keep), folder=tmp_path)
    assert checkpoint_steps(tmp_path) == left


def test_damaged_checkpoints_are_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    truth, messages = fit(Tiny(), Points(), plan()), list[str]()
    fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path)
    for step in (8, 12):
        (tmp_path / CHECKPOINTS / f"step-{step:08d}.safetensors").write_bytes(b"")
    resumed = fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path, resume=True, on_message=messages.append)
    assert [message.split("/")[-1] for message in messages] == [
        f"step-{step:08d}.safetensors is damaged: its checksum does not match; the one before it is used"
        for step in (12, 8)
    ]
    assert same(resumed, truth)
    assert checkpoint_steps(tmp_path) == [4, 6, 8, 12]


def test_damaged_checkpoints_of_later_steps_do_not_replace_a_valid_one(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path)
    folder = CheckpointFolder(tmp_path / CHECKPOINTS, keep=1)
    valid = load(tmp_path, 4)
    for step in (6, 8, 12):
        (tmp_path / CHECKPOINTS / f"step-{step:08d}.json").write_text("{}")
    folder.save(valid)
    assert folder.steps() == [4]
    found = folder.load_latest()
    assert found is not None
    assert found.step == 4


def test_resuming_without_a_valid_checkpoint_raises_an_error(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    for file in (tmp_path / CHECKPOINTS).glob("*.json"):
        file.write_text("{")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged; start again in another folder"):
        fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True)


def test_a_run_is_resumed_with_the_same_plan_only(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    with pytest.raises(
        ConfigError, match=r"has another plan: max_grad_norm was 0.3 and is 0.5; only cuda_graphs, .*, steps may"
    ):
        fit(Tiny(), Points(), plan(steps=24, max_grad_norm=0.5), folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"steps=11, but the run in .* has done 12 steps already"):
        fit(Tiny(), Points(), plan(steps=11), folder=tmp_path, resume=True)


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_plan_does_not_block_the_checkpoints(damage: bytes, tmp_path: Path) -> None:
    whole = fit(Tiny(), Points(), plan(), folder=tmp_path / "whole")
    with pytest.raises(TrainingInterruptedError):
        fit(Tiny(), Interrupted(7, signal.SIGINT), plan(), folder=tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_bytes(damage)
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path / "run", resume=True), whole)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["steps"] == 12


class Interrupted(Points):
    """The task, which sends a signal to its own process in one loss."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number, self.calls = at, number, 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        if self.calls == self.at:
            assert threading.current_thread() is threading.main_thread()
            signal.raise_signal(self.number)
        return super().loss(model, batch)


@pytest.mark.parametrize("at", [1, 7, 11])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_the_resumed_run_is_the_same(number: int, at: int, tmp_path: Path) -> None:
    made = plan(averaging=ExponentialAverage(decay=0.8))
    whole = fit(Tiny(dropout=0.2), Points(), made)
    before = signal.getsignal(number)
    with pytest.raises(TrainingInterruptedError, match=signal.Signals(number).name) as found:
        fit(Tiny(dropout=0.2), Interrupted(at, number), made, folder=tmp_path)
    assert found.value.number == number
    assert signal.getsignal(number) == before
    assert checkpoint_steps(tmp_path)[-1] == at
    assert same(fit(Tiny(dropout=0.2), Points(), made, folder=tmp_path, resume=True), whole)


class KilledCompiler(Interrupted):
    """The task, whose loss fails after the signal, as when the signal also ended a compiler of torch.compile."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        if self.calls == self.at:
            raise RuntimeError("CppCompileError: C++ compile error")
        return found


@pytest.mark.parametrize(("at", "saved"), [(1, []), (7, [4, 6])])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_fails_because_of_a_signal_is_not_saved_and_the_run_stops(
    number: int, at: int, saved: list[int], tmp_path: Path
) -> None:
    whole = fit(Tiny(dropout=0.2), Points(), plan())
    with pytest.raises(TrainingInterruptedError, match=signal.Signals(number).name) as found:
        fit(Tiny(dropout=0.2), KilledCompiler(at, number), plan(), folder=tmp_path)
    assert found.value.number == number
    assert checkpoint_steps(tmp_path) == saved
    assert same(fit(Tiny(dropout=0.2), Points(), plan(), folder=tmp_path, resume=True), whole)


def test_an_error_without_a_signal_is_raised_as_it_is(tmp_path: Path) -> None:
    class Failing(Points):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fit(Tiny(), Failing(), plan(), folder=tmp_path)


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    longer = plan(steps=18, save_every=5)
    fitted = fit(Tiny(), Points(), longer, folder=tmp_path, resume=True)
    assert fitted.steps == 18
    assert [step for step, _ in fitted.losses][:2] == [1, 4]
    assert checkpoint_steps(tmp_path)[-1] == 18
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 18
    assert same(fit(Tiny(), Points(), longer, folder=tmp_path, resume=True), fitted), "it is finished"


def test_steps_and_the_first_validation_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TIMED_SECONDS", 0.0)
    timed: list[Timing] = []
    fit(Tiny(), Points(), plan(evaluate_every=5), on_timing=timed.append)
    first, second = timed
    assert (first.steps_left, first.validation, first.validations_left) == (8, None, 3)
    assert (second.steps_left, second.validations_left) == (7, 2)
    assert first.step > 0 < (second.validation or 0)
    timed.clear()
    fit(Tiny(), Points(), plan(steps=3, evaluate_every=None), on_timing=timed.append)
    assert [(each.steps_left, each.validations_left) for each in timed] == [(0, 0)], "three steps are too few"


def test_the_time_of_a_validation_is_no_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TIMED_SECONDS", 0.0)
    clock = 0.0

    class Clocked(Points):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            nonlocal clock
            clock += 1
            return super().loss(model, batch)

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            nonlocal clock
            clock += 100
            return super().evaluate(model)

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    timed: list[Timing] = []
    fit(Tiny(), Clocked(), plan(evaluate_every=2, gradient_accumulation_steps=1), on_timing=timed.append)
    assert timed == [Timing(1.0, 10, 100.0, 5)]


@pytest.mark.parametrize(("every", "done", "count"), [(5, 0, 3), (5, 5, 2), (6, 0, 2), (None, 3, 1), (5, 12, 0)])
def test_validations_are_counted(every: int | None, done: int, count: int) -> None:
    assert count_validations(plan(evaluate_every=every), done) == count


def test_measuring_a_step_changes_neither_the_model_nor_the_rng() -> None:
    model = Tiny(dropout=0.2).eval()
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    assert measure_step_seconds(model, Points(), plan()) > 0
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(ConfigError, match=r"already has a run; resume it with resume=True \(--resume\), or"):
        fit(Tiny(), Points(), plan(), folder=tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_resuming_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 12


def test_the_checkpoint_of_another_model_raises_an_error(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    other = Tiny()
    other.head = nn.Linear(13, 6, bias=False)
    with pytest.raises(CheckpointError, match=r"is of another model: (?s:.*)head.weight"):
        fit(other, Points(), plan(), folder=tmp_path, resume=True)


def test_invalid_arguments_raise_an_error_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume=True needs a folder"):
        fit(Tiny(), Points(), plan(), resume=True)
    with pytest.raises(ConfigError, match="load_best_at_end needs a folder"):
        fit(Tiny(), Points(), plan(load_best_at_end=True))
    with pytest.raises(ConfigError, match=r"batch_size=24 cannot be divided evenly by world size 5 x .* such as 25"):
        fit(Tiny(), Points(), plan(), folder=tmp_path / "none", group=ProcessGroup(0, 5))
    assert not (tmp_path / "none").exists()


def test_on_progress_gets_losses_metrics_and_the_time_left() -> None:
    shown: list[Progress] = []
    fitted = fit(Tiny(), Points(), plan(steps=25, evaluate_every=20), on_progress=shown.append)
    assert [each.step for each in shown] == [1, 4, 8, 10, 12, 16, 20, 24, 25]
    assert [(each.step, each.loss) for each in shown] == fitted.losses
    assert shown[0].lr == pytest.approx(3e-2 / 3), "a third of the warmup"
    assert shown[-1].seconds_left == 0
    assert shown[3].seconds_left == pytest.approx(15 * BATCH / shown[3].samples_per_second)
    assert shown[-1].metrics == fitted.metrics[0][1]


def test_the_reported_loss_is_the_mean_since_the_last_report() -> None:
    """The mean over all targets, not over the means of steps, which have different counts."""
    frozen = AdamW(lr=1e-30)
    losses = dict(fit(Tiny(), Points(), plan(optimizer=frozen, save_every=99, evaluate_every=None, steps=10)).losses)
    task, model = Points(), Tiny()
    with torch.no_grad():
        each = [task.loss(model, task.batch(step, 0, 1)) for step in range(1, 10)]
    mean = sum(float(one.total) for one in each) / sum(float(one.count) for one in each)
    assert losses[10] == pytest.approx(mean, rel=1e-6)


def test_a_compiled_model_gives_the_same_losses() -> None:
    plain, compiled = fit(Tiny(), Points(), plan()), fit(Tiny(), Points(), plan(compile=True))
    assert compiled.losses == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in plain.losses]
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
