"""`regard explore`: the server and the exported page."""

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app


def test_export_writes_a_page_that_needs_no_server(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["explore", "--export", str(tmp_path / "site")])
    assert found.exit_code == 0
    assert (tmp_path / "site" / "index.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_server_prints_its_address_and_answers() -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    command = [sys.executable, "-m", "regard", "explore", "--port", "0", "--no-browser"]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the machine has
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        with direct.open(address, timeout=60) as answer:
            assert b"<title>regard</title>" in answer.read()
    finally:
        server.kill()
        server.communicate()


def test_a_port_in_use_is_named() -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["explore", "--port", str(port), "--no-browser"])
    assert found.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in found.stderr
    assert "--port 0" in found.stderr


def test_an_address_of_another_machine_is_refused() -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    found = CliRunner().invoke(app, ["explore", "--host", "203.0.113.7", "--port", "0", "--no-browser"])
    assert found.exit_code == 2
    assert "cannot listen on 203.0.113.7:0" in found.stderr
