"""Jobs of the server: progress, results, errors, cancelling, one at a time."""

import asyncio
import json
import os
import time
from functools import partial
from typing import Any

import pytest

from regard.base.errors import ConfigError
from regard.explorer.worker import Progress, Task, Worker


def double(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    progress("doubling")
    return {"twice": 2 * request["number"], "process": os.getpid()}


def wait(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    progress("waiting")
    time.sleep(60)
    return {}


def pause(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    time.sleep(0.3)
    return {}


def refuse(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    raise ConfigError("three is not even")


def fail(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    raise ZeroDivisionError("a fault\nwith a second line")


def die(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    os._exit(9)


def tasks() -> dict[str, Task]:
    return {"double": double, "wait": wait, "pause": pause, "refuse": refuse, "fail": fail, "die": die}


async def never() -> bool:
    return False


async def collect(worker: Worker, name: str, **request: Any) -> list[tuple[str, dict[str, Any]]]:
    return [message async for message in worker.run(name, request, never)]


def test_jobs_report_progress_results_and_errors_and_survive_a_dead_process() -> None:
    async def walk() -> None:
        worker = Worker(tasks)
        started, *first = await collect(worker, "double", number=21)
        assert started == ("progress", {"text": "starting Python"})
        assert first[0] == ("progress", {"text": "doubling"})
        assert first[1][1]["twice"] == 42
        assert await collect(worker, "refuse") == [("error", {"error": "three is not even"})]
        assert await collect(worker, "fail") == [("error", {"error": "ZeroDivisionError: a fault"})]
        again = await collect(worker, "double", number=1)
        assert again[1][1]["process"] == first[1][1]["process"]  # errors do not end the process
        [(kind, said)] = await collect(worker, "die")
        assert kind == "error"
        assert "ended unexpectedly" in said["error"]
        assert (await collect(worker, "double", number=2))[-1][1]["twice"] == 4
        worker.stop()

    asyncio.run(walk())


def test_a_cancelled_job_leaves_no_process_behind() -> None:
    async def walk() -> None:
        worker, cancelled = Worker(tasks), False

        async def gone() -> bool:
            return cancelled

        async for kind, _ in worker.run("wait", {}, gone):
            assert kind == "progress"
            process = worker.process_id
            cancelled = True
        assert process is not None
        assert (await collect(worker, "double", number=5))[-1][1]["twice"] == 10  # it waits for the end of the other
        assert worker.process_id != process
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        worker.stop()

    asyncio.run(walk())


def test_a_job_that_ends_soon_after_its_client_left_keeps_the_process() -> None:
    """Typing cancels a job for each letter; the loaded model must survive that."""

    async def walk() -> None:
        worker = Worker(tasks)
        first = (await collect(worker, "double", number=1))[-1][1]["process"]

        async def job() -> None:
            async for _ in worker.run("pause", {}, never):
                pass

        task = asyncio.create_task(job())
        await asyncio.sleep(0.1)
        task.cancel()  # as the server does when the connection ends
        assert (await collect(worker, "double", number=2))[-1][1]["process"] == first
        worker.stop()

    asyncio.run(walk())


def slow_tasks() -> dict[str, Task]:
    time.sleep(1.5)  # as long as importing torch may take
    return tasks()


def test_a_job_cancelled_while_the_process_starts_does_not_end_the_process() -> None:
    """Otherwise choosing another tab within the first seconds would import torch again, and again."""

    async def walk() -> None:
        worker, cancelled = Worker(slow_tasks), False

        async def gone() -> bool:
            return cancelled

        async for _ in worker.run("double", {"number": 1}, gone):
            process, cancelled = worker.process_id, True
        assert (await collect(worker, "double", number=2))[-1][1]["process"] == process
        worker.stop()

    asyncio.run(walk())


def test_a_job_that_needs_too_much_memory_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.explorer.worker.LARGEST", 1 << 20)

    async def walk() -> None:
        worker = Worker(tasks)
        [(kind, said)] = [each for each in await collect(worker, "wait") if each[0] != "progress"]
        assert kind == "error"
        assert "memory" in said["error"]
        assert worker.process_id is None

    asyncio.run(walk())


def read_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]


@pytest.mark.parametrize("show", ["overview", "edit", "flow"])
def test_a_model_is_shown_through_the_server(show: str) -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    pytest.importorskip("httpx2", reason="the test client of starlette needs httpx2")
    from fastapi.testclient import TestClient

    from regard.cli.exploring import list_offered, tasks as offered_tasks
    from regard.explorer.api import Content, create_app

    app = create_app({"127.0.0.1:8765"}, None, Content(models=partial(list_offered, None), tasks=offered_tasks))
    client = TestClient(app, base_url="http://127.0.0.1:8765")
    edits = [{"kind": "ablate", "layer": 0, "head": 1}] if show == "edit" else []
    request = {"model": "text-gpt", "text": "The for statement is used to", "show": show, "edits": edits}
    events = read_events(client.post("/api/jobs/model", json=request).text)
    app.state.worker.stop()
    kind, answer = events[-1]
    assert kind == "result", answer
    assert answer["tokens"][0] == "The"
    assert len(answer["before"]) >= 8
    assert {each["id"] for each in answer["before"]} == {each["id"] for each in answer["after"]}
    if show == "edit":
        assert answer["before"] != answer["after"]
        assert len(answer["ablations"]) == sum(len(layer["heads"]) for layer in answer["layers"])
    if show == "flow":
        total = sum(part["value"] for part in answer["attribution"])
        best = max(answer["before"], key=lambda each: each["logit"])
        assert total == pytest.approx(best["logit"], abs=1e-3)


def test_a_model_that_is_not_offered_is_refused() -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    pytest.importorskip("httpx2", reason="the test client of starlette needs httpx2")
    from fastapi.testclient import TestClient

    from regard.explorer.api import Content, create_app

    app = create_app({"127.0.0.1:8765"}, None, Content(models=lambda: [{"name": "text-gpt"}]))
    client = TestClient(app, base_url="http://127.0.0.1:8765")
    answer = client.post("/api/jobs/model", json={"model": "/etc", "text": "x"})
    assert answer.status_code == 404
    assert "is not offered" in answer.json()["error"]
