"""The API reference: every public name has a section with its signature, and an example that runs."""

import doctest
import inspect
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from tools.api_reference import MODULES, Entry, entries, example_lines, parse_example, setup, write_entry, write_page

ENTRIES = [entry for module in MODULES for entry in entries(module)]


@pytest.fixture(scope="module")
def namespaces() -> dict[str, dict[str, Any]]:
    """The names that the examples of each module begin with."""
    pytest.importorskip("transformers")
    made: dict[str, dict[str, Any]] = {}
    for module in MODULES:
        made[module] = {}
        exec(setup(module), made[module])
    return made


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_the_example_runs(
    entry: Entry, namespaces: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    test = parse_example(entry)
    assert test.examples, f"{entry.title} has no example in its docstring"
    test.globs = namespaces[entry.module] | {entry.name: entry.value}
    said = StringIO()
    failed = doctest.DocTestRunner(verbose=False).run(test, out=said.write).failed
    assert not failed, said.getvalue()


@pytest.mark.parametrize("module", MODULES)
def test_a_page_has_a_section_for_each_name(module: str) -> None:
    page = write_page(module)
    for entry in entries(module):
        assert f"\n## {entry.name}\n" in page
        first = (inspect.getdoc(entry.value) or "").partition("\n")[0]
        assert first[:20].partition("`")[0].partition("_")[0] in page


def test_every_public_name_of_the_package_is_on_its_page() -> None:
    listed = {entry.name for entry in entries("regard")}
    names = {name for name in regard.__all__ if not inspect.ismodule(getattr(regard, name))}
    assert listed == names - {"__version__"}


def test_a_section_has_the_signature_the_arguments_and_the_example() -> None:
    def scale(x: float, by: float = 2.0) -> float:
        """Multiply x_1 by a number.

        x   the number
        by  the factor, which is
            two if it is not given

        >>> scale(3)
        6.0
        """
        return x * by

    text = write_entry(Entry("module", "scale", scale))
    assert "```text\nscale(x, by=2.0)\n```" in text
    assert "Multiply x\\_1 by a number." in text
    assert "- `x`: the number\n- `by`: the factor, which is two if it is not given" in text
    assert example_lines(Entry("module", "scale", scale)) == [">>> scale(3)", "6.0"]
    assert ">>>" not in write_entry(Entry("module", "float", float)).partition("```pycon")[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_an_example_shows_more_than_the_name(entry: Entry) -> None:
    printed = [example.want.strip() for example in parse_example(entry).examples if example.want]
    assert printed, "the example prints nothing"
    assert printed != [entry.name], "the example prints only the name; show what it does"
