"""The birthplaces data set: short biographies, and questions about the place of birth with their answers."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.base.errors import DataError
from regard.base.seeds import make_generator
from regard.data.folders import list_files
from regard.data.plain_text import read_lines

DOCUMENT_ORDER_SEED = 20_260
QUESTION = "Where was {name} born?"
# a document begins with a name and a full stop that does not belong to an initial or abbreviation
TITLE = re.compile(r"(.+?(?<![ .][A-Z])(?<!^[A-Z])(?<!\bJr)(?<!\bSr)(?<!\bSt)(?<!\bDr))\. ")


@dataclass(frozen=True)
class BirthplaceQuestion:
    """A question about a person's place of birth, and the place.

    >>> BirthplaceQuestion("Where was Ada born?", "London").place
    'London'
    """

    text: str
    place: str


@dataclass(frozen=True)
class Birthplaces:
    """The birthplaces data set: biographies, and questions for training and development.

    subjects  for each biography in `documents`, the name of the person that it is about

    >>> question = BirthplaceQuestion("Where was Ada born?", "London")
    >>> len(Birthplaces(("Ada was born in London.",), ("Ada",), (question,), ()).documents)
    1
    """

    documents: tuple[str, ...]
    subjects: tuple[str, ...]  # "" if a document does not begin with a name
    train: tuple[BirthplaceQuestion, ...]
    dev: tuple[BirthplaceQuestion, ...]


def read_birthplaces(folder: str | os.PathLike[str]) -> Birthplaces:
    """Read a folder with wiki.txt (one document per line) and two .tsv files with `train` and `dev` in their names.

    The documents are shuffled, because their order in the file follows the order of the questions.

    >>> _ = Path("wiki.txt").write_text("Ada was born in London.")
    >>> _ = [Path(f"{name}.tsv").write_text("Where was Ada born?\\tLondon") for name in ("train", "dev")]
    >>> read_birthplaces(".").dev[0].place
    'London'
    """
    place = Path(folder)
    wiki = place / "wiki.txt"
    documents = read_lines(wiki)
    for number, document in enumerate(documents, 1):
        if not document.strip():
            raise DataError(f"{wiki}, line {number} is empty; expected a document")
    # document i answers question i of train, dev and test concatenated, so the order would leak the answers
    order = torch.randperm(len(documents), generator=make_generator(DOCUMENT_ORDER_SEED)).tolist()
    shuffled = tuple(documents[each] for each in order)
    titles = map(TITLE.match, shuffled)
    return Birthplaces(
        documents=shuffled,
        subjects=tuple("" if title is None else title[1] for title in titles),
        train=tuple(read_questions(_find_tsv(place, "train"))),
        dev=tuple(read_questions(_find_tsv(place, "dev"))),
    )


def read_questions(file: Path) -> Iterable[BirthplaceQuestion]:
    """Read the questions of a .tsv file: a question, a tab and a place on each line."""
    for number, line in enumerate(read_lines(file), 1):
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            raise DataError(f"{file}, line {number}: expected a question, a tab and a place, not {line[:80]!r}")
        yield BirthplaceQuestion(*fields)


def _find_tsv(folder: Path, word: str) -> Path:
    found = [file for file in list_files(folder) if file.suffix.lower() == ".tsv" and word in file.name]
    if len(found) != 1:
        named = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{folder} should have one .tsv with {word!r} in its name, but has {named}")
    return found[0]
