"""Images with labels, and one reader for the forms in which sets of them are kept."""

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
from regard.data.folders import entries, folders

if TYPE_CHECKING:
    from regard.data.archives import Bundle

# words by which files and folders are named for a part of a set
SPLITS = {"train": "train", "training": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
PARTIAL = {".part", ".partial", ".crdownload", ".download"}  # how browsers name what they have not all of
FORMS = (
    "CIFAR files (.bin, or Python batches such as data_batch_1), archives of these (.tar.gz), parquet files of "
    "Hugging Face (train-00000-of-00001.parquet), a folder of images for each class, or images.webp with labels.npy "
    "and classes.json, in a folder or in zips"
)


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size as they are kept, whole numbers from 0 to 255, and the class of each."""

    pixels: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, "n"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.pixels) != len(self.labels):
            raise DataError(f"{len(self.pixels)} images have {len(self.labels)} labels; each needs one")
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten()
        if len(wrong):
            record = int(wrong[0])
            raise DataError(
                f"image {record} has label {int(self.labels[record])}, but there are {len(self.classes)} classes, "
                "counted from 0"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, records: Int64[Tensor, "_"]) -> "Images":
        """Some of the images, in the order of their numbers given."""
        return Images(self.pixels[records], self.labels[records], self.classes)


def joined(parts: Sequence[Images], names: Sequence[str]) -> Images:
    """Parts of one set as one; `names` are their files, for errors."""
    for part, name in zip(parts, names, strict=True):
        if part.classes != parts[0].classes:
            raise DataError(f"{name} has other classes than {names[0]}, so they are not parts of one set")
        if part.pixels.shape[1:] != parts[0].pixels.shape[1:]:
            raise DataError(
                f"{name} has images of {tuple(part.pixels.shape[1:])} (channels, height, width), but {names[0]} of "
                f"{tuple(parts[0].pixels.shape[1:])}"
            )
    if len(parts) == 1:
        return parts[0]
    return Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]), parts[0].classes
    )


def read_images(path: str | os.PathLike[str], split: str = "train", *, size: tuple[int, int] | None = None) -> Images:
    """The set of images at a path, recognised by what lies there.

    split  the part to read, where files or folders are named for parts: train, test or val
    size   height and width to bring all images to; without it, they must have one size, which stays
    """
    from regard.data.image_folder import resize_image  # built from Images

    place = Path(path)
    if not place.exists():
        raise DataError(f"{place} is not there; expected {FORMS}")
    found = _of_file(place, split, size) if place.is_file() else _of_folder(place, split, size)
    return found if size is None else resize_image(found, size)


def _of_file(place: Path, split: str, size: tuple[int, int] | None) -> Images:
    from regard.data import cifar, mosaic, parquet  # each is built from Images
    from regard.data.archives import is_tar, is_zip, open_bundle

    if is_tar(place):
        return cifar.read_cifar(open_bundle(place), split)
    _check_single(place, split)
    if is_zip(place):
        return mosaic.read_mosaic(open_bundle(place))
    if place.suffix.lower() == ".parquet":
        return parquet.read_files([place], size)
    if cifar.is_batch(place):
        return cifar.read_file(place)
    raise DataError(f"{place} is not recognised; expected {FORMS}")


def _of_folder(place: Path, split: str, size: tuple[int, int] | None) -> Images:
    from regard.data import cifar, image_folder, mosaic  # each is built from Images
    from regard.data.archives import check_copies, is_tar, is_zip, open_bundle

    bundle = open_bundle(place)
    here = [name for form in _forms(bundle) for name in form]
    zips = [] if here else [name for name in bundle if is_zip(place / name)]
    inner = [folder for folder in folders(place) if any(_forms(open_bundle(folder)))]
    if here or zips:
        _check_whole(place, split)
        unpacked = {Path(name).stem for name in zips}
        for folder in inner:
            if folder.name not in unpacked and split_of(folder.name) in (None, SPLITS.get(split, split)):
                raise DataError(
                    f"{folder} has images, too, but beside {(here or zips)[0]} they would not be read; put all of a "
                    "set into one folder, or give that of one set"
                )
    if here:
        return _of_records(bundle, split, size)
    if zips:
        chosen = of_split(place, zips, split)
        check_copies(place, chosen, "part of a set")
        files = [place / name for name in chosen]
        return joined([mosaic.read_mosaic(open_bundle(file)) for file in files], [str(file) for file in files])
    if inner:
        return _of_inner(place, {folder.name: open_bundle(folder) for folder in inner}, split, size)
    tars = [name for name in bundle if is_tar(place / name)]
    if len(tars) > 1:
        raise DataError(f"{place} has several archives: {', '.join(tars)}; give one of them")
    if tars:
        return cifar.read_cifar(open_bundle(place / tars[0]), split)
    if folders(place):
        part = _split_folder(place, split)
        image_folder.check_loose(place, part)
        return image_folder.read_folder(part, size)
    raise DataError(f"{place} has no images in a form that is read; expected {FORMS}")


def _check_whole(place: Path, split: str) -> None:
    """Raise where a download of the part to read has not come to its end; some browsers make a folder of one."""
    for entry in entries(place):
        if entry.suffix.lower() in PARTIAL and split_of(entry.name) in (None, SPLITS.get(split, split)):
            raise DataError(
                f"{entry} is a download that has not come to its end, so a part of the set may be missing; finish it, "
                "or move it away"
            )


def _forms(bundle: "Bundle") -> list[list[str]]:
    """The files of a folder that hold many images each: a mosaic, CIFAR files and parquet files."""
    from regard.data import cifar, mosaic, parquet  # each is built from Images

    return [[mosaic.PIXELS] if mosaic.is_mosaic(bundle) else [], cifar.batches(bundle), parquet.tables(bundle)]


def _of_records(bundle: "Bundle", split: str, size: tuple[int, int] | None) -> Images:
    """The set of the one form that the files of a folder have."""
    from regard.data import cifar, mosaic, parquet  # each is built from Images

    whole, batches, tables = _forms(bundle)
    several = [names[0] for names in (whole, batches, tables) if names]
    if len(several) > 1:
        raise DataError(f"{bundle.place} has several sets: {', '.join(several)}; put each into a folder of its own")
    if whole:
        _check_single(bundle.place, split)
        return mosaic.read_mosaic(bundle)
    if split_of(bundle.place.name) == SPLITS.get(split, split) and not any(map(split_of, [*batches, *tables])):
        split = "train"  # in a folder of a part, files that do not tell theirs are all of it
    return cifar.read_cifar(bundle, split) if batches else parquet.read_tables(bundle, split, size)


def _of_inner(place: Path, inner: Mapping[str, "Bundle"], split: str, size: tuple[int, int] | None) -> Images:
    """The set in the one folder that a place has, or in that of its part."""
    told = any(split_of(file) for bundle in inner.values() for form in _forms(bundle) for file in form)
    names = [*inner]
    if not told and all(name.lower() in SPLITS for name in names):
        names = of_split(place, names, split)
    if len(names) > 1:
        raise DataError(f"{place} has several sets: {', '.join(names)}; give the folder of one")
    return _of_records(inner[names[0]], split, size)


def of_split(place: Path, names: Sequence[str], split: str) -> list[str]:
    """The names that belong to a part of a set; where none is named for a part, all of them are for training."""
    told = {name: split_of(name) for name in names}
    if not any(told.values()):
        if SPLITS.get(split, split) != "train":
            raise DataError(f"{place} has no parts, so there is no {split!r} to read; it has: {', '.join(names)}")
        return list(names)
    for name, part in told.items():
        if part is None:
            raise DataError(
                f"{place / name} does not say of which part it is, as {next(filter(told.get, told))} does; name it for "
                "train, test or val, or move it away"
            )
    return _named_for(place, told, split)


def _named_for(place: Path, told: Mapping[str, str | None], split: str) -> list[str]:
    found = [name for name, part in told.items() if part == SPLITS.get(split, split)]
    if not found:
        raise DataError(f"{place} has nothing for split={split!r}; it has: {', '.join(told)}")
    return found


def split_of(name: str) -> str | None:
    """The part of a set that a file or folder is named for: `cifar100_train_a.zip` is for training."""
    if name.startswith("data_batch"):
        return "train"  # as CIFAR-10 calls it
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _check_single(place: Path, split: str) -> None:
    """Raise where one part was asked for, but the place holds images that are not told to be of that part."""
    part = SPLITS.get(split, split)
    if part not in ("train", split_of(place.name)):
        raise DataError(f"{place} has no parts and is not named for one, so there is no {split!r} to read")


def _split_folder(place: Path, split: str) -> Path:
    """The folder of a part where folders are parts, else the place itself."""
    names = [folder.name for folder in folders(place)]
    parts = {SPLITS[name.lower()] for name in names if name.lower() in SPLITS}
    # a folder `train` among others may well have pictures of trains
    if len(parts) < 2 and not all(name.lower() in SPLITS for name in names):
        if SPLITS.get(split, split) != "train":
            raise DataError(f"{place} has a folder for each class and no parts, so there is no {split!r} to read")
        return place
    found = _named_for(place, {name: split_of(name) for name in names}, split)
    if len(found) > 1:
        raise DataError(f"{place} has several folders for {split!r}: {', '.join(found)}; give one of them")
    return place / found[0]
