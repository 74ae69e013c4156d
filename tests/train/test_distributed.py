"""DDP and FSDP give the results of one process, and checkpoints are resumed on a different number of processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.base.errors import ConfigError
from regard.train.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from regard.train.distributed import join_process_group
from regard.train.loop import TrainingResult, fit
from tests.train.subprocesses import start
from tests.train.tiny import PLANS, Points, Tiny
from tests.train.workers import AVERAGED, StoppedError, Stopping, gpt_run, worker

PARALLEL = ("ddp", "fsdp")
TRAINED = [(2, name) for name in PLANS] + [(4, name) for name in AVERAGED]
# the order of sums differs; Muon orthogonalizes in bfloat16
TOLERANCE = {"float16": 1e-3, "fsdp-muon": 1e-2}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def start_workers(size: int, *args: Any) -> None:
    """Run worker processes with the environment of torchrun, which itself takes much longer to start."""
    port = free_port()
    processes = [start(worker, rank, size, port, *map(str, args)) for rank in range(size)]
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The results of two and of four processes; four also resume the runs of one and of two."""
    two, four = (tmp_path_factory.mktemp(name) for name in ("two", "four"))
    with pytest.raises(StoppedError):
        fit(Tiny(), Stopping(), PLANS["last"], folder=two / "one")
    start_workers(2, "train", two)
    start_workers(4, "train", four, two)
    return {2: two, 4: four}


@pytest.fixture(scope="module")
def alone() -> dict[str, TrainingResult]:
    """The results of one process."""
    return {name: fit(Tiny(), Points(), each) for name, each in PLANS.items()}


def read_result(out: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors")


def load_latest(folder: Path) -> Checkpoint:
    checkpoint = CheckpointFolder(folder).load_latest()
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(("size", "name"), TRAINED)
def test_several_processes_give_the_result_of_one(
    size: int, parallel: str, name: str, trained: dict[int, Path], alone: dict[str, TrainingResult]
) -> None:
    result, weights = read_result(trained[size], f"{parallel}-{name}")
    tolerance = TOLERANCE.get(name, TOLERANCE.get(f"{parallel}-{name}", 1e-6))
    truth = alone[name]
    assert result["losses"] == [[step, pytest.approx(loss, rel=tolerance)] for step, loss in truth.losses]
    assert [[step, metrics["likelihood"]] for step, metrics in result["metrics"]] == [
        [step, pytest.approx(metrics["likelihood"], rel=10 * tolerance)] for step, metrics in truth.metrics
    ]
    for parameter, value in truth.model.named_parameters():
        torch.testing.assert_close(weights[parameter], value.detach(), rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_fused_loss_of_two_processes_is_that_of_logits_in_one(parallel: str, trained: dict[int, Path]) -> None:
    result, weights = read_result(trained[2], f"{parallel}-fused")
    truth = fit(*gpt_run())
    assert result["losses"] == [[step, pytest.approx(loss, rel=1e-5)] for step, loss in truth.losses]
    for name, value in truth.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("saved_by", ["one", *PARALLEL])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_checkpoint_is_resharded_for_four_processes_bit_for_bit(
    parallel: str, saved_by: str, trained: dict[int, Path]
) -> None:
    before = load_latest(trained[2] / saved_by / CHECKPOINTS)
    after = load_latest(trained[4] / f"{parallel}-from-{saved_by}-again")
    assert before.step == after.step == 8
    assert before.metadata == after.metadata
    assert before.tensors.keys() == after.tensors.keys()
    assert {name.split("/")[0] for name in before.tensors} == {"model", "optimizer", "averaging", "rng"}
    for name, tensor in before.tensors.items():
        assert tensor.dtype == after.tensors[name].dtype
        assert torch.equal(tensor, after.tensors[name]), name


@pytest.mark.parametrize("saved_by", ["one", *PARALLEL])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_four_processes_resume_the_run_of_one_or_two(
    parallel: str, saved_by: str, trained: dict[int, Path], alone: dict[str, TrainingResult]
) -> None:
    result, _ = read_result(trained[4], f"{parallel}-from-{saved_by}")
    assert result["losses"] == [[step, pytest.approx(loss, rel=1e-6)] for step, loss in alone["last"].losses]
    count = 1 if saved_by == "one" else 2
    assert (trained[4] / f"{parallel}-from-{saved_by}.txt").read_text() == (
        f"the checkpoint of step 8 was saved by {count} processes and is resumed on 4: "
        "random numbers, as in dropout, come from new seeds"
    )


@pytest.mark.parametrize("saved_by", PARALLEL)
def test_one_process_resumes_the_run_of_two(
    saved_by: str, trained: dict[int, Path], alone: dict[str, TrainingResult], tmp_path: Path
) -> None:
    source = trained[2] / saved_by
    assert (source / CHECKPOINTS / "step-00000008").is_dir() == (saved_by == "fsdp")
    (tmp_path / "run").symlink_to(source)
    resumed = fit(Tiny(), Points(), PLANS["last"], folder=tmp_path / "run", resume=True)
    assert resumed.losses == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in alone["last"].losses]


def test_no_thread_of_the_group_is_left_after_it_is_destroyed(root: Path, tmp_path: Path) -> None:
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    # a new process, as torchrun starts it: in a forked one there is no reference cycle
    command = [sys.executable, str(root / "tests" / "train" / "workers.py"), "threads", str(tmp_path)]
    subprocess.run(command, env={**os.environ, **environment, "PYTHONPATH": str(root)}, check=True, timeout=240)
    during, after = json.loads((tmp_path / "threads.json").read_text())
    assert during > after == 0


def test_a_worker_that_dies_is_restarted_and_the_run_resumes(
    root: Path, alone: dict[str, TrainingResult], tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        str(root / "tests" / "train" / "workers.py"), "die", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "died").exists()
    result, _ = read_result(tmp_path, "died")
    assert result["losses"] == [[step, pytest.approx(loss, rel=1e-6)] for step, loss in alone["last"].losses]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_without_torchrun_the_group_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with join_process_group("fsdp", device="cpu") as group:
        assert (group.rank, group.world_size, group.device, group.is_main) == (0, 1, torch.device("cpu"), True)
        assert not group.is_sharded


def test_an_unknown_value_of_parallel_raises_an_error() -> None:
    with (
        pytest.raises(ConfigError, match=r"^parallel must be one of ddp, fsdp, not 'tensor'$"),
        join_process_group("tensor"),
    ):
        pass


def test_more_processes_than_gpus_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "9")
    with (
        pytest.raises(ConfigError, match=r"GPUs and torchrun started more .* --nproc-per-node \d"),
        join_process_group(device="cuda"),
    ):
        pass
