"""The pages run. Every `python` and `console` block is executed, and what a page says comes out must come out.

- `python` blocks run from top to bottom of a page, in one namespace. A `text` block right after one is its output.
- in a `console` block, `$ regard ...` and `$ python -m regard ...` run, and the lines after each are its output
  (stderr too, where it fails; a failure is announced by `$ echo $?` and its number). `$ make x` needs that target.
- `...` in an output stands for anything, as in doctest. An output that is not shown is not compared.
"""

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regard.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = {"docs/work.md"}  # half a minute
EXPORTING = {"docs/tutorials/first_hour.md"}  # exports the explorer, as a test of its command does
NOT_RUN = ("make", "pip", "git", "cd", "source")
RUN = (["regard"], ["python", "-m", "regard"], ["python3", "-m", "regard"])


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, its first line, and whether it directly follows another."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    end = None
    for found in re.finditer(r"^```(\w*)[^\n`]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        between = page[end : found.start()] if end is not None else "something"
        yield Block(found[1], found[2], page[: found.start(2)].count("\n") + 1, not between.strip())
        end = found.end()


def same(want: str, got: str) -> bool:
    """Whether an output is the one shown, trailing spaces aside."""
    want, got = ("\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n" for text in (want, got))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


class PageError(AssertionError):
    """A page says something that is not so."""


def demand(true: bool, words: str) -> None:
    if not true:
        raise PageError(words)


def compare(where: str, want: str, got: str) -> None:
    demand(same(want, got), f"{where} shows\n{want}\nbut it printed\n{got}")


def run_page(path: Path) -> int:
    """Run a page and return how many of its blocks ran."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran, printed = 0, None
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{path.name}:{block.line}"
        if block.language == "python":
            printed = run_python(block, where, namespace)
            ran += 1
        elif block.language == "text" and block.follows and printed is not None:
            compare(where, block.text, printed)
            printed = None
        else:
            printed = None
            if block.language == "console":
                run_console(block, where)
                ran += 1
    return ran


def run_python(block: Block, where: str, namespace: dict[str, Any]) -> str:
    # empty lines in front, so that a traceback names the line of the page
    code = compile("\n" * (block.line - 1) + block.text, where.split(":")[0], "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def run_console(block: Block, where: str) -> None:
    commands = [entry for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE) if entry.strip()]
    demand(block.text.lstrip().startswith("$ "), f"{where}: a console block starts with a command, `$ ...`")
    failed: int | None = None
    for place, entry in enumerate(commands):
        line, _, want = entry.replace("\\\n", " ").partition("\n")
        words = shlex.split(line, comments=True)
        if line.strip() == "echo $?":
            demand(failed is not None, f"{where}: `$ echo $?` follows a command that was run")
            compare(where, want, str(failed))
            continue
        prefix = next((start for start in RUN if words[: len(start)] == start), None)
        if prefix is None:
            demand(words[0] in NOT_RUN, f"{where}: `{line}` is not run by the tests; use regard, make, pip or git")
            if words[0] == "make":
                missing = [word for word in words[1:] if "=" not in word and word not in targets()]
                demand(not missing, f"{where}: the Makefile has no target {missing}")
            continue
        # in this process: starting Python and torch for each of a hundred commands would take minutes
        done = CliRunner().invoke(app, words[len(prefix) :], prog_name="regard", env={"COLUMNS": "80", "NO_COLOR": "1"})
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        failed = done.exit_code
        announced = place + 1 < len(commands) and commands[place + 1].strip().startswith("echo $?")
        demand(announced or not failed, f"{where}: `{line}` ended with {failed}\n{done.stdout}{done.stderr}")
        if want.strip():
            compare(where, want, done.stdout + (done.stderr if failed else ""))


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=(name := str(page.relative_to(ROOT))),
            marks=[pytest.mark.slow] * (name in LONG) + [pytest.mark.xdist_group("export")] * (name in EXPORTING),
        )
        for page in PAGES
    ],
)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    run_page(page)


def written(path: Path, text: str) -> Path:
    path = path / "page.md"
    path.write_text(text.replace("~~~", "```"), encoding="utf-8")
    return path


GOOD = """
# A page
~~~python
x = 2
print("a", x)
~~~

~~~text
a 2
~~~

Words.

~~~python
print(x + 1, "and much more")
~~~
~~~text
3 ... more
~~~
~~~console
$ make test
$ pip install -e .  # not run
$ regard --version
regard ...
$ python -m regard masks "causal()" \\
    --queries 2
causal()

██ ·
████
...
$ regard masks "casual()"
regard: unknown mask 'casual'; did you mean 'causal'?
$ echo $?
2
~~~
~~~text
A block of text that follows no program is only text.
~~~
"""


def test_a_true_page_passes(tmp_path: Path) -> None:
    assert run_page(written(tmp_path, GOOD)) == 3


@pytest.mark.parametrize(
    ("true", "false", "words"),
    [
        ("a 2", "a 3", "page.md:9 shows\na 3\n\nbut it printed\na 2"),
        ("3 ... more", "4 ... more", "but it printed\n3 and much more"),
        ("regard ...", "regards ...", "shows\nregards"),
        ("██ ·", "██ █", "but it printed\ncausal()"),
        ("$ make test", "$ make tests", "the Makefile has no target ['tests']"),
        ("$ pip install", "$ curl", "is not run by the tests"),
        ("echo $?\n2", "echo $?\n1", "but it printed\n2"),
        ("$ echo $?\n2\n", "", "ended with 2"),
        ("x = 2", "x = 1 / 0", "division by zero"),
        ("$ make test", "make test", "a console block starts with a command"),
    ],
)
def test_a_false_page_fails(tmp_path: Path, true: str, false: str, words: str) -> None:
    assert GOOD.count(true) == 1
    with pytest.raises((PageError, ZeroDivisionError)) as raised:
        run_page(written(tmp_path, GOOD.replace(true, false)))
    assert words in str(raised.value)


def test_an_output_far_from_its_program_is_only_text(tmp_path: Path) -> None:
    assert run_page(written(tmp_path, "~~~python\nprint(1)\n~~~\nWords.\n~~~text\n2\n~~~\n")) == 1


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in filter(Path.is_file, [*PAGES, ROOT / "CHANGELOG.md"])
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8")))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
