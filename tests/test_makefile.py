"""The Makefile is the one way to set up, test and run, for people and for CI."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TARGETS = (
    "run",
    "test",
    "check",
    "fix",
    "slow",
    "faults",
    "bench",
    "zoo",
    "docs",
    "site",
    "release-check",
    "clean",
    "help",
)


@pytest.fixture
def makefile(root: Path) -> str:
    return (root / "Makefile").read_text()


def recipe(makefile: str, target: str) -> str:
    """The dependencies and commands of a target, with variables filled in and lines joined."""
    variables = dict(re.findall(r"^(\w+) :?\??= (.*)$", makefile, re.MULTILINE))
    text = makefile.replace("\\\n", " ")
    for _ in range(3):
        text = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
    found = re.search(rf"^{re.escape(target)}:(.*\n(?:\t.*\n)*)", text, re.MULTILINE)
    assert found, f"no target {target}"
    return found[1]


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_exists_and_is_explained(makefile: str, target: str) -> None:
    assert "##" in recipe(makefile, target)
    assert target in re.findall(r"\.PHONY: (.*)", makefile)[0].split()


def test_the_tests_come_after_the_checks_and_measure_coverage(makefile: str) -> None:
    test = recipe(makefile, "test")
    assert test.startswith(" check ")
    for words in ("--cov=regard/base", "--cov=regard/core", "--cov-branch", "--cov-fail-under=95", '-m "not slow"'):
        assert words in test


def test_the_checks_are_style_types_architecture_and_security(makefile: str) -> None:
    check = recipe(makefile, "check")
    for words in ("ruff check", "ruff format --check", "mypy --strict", "tests/test_architecture.py", "tools.audit"):
        assert words in check


def test_the_other_targets_do_what_they_say(makefile: str) -> None:
    assert "-m regard explore" in recipe(makefile, "run")
    assert "-m slow" in recipe(makefile, "slow")
    assert "-m bench" in recipe(makefile, "bench")
    assert "tests/test_docs.py" in recipe(makefile, "docs")
    assert "-m tools.site" in recipe(makefile, "docs")
    assert "-m tools.site --explorer" in recipe(makefile, "site")
    assert "-m tools.release" in recipe(makefile, "release-check")
    assert ".venv" not in recipe(makefile, "clean").partition("\n")[2]


@pytest.mark.parametrize("stamp", [".venv/.run", ".venv/.test"])
def test_every_install_is_constrained_and_repeated_only_when_it_has_to_be(makefile: str, stamp: str) -> None:
    install = recipe(makefile.replace("$(VENV)/", ".venv/"), stamp)
    assert install.startswith(" pyproject.toml constraints.txt |")
    assert "install -c constraints.txt -e" in install
    assert f"touch {stamp}" in install or "touch $@" in install


def test_ci_runs_make_test(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -eu" in lines
    assert lines[-1] == "exec make test"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_agrees(root: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # also under `make test`
    listed = subprocess.run(["make", "help"], cwd=root, env=alone, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(TARGETS)
    for target in TARGETS:
        subprocess.run(["make", "--dry-run", target], cwd=root, env=alone, capture_output=True, check=True)
