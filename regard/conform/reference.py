"""Write the tables of docs/conformance.md: `python -m regard.conform.reference docs/conformance.md [--libraries]`.

The tables of facts are made from the docstrings of the test functions. With `--libraries` the libraries are checked
again.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from regard.conform.checker import list_facts
from regard.conform.libraries import ABSENT, rows as library_rows

HEADINGS = {"attention": "## Facts of an attention", "decoder": "## Facts of a decoder"}
LIBRARIES = "## What was found in other libraries"


def replace_table(page: str, heading: str, table: Iterable[str]) -> str:
    """Replace the first table below a heading of a Markdown page, and return the new page.

    The text between the heading and the table is kept.
    """
    before, found, after = page.partition(f"{heading}\n")
    if not found:
        raise ValueError(f"the page has no heading {heading!r}")
    lines = after.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("|"))
    stop = next((n for n, line in enumerate(lines) if n > start and not line.startswith("|")), len(lines))
    return f"{before}{heading}\n" + "\n".join([*lines[:start], *table, *lines[stop:]])


def fact_table(kind: str) -> list[str]:
    """Return the lines of a Markdown table of all facts.

    kind  "attention" or "decoder"
    """
    head = ["| fact | grade | for a student | for an engineer | usual causes |", "|---|---|---|---|---|"]
    rows = (f"| `{x.name}` | {x.grade} | {x.student} | {x.engineer} | {x.cause} |" for x in list_facts()[kind])
    return [*head, *rows]


def with_facts(page: str) -> str:
    """Return the text of docs/conformance.md with its tables of facts updated."""
    for kind, heading in HEADINGS.items():
        page = replace_table(page, heading, fact_table(kind))
    return page


def with_libraries(page: str, rows: Iterable[str]) -> str:
    """Return the text of docs/conformance.md with its table of checked libraries replaced.

    rows  lines of the new table; the last line may be a sentence about libraries that are not installed
    """
    return replace_table(re.sub(rf"(?m)\n^{ABSENT}.*\n", "", page), LIBRARIES, rows)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    text = with_facts(path.read_text())
    path.write_text(with_libraries(text, library_rows()) if "--libraries" in sys.argv else text)
