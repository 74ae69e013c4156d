"""Facts are found again however a question is written, and none is lost when many tell at once."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from regard.base.errors import DataError
from regard.data.fact_store import StoredFact, open_fact_store


def test_a_fact_is_found_whatever_its_capitals_spaces_and_mark(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    assert store.answer("Where was Ada Lovelace born?") is None
    store.keep("Where was Ada  Lovelace born?", " London ")
    assert store.answer("where was ada lovelace born") == "London"
    assert store.answer("Where was Ada born?") is None


def test_a_newer_answer_takes_the_place_of_the_older_and_is_to_be_learned(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.keep("Where?", "Here")
    store.mark_learned(store.all())
    assert store.all() == [StoredFact("Where?", "Here", True)]
    store.keep("where", "There")
    assert store.all() == [StoredFact("where", "There", False)]


def test_what_was_told_anew_while_a_model_learned_stays_to_be_learned(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.keep("Where?", "Here")
    before = store.all()
    store.keep("Where?", "There")
    store.mark_learned(before)
    assert [fact.learned for fact in store.all()] == [False]


@pytest.mark.parametrize(("question", "answer"), [("", "x"), ("?", "x"), ("Where?", "  ")])
def test_half_a_fact_is_refused(tmp_path: Path, question: str, answer: str) -> None:
    with pytest.raises(DataError, match="a fact has a question and an answer"):
        open_fact_store(tmp_path / "facts.sqlite").keep(question, answer)


@pytest.mark.parametrize(("question", "answer"), [("Where\udcff?", "Here"), ("Where?", "Here\udcff")])
def test_bytes_that_were_no_utf8_are_refused(tmp_path: Path, question: str, answer: str) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    with pytest.raises(DataError, match=r"a fact is UTF-8, which cannot spell character [45] of"):
        store.keep(question, answer)
    assert store.all() == []


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader, " * 100)
    with pytest.raises(DataError, match=r"letter\.txt is not a store of facts"):
        open_fact_store(file).keep("Where?", "Here")
    assert file.read_text() == "Dear reader, " * 100


def test_a_store_in_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_fact_store(tmp_path / "nowhere" / "facts.sqlite")


def test_many_processes_at_once_lose_no_fact(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    code = (
        "import sys; from regard.data.fact_store import open_fact_store\n"
        "store = open_fact_store(sys.argv[1])\n"
        "for n in range(40): store.keep(f'Where was {sys.argv[2]} {n} born?', f'Town {n}')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in ("Ada", "Bo")]
    assert [each.wait() for each in running] == [0, 0]
    assert len(open_fact_store(file).all()) == 80


def test_a_writer_that_fails_leaves_nothing_half_done(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    store.keep("Where?", "Here")

    def half() -> None:
        with store._opened() as connection:
            connection.execute("DELETE FROM facts")
            connection.execute("DELETE FROM others")

    with pytest.raises(DataError, match="no such table"):
        half()
    assert store.answer("Where?") == "Here"
    assert sqlite3.connect(store.file).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_asking_makes_no_file_and_needs_none_to_be_written(tmp_path: Path) -> None:
    store = open_fact_store(tmp_path / "facts.sqlite")
    assert (store.answer("Where?"), store.all()) == (None, [])
    assert not store.file.exists()
    store.keep("Where?", "Here")
    store.file.chmod(0o444)
    assert store.answer("where") == "Here"
    (tmp_path / "text").write_text("no store, but long enough to be taken for one" * 40)
    with pytest.raises(DataError, match="is not a store of facts, or cannot be read"):
        open_fact_store(tmp_path / "text").answer("Where?")
