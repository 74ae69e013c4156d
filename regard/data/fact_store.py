"""Questions and their answers in a SQLite file that many may use at once: what was told once is not lost."""

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

PATIENCE = 30.0  # seconds that a writer waits for another
TABLE = """
CREATE TABLE IF NOT EXISTS facts (
    question TEXT PRIMARY KEY,  -- as it is compared
    asked    TEXT NOT NULL,     -- as it was typed
    answer   TEXT NOT NULL,
    learned  INTEGER NOT NULL DEFAULT 0,
    told     TEXT NOT NULL DEFAULT (datetime('now'))
)
"""


@dataclass(frozen=True)
class StoredFact:
    """A question as it was asked, its answer, and whether a model has learned it since."""

    question: str
    answer: str
    learned: bool


@dataclass(frozen=True)
class FactStore:
    """A store of facts. Every call is a transaction of its own, so processes may come and go as they like."""

    file: Path

    def answer(self, question: str) -> str | None:
        """What was told about a question, whatever its capitals, spaces and final mark."""
        found = self._read("SELECT answer FROM facts WHERE question = ?", normalize_name(question))
        return str(found[0][0]) if found else None

    def keep(self, question: str, answer: str) -> None:
        """Remember an answer; a newer one takes the place of an older, and has to be learned anew."""
        if not normalize_name(question) or not answer.strip():
            raise DataError(f"a fact has a question and an answer, but they are {question!r} and {answer!r}")
        _check_spelling(answer)
        with self._opened() as store:
            store.execute(
                "INSERT INTO facts (question, asked, answer) VALUES (?, ?, ?) ON CONFLICT (question) DO UPDATE SET "
                "asked = excluded.asked, answer = excluded.answer, learned = 0, told = datetime('now')",
                (normalize_name(question), question.strip(), answer.strip()),
            )

    def all(self) -> list[StoredFact]:
        """All facts, in the order of their questions."""
        rows = self._read("SELECT asked, answer, learned FROM facts ORDER BY question")
        return [StoredFact(asked, answer, bool(learned)) for asked, answer, learned in rows]

    def mark_learned(self, facts: list[StoredFact]) -> None:
        """Those that a model has learned; one that was told anew in the meantime stays to be learned."""
        pairs = [(normalize_name(fact.question), fact.answer) for fact in facts]
        with self._opened() as store:
            store.executemany("UPDATE facts SET learned = 1 WHERE question = ? AND answer = ?", pairs)

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Rows of a store, which is neither made nor changed for it."""
        if not self.file.exists():
            return []
        try:
            connection = sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
            try:
                return connection.execute(query, values).fetchall()
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise DataError(f"{self.file} is not a store of facts, or cannot be read: {error}") from None

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self.file, timeout=PATIENCE)
        except sqlite3.Error as error:
            raise DataError(f"{self.file} cannot be opened as a store of facts: {error}") from None
        try:
            with connection:  # commits, or takes everything back
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(TABLE)
                yield connection
        except sqlite3.Error as error:
            raise DataError(f"{self.file} is not a store of facts, or cannot be written: {error}") from None
        finally:
            connection.close()


def open_fact_store(file: str | os.PathLike[str]) -> FactStore:
    """The store in a file, which is made when something is kept."""
    path = Path(file)
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be made: there is no folder {path.parent}")
    return FactStore(path)


def normalize_name(question: str) -> str:
    """A question as it is compared with others."""
    _check_spelling(question)
    plain = unicodedata.normalize("NFKC", question).casefold()
    return re.sub(r"\s+", " ", plain).strip().rstrip("?!. ")


def _check_spelling(text: str) -> None:
    """Raise where a text holds half a surrogate pair, which no store can spell: bytes that were read as no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"a fact is UTF-8, which cannot spell character {error.start} of {text!r}") from None
