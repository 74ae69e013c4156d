"""Fact store: questions and answers in a SQLite file that several processes can use at once."""

import os
import re
import sqlite3
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.base.errors import DataError
from regard.base.files import exists, is_file, is_folder
from regard.data.plain_text import check_utf8

LOCK_TIMEOUT = 30.0  # seconds
TABLE = """
CREATE TABLE IF NOT EXISTS facts (
    question TEXT PRIMARY KEY,  -- normalized
    asked    TEXT NOT NULL,     -- as typed
    answer   TEXT NOT NULL,
    learned  INTEGER NOT NULL DEFAULT 0,
    saved    TEXT NOT NULL DEFAULT (datetime('now'))
)
"""


@dataclass(frozen=True)
class StoredFact:
    """A question as the user typed it, its answer, and whether a model was trained on it."""

    question: str
    answer: str
    learned: bool


@dataclass(frozen=True)
class FactStore:
    """A store of questions and answers in an SQLite file.

    Every method call is one transaction, so several processes can use the file at once.
    """

    file: Path

    def answer(self, question: str) -> str | None:
        """Return the stored answer to a question; None if there is none.

        Questions that differ only in case, blanks or final punctuation are the same question.
        """
        found = self._read("SELECT answer FROM facts WHERE question = ?", normalize_question(question))
        return str(found[0][0]) if found else None

    def save(self, question: str, answer: str) -> None:
        """Save an answer, marked as not yet learned by the model.

        An older answer to the same question is replaced.
        """
        if not normalize_question(question) or not answer.strip():
            raise DataError(f"a fact needs a question and an answer, not {question!r} and {answer!r}")
        check_utf8(answer)
        with self._transaction() as store:
            store.execute(
                "INSERT INTO facts (question, asked, answer) VALUES (?, ?, ?) ON CONFLICT (question) DO UPDATE SET "
                "asked = excluded.asked, answer = excluded.answer, learned = 0, saved = datetime('now')",
                (normalize_question(question), question.strip(), answer.strip()),
            )

    def all(self) -> list[StoredFact]:
        """Return all facts, sorted by question."""
        rows = self._read("SELECT asked, answer, learned FROM facts ORDER BY question")
        return [StoredFact(asked, answer, bool(learned)) for asked, answer, learned in rows]

    def mark_learned(self, facts: list[StoredFact]) -> None:
        """Mark facts as learned by a model, except facts whose answer has changed since they were read."""
        pairs = [(normalize_question(fact.question), fact.answer) for fact in facts]
        with self._transaction() as store:
            store.executemany("UPDATE facts SET learned = 1 WHERE question = ? AND answer = ?", pairs)

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL query selects, or an empty list if the file does not exist.

        The file is opened for reading only.
        """
        if not self.file.exists():
            return []
        try:
            connection = sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True, timeout=LOCK_TIMEOUT)
            try:
                return connection.execute(query, values).fetchall()
            finally:
                connection.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self.file} is not a fact store, or cannot be read: {error}") from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Context manager: an SQLite write transaction, which is rolled back on an error."""
        try:
            connection = sqlite3.connect(self.file, timeout=LOCK_TIMEOUT)
        except sqlite3.Error as error:
            raise DataError(f"{self.file} cannot be opened as a fact store: {error}") from None
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(TABLE)
                yield connection
        except sqlite3.Error as error:
            raise DataError(f"{self.file} is not a fact store, or cannot be written: {error}") from None
        finally:
            connection.close()


def open_fact_store(file: str | os.PathLike[str]) -> FactStore:
    """Open the fact store in a file. The first `save` creates the file.

    >>> open_fact_store("facts.sqlite").answer("Where was Ada born?")
    """
    path = Path(file)
    if not is_folder(path.parent):
        raise DataError(f"{path} cannot be created: there is no folder {path.parent}")
    if exists(path) and not is_file(path):  # SQLite would wait for a pipe, and could not be interrupted
        raise DataError(f"{path} is a folder, a device or a pipe; pass a file")
    return FactStore(path)


def normalize_question(question: str) -> str:
    """Normalise a question for comparison: lower case, single blanks, and no punctuation at its end."""
    check_utf8(question)
    plain = unicodedata.normalize("NFKC", question).casefold()
    return re.sub(r"\s+", " ", plain).strip().rstrip("?!. ")
