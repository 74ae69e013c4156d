"""Sentences in two languages, line by line."""

import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import DataError
from regard.data.plain_text import lines_of

UNSEEN = {"Cc", "Cf"}  # categories of Unicode: control characters, and marks such as the space of no width


@dataclass(frozen=True)
class SentencePairs:
    """Sentences and their translations: the same number of both, in the same order."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise DataError(f"{len(self.source)} sentences have {len(self.target)} translations; each needs one")

    def __len__(self) -> int:
        return len(self.source)

    def chosen(self, records: Int64[Tensor, "_"]) -> "SentencePairs":
        """Some of the pairs, in the order of their numbers given."""
        places = records.tolist()
        return SentencePairs(tuple(self.source[each] for each in places), tuple(self.target[each] for each in places))


def read_sentence_pairs(
    path: str | os.PathLike[str], split: str = "train", source: str = "en", target: str = "de", *, form: str = ""
) -> SentencePairs:
    """Pairs from a folder with one file for each language, as Multi30k has them: `train.en` and `train.de`.

    Files may be packed (.gz). `form="lc.norm.tok"` reads `train.lc.norm.tok.en`: lower-cased, normalised, tokenised.
    """
    folder = Path(path)
    files = [_file(folder, ".".join(filter(None, [split, form, language]))) for language in (source, target)]
    sides = [_sentences(file) for file in files]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{files[0]} has {len(sides[0])} lines, but {files[1]} has {len(sides[1])}; "
            "line i of one must be the translation of line i of the other"
        )
    return SentencePairs(*map(tuple, sides))


def _sentences(file: Path) -> list[str]:
    """The lines of a file without the spaces around them; raises where one is no single sentence."""
    sentences = [line.strip() for line in lines_of(file)]
    for number, sentence in enumerate(sentences, 1):
        if not sentence:
            raise DataError(f"{file}, line {number} is empty; expected a sentence")
        if "\r" in sentence:
            raise DataError(
                f"{file}, line {number} has \\r without \\n inside, which old systems ended lines with; expected a "
                "sentence on each line, and lines that end in \\n or \\r\\n"
            )
        if all(each.isspace() or unicodedata.category(each) in UNSEEN for each in sentence):
            raise DataError(
                f"{file}, line {number} has only characters that cannot be seen, {sentence[:4]!a}; expected a sentence"
            )
    return sentences


def _file(folder: Path, name: str) -> Path:
    found = [file for file in (folder / name, folder / f"{name}.gz") if file.is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has {name} and also {name}.gz; expected one of them: move the other away")
    if found:
        return found[0]
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with {name} or {name}.gz")
    there = sorted(file.name for file in folder.iterdir() if file.is_file())
    raise DataError(f"{folder} has neither {name} nor {name}.gz; it has: {', '.join(there) or 'no files'}")
