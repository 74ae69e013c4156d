"""Image data sets: images with labels, read from CIFAR files, parquet files or a folder for each class."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from regard.base.errors import DataError
from regard.data.folders import list_entries, list_folders

if TYPE_CHECKING:
    from regard.data.archives import Archive

# words in the names of files and folders, and the split they mean
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
PARTIAL_DOWNLOADS = {".part", ".partial", ".crdownload", ".download"}  # suffixes of unfinished downloads
SUPPORTED_FORMATS = (
    "CIFAR files (.bin, or Python batches such as data_batch_1), archives of these (.tar.gz), parquet files of "
    "Hugging Face (train-00000-of-00001.parquet), or a folder of images for each class"
)


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size as uint8 pixels, and the class of each."""

    pixels: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, "n"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.pixels) != len(self.labels):
            raise DataError(f"there are {len(self.pixels)} images, but {len(self.labels)} labels")
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten()
        if len(wrong):
            record = int(wrong[0])
            raise DataError(
                f"image {record} has label {int(self.labels[record])}, but there are {len(self.classes)} classes, "
                "counted from 0"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, records: Int64[Tensor, "_"]) -> "Images":
        """The images with these indices."""
        return Images(self.pixels[records], self.labels[records], self.classes)


def concatenate_images(parts: Sequence[Images], names: Sequence[str]) -> Images:
    """Concatenate parts of one data set; `names` are their files, for errors."""
    for part, name in zip(parts, names, strict=True):
        if part.classes != parts[0].classes:
            raise DataError(f"{name} has other classes than {names[0]}, so they are not parts of one data set")
    if len(parts) == 1:
        return parts[0]
    return Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]), parts[0].classes
    )


def read_images(path: str | os.PathLike[str], split: str = "train", *, size: tuple[int, int] | None = None) -> Images:
    """Read an image data set; its format is detected from the files.

    split  train, test or val, where files or folders are named for splits
    size   height and width to resize all images to; without it, all images must have the same size
    """
    from regard.data.image_folder import resize_images  # built from Images

    place = Path(path)
    if not place.exists():
        raise DataError(f"{place} does not exist; expected {SUPPORTED_FORMATS}")
    found = _read_file(place, split, size) if place.is_file() else _read_folder(place, split, size)
    return found if size is None else resize_images(found, size)


def _read_file(file: Path, split: str, size: tuple[int, int] | None) -> Images:
    from regard.data import cifar, parquet  # each is built from Images
    from regard.data.archives import is_tar, open_archive

    if is_tar(file):
        return cifar.read_cifar(open_archive(file), split)
    if SPLIT_NAMES.get(split, split) not in ("train", split_from_name(file.name)):
        raise DataError(f"{file} has no splits and is not named for one, so it has no {split!r}")
    if file.suffix.lower() == ".parquet":
        return parquet.read_parquet_files([file], size)
    if cifar.is_cifar_file(file):
        return cifar.read_cifar_file(file)
    raise DataError(f"{file} has an unknown format; expected {SUPPORTED_FORMATS}")


def _read_folder(folder: Path, split: str, size: tuple[int, int] | None) -> Images:
    from regard.data import cifar, image_folder  # each is built from Images
    from regard.data.archives import is_tar, open_archive

    archive = open_archive(folder)
    here = _image_files(archive)
    inner = [each for each in list_folders(folder) if _image_files(open_archive(each))]
    if here:
        _check_downloads(folder, split)
        for each in inner:
            if split_from_name(each.name) in (None, SPLIT_NAMES.get(split, split)):
                raise DataError(
                    f"{each} has images too, which would not be read beside {here[0]}; put all files into one folder, "
                    "or pass one of the folders"
                )
        return _read_image_files(archive, split, size)
    if inner:
        return _read_subfolder(folder, {each.name: open_archive(each) for each in inner}, split, size)
    tars = [name for name in archive if is_tar(folder / name)]
    if len(tars) > 1:
        raise DataError(f"{folder} has several archives: {', '.join(tars)}; pass one of them")
    if tars:
        return cifar.read_cifar(open_archive(folder / tars[0]), split)
    if list_folders(folder):
        split_folder = _find_split_folder(folder, split)
        image_folder.check_loose_images(folder, split_folder)
        return image_folder.read_image_folder(split_folder, size)
    raise DataError(f"{folder} has no images in a known format; expected {SUPPORTED_FORMATS}")


def _check_downloads(folder: Path, split: str) -> None:
    """Raise if a download of the split is unfinished; some browsers make a folder of one."""
    for entry in list_entries(folder):
        if entry.suffix.lower() in PARTIAL_DOWNLOADS and split_from_name(entry.name) in (
            None,
            SPLIT_NAMES.get(split, split),
        ):
            raise DataError(f"{entry} is an unfinished download, so images may be missing; finish or remove it")


def _image_files(archive: "Archive") -> list[str]:
    """The CIFAR and parquet files of a folder."""
    from regard.data import cifar, parquet  # each is built from Images

    return cifar.list_cifar_files(archive) + parquet.list_parquet_files(archive)


def _read_image_files(archive: "Archive", split: str, size: tuple[int, int] | None) -> Images:
    """Read the CIFAR or parquet files of a folder."""
    from regard.data import cifar, parquet  # each is built from Images

    batches, tables = cifar.list_cifar_files(archive), parquet.list_parquet_files(archive)
    if batches and tables:
        raise DataError(
            f"{archive.path} has several data sets: {batches[0]}, {tables[0]}; put each into its own folder"
        )
    if split_from_name(archive.path.name) == SPLIT_NAMES.get(split, split) and not any(
        map(split_from_name, [*batches, *tables])
    ):
        split = "train"  # the folder is named for the split and its files are not: all of them belong to it
    return cifar.read_cifar(archive, split) if batches else parquet.read_parquet(archive, split, size)


def _read_subfolder(folder: Path, inner: Mapping[str, "Archive"], split: str, size: tuple[int, int] | None) -> Images:
    """Read the only subfolder with image files, or that of the split."""
    named = any(split_from_name(file) for archive in inner.values() for file in _image_files(archive))
    names = [*inner]
    if not named and all(name.lower() in SPLIT_NAMES for name in names):
        names = select_split(folder, names, split)
    if len(names) > 1:
        raise DataError(f"{folder} has several data sets: {', '.join(names)}; pass the folder of one")
    return _read_image_files(inner[names[0]], split, size)


def select_split(folder: Path, names: Sequence[str], split: str) -> list[str]:
    """The names that belong to a split; if no name says its split, all of them are for training."""
    splits = {name: split_from_name(name) for name in names}
    if not any(splits.values()):
        if SPLIT_NAMES.get(split, split) != "train":
            raise DataError(f"{folder} has no splits, so it has no {split!r}; its files are {', '.join(names)}")
        return list(names)
    for name, part in splits.items():
        if part is None:
            raise DataError(
                f"{folder / name} is not named for a split, as {next(filter(splits.get, splits))} is; rename it for "
                "train, test or val, or remove it"
            )
    return _names_of_split(folder, splits, split)


def _names_of_split(folder: Path, splits: Mapping[str, str | None], split: str) -> list[str]:
    found = [name for name, part in splits.items() if part == SPLIT_NAMES.get(split, split)]
    if not found:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(splits)}")
    return found


def split_from_name(name: str) -> str | None:
    """The split that a file or folder is named for, such as "train" for `cifar100_train.bin`."""
    if name.startswith("data_batch"):
        return "train"  # as in CIFAR-10
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def _find_split_folder(folder: Path, split: str) -> Path:
    """The subfolder of a split if subfolders are splits, else the folder itself."""
    names = [each.name for each in list_folders(folder)]
    splits = {SPLIT_NAMES[name.lower()] for name in names if name.lower() in SPLIT_NAMES}
    # a single folder `train` among others may be a class of pictures of trains
    if len(splits) < 2 and not all(name.lower() in SPLIT_NAMES for name in names):
        if SPLIT_NAMES.get(split, split) != "train":
            raise DataError(f"{folder} has a folder for each class and no splits, so it has no {split!r}")
        return folder
    found = _names_of_split(folder, {name: split_from_name(name) for name in names}, split)
    if len(found) > 1:
        raise DataError(f"{folder} has several folders for {split!r}: {', '.join(found)}; pass one of them")
    return folder / found[0]
