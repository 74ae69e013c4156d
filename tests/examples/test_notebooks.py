"""The notebooks of `examples/`: each runs offline from top to bottom, and gives the outputs that are saved in it."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import EXAMPLES, MAX_BYTES, code_cells, main, run_cell, run_notebook

NAMES = ("find_a_bug", "first_steps", "look_inside_hugging_face", "sliding_window", "train_and_translate")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def test_there_are_five_notebooks() -> None:
    assert sorted(file.stem for file in EXAMPLES.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_small_and_was_run(name: str) -> None:
    notebook = read(name)
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < MAX_BYTES
    assert (notebook["nbformat"], notebook["cells"][0]["source"][0][:2]) == (4, "# ")
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [*range(1, len([*code_cells(notebook)]) + 1)]
    assert all(cell["outputs"] for cell in code_cells(notebook))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_gives_its_outputs_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    notebook = read(name)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run_notebook(notebook), strict=True), 1):
        assert text_of(outputs) == text_of(cell["outputs"]), f"cell {number}; python -m tools.notebooks --save"


def text_of(outputs: list[dict[str, Any]]) -> str:
    """The text of outputs; numbers with three decimals may differ in the last one, so it is left out."""
    lines = [line for each in outputs for line in each.get("text") or each["data"]["text/plain"]]
    return re.sub(r"(\d\.\d\d)\d\b", r"\1", "".join(lines))


def test_an_output_that_is_not_saved_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.ipynb"
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["x = 2\n", "print(x)\n", "x + 1"]}
    file.write_text(json.dumps({"cells": [{**cell, "execution_count": None, "outputs": []}]}))
    assert main([str(file)]) == 1
    assert "one.ipynb, cell 1 has\n[]\nbut the outputs are" in capsys.readouterr().out
    assert main(["--save", str(file)]) == 0
    assert main([str(file)]) == 0
    saved = json.loads(file.read_text())["cells"][0]["outputs"]
    assert [each.get("text") or each["data"]["text/plain"] for each in saved] == [["2\n"], ["3"]]


def test_html_is_saved_except_for_whole_pages() -> None:
    table, frame = (
        "class A:\n    def _repr_html_(self): return '<p>a</p>'\nA()",
        "import regard\nregard.show(regard.causal())",
    )
    assert run_cell(table, {}, 1)[0]["data"]["text/html"] == ["<p>a</p>"]
    assert list(run_cell(frame, {}, 1)[0]["data"]) == ["text/plain"]
