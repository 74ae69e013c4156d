"""docs/where.md: every concept is where the page says, and every folder is on the page."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| (.+) \| `(.+)` \| `(.+)` \|$", (ROOT / "docs" / "where.md").read_text(), re.M)


def defined_names(file: Path) -> set[str]:
    """Functions and classes at the top of a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


@pytest.mark.parametrize(("concept", "file", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_concept_is_where_the_page_says(concept: str, file: str, name: str) -> None:
    assert name in defined_names(ROOT / "regard" / file)


def test_every_folder_is_on_the_page() -> None:
    folders = {path.parent.name for path in (ROOT / "regard").glob("*/__init__.py")}
    assert folders - {file.split("/")[0] for _, file, _ in ROWS} == set()


def test_no_concept_is_listed_twice() -> None:
    concepts = [concept for concept, _, _ in ROWS]
    assert len(concepts) == len(set(concepts))
