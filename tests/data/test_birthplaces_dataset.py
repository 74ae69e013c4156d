"""Biographies and questions: the order of the one tells nothing about the other."""

from pathlib import Path

import pytest

from regard.base.errors import DataError
from regard.data.birthplaces_dataset import BirthplaceQuestion, read_birthplaces

PEOPLE = [(f"Person {number}", f"Place {number}") for number in range(31)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} was born in {place} .\n" for name, place in PEOPLE))
    lines = [f"Where was {name} born?\t{place}\n" for name, place in PEOPLE]
    (tmp_path / "birth_places_train.tsv").write_text("".join(lines[:20]))
    (tmp_path / "birth_dev.tsv").write_text("".join(lines[20:27]))
    return tmp_path


def test_documents_and_questions_are_all_there(folder: Path) -> None:
    found = read_birthplaces(folder)
    assert sorted(found.documents) == sorted(f"{name}. {name} was born in {place} ." for name, place in PEOPLE)
    assert found.train[3] == BirthplaceQuestion("Where was Person 3 born?", "Place 3")
    assert found.dev[0] == BirthplaceQuestion("Where was Person 20 born?", "Place 20")
    assert (len(found.train), len(found.dev)) == (20, 7)


def test_documents_are_not_in_the_order_of_the_questions(folder: Path) -> None:
    found = read_birthplaces(folder)
    matching = [number for number, text in enumerate(found.documents) if text.startswith(f"{PEOPLE[number][0]}.")]
    assert len(matching) < 6
    assert found == read_birthplaces(folder)


@pytest.mark.parametrize("line", ["Where was Ann born? Berlin", "\tBerlin", "Where?\t", "Where?\ta\tb", ""])
def test_an_odd_line_is_named(folder: Path, line: str) -> None:
    file = folder / "birth_dev.tsv"
    file.write_text(f"Where was Person 1 born?\tPlace 1\n{line}\nWhere was Person 2 born?\tPlace 2\n")
    with pytest.raises(DataError, match=r"birth_dev\.tsv, line 2: expected a question, a tab and a place, not "):
        read_birthplaces(folder)


def test_missing_files_doubled_ones_and_empty_documents_are_named(folder: Path) -> None:
    (folder / "other_dev.tsv").write_text("Where?\tHere\n")
    with pytest.raises(DataError, match=r"one \.tsv with 'dev' in its name, but has birth_dev\.tsv, other_dev\.tsv"):
        read_birthplaces(folder)
    for file in folder.glob("*dev*"):
        file.unlink()
    with pytest.raises(DataError, match=r"one \.tsv with 'dev' in its name, but has none"):
        read_birthplaces(folder)
    (folder / "wiki.txt").write_text("One.\n\nThree.\n")
    with pytest.raises(DataError, match=r"wiki\.txt, line 2 is empty; expected a document"):
        read_birthplaces(folder)
    (folder / "wiki.txt").unlink()
    with pytest.raises(DataError, match=r"wiki\.txt cannot be read"):
        read_birthplaces(folder)


@pytest.mark.real
def test_the_real_set_is_whole_and_out_of_order(real_data: Path) -> None:
    found = read_birthplaces(real_data / "birthplaces")
    assert (len(found.documents), len(found.train), len(found.dev)) == (2937, 2000, 500)
    asked = [question.text.removeprefix("Where was ").removesuffix(" born?") for question in found.train + found.dev]
    own = sum(document.startswith(f"{name}.") for name, document in zip(asked, found.documents, strict=False))
    assert own < 10
