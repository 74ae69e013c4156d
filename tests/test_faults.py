"""Faults outside of training: killed jobs and servers, two processes in one folder, wrong clocks, full disks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.explorer.worker import Progress, Task, Worker

LARGEST_FILE = 4096  # bytes; a limit of the system, with the same error path as a full disk


def wait(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    progress(str(os.getpid()))
    time.sleep(60)
    return {}


def answer(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    return {"process": os.getpid()}


def tasks() -> dict[str, Task]:
    return {"wait": wait, "answer": answer}


async def never() -> bool:
    return False


def regard(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "regard", *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_ended(process: int) -> bool:
    """Whether a process has ended; one that nobody has waited for is a zombie and counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_job_killed_by_the_system_is_an_error_and_the_next_one_runs() -> None:
    async def walk() -> None:
        worker = Worker(tasks)
        said = []
        async for kind, content in worker.run("wait", {}, never):
            said.append(kind)
            if kind == "progress" and content["text"] != "starting Python":
                os.kill(int(content["text"]), signal.SIGKILL)  # as the system does when memory runs out
        assert said == ["progress", "progress", "error"]
        *_, (kind, content) = [message async for message in worker.run("answer", {}, never)]
        assert kind == "result"
        assert content["process"] == worker.process_id
        worker.stop()

    asyncio.run(walk())


SERVER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_faults import Worker, never, tasks

async def walk():
    async for kind, content in Worker(tasks).run("wait", {{}}, never):
        if content["text"] != "starting Python":
            print(content["text"], flush=True)

if __name__ == "__main__":
    asyncio.run(walk())
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_a_killed_server_leaves_no_computing_process(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER.format(folder=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        process = int(server.stdout.readline())
        server.kill()
    for _ in range(300):
        if has_ended(process):
            break
        time.sleep(0.1)
    assert has_ended(process), "the job of a killed server still runs"


def test_two_processes_write_results_into_one_folder(tmp_path: Path) -> None:
    words = ("lab", "run", "beta", "scale-by-root", "--smoke", "--results", "results", "--json")
    both = [regard(*words, cwd=tmp_path) for _ in range(2)]
    shown = [each.communicate() for each in both]
    assert [each.returncode for each in both] == [0, 0], shown
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert files == ["beta.json", "scale-by-root.json"], "no unfinished file is left"
    for name in files:
        assert json.loads((tmp_path / "results" / name).read_text())["results"]


@pytest.mark.parametrize("year", [1970, 2100])
def test_results_do_not_depend_on_the_clock(year: int, tmp_path: Path) -> None:
    from dataclasses import replace

    from regard.lab.claim import claims
    from regard.lab.results import load_result, save_result, shipped_results

    made = replace(shipped_results()["beta"], created=f"{year}-01-01T00:00:00+00:00")
    file = save_result(made, tmp_path)
    os.utime(file, ((year - 1970) * 31_556_952,) * 2)
    loaded = load_result(claims()["beta"], tmp_path)
    assert loaded == made
    assert loaded.current


def test_a_run_resumes_from_its_last_step_whatever_the_times_of_its_files(tmp_path: Path) -> None:
    import torch

    from regard.train.checkpoint import Checkpoint, CheckpointFolder

    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        folder.save(Checkpoint(step, {"model/weight": torch.tensor([float(step)])}, {}, None))
    for place, path in enumerate(sorted(tmp_path.rglob("*"))):
        os.utime(path, (10**9 - place * 1000,) * 2)  # the clock went backwards
    latest = folder.load_latest()
    assert latest is not None
    assert latest.tensors["model/weight"].item() == 3


OLD = "what was there before"


def limit_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        # draws all figures of the lab, in half a minute
        pytest.param(("explore", "--export", "."), "index.html", marks=pytest.mark.slow),
        (("look", "induction-gpt", "--html", "page.html"), "page.html"),
        (("masks", "causal()", "--picture", "mask.png"), "mask.png"),
        (("lab", "show", "beta", "--html", "page.html"), "page.html"),
        (("work", "three-tokens", "--out", "solution.html"), "solution.html"),
        (("work", "exercises", "self-attention", "--export", "exercises.ipynb"), "exercises.ipynb"),
        (
            ("check", "torch.nn.functional:scaled_dot_product_attention", "--quick", "--save", "report.json"),
            "report.json",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limit on file sizes")
def test_a_full_disk_while_exporting_is_one_line_and_keeps_the_old_file(
    words: Sequence[str], name: str, tmp_path: Path
) -> None:
    fresh = "exercises" in words  # never overwrites a file
    if not fresh:
        (tmp_path / name).write_text(OLD)
    # -B: Python would keep truncated bytecode of the modules that it imports
    command = [sys.executable, "-B", "-m", "regard", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit_files)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == f"regard: {name} cannot be written: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ([] if fresh else [name])
    assert fresh or (tmp_path / name).read_text() == OLD
