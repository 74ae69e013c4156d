"""Several processes learn what one learns, and each number of them goes on with what any other wrote."""

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
from regard.train.checkpoint import CheckpointFolder, TrainingState
from regard.train.distributed import join_process_group
from regard.train.loop import TrainingResult, fit
from tests.train.children import start
from tests.train.tiny import PLANS, Points, Tiny
from tests.train.together import StoppedError, Stopping, worker

WAYS = ("data", "sharded")
LEARNED = [(2, name) for name in PLANS] + [(4, "accumulated"), (4, "last")]
# sums are taken in another order; float16 rounds coarsely, and Muon turns matrices in bfloat16 whatever the plan says
TOLERANCE = {"float16": 1e-3, "sharded-muon": 1e-2}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def together(size: int, *args: Any) -> None:
    """So many processes with the environment that torchrun gives them, which is much slower to start."""
    port = free_port()
    processes = [start(worker, rank, size, port, *map(str, args)) for rank in range(size)]
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What each number of processes wrote; four of them also went on with the runs of one and of two."""
    two, four = (tmp_path_factory.mktemp(name) for name in ("two", "four"))
    with pytest.raises(StoppedError):
        fit(Tiny(), Stopping(), PLANS["last"], folder=two / "one")
    together(2, "learn", two)
    together(4, "learn", four, two)
    return {2: two, 4: four}


@pytest.fixture(scope="module")
def alone() -> dict[str, TrainingResult]:
    """What one process learns."""
    return {name: fit(Tiny(), Points(), each) for name, each in PLANS.items()}


def found(out: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors")


def newest(folder: Path) -> TrainingState:
    state = CheckpointFolder(folder).newest()
    assert state is not None
    return state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "name"), LEARNED)
def test_several_processes_learn_what_one_does(
    size: int, way: str, name: str, learned: dict[int, Path], alone: dict[str, TrainingResult]
) -> None:
    told, weights = found(learned[size], f"{way}-{name}")
    most = TOLERANCE.get(name, TOLERANCE.get(f"{way}-{name}", 1e-6))
    truth = alone[name]
    assert told["losses"] == [[step, pytest.approx(loss, rel=most)] for step, loss in truth.losses]
    assert [[step, figures["likelihood"]] for step, figures in told["figures"]] == [
        [step, pytest.approx(figures["likelihood"], rel=10 * most)] for step, figures in truth.figures
    ]
    for parameter, value in truth.model.named_parameters():
        torch.testing.assert_close(weights[parameter], value.detach(), rtol=0, atol=10 * most)


@pytest.mark.parametrize("wrote", ["one", *WAYS])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_is_cut_anew_for_four_processes_bit_for_bit(way: str, wrote: str, learned: dict[int, Path]) -> None:
    before = newest(learned[2] / wrote / "states")
    after = newest(learned[4] / f"{way}-from-{wrote}-again")
    assert before.step == after.step == 8
    assert before.facts == after.facts
    assert before.tensors.keys() == after.tensors.keys()
    assert {name.split("/")[0] for name in before.tensors} == {"model", "optimizer", "averaging", "generators"}
    for name, tensor in before.tensors.items():
        assert tensor.dtype == after.tensors[name].dtype
        assert torch.equal(tensor, after.tensors[name]), name


@pytest.mark.parametrize("wrote", ["one", *WAYS])
@pytest.mark.parametrize("way", WAYS)
def test_four_processes_go_on_with_what_others_began(
    way: str, wrote: str, learned: dict[int, Path], alone: dict[str, TrainingResult]
) -> None:
    told, _ = found(learned[4], f"{way}-from-{wrote}")
    assert told["losses"] == [[step, pytest.approx(loss, rel=1e-6)] for step, loss in alone["last"].losses]
    count = 1 if wrote == "one" else 2
    assert (learned[4] / f"{way}-from-{wrote}.txt").read_text() == (
        f"the state after step 8 was written by {count} processes and 4 go on: "
        "what is drawn at random, as in dropout, is drawn anew"
    )


@pytest.mark.parametrize("wrote", WAYS)
def test_one_process_goes_on_with_what_two_began(
    wrote: str, learned: dict[int, Path], alone: dict[str, TrainingResult], tmp_path: Path
) -> None:
    source = learned[2] / wrote
    assert (source / "states" / "step-00000008").is_dir() == (wrote == "sharded")
    (tmp_path / "run").symlink_to(source)
    resumed = fit(Tiny(), Points(), PLANS["last"], folder=tmp_path / "run", resume=True)
    assert resumed.losses == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in alone["last"].losses]


def test_no_thread_of_the_group_is_left_when_processes_part(root: Path, tmp_path: Path) -> None:
    told = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    # a process of its own, as torchrun starts them: in a forked one the cycle is gone by itself
    command = [sys.executable, str(root / "tests" / "train" / "together.py"), "part", str(tmp_path)]
    subprocess.run(command, env={**os.environ, **told, "PYTHONPATH": str(root)}, check=True, timeout=240)
    within, after = json.loads((tmp_path / "threads.json").read_text())
    assert within > after == 0


def test_a_worker_that_dies_is_restarted_and_the_run_goes_on(
    root: Path, alone: dict[str, TrainingResult], tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        str(root / "tests" / "train" / "together.py"), "die", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "died").exists()
    told, _ = found(tmp_path, "died")
    assert told["losses"] == [[step, pytest.approx(loss, rel=1e-6)] for step, loss in alone["last"].losses]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with join_process_group("sharded", device="cpu") as world:
        assert (world.rank, world.size, world.device, world.leads) == (0, 1, torch.device("cpu"), True)
        assert not world.sharded


def test_an_unknown_way_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"^joined\(parallel\) is one of data, sharded, not 'tensor'$"),
        join_process_group("tensor"),
    ):
        pass


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "9")
    with (
        pytest.raises(ConfigError, match=r"GPUs and torchrun started more .* --nproc-per-node \d"),
        join_process_group(device="cuda"),
    ):
        pass
