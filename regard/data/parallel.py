"""Sentences in two languages, line by line."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import DataError
from regard.data.plain_text import lines_of


@dataclass(frozen=True)
class Parallel:
    """Sentences and their translations: the same number of both, in the same order."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise DataError(f"{len(self.source)} sentences have {len(self.target)} translations; each needs one")

    def __len__(self) -> int:
        return len(self.source)

    def chosen(self, records: Int64[Tensor, "_"]) -> "Parallel":
        """Some of the pairs, in the order of their numbers given."""
        places = records.tolist()
        return Parallel(tuple(self.source[each] for each in places), tuple(self.target[each] for each in places))


def read_parallel(
    path: str | os.PathLike[str], split: str = "train", source: str = "en", target: str = "de", *, form: str = ""
) -> Parallel:
    """Pairs from a folder with one file for each language, as Multi30k has them: `train.en` and `train.de`.

    Files may be packed (.gz). `form="lc.norm.tok"` reads `train.lc.norm.tok.en`: lower-cased, normalised, tokenised.
    """
    folder = Path(path)
    files = [_file(folder, ".".join(filter(None, [split, form, language]))) for language in (source, target)]
    sides = [lines_of(file) for file in files]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{files[0]} has {len(sides[0])} lines, but {files[1]} has {len(sides[1])}; "
            "line i of one must be the translation of line i of the other"
        )
    for file, lines in zip(files, sides, strict=True):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                raise DataError(f"{file}, line {number} is empty; expected a sentence")
    return Parallel(*(tuple(line.strip() for line in lines) for lines in sides))


def _file(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with {name} or {name}.gz")
    there = sorted(file.name for file in folder.iterdir() if file.is_file())
    raise DataError(f"{folder} has neither {name} nor {name}.gz; it has: {', '.join(there) or 'no files'}")
