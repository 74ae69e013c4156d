"""`regard check` prints what is broken to stdout, and its exit code says whether anything is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from regard.cli import print_errors
from regard.cli.check import command, declaration_flags, show_progress

FILE = """
import torch

def twice(q, k, v):
    return (q / q.shape[-1] @ k.mT).softmax(-1) @ v

def causal(q, k, v):
    n = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(~n, -torch.inf).softmax(-1) @ v

def heads_first(q, k, v):
    return torch.einsum("bhij,bjhc->bihc", torch.einsum("bihc,bjhc->bhij", q, k).softmax(-1), v)

def tiles(q, k, v):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v

def forgets(q, k, v, mask=None):
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v

def stops(q, k, v):
    raise SystemExit(0)

class Stops:
    def __init__(self):
        raise SystemExit(0)

class Sized(torch.nn.Module):
    def __init__(self, width):
        super().__init__()

def counts(tokens):
    return torch.nn.functional.one_hot(tokens, 5).cumsum(1).float()
"""
BESIDE = """
from __future__ import annotations
from dataclasses import dataclass
from helper import scale

@dataclass
class Settings:
    scale: float = 1.0

def uses_a_neighbour(q, k, v):
    return (q * scale(q) @ k.mT).softmax(-1) @ v
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "unfinished.py").write_text("def f(:")
    (tmp_path / "lacking.py").write_text("import nothing_here")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "beside.py").write_text(BESIDE)
    (tmp_path / "folder" / "helper.py").write_text("def scale(q): return q.shape[-1] ** -0.5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path
    for name in ("mine", "beside", "helper"):
        sys.modules.pop(name, None)


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(print_errors(command))
    return CliRunner().invoke(app, list(words))


def test_a_broken_rule_is_printed_and_exits_with_one() -> None:
    done = run("mine.py:twice", "--quick")
    assert done.exit_code == 1
    assert "✗ scale: q . k is multiplied by 1/c (applied twice)" in done.stdout
    assert "checking" not in done.stdout + done.stderr  # a log has no use for it


def test_progress_is_printed_to_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_progress("scale")
    assert capsys.readouterr().err == "checking scale\n"


def test_printed_text_is_folded_under_itself_and_examples_stay_whole() -> None:
    lines = run("mine.py:heads_first", "--quick", "--layout", "b n h c").stdout.splitlines()
    prose = next(n for n, line in enumerate(lines) if line.startswith("  usual causes      scaled twice"))
    assert all(len(line) <= 80 for line in lines[: prose + 2])
    assert lines[prose + 1].startswith(" " * 20 + lines[prose + 1].strip()[:1])
    assert "    attend = as_probe(heads_first, layout='b n h c').call" in lines


def test_an_example_that_is_printed_can_be_pasted(here: Path) -> None:
    printed = run("mine.py:forgets", "--quick").stdout.splitlines()
    start = printed.index("  smallest input found") + 1
    code = [line.strip() for line in printed[start : printed.index("", start)] if line.startswith("    ")]
    assert any(len(line) > 80 for line in code)
    space: dict[str, object] = {"torch": torch}
    exec(FILE, space)
    exec("\n".join(code), space)


def test_a_correct_attention_exits_with_zero() -> None:
    done = run("mine.py:causal", "--causal", "--quick", "--alignment", "bottom-right")
    assert done.exit_code == 0, done.stdout
    assert "0 failed" in done.stdout


def test_a_difference_from_our_policy_exits_with_three_unless_it_is_ignored() -> None:
    words = ("mine.py:tiles", "--only", "grouping")
    done = run(*words)
    assert done.exit_code == 3
    assert "≠ grouping: query heads use key heads by tile" in done.stdout
    assert "0 facts passed, 0 failed, 1 differ from our policy (grouping)" in done.stdout
    assert run(*words, "--ignore-policy").exit_code == 0
    assert run(*words, "--only", "scale", "--scale", "2", "--ignore-policy").exit_code == 1


def test_findings_are_annotated_on_github(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("mine.py:twice", "--only", "scale", "--github")
    expected = "::error file=mine.py,line=4,title=scale::twice: q . k is multiplied by 1/c"
    assert expected in done.stdout
    assert (
        "::warning file=mine.py,line=14,title=grouping::"
        in run("mine.py:tiles", "--only", "grouping", "--github").stdout
    )
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert expected in run("mine.py:twice", "--only", "scale", "--json").stderr


def test_a_usage_error_comes_without_importing_torch(here: Path) -> None:
    for words in (
        ["yours.py:f"],
        ["yours:f"],
        ["mine.py"],
        ["mine.py:causal", "--heads", "0"],
        ["mine.py:causal", "--layout", "x"],
    ):
        code = f"import sys; from regard.cli import app; app({['check', *words]!r}, standalone_mode=False)"
        code = f"try:\n    {code}\nexcept BaseException:\n    pass\nprint('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False", (words, done.stderr)


def test_what_is_declared_is_tested() -> None:
    done = run("mine.py:causal", "--causal", "--window-before", "4", "--quick", "--json")
    assert done.exit_code == 1
    values = json.loads(done.stdout)
    assert [each["name"] for each in values["facts"] if each["status"] == "failed"] == ["window"]


def test_a_file_may_import_its_neighbours() -> None:
    done = run("folder/beside.py:uses_a_neighbour", "--only", "scale")
    assert done.exit_code == 0, done.stderr


def test_advice_is_in_options() -> None:
    assert "declare --grouping tile" in run("mine.py:tiles", "--only", "grouping").stdout
    assert declaration_flags("causal=False, window_after=1") == "--no-causal --window-after 1"
    assert declaration_flags("layout='n b c'") == "--layout 'n b c'"
    assert "pass --vocab" in run("mine.py:counts", "--kind", "decoder").stderr


def test_a_module_on_the_path_is_found() -> None:
    done = run("mine:causal", "--only", "scale")
    assert done.exit_code == 0
    assert "1 fact passed" in done.stdout


def test_a_decoder_is_checked_as_one(here: Path) -> None:
    done = run("mine.py:counts", "--kind", "decoder", "--vocab", "5", "--junit", "report.xml")
    assert done.exit_code == 0, done.stdout
    suite = ElementTree.fromstring((here / "report.xml").read_text())
    assert suite.get("failures") == "0"


def test_every_fact_is_listed_with_its_words() -> None:
    values = json.loads(run("--list", "--json").stdout)
    assert len(values) > 70
    assert {each["of"] for each in values} == {"attention", "decoder"}
    assert all(each["student"] and each["engineer"] and each["cause"] for each in values)
    assert "softmax-over-the-other-axis" in run("--list").stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no target: pass package.module:name"),
        (["mine.py"], "'mine.py' is not a target; write package.module:name"),
        (["yours.py:f"], "there is no file yours.py"),
        (["mine.py:caussal"], "mine.py has no caussal; did you mean 'causal'?"),
        (["regard:atend"], "regard has no atend; did you mean 'attend'?"),
        (["mine.py:zzz"], "mine.py has no zzz; it has: "),
        (["mine.py:Sized"], "write mine = Sized(...) in a file of your own, and pass file.py:mine"),
        (["torch.nn:MultiheadAttention"], "is a class that cannot be made without arguments: TypeError"),
        (["mine.py:causal", "--layout", "n b"], "layout is one of 'b h n c'"),
        (["no_such_module:f"], "no_such_module cannot be loaded: ModuleNotFoundError: No module named"),
        (["unfinished.py:f"], "unfinished.py cannot be loaded: SyntaxError: invalid syntax"),
        (["unfinished:f"], "unfinished cannot be loaded: SyntaxError: invalid syntax"),
        (["lacking.py:f"], "lacking.py cannot be loaded: ModuleNotFoundError: No module named 'nothing_here'"),
        (["mine.py:causal", "--junit", "none/out.xml"], "none/out.xml cannot be written: there is no folder none"),
        (["mine.py:causal", "--junit", "folder"], "folder cannot be written: it is a folder; name a file in it"),
        (["leaves.py:f"], "leaves.py cannot be loaded: SystemExit: 0; import it by itself"),
        (["leaves:f"], "leaves cannot be loaded: SystemExit: 0; import it by itself"),
        (["mine.py:stops", "--quick"], "stops could not be checked: it raised SystemExit(0)"),
        (["mine.py:Stops"], "is a class that cannot be made without arguments: SystemExit: 0"),
        (["mine.py:causal", "--only", "scale", "--without", "scale"], "no fact is left to test"),
        (["mine.py:causal", "--heads", "0"], "heads is 0, but must be at least 1"),
        (["mine.py:causal", "--grouping", "tiles"], "did you mean 'tile'?"),
    ],
)
def test_a_usage_error_exits_with_two(words: list[str], text: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert text in done.stderr
