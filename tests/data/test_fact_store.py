"""Facts are found again however a question is written, and none is lost when many tell at once."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from regard.base.errors import DataError
from regard.data.fact_store import StoredFact, open_fact_store


def test_questions_are_compared_without_case_blanks_and_punctuation(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    assert store.answer("Where was Ada Lovelace born?") is None
    store.save("Where was Ada  Lovelace born?", " London ")
    assert store.answer("where was ada lovelace born") == "London"
    assert store.answer("Where was Ada born?") is None


def test_a_newer_answer_replaces_the_older_and_is_not_learned(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.save("Where?", "Here")
    store.mark_learned(store.all())
    assert store.all() == [StoredFact("Where?", "Here", True)]
    store.save("where", "There")
    assert store.all() == [StoredFact("where", "There", False)]


def test_an_answer_that_changed_during_learning_is_not_marked_as_learned(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.save("Where?", "Here")
    before = store.all()
    store.save("Where?", "There")
    store.mark_learned(before)
    assert [fact.learned for fact in store.all()] == [False]


@pytest.mark.parametrize(("question", "answer"), [("", "x"), ("?", "x"), ("Where?", "  ")])
def test_a_fact_without_question_or_answer_is_refused(tmp_path: Path, question: str, answer: str) -> None:
    with pytest.raises(DataError, match="a fact needs a question and an answer"):
        open_fact_store(tmp_path / "facts.sqlite").save(question, answer)


@pytest.mark.parametrize(("question", "answer"), [("Where\udcff?", "Here"), ("Where?", "Here\udcff")])
def test_lone_surrogates_are_refused(tmp_path: Path, question: str, answer: str) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    with pytest.raises(
        DataError, match=r"the text has a lone surrogate, U\+DCFF, at position [45], which UTF-8 cannot encode"
    ):
        store.save(question, answer)
    assert store.all() == []


def test_a_file_that_is_not_a_fact_store_is_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader, " * 100)
    with pytest.raises(DataError, match=r"letter\.txt is not a fact store"):
        open_fact_store(file).save("Where?", "Here")
    assert file.read_text() == "Dear reader, " * 100


def test_a_store_in_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_fact_store(tmp_path / "nowhere" / "facts.sqlite")


def test_concurrent_processes_lose_no_fact(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    code = (
        "import sys; from regard.data.fact_store import open_fact_store\n"
        "store = open_fact_store(sys.argv[1])\n"
        "for n in range(40): store.save(f'Where was {sys.argv[2]} {n} born?', f'Town {n}')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in ("Ada", "Bo")]
    assert [each.wait() for each in running] == [0, 0]
    assert len(open_fact_store(file).all()) == 80


def test_a_failed_write_is_rolled_back(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.save("Where?", "Here")

    def half() -> None:
        with store._transaction() as connection:
            connection.execute("DELETE FROM facts")
            connection.execute("DELETE FROM others")

    with pytest.raises(DataError, match="no such table"):
        half()
    assert store.answer("Where?") == "Here"
    assert sqlite3.connect(store.file).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_reading_creates_no_file_and_needs_no_write_access(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    assert (store.answer("Where?"), store.all()) == (None, [])
    assert not store.file.exists()
    store.save("Where?", "Here")
    store.file.chmod(0o444)
    assert store.answer("where") == "Here"
    (tmp_path / "text").write_text("no store, but long enough to be taken for one" * 40)
    with pytest.raises(DataError, match="is not a fact store, or cannot be read"):
        open_fact_store(tmp_path / "text").answer("Where?")


def test_a_pipe_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DataError, match="is a folder, a device or a pipe; pass a file"):
            open_fact_store(path)
