"""`regard bench`: hands over to the benchmark of a checkout, or says where it is to be found."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import regard
from regard.cli import app

run = CliRunner()
BENCH = """
def main(argv: list[str]) -> int:
    print("measured with", argv)
    return 1 if "--quick" in argv else 0
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pretends to be the repository around the package, still without its benchmark."""
    monkeypatch.setattr(regard, "__file__", str(tmp_path / "regard" / "__init__.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "bench", None)  # remembered, and restored at the end
    monkeypatch.delitem(sys.modules, "bench")
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_without_the_repository_it_says_where_the_benchmark_is(checkout: Path) -> None:
    result = run.invoke(app, ["bench"])
    assert result.exit_code == 2
    assert result.stderr.startswith("regard: the benchmark is part of the repository, not of the installed package")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--json"], 0),
        (["--quick", "--json"], 1),
        (["growth", "--json", "--picture", "growth.png"], 0),
        (["growth", "--device", "cuda"], 0),
        (["--device", "cpu"], 0),
    ],
)
def test_options_and_exit_code_are_handed_through(checkout: Path, words: list[str], code: int) -> None:
    (checkout / "bench").mkdir()
    (checkout / "bench" / "__init__.py").write_text(BENCH)
    result = run.invoke(app, ["bench", *words])
    assert result.stdout == f"measured with {words}\n"
    assert result.exit_code == code


def test_wrong_words_raise_an_error(tmp_path: Path) -> None:
    for words, message in (
        (["speed"], "regard bench takes growth, or nothing to compare with other libraries, not 'speed'"),
        (["--picture", "a.png"], "--picture draws growth; run regard bench growth --picture PATH"),
        (["--device", "gpu"], "--device is cpu or cuda, not 'gpu'"),
        (["growth", "--picture", "a.txt"], "has no known picture format"),
    ):
        result = run.invoke(app, ["bench", *words])
        assert result.exit_code == 2
        assert message in result.stderr
