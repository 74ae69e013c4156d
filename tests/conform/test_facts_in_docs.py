"""The tables in the documentation are generated: they say what the checker says."""

import re
from pathlib import Path

import pytest

from regard.conform.facts import ATTENTION
from regard.conform.reference import ABSENT, LIBRARIES, replace_table, with_facts, with_libraries

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()


def test_the_tables_of_facts_are_those_of_the_checker() -> None:
    assert with_facts(PAGE) == PAGE, "run: python -m regard.conform.reference docs/conformance.md"


def test_the_table_of_libraries_names_facts_of_the_checker() -> None:
    lines = [line for line in PAGE.partition(LIBRARIES)[2].splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 10
    named = {name for line in lines for cell in line.split(" | ")[2:] for name in re.findall(r"`([\w-]+)`", cell)}
    assert named <= set(ATTENTION)


def test_the_table_of_libraries_is_replaced_with_its_last_sentence() -> None:
    rows = ["| attention |", "|---|", "| one |", f"\n{ABSENT} two."]
    once = with_libraries(PAGE, rows)
    assert once.endswith("\n".join([*rows, ""]))
    assert with_libraries(once, rows) == once


def test_a_page_without_the_heading_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no heading '## None'"):
        replace_table(PAGE, "## None", [])
