"""Where people were born: short biographies to read, and questions with their answers."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.base.errors import DataError
from regard.base.seeds import make_generator
from regard.data.folders import files
from regard.data.plain_text import lines_of

READING_ORDER = 20_260  # a seed: every reader of one folder gets the same order
QUESTION = "Where was {name} born?"
# a document begins with a name and a full stop, which is not that of an initial
TITLE = re.compile(r"(.+?(?<![ .][A-Z])(?<!^[A-Z])(?<!\bJr)(?<!\bSr)(?<!\bSt)(?<!\bDr))\. ")


@dataclass(frozen=True)
class BirthplaceQuestion:
    """A question and the place that answers it."""

    text: str
    place: str


@dataclass(frozen=True)
class Birthplaces:
    """Documents to read, whom each is about, questions to learn from and questions to be judged by."""

    documents: tuple[str, ...]
    subjects: tuple[str, ...]  # empty where a document does not say
    train: tuple[BirthplaceQuestion, ...]
    dev: tuple[BirthplaceQuestion, ...]


def read_birthplaces(folder: str | os.PathLike[str]) -> Birthplaces:
    """The set in a folder: wiki.txt with a document a line, and a .tsv with `train` and one with `dev` in its name."""
    place = Path(folder)
    wiki = place / "wiki.txt"
    documents = lines_of(wiki)
    for number, document in enumerate(documents, 1):
        if not document.strip():
            raise DataError(f"{wiki}, line {number} is empty; expected a document")
    # document i answers question i of train, dev and test in a row: unshuffled, its number would tell a model which
    order = torch.randperm(len(documents), generator=make_generator(READING_ORDER)).tolist()
    shuffled = tuple(documents[each] for each in order)
    titles = map(TITLE.match, shuffled)
    return Birthplaces(
        documents=shuffled,
        subjects=tuple("" if title is None else title[1] for title in titles),
        train=tuple(read_questions(_only(place, "train"))),
        dev=tuple(read_questions(_only(place, "dev"))),
    )


def read_questions(file: Path) -> Iterable[BirthplaceQuestion]:
    """The questions of a .tsv: on each line a question, a tab and a place."""
    for number, line in enumerate(lines_of(file), 1):
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            raise DataError(f"{file}, line {number}: expected a question, a tab and a place, not {line[:80]!r}")
        yield BirthplaceQuestion(*fields)


def _only(folder: Path, word: str) -> Path:
    found = [file for file in files(folder) if file.suffix.lower() == ".tsv" and word in file.name]
    if len(found) != 1:
        named = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{folder} should have one .tsv with {word!r} in its name, but has {named}")
    return found[0]
