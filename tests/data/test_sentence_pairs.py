"""Two languages line by line: what does not pair up is refused."""

import gzip
from pathlib import Path

import pytest
import torch

from regard.base.errors import DataError
from regard.data.sentence_pairs import SentencePairs, read_sentence_pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.en").write_text("A dog .\nTwo\u2028cats .\nOne bird .\n")
    (tmp_path / "train.de").write_text("Ein Hund .\nZwei Katzen .\r\nEin Vogel .")
    (tmp_path / "train.lc.norm.tok.en.gz").write_bytes(gzip.compress(b"a dog .\n"))
    (tmp_path / "train.lc.norm.tok.de.gz").write_bytes(gzip.compress(b"ein hund .\n"))
    (tmp_path / "val.fr").write_text("un chien\n")
    (tmp_path / "val.de").write_text("ein hund\n")
    return tmp_path


def test_lines_pair_up(folder: Path) -> None:
    pairs = read_sentence_pairs(folder, "train")
    assert pairs.source == ("A dog .", "Two\u2028cats .", "One bird .")
    assert pairs.target == ("Ein Hund .", "Zwei Katzen .", "Ein Vogel .")
    assert len(pairs) == 3


def test_compressed_and_preprocessed_files_and_other_languages_are_read(folder: Path) -> None:
    assert read_sentence_pairs(folder, "train", preprocessing="lc.norm.tok") == SentencePairs(
        ("a dog .",), ("ein hund .",)
    )
    assert read_sentence_pairs(folder, "val", source="de", target="fr") == SentencePairs(("ein hund",), ("un chien",))


def test_select_gives_the_pairs_with_these_indices(folder: Path) -> None:
    chosen = read_sentence_pairs(folder).select(torch.tensor([2, 0]))
    assert chosen == SentencePairs(("One bird .", "A dog ."), ("Ein Vogel .", "Ein Hund ."))


def test_unequal_files_are_refused(folder: Path) -> None:
    (folder / "train.de").write_text("Ein Hund .\nZwei Katzen .\n")
    with pytest.raises(DataError, match=r"train\.en has 3 lines, but .*train\.de has 2; line i of one must be the tra"):
        read_sentence_pairs(folder)
    with pytest.raises(
        DataError, match=r"SentencePairs needs the same number of source, target, but has 1 source, 2 target"
    ):
        SentencePairs(("a",), ("b", "c"))


def test_an_empty_line_is_named(folder: Path) -> None:
    (folder / "train.de").write_text("Ein Hund .\n \nEin Vogel .\n")
    with pytest.raises(DataError, match=r"train\.de, line 2 is empty; expected a sentence"):
        read_sentence_pairs(folder)


@pytest.mark.parametrize(
    ("text", "line"), [("Ein Hund .\rZwei Katzen .\rEin Vogel .\r", 1), ("Ein Hund .\nZwei Katzen .\rEin Vogel .\n", 2)]
)
def test_a_carriage_return_inside_a_line_is_refused(text: str, line: int, folder: Path) -> None:
    (folder / "train.de").write_bytes(text.encode())
    (folder / "train.en").write_bytes(b"A dog .\n" * (text.count("\n") or 1))  # as many as there seem to be
    words = rf"train\.de, line {line} contains \\r; expected one sentence per line, and lines that end in \\n or \\r\\n"
    with pytest.raises(DataError, match=words):
        read_sentence_pairs(folder)


def test_a_file_and_its_compressed_copy_are_refused(folder: Path) -> None:
    (folder / "train.de.gz").write_bytes(gzip.compress(b"Ein Hund .\n"))
    with pytest.raises(DataError, match=r"has train\.de and train\.de\.gz; remove one of them"):
        read_sentence_pairs(folder)


def test_a_missing_file_is_named_with_the_available_ones(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"has neither test\.en nor test\.en\.gz; it has train\.de, train\.en, train\.l"
    ):
        read_sentence_pairs(folder, "test")
    with pytest.raises(DataError, match=r"absent is not a folder; expected one with train\.en or train\.en\.gz"):
        read_sentence_pairs(folder / "absent")


def test_invalid_utf8_is_named(folder: Path) -> None:
    (folder / "train.de").write_bytes(b"Ein Hund .\nZwei\xff\nEin Vogel .\n")
    with pytest.raises(DataError, match=r"train\.de, line 2, byte 15: 0xFF is not UTF-8"):
        read_sentence_pairs(folder)


@pytest.mark.real
@pytest.mark.parametrize(("split", "count"), [("train", 29_000), ("val", 1_014), ("test_2016_flickr", 1_000)])
@pytest.mark.parametrize("form", ["", "lc.norm.tok"])
def test_multi30k_has_its_sentences(real_data: Path, split: str, count: int, form: str) -> None:
    pairs = read_sentence_pairs(real_data / "multi30k", split, preprocessing=form)
    assert len(pairs) == count
    assert any("ß" in sentence for sentence in pairs.target)
    assert not any("ß" in sentence for sentence in pairs.source)
