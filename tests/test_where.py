"""docs/where.md and other pages: every concept, file and module is where a page says, and every folder is listed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| (.+) \| `(.+)` \| `(.+)` \|$", (ROOT / "docs" / "where.md").read_text(), re.M)

LOG = ROOT / "docs" / "log.md"  # its entries are not changed afterwards
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {LOG})]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:regard|tests|tools|bench|docs)/[a-z_/0-9]+(?:\.[a-z]+)?)`", text))
    modules = {
        name.replace(".", "/") for name in re.findall(r"python -m\s+((?:regard|tests|tools|bench)\b[\w.]*\w)", text)
    }
    files |= {f"{name}.py" for name in modules if not (ROOT / name / "__main__.py").is_file()}
    assert not [name for name in sorted(files) if not (ROOT / name).exists()]
