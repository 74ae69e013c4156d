"""`regard doctor`: what it reports, what it finds wrong, and its exit code."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app, doctor

run = CliRunner()


def findings() -> dict[str, Any]:
    result = run.invoke(app, ["doctor", "--json"])
    return {f"{each['section']}: {each['name']}": each for each in json.loads(result.stdout)}


def test_it_reports_versions_devices_kernels_extras_and_disk() -> None:
    found = findings()
    assert found["versions: regard"]["detail"].startswith(regard.__version__)
    assert found["versions: torch"]["detail"] == torch.__version__
    assert found["extra peers: transformers"]["detail"] == metadata.version("transformers")
    assert "cores" in found["devices: cpu"]["detail"]
    assert found["disk: here"]["state"] == "ok"
    assert found["kernels on cpu, causal window: blocked"]["state"] == "ok"
    assert found["kernels on cpu, causal window: flex"]["state"] == "missing"
    assert "needs a GPU" in found["kernels on cpu, causal window: flex"]["detail"]


def test_the_text_has_one_line_for_each_finding() -> None:
    result = run.invoke(app, ["doctor"])
    for finding in findings().values():
        assert f"{finding['name']:<16} {finding['detail'][:40]}" in result.stdout


def test_a_torchvision_for_another_torch_is_a_problem_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.integrations.torchvision.can_import", lambda: False)
    result = run.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAIL torchvision" in result.stdout
    assert f"was built for another torch than {torch.__version__}" in result.stdout
    assert "`pip install --force-reinstall --no-deps torchvision" in result.stdout


def test_a_torchvision_that_loads_or_is_not_there_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.integrations.torchvision.can_import", lambda: True)
    assert [each.state for each in doctor.find_torchvision()] == ["ok"]
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert [each.state for each in doctor.find_torchvision()] == ["missing"]


@pytest.mark.parametrize(
    ("name", "least", "extra", "state", "detail"),
    [
        ("torch", "2.1", None, "ok", torch.__version__),
        ("torch", "99.1", None, "problem", f"{torch.__version__} is older than 99.1; `pip install 'torch>=99.1'`"),
        ("no-such-thing", "1", None, "problem", "not installed; `pip install 'no-such-thing>=1'`"),
        ("no-such-thing", "1", "web", "missing", "not installed; `pip install 'regard[web]'`"),
    ],
)
def test_a_package_is_judged_by_its_version(name: str, least: str, extra: str, state: str, detail: str) -> None:
    assert doctor.judge_package(name, least, extra)[2:] == (state, detail)


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9", "2.11"), ("2.11.0a1", "2.11.1"), ("1", "1.0.1"), ("2.13+cpu", "2.14")]
)
def test_versions_compare_by_their_numbers(older: str, newer: str) -> None:
    assert doctor._numbers(older) < doctor._numbers(newer)


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 2**29}))
    here, cache = doctor.find_space()
    assert here.state == cache.state == "problem"
    assert cache.detail == f"0.5 GiB free in {tmp_path / 'cache'} (does not exist yet)"
