"""A run is a function of its plan: killed at any instant and resumed, it ends bit for bit as the uninterrupted one."""

import errno
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import CheckpointError, ConfigError, TrainingError
from regard.train import checkpoint
from regard.train.averaging import ExponentialAverage, LastKAverage
from regard.train.checkpoint import CheckpointFolder
from regard.train.log import Log
from regard.train.loop import Progress, TrainingResult, fit
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.process_group import Processes
from regard.train.schedule import Constant
from regard.train.task import Loss
from tests.train import killed
from tests.train.children import start
from tests.train.tiny import BATCH, Points, Tiny, plan

TIMES = ("seconds", "records_per_second")


def lines(folder: Path) -> list[dict[str, float]]:
    """The log, without how long things took."""
    told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name not in TIMES} for each in told]


def same(one: TrainingResult, other: TrainingResult) -> bool:
    weights = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in weights)
    return equal and (one.losses, one.figures, one.steps) == (other.losses, other.figures, other.steps)


def whole(folder: Path) -> list[int]:
    """The steps of the states in a run's folder, each of which can be read and holds no NaN."""
    keeper = CheckpointFolder(folder / "states")
    for step in keeper.steps():
        tensors = keeper._read(folder / "states" / f"step-{step:08d}.json").tensors
        assert not any(t.is_floating_point() and t.isnan().any() for t in tensors.values())
    return keeper.steps()


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrainingResult, Path]]:
    """Each plan run to its end, and its folder."""
    folders = {name: tmp_path_factory.mktemp(name) for name in killed.PLANS}
    return {name: (fit(killed.model(), Points(), killed.PLANS[name], folder=f), f) for name, f in folders.items()}


@pytest.mark.parametrize("name", killed.PLANS)
@pytest.mark.parametrize("instant", killed.INSTANTS)
def test_killed_at_an_instant_and_resumed_it_ends_alike(
    name: str, instant: str, uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted[name]
    killed.killed(tmp_path, name, instant)
    whole(tmp_path)
    resumed = fit(killed.model(), Points(), killed.PLANS[name], folder=tmp_path, resume=True)
    assert same(resumed, truth)
    assert lines(tmp_path) == lines(folder)
    assert files(tmp_path) == files(folder), "nothing is left that an uninterrupted run would not have"


def test_killed_again_and_again_it_ends_alike(
    uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted["adamw"]
    for instant in ("half of the tensors", "half of the first tensors", "between the files of a state", "a first loss"):
        killed.killed(tmp_path, "adamw", instant, resume=True)
    assert same(fit(killed.model(), Points(), killed.PLANS["adamw"], folder=tmp_path, resume=True), truth)
    assert lines(tmp_path) == lines(folder)


def test_killed_from_outside_at_any_time_it_ends_alike(
    uninterrupted: dict[str, tuple[TrainingResult, Path]], tmp_path: Path
) -> None:
    truth, folder = uninterrupted["adamw"]
    draw = random.Random(5)
    for _ in range(6):
        process = start(killed.run, tmp_path, "adamw", None, True)
        time.sleep(draw.uniform(0.05, 0.5))
        process.kill()
        process.join(60)
        whole(tmp_path)
    assert same(fit(killed.model(), Points(), killed.PLANS["adamw"], folder=tmp_path, resume=True), truth)
    assert lines(tmp_path) == lines(folder)


def test_a_finished_run_that_is_resumed_gives_what_it_gave(
    uninterrupted: dict[str, tuple[TrainingResult, Path]],
) -> None:
    truth, folder = uninterrupted["muon"]
    before = (folder / "log.jsonl").read_bytes()
    assert same(fit(killed.model(), Points(), killed.PLANS["muon"], folder=folder, resume=True), truth)
    assert (folder / "log.jsonl").read_bytes() == before


def test_two_runs_of_a_plan_are_one_and_another_seed_is_another() -> None:
    one = fit(Tiny(dropout=0.2), Points(), plan())
    torch.rand(5), random.random(), numpy.random.rand()  # what was drawn before changes nothing
    assert same(fit(Tiny(dropout=0.2), Points(), plan()), one)
    assert not same(fit(Tiny(dropout=0.2), Points(), plan(seed=1)), one)


def test_a_folder_changes_nothing(tmp_path: Path) -> None:
    assert same(fit(Tiny(dropout=0.2), Points(), plan()), fit(Tiny(dropout=0.2), Points(), plan(), folder=tmp_path))


def test_what_an_evaluation_draws_is_not_felt() -> None:
    class Drawing(Points):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            torch.rand(7), random.random(), numpy.random.rand(3)
            assert not model.training
            assert not torch.is_grad_enabled()
            return super().evaluate(model)

    drawing, still = (fit(Tiny(dropout=0.2), task, plan()) for task in (Drawing(), Points()))
    assert drawing.losses == still.losses
    assert torch.equal(drawing.model.head.weight, still.model.head.weight)


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_shares_of_a_batch_add_up_to_the_batch_though_they_count_unequally(accumulate: int) -> None:
    one, cut = (fit(Tiny(), Points(), plan(gradient_accumulation_steps=each)) for each in (1, accumulate))
    for (step, loss), (other, again) in zip(one.losses, cut.losses, strict=True):
        assert step == other
        assert again == pytest.approx(loss, rel=1e-6)


def test_a_step_is_one_of_torch_written_out() -> None:
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
def test_in_half_precision_it_learns_nearly_the_same(precision: str, optimizer: AdamW | Muon) -> None:
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
    """The task, with one gradient at the fourth call that is beyond all numbers."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        if model.calls == 4:  # for one weight alone: the optimizer of the others must not step either
            model.embed.bias.register_hook(lambda grad: grad * torch.inf)
        return found


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.02), Muon(adamw=AdamW(lr=0.02))], ids=["adamw", "muon"])
def test_a_gradient_beyond_float16_skips_its_step_for_all_weights(optimizer: AdamW | Muon, tmp_path: Path) -> None:
    made = plan(
        steps=4, precision="float16", optimizer=optimizer, save_every=1, evaluate_every=None, keep_checkpoints=4
    )
    model = Tiny()
    fit(model, Overflowing(), made, folder=tmp_path)
    keeper = CheckpointFolder(tmp_path / "states")
    before, after = (keeper._read(tmp_path / "states" / f"step-{step:08d}.json") for step in (3, 4))
    for name, _ in model.named_parameters():
        assert torch.equal(before.part("model")[name], after.part("model")[name])
    assert after.facts["scaler"]["scale"] == before.facts["scaler"]["scale"] / 2
    whole(tmp_path)


def test_a_run_in_float16_resumes_bit_for_bit(tmp_path: Path) -> None:
    made = plan(precision="float16", averaging=ExponentialAverage(decay=0.8))
    truth = fit(Tiny(), Points(), made)
    with pytest.raises(Unreadable):
        fit(Tiny(), Failing(9), made, folder=tmp_path)
    assert same(fit(Tiny(), Points(), made, folder=tmp_path, resume=True), truth)


class Unreadable(OSError):  # noqa: N818 (it is what a file system says)
    """What a reader of data says."""


class Failing(Points):
    """The task, whose data cannot be read from a step on."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.step, self.error = step, error or Unreadable("people.tsv, line 7: 2 columns, not 3")

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        if step >= self.step:
            raise self.error
        return super().batch(step, part, of)


@pytest.mark.parametrize("error", [None, ValueError("a row is short"), StopIteration("no more")])
def test_unreadable_data_stops_the_run_in_its_own_words_and_the_last_state_stays(
    error: Exception | None, tmp_path: Path
) -> None:
    task = Failing(9, error)
    with pytest.raises(type(task.error)) as caught:
        fit(Tiny(), task, plan(), folder=tmp_path)
    assert caught.value is task.error
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")]
    assert whole(tmp_path) == [6, 8], "a step before the bad one is still taken"


class Spoilt(Points):
    """The task, with a loss or a gradient that is no number at some call."""

    def __init__(self, call: int, value: float, *, gradient: bool = False) -> None:
        super().__init__()
        self.call, self.value, self.gradient = call, value, gradient

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        if model.calls != self.call:
            return found
        extra = model.head.weight.sum() * self.value
        return Loss(found.total + (extra - extra.detach() if self.gradient else extra), found.count)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", [7, 8, 9, 12])
def test_a_loss_that_is_no_number_stops_the_run_with_the_last_good_state_kept(
    call: int, value: float, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"^the loss is -?(nan|inf) near step \d+, and the last good state is kept"):
        fit(Tiny(), Spoilt(call, value), plan(), folder=tmp_path)
    assert whole(tmp_path) == ([4, 6] if call < 9 else [6, 8])


def test_weights_spoilt_by_the_very_step_before_a_state_are_not_written(tmp_path: Path) -> None:
    class Sneaky(Spoilt):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            found = Points.loss(self, model, batch)
            if model.calls == self.call:
                model.head.weight.register_hook(lambda grad: grad * torch.nan)
            return found

    with pytest.raises(TrainingError, match=r"^\S+ is not finite any more after step 8, and the last good state"):
        fit(Tiny(), Sneaky(8, 0.0), plan(), folder=tmp_path)
    assert whole(tmp_path) == [4, 6]


def test_without_a_folder_nothing_is_said_to_be_kept() -> None:
    with pytest.raises(TrainingError, match="no state was kept before; begin again"):
        fit(Tiny(), Spoilt(2, float("nan")), plan())


def test_a_score_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    class Scoreless(Points):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"accuracy": float("nan")}

    with pytest.raises(TrainingError, match="the evaluation after step 6 gave accuracy=nan, and the last good state"):
        fit(Tiny(), Scoreless(), plan(), folder=tmp_path)
    assert whole(tmp_path) == [4]


class Silent(Points):
    """The task without anything held out."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def test_a_task_without_figures_is_trained_but_cannot_be_chosen_by_them(tmp_path: Path) -> None:
    fitted = fit(Tiny(), Silent(), plan(), folder=tmp_path / "last")
    assert (fitted.figures, fitted.best) == ([], None)
    for more in ({"patience": 2}, {"load_best_at_end": True}):
        with pytest.raises(ConfigError, match="go by a score, but the task's evaluation gives no figures"):
            fit(Tiny(), Silent(), plan(**more), folder=tmp_path / next(iter(more)))


def test_batches_without_targets_are_said_to_have_none() -> None:
    class Empty(Points):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return Loss(model(batch[0]).sum() * 0, 0)

    with pytest.raises(TrainingError, match="nothing to learn from up to step 1: every Loss has a count of 0"):
        fit(Tiny(), Empty(), plan())


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [(checkpoint, "save_file", "the state after step 8"), (Log, "add", "the log"), (Log, "settle", "the state after")],
    ids=["state", "log", "sync"],
)
def test_a_full_disk_stops_the_run_and_what_was_whole_stays(
    owner: Any, name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = {"save_file": 3, "add": 5, "settle": 3}[name]
    monkeypatch.setattr(owner, name, killed.at(count, getattr(owner, name), dying=full))
    with pytest.raises(TrainingError, match=f"{what}.* could not be written: .*No space left on device; states that"):
        fit(Tiny(), Points(), plan(), folder=tmp_path)
    assert whole(tmp_path) == [4, 6]
    assert not [name for name in files(tmp_path) if "unfinished" in name]
    monkeypatch.undo()
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in (
        ("file", "there is a file of that name"),
        ("file/run", r".*Not a directory.*"),
        ("x" * 300, ".*"),
    ):
        with pytest.raises(TrainingError, match=f"a run cannot be kept in .*{folder}: {why}; see to that, or choose"):
            fit(Tiny(), Failing(1), plan(), folder=tmp_path / folder)


def test_a_file_system_that_refuses_stops_the_run(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # no file may grow beyond: a real failure of a write
    try:
        with pytest.raises(TrainingError, match="the state after step 4 could not be written"):
            fit(Tiny(), Points(), plan(), folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert files(tmp_path) == {".lock", "plan.json", "log.jsonl"}


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    heard: list[str] = []

    def second(now: Progress) -> None:
        before = files(tmp_path)
        with pytest.raises(ConfigError, match="another process is running in"):
            fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True)
        heard.append("refused")
        assert files(tmp_path) == before

    fit(Tiny(), Points(), plan(), folder=tmp_path, show=second)
    assert heard
    assert whole(tmp_path)[-1] == plan().steps


@pytest.mark.parametrize("where", ["loss", "evaluate", "save"])
def test_an_interrupt_leaves_a_whole_state_and_no_half_written_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*args: Any) -> None:
        if where == "save":
            Path(args[1]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    owner, name, count = {"loss": (Points, "loss", 11), "evaluate": (Points, "evaluate", 2)}.get(
        where, (checkpoint, "save_file", 4)
    )
    monkeypatch.setattr(owner, name, killed.at(count, getattr(owner, name), dying=pressed))
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its jobs with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(Tiny(), Points(), plan(), folder=tmp_path)
    finally:
        signal.signal(signal.SIGINT, heard)
    monkeypatch.undo()
    assert whole(tmp_path) == [6, 8]
    assert not [name for name in files(tmp_path) if "unfinished" in name]
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))


class Scored(Points):
    """The task, with scores as told, and the weights that got them."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores, self.evaluated = scores, list[Tensor]()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluated.append(model.head.weight.detach().clone())
        return {"score": self.scores[len(self.evaluated) - 1]}


@pytest.mark.parametrize("averaging", [None, ExponentialAverage(decay=0.8), LastKAverage(count=2, every=5)], ids=str)
def test_the_best_weights_are_chosen_and_kept(
    averaging: ExponentialAverage | LastKAverage | None, tmp_path: Path
) -> None:
    task = Scored(1.0, 5.0, 2.0, 3.0)
    made = plan(load_best_at_end=True, evaluate_every=3, save_every=2, keep_checkpoints=1, averaging=averaging)
    fitted = fit(Tiny(), task, made, folder=tmp_path)
    assert fitted.best == 5.0
    assert torch.equal(fitted.model.head.weight, task.evaluated[1])
    assert whole(tmp_path) == [6, 12], "the best and the last"


def test_a_best_state_that_was_damaged_is_told_and_the_next_best_is_taken(tmp_path: Path) -> None:
    task, heard = Scored(1.0, 5.0, 4.0, 3.0), list[str]()

    def spoil(progress: Progress) -> None:
        if progress.step == 10:
            file = tmp_path / "states" / "step-00000006.safetensors"
            file.write_bytes(file.read_bytes()[:-1])

    made = plan(load_best_at_end=True, evaluate_every=3, keep_checkpoints=9)
    fitted = fit(Tiny(), task, made, folder=tmp_path, tell=heard.append, show=spoil)
    assert torch.equal(fitted.model.head.weight, task.evaluated[2])
    assert len(heard) == 1
    assert heard[0].endswith("step-00000006.safetensors is damaged: it is not what was written; the next best is used")


def test_patience_ends_a_run_and_outlives_a_resumption(tmp_path: Path) -> None:
    made = plan(steps=30, evaluate_every=2, save_every=2, patience=3)
    scores = [1.0, 3.0, 2.0, 3.0, 1.0, 9.0]
    fitted = fit(Tiny(), Scored(*scores), made, folder=tmp_path / "whole")
    assert fitted.steps == 10, "the third evaluation that is no better than the second"

    class Stopping(Failing):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"score": scores[int(model.calls) // 2 - 1]}

    with pytest.raises(Unreadable):
        fit(Tiny(), Stopping(7), made, folder=tmp_path / "cut")
    again = fit(Tiny(), Stopping(99), made, folder=tmp_path / "cut", resume=True)
    assert (again.steps, again.losses) == (10, fitted.losses)


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [10, 12]), (4, [6, 8, 10, 12]), (99, [2, 4, 6, 8, 10, 12])])
def test_the_last_states_are_kept(keep: int, left: list[int], tmp_path: Path) -> None:
    fit(Tiny(), Silent(), plan(save_every=2, evaluate_every=None, keep_checkpoints=keep), folder=tmp_path)
    assert whole(tmp_path) == left


def test_damaged_states_are_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    truth, heard = fit(Tiny(), Points(), plan()), list[str]()
    fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path)
    for step in (8, 12):
        (tmp_path / "states" / f"step-{step:08d}.safetensors").write_bytes(b"")
    resumed = fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path, resume=True, tell=heard.append)
    assert [told.split("/")[-1] for told in heard] == [
        f"step-{step:08d}.safetensors is damaged: it is not what was written; the one before it is used"
        for step in (12, 8)
    ]
    assert same(resumed, truth)
    assert whole(tmp_path) == [4, 6, 8, 12]


def test_damaged_states_of_later_steps_do_not_push_out_a_good_one(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(keep_checkpoints=9), folder=tmp_path)
    keeper = CheckpointFolder(tmp_path / "states", keep=1)
    state = keeper._read(tmp_path / "states" / "step-00000004.json")
    for step in (6, 8, 12):
        (tmp_path / "states" / f"step-{step:08d}.json").write_text("{}")
    keeper.write(state)
    assert keeper.steps() == [4]
    found = keeper.newest()
    assert found is not None
    assert found.step == 4


def test_no_whole_state_at_all_is_an_error(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    for file in (tmp_path / "states").glob("*.json"):
        file.write_text("{")
    with pytest.raises(CheckpointError, match=r"no state in .*states is whole; begin anew in another folder"):
        fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True)


def test_a_run_is_resumed_with_its_own_plan_alone(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    with pytest.raises(
        ConfigError, match=r"had another plan: max_grad_norm was 0.3 and is 0.5, steps was 12 and is 24; resume"
    ):
        fit(Tiny(), Points(), plan(steps=24, max_grad_norm=0.5), folder=tmp_path, resume=True)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(CheckpointError, match="the plan of this run is damaged or gone: "):
        fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(ConfigError, match=r"holds a run already; go on with it by resume=True \(--resume\), or"):
        fit(Tiny(), Points(), plan(), folder=tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_resuming_where_there_is_nothing_begins(tmp_path: Path) -> None:
    assert same(fit(Tiny(), Points(), plan(), folder=tmp_path, resume=True), fit(Tiny(), Points(), plan()))
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 12


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    fit(Tiny(), Points(), plan(), folder=tmp_path)
    other = Tiny()
    other.head = nn.Linear(13, 6, bias=False)
    with pytest.raises(CheckpointError, match=r"is of another model: (?s:.*)head.weight"):
        fit(other, Points(), plan(), folder=tmp_path, resume=True)


def test_what_cannot_be_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder to resume from; say which with folder="):
        fit(Tiny(), Points(), plan(), resume=True)
    with pytest.raises(ConfigError, match="load_best_at_end needs a folder"):
        fit(Tiny(), Points(), plan(load_best_at_end=True))
    with pytest.raises(ConfigError, match=r"batch_size=24 cannot be divided evenly by world size 5 x .* such as 25"):
        fit(Tiny(), Points(), plan(), folder=tmp_path / "none", world=Processes(0, 5))
    assert not (tmp_path / "none").exists()


def test_progress_is_shown_with_what_is_left() -> None:
    shown: list[Progress] = []
    fitted = fit(Tiny(), Points(), plan(steps=25, evaluate_every=20), show=shown.append)
    assert [each.step for each in shown] == [1, 4, 8, 10, 12, 16, 20, 24, 25]
    assert [(each.step, each.loss) for each in shown] == fitted.losses
    assert shown[0].rate == pytest.approx(3e-2 / 3), "a third of the warm-up"
    assert shown[-1].seconds_left == 0
    assert shown[3].seconds_left == pytest.approx(15 * BATCH / shown[3].records_per_second)
    assert shown[-1].figures == fitted.figures[0][1]


def test_the_loss_that_is_told_is_the_mean_of_the_steps_since_the_last() -> None:
    """Over all targets, not over the means of steps, which count differently."""
    frozen = AdamW(lr=1e-30)
    losses = dict(fit(Tiny(), Points(), plan(optimizer=frozen, save_every=99, evaluate_every=None, steps=10)).losses)
    task, model = Points(), Tiny()
    with torch.no_grad():
        each = [task.loss(model, task.batch(step, 0, 1)) for step in range(1, 10)]
    mean = sum(float(one.total) for one in each) / sum(float(one.count) for one in each)
    assert losses[10] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same() -> None:
    plain, compiled = fit(Tiny(), Points(), plan()), fit(Tiny(), Points(), plan(compile=True))
    assert compiled.losses == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in plain.losses]
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
