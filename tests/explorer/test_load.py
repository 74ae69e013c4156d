"""The server under fuzzed requests and many clients."""

import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `web` is not installed")
pytest.importorskip("uvicorn", reason="the extra `web` is not installed")

import uvicorn

from regard.cli.exploring import list_offered, tasks
from regard.explorer.api import Content, create_app

CLIENTS, SECONDS = 50, 60
HOST = "127.0.0.1:8765"
SLOW_PAGES = {"/api/figures/{claim}", "/api/sheets", "/api/claims"}  # they import the lab; their own tests ask them
GROWTH = 200 << 20  # bytes that the server may grow by under load


@pytest.fixture
def port() -> Iterator[int]:
    """A running server."""
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    app = create_app({f"127.0.0.1:{number}"}, None, Content(models=partial(list_offered, None), tasks=tasks))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield number
    server.should_exit = True
    thread.join()
    app.state.worker.stop()


def test_random_requests_never_break_the_server() -> None:
    """Requests made from the schema get an answer without a server error."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings

    app = create_app({HOST}, None, Content())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": HOST})
    answers = []

    def send(case: Any) -> None:
        answers.append((case.path, case.call(headers={"host": HOST}).status_code))

    for operation in schema.get_all_operations():
        found = operation.ok()
        if found.path in SLOW_PAGES:
            continue
        limits = settings(
            max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )
        limits(given(case=found.as_strategy())(send))()
    app.state.worker.stop()
    assert len({path for path, _ in answers}) >= 6
    assert not [(path, status) for path, status in answers if status >= 500]


def test_fifty_clients_get_answers_and_memory_stays(port: int) -> None:
    """Fifty clients for a minute: no error, and the server does not grow."""
    end, errors, counts = time.monotonic() + SECONDS, list[str](), [0] * CLIENTS
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def visit(number: int) -> None:
        body = b'{"mask": "causal() & window(before=7)", "queries": 512, "keys": 512}'
        while time.monotonic() < end:
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                if number % 2:
                    connection.request("GET", "/")
                else:
                    connection.request("POST", "/api/explain", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    errors.append(f"{answer.status}")
                counts[number] += 1
            except OSError as error:
                errors.append(repr(error))
            finally:
                connection.close()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(visit, range(CLIENTS)))
    assert not errors
    assert min(counts) > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < GROWTH
