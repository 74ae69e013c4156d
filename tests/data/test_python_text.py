"""The text that comes with Python."""

import sys

import pytest

from regard.base.errors import DataError
from regard.data.python_text import python_text


def test_the_help_of_python_is_one_text() -> None:
    text = python_text()
    assert len(text) > 300_000
    assert "statement" in text
    assert text.index("\n\nassignment\n\n") < text.index("\n\nyield\n\n")
    assert text == python_text()
    assert text.endswith("\n")


def test_a_python_without_pydoc_data_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"has no pydoc_data.*read_text\(path\)"):
        python_text()
