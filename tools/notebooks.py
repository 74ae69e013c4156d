"""Run the notebooks of `examples/` without Jupyter: `python -m tools.notebooks [--save] [FILE ...]`.

The code cells of a notebook run in one process, in order. As in IPython, the outputs of a cell are what it prints and
the value of its last expression. `--save` writes the outputs into the file. Without `--save`, the outputs are compared
with those in the file.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
MAX_BYTES = 40_000  # of a notebook


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the code cells of a notebook, in order."""
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def run_cell(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one code cell. Returns its outputs in the format of .ipynb files.

    namespace  the variables of the notebook, which the cell can change
    number     number of the cell, for tracebacks
    """
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), list[dict[str, Any]]()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), namespace)  # nosec B102: our own notebooks
        value = None
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), f"<cell {number}>", "eval")
            value = eval(expression, namespace)  # nosec B307: our own notebooks
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": str(value).splitlines(True)}
        page = value._repr_html_() if hasattr(value, "_repr_html_") else None
        if page is not None and "srcdoc=" not in page:  # a whole page in a frame is too large for a file
            data["text/html"] = page.splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def run_notebook(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run all code cells of a notebook in an empty temporary folder. Returns the outputs of each cell."""
    from regard.integrations.torchvision import let_torchvision_load

    let_torchvision_load()
    # torch.compile reads the globals of a function by its module
    module = sys.modules["example"] = ModuleType("example")
    namespace = vars(module)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            cells = enumerate(code_cells(notebook), 1)
            return [run_cell("".join(cell["source"]), namespace, number) for number, cell in cells]
        finally:
            os.chdir(before)


def main(arguments: list[str]) -> int:
    """Run the notebooks; returns 1 if the outputs of one are not those in its file."""
    save, names = "--save" in arguments, [each for each in arguments if each != "--save"]
    wrong = 0
    for file in map(Path, names or sorted(map(str, EXAMPLES.glob("*.ipynb")))):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run_notebook(notebook), strict=True), 1):
            if save:
                cell["outputs"], cell["execution_count"] = outputs, number
            elif cell["outputs"] != outputs:
                wrong = 1
                print(f"{file.name}, cell {number} has\n{cell['outputs']}\nbut the outputs are\n{outputs}")
        if save:
            file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
