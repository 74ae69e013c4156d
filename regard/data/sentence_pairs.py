"""Parallel corpora: sentence pairs in two languages, one sentence per line."""

import os
from dataclasses import dataclass
from pathlib import Path

from regard.base.errors import DataError
from regard.base.files import is_file, is_folder
from regard.data.plain_text import read_lines
from regard.data.records import Records


@dataclass(frozen=True)
class SentencePairs(Records):
    """A translation data set: sentences and their translations, in the same order.

    >>> SentencePairs(("one",), ("eins",)).target
    ('eins',)
    """

    PER_RECORD = ("source", "target")
    source: tuple[str, ...]
    target: tuple[str, ...]


def read_sentence_pairs(
    path: str | os.PathLike[str],
    split: str = "train",
    source: str = "en",
    target: str = "de",
    *,
    preprocessing: str = "",
) -> SentencePairs:
    """Read sentence pairs from a folder with a file for each split and language, such as `train.en` and `train.de`.

    split          "train", "val" or the name of a test split
    source         language of the sentences
    target         language of the translations
    preprocessing  part of the file names: "lc.norm.tok" reads `train.lc.norm.tok.en`, which is lower-cased,
                   normalised and tokenised

    Files may be compressed (.gz). Multi30k has this layout.

    >>> _ = Path("train.en").write_text("one"), Path("train.de").write_text("eins")
    >>> read_sentence_pairs(".").target
    ('eins',)
    """
    folder = Path(path)
    files = [
        _find_file(folder, ".".join(filter(None, [split, preprocessing, language]))) for language in (source, target)
    ]
    sides = [_read_sentences(file) for file in files]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{files[0]} has {len(sides[0])} lines, but {files[1]} has {len(sides[1])}; "
            "line i of one must be the translation of line i of the other"
        )
    return SentencePairs(*map(tuple, sides))


def _read_sentences(file: Path) -> list[str]:
    """Read a file with one sentence per line, and remove white space at both ends of each line.

    Lines can end in \\n or \\r\\n. Raises DataError if a line is empty after this, or has a carriage return inside.
    """
    sentences = [line.strip() for line in read_lines(file)]
    for number, sentence in enumerate(sentences, 1):
        if not sentence:
            raise DataError(f"{file}, line {number} is empty; expected a sentence")
        if "\r" in sentence:
            raise DataError(
                f"{file}, line {number} contains \\r; expected one sentence per line, and lines that end in \\n or "
                "\\r\\n"
            )
    return sentences


def _find_file(folder: Path, name: str) -> Path:
    found = [file for file in (folder / name, folder / f"{name}.gz") if is_file(file)]
    if len(found) > 1:
        raise DataError(f"{folder} has {name} and {name}.gz; remove one of them")
    if found:
        return found[0]
    if not is_folder(folder):
        raise DataError(f"{folder} is not a folder; expected one with {name} or {name}.gz")
    available = sorted(file.name for file in folder.iterdir() if file.is_file())
    raise DataError(f"{folder} has neither {name} nor {name}.gz; it has {', '.join(available) or 'no files'}")
