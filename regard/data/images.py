"""Image data sets in memory: pixels, labels and class names. Finds the split ("train", "test") in a file name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from regard.base.errors import DataError
from regard.data.records import Records

# words in the names of files and folders, and the split they mean
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}


@dataclass(frozen=True, eq=False)
class Images(Records):
    """An image data set: images of one size as uint8 pixels, and the class of each.

    classes  names of the classes; labels are indices into them

    >>> images = digits()
    >>> images.labels[:3].tolist(), images.classes[:3]
    ([0, 1, 2], ('0', '1', '2'))
    """

    PER_RECORD = ("pixels", "labels")
    pixels: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, "n"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten()
        if len(wrong):
            record = int(wrong[0])
            raise DataError(
                f"image {record} has label {int(self.labels[record])}, but there are {len(self.classes)} classes, "
                "counted from 0"
            )


def concatenate_images(parts: Sequence[Images], names: Sequence[str]) -> Images:
    """Concatenate the parts of one image data set.

    names  file of each part, for error messages
    """
    for part, name in zip(parts, names, strict=True):
        if part.classes != parts[0].classes:
            raise DataError(f"{name} has other classes than {names[0]}, so they are not parts of one data set")
    pixels, labels = (torch.cat([getattr(part, name) for part in parts]) for name in Images.PER_RECORD)
    return Images(pixels, labels, parts[0].classes)


def select_split(folder: Path, names: Sequence[str], split: str) -> list[str]:
    """Return the file names that contain the name of a split. If no name contains one, all files belong to "train".

    folder  folder of the files, for error messages
    """
    splits = {name: split_from_name(name) for name in names}
    if not any(splits.values()):
        if split != "train":
            raise DataError(f"{folder} has no splits, so it has no {split!r}; its files are {', '.join(names)}")
        return list(names)
    for name, part in splits.items():
        if part is None:
            raise DataError(
                f"{folder / name} is not named for a split, as {next(filter(splits.get, splits))} is; rename it for "
                "train, test or val, or remove it"
            )
    return names_of_split(folder, splits, split)


def names_of_split(folder: Path, splits: Mapping[str, str | None], split: str) -> list[str]:
    """Return the file names that belong to a split; raise DataError if there are none.

    folder  folder of the files, for error messages
    splits  the split of each file name, or None
    """
    found = [name for name, part in splits.items() if part == split]
    if not found:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(splits)}")
    return found


def split_from_name(name: str) -> str | None:
    """Return the split that a file or folder name contains, such as "train" for `cifar100_train.bin`, or None."""
    if name.startswith("data_batch"):
        return "train"  # names such as data_batch_1 of CIFAR-10
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
