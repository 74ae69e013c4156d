"""The documentation site: every page is in the navigation, links are rewritten, nothing is loaded from elsewhere."""

import re
from pathlib import Path

import pytest

from tools import diagram
from tools.api_reference import MODULES
from tools.pictures import FIRST, SIZES, VIEWS
from tools.site import (
    OUTSIDE,
    broken_links,
    install_section,
    list_decisions,
    nav_pages,
    remote_addresses,
    rewrite_links,
    sheets,
    unescape_pipes,
)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXT_OR_CODE = {".py", ".js", ".md", ".toml", ".html"}


def test_the_navigation_has_every_page_once() -> None:
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "decisions"}
    generated = {f"reference/{module}.md" for module in MODULES} | {"decisions/index.md"}
    outside = set(OUTSIDE.values()) - {"index.md"}
    pages = nav_pages()
    assert len(pages) == len(set(pages))
    assert {page for page in pages if not page.startswith("sheets/")} == written | generated | outside


def test_the_list_of_decisions_has_every_decision() -> None:
    page = list_decisions()
    assert all(f"]({file.name})" in page for file in (DOCS / "decisions").glob("0*.md"))


def test_the_first_page_says_how_to_install() -> None:
    assert "pip install -c constraints.txt" in install_section()
    assert install_section().count("\n## ") == 0
    assert "pip install -c" not in (DOCS / "index.md").read_text("utf-8"), "it is taken from the README"


@pytest.mark.parametrize(
    ("origin", "link", "expected"),
    [
        ("docs/masks.md", "[x](kernels.md)", "[x](kernels.md)"),
        ("docs/masks.md", "[x](kernels.md#work)", "[x](kernels.md#work)"),
        ("docs/tutorials/teach.md", "[x](../work.md)", "[x](../work.md)"),
        ("docs/tutorials/teach.md", "[x](../../CONTRIBUTING.md#add-a-model)", "[x](../contributing.md#add-a-model)"),
        ("CONTRIBUTING.md", "[x](docs/log.md)", "[x](log.md)"),
        ("docs/log.md", "[x](decisions)", "[x](decisions/index.md)"),
        ("docs/log.md", "[code](../regard/core/attend.py)", "`regard/core/attend.py`"),
        ("docs/log.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("docs/log.md", "```text\n[x](../README.md)\n```", "```text\n[x](../README.md)\n```"),
    ],
)
def test_links_are_those_of_the_site(origin: str, link: str, expected: str) -> None:
    assert rewrite_links(link, ROOT / origin) == expected


def test_code_in_a_table_has_no_backslashes() -> None:
    row = r"| `a \| b` | c \| d |"
    assert unescape_pipes(f"{row}\n") == "| `a | b` | c \\| d |\n"
    assert unescape_pipes(r"`a \| b`") == r"`a \| b`"


def test_a_page_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://example.org">x</a><script src="a.js"></script>')
    assert remote_addresses(tmp_path) == []
    (tmp_path / "bad.html").write_text('<script src="https://example.org/a.js"></script>')
    assert remote_addresses(tmp_path) == ["bad.html: https://example.org/a.js"]


def test_a_link_to_a_missing_file_or_anchor_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"><a href="b.html#there">x</a> <a href="#here"> <a href="https://x.org">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"><a href="./a.html">x</a>')
    assert broken_links(tmp_path) == []
    (tmp_path / "b.html").write_text('<h1 id="moved"><a href="c.html">x</a>')
    assert broken_links(tmp_path) == ["a.html: b.html#there", "b.html: c.html"]


def test_every_picture_is_on_a_page_and_those_of_the_explorer_are_taken_by_code() -> None:
    text = "".join(page.read_text("utf-8") for page in (ROOT / "README.md", *DOCS.rglob("*.md")))
    pictures = {file.name for file in (DOCS / "images").iterdir()}
    assert [name for name in sorted(pictures) if f"images/{name}" not in text] == []
    taken = {(not size and FIRST.get(view)) or f"explorer-{view}{size}" for view in VIEWS for size in SIZES}
    assert {name for name in pictures if name.startswith("explorer")} == {f"{name}.png" for name in taken}


def test_a_sheet_has_its_answers_with_formulas_as_mathml() -> None:
    name, text = next(sheets())
    assert f"sheets/{name}.md" in nav_pages()
    assert "<math" in text
    assert "$$" not in text


def test_every_sheet_is_in_the_navigation() -> None:
    from regard.lab.answers import sheet_titles

    assert {f"sheets/{name}.md" for name in sheet_titles()} == {
        page for page in nav_pages() if page.startswith("sheets/")
    }


def test_the_page_of_the_architecture_has_every_folder_and_files_that_exist() -> None:
    package, listed = ROOT / "regard", set()
    rows = re.findall(r"^\| (`.+?`) \| .+ \| (`.+?`) \|$", (DOCS / "architecture.md").read_text("utf-8"), re.M)
    for names, files in rows:
        folders = re.findall(r"`(.+?)`", names)
        assert all((package / folders[0] / file).is_file() for file in re.findall(r"`(.+?)`", files)), names
        listed.update(folders)
    folders = {str(file.parent.relative_to(package)) for file in package.rglob("*") if file.suffix in TEXT_OR_CODE}
    assert {folder for folder in folders if not folder.startswith("models/zoo/")} - {"."} <= listed
    assert all((package / folder).is_dir() for folder in listed)


def test_the_diagram_is_drawn_from_the_imports() -> None:
    rows, shown = diagram.rows(), (DOCS / "images" / "architecture.svg").read_text("utf-8")
    assert rows[0] == ["base"]
    assert rows[-1] == ["cli"]
    assert shown == diagram.draw(), "run python -m tools.diagram > docs/images/architecture.svg"
