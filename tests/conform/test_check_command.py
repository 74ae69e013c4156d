"""`regard check` tells on stdout what is broken, and by its exit code whether anything is."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from regard.cli import clean
from regard.cli.check import command

FILE = """
import torch

def twice(q, k, v):
    return (q @ k.mT / q.shape[-1]).softmax(-1) @ v

def causal(q, k, v):
    n = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~n, -torch.inf).softmax(-1) @ v

def counts(tokens):
    return torch.nn.functional.one_hot(tokens, 5).cumsum(1).float()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(clean(command))
    return CliRunner().invoke(app, list(words))


def test_a_broken_rule_is_told_and_ends_with_one() -> None:
    done = run("mine.py:twice", "--quick")
    assert done.exit_code == 1
    assert "✗ scale: q . k is multiplied by 1/c (applied twice)" in done.stdout
    assert "checking scale" in done.stderr
    assert "checking" not in done.stdout


def test_a_right_attention_ends_with_zero() -> None:
    done = run("mine.py:causal", "--causal", "--quick", "--alignment", "bottom-right")
    assert done.exit_code == 0, done.stdout
    assert "0 broken" in done.stdout


def test_what_is_declared_is_tested() -> None:
    done = run("mine.py:causal", "--causal", "--window-before", "4", "--quick", "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [each["name"] for each in told["facts"] if each["status"] == "failed"] == ["window"]


def test_a_module_on_the_path_is_found() -> None:
    done = run("mine:causal", "--only", "scale")
    assert done.exit_code == 0
    assert "1 facts hold" in done.stdout


def test_a_decoder_is_checked_as_one(here: Path) -> None:
    done = run("mine.py:counts", "--decoder", "--vocab", "5", "--junit", "report.xml")
    assert done.exit_code == 0, done.stdout
    suite = ElementTree.fromstring((here / "report.xml").read_text())
    assert suite.get("failures") == "0"


def test_every_fact_is_listed_with_its_words() -> None:
    told = json.loads(run("--list", "--json").stdout)
    assert len(told) > 70
    assert {each["of"] for each in told} == {"attention", "decoder"}
    assert all(each["student"] and each["engineer"] and each["cause"] for each in told)
    assert "softmax-over-the-other-axis" in run("--list").stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "say what to check: regard check package.module:name"),
        (["mine.py"], "'mine.py' does not name a thing; write package.module:name"),
        (["yours.py:f"], "there is no file yours.py"),
        (["mine.py:thrice"], "mine.py has no thrice; it has: torch, twice, causal, counts"),
        (["no_such_module:f"], "there is no module no_such_module"),
        (["mine.py:causal", "--grouping", "tiles"], "did you mean 'tile'?"),
    ],
)
def test_a_usage_error_ends_with_two(words: list[str], text: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert text in done.stderr
