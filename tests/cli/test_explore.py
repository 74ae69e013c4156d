"""`regard explore`: the server and the exported page."""

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.exploring import check_model
from regard.models.presets import list_models


@pytest.mark.xdist_group("export")  # figures are drawn once in a process, in many seconds
def test_the_export_holds_ones_own_lesson_and_an_error_in_it_names_its_line(tmp_path: Path) -> None:
    lesson = tmp_path / "mine.md"
    lesson.write_text("# Mine\n\n```regard plane beta=3\nLook.\n```\n", encoding="utf-8")
    found = CliRunner().invoke(app, ["explore", "--lesson", str(lesson), "--export", str(tmp_path / "site")])
    assert found.exit_code == 0
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert '"title": "Mine"' in page
    assert page.count("data:image/svg+xml;base64,") > 40  # figures of the lab
    lesson.write_text("# Mine\n\n```regard plane gamma=3\n```\n", encoding="utf-8")
    found = CliRunner().invoke(app, ["explore", "--lesson", str(lesson), "--export", str(tmp_path / "site")])
    assert found.exit_code == 2
    assert "mine.md, line 3" in found.stderr
    assert "gamma=3" in found.stderr


def test_an_export_of_one_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["explore", "text-gpt", "--export", str(tmp_path / "site")])
    assert found.exit_code == 2
    assert "save one recorded model with regard.show(seen).save(path)" in " ".join(found.stderr.split())
    assert not (tmp_path / "site").exists()


def test_a_damaged_report_is_named(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    command = ["explore", "text-gpt", "--report", str(tmp_path / "report.json"), "--no-browser", "--port", "0"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 2
    assert "is no report" in found.stderr


@pytest.mark.parametrize(
    ("name", "hint"), [("text-gtp", "'text-gpt'"), ("nosuchmodel", "list_models"), ("a b/c", "folder")]
)
def test_an_unknown_model_stops_before_the_server_starts(name: str, hint: str) -> None:
    found = CliRunner().invoke(app, ["explore", name, "--no-browser", "--port", "0"])
    assert found.exit_code == 2
    assert f"there is no folder '{name}'" in found.stderr
    assert hint in found.stderr
    assert not found.stdout


@pytest.mark.parametrize("name", [*list_models(pretrained=True), "gpt2", "."])
def test_names_of_models_pass(name: str) -> None:
    check_model(name)


def test_a_pretrained_model_is_found_without_torch() -> None:
    code = "import sys; from regard.cli import exploring as e; e.check_model('text-gpt'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


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
