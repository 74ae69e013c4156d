"""The tables of facts in the documentation say what the checker says."""

from pathlib import Path

import pytest

from regard.conform.checker import list_facts

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"


@pytest.mark.parametrize("kind", ["attention", "decoder"])
def test_the_documentation_lists_every_fact_in_its_order_and_words(kind: str) -> None:
    rows = [f"| `{each.name}` | {each.student} | {each.engineer} | {each.cause} |" for each in list_facts()[kind]]
    article = "an" if kind == "attention" else "a"
    part = DOCS.read_text().partition(f"## Facts of {article} {kind}\n")[2].partition("\n## ")[0]
    assert [line for line in part.splitlines() if line.startswith("| `")] == rows
