"""Images with labels, and one reader for the forms in which sets of them are kept."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from regard.base.errors import DataError

# words by which files and folders are named for a part of a set
SPLITS = {"train": "train", "training": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
FORMS = (
    "CIFAR files (.bin, or Python batches such as data_batch_1), archives of these (.tar.gz), a folder of images for "
    "each class, or images.webp with labels.npy and classes.json, in a folder or in zips"
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
    size   height and width to bring images of different sizes to, for a folder of image files
    """
    from regard.data import cifar, image_folder, mosaic  # each is built from Images
    from regard.data.bundles import is_tar, open_bundle

    place = Path(path)
    if not place.exists():
        raise DataError(f"{place} is not there; expected {FORMS}")
    if place.is_file():
        if not is_tar(place):
            _check_single(place, split)
        if place.suffix == ".zip":
            return mosaic.read_mosaic(open_bundle(place))
        if is_tar(place):
            return cifar.read_cifar(open_bundle(place), split)
        if cifar.is_batch(place):
            return cifar.read_file(place)
        raise DataError(f"{place} is not recognised; expected {FORMS}")
    bundle = open_bundle(place)
    if mosaic.PIXELS in bundle:
        _check_single(place, split)
        return mosaic.read_mosaic(bundle)
    if cifar.batches(bundle):
        return cifar.read_cifar(bundle, split)
    zips = [name for name in bundle if name.endswith(".zip")]
    if zips:
        files = [place / name for name in of_split(place, zips, split)]
        return joined([mosaic.read_mosaic(open_bundle(file)) for file in files], [str(file) for file in files])
    inner = [folder for folder in _folders(place) if cifar.batches(open_bundle(folder))]
    if len(inner) > 1:
        raise DataError(f"{place} has several sets: {', '.join(each.name for each in inner)}; give the folder of one")
    if inner:
        return cifar.read_cifar(open_bundle(inner[0]), split)
    tars = [name for name in bundle if is_tar(place / name)]
    if len(tars) > 1:
        raise DataError(f"{place} has several archives: {', '.join(tars)}; give one of them")
    if tars:
        return cifar.read_cifar(open_bundle(place / tars[0]), split)
    if _folders(place):
        return image_folder.read_folder(_split_folder(place, split), size)
    raise DataError(f"{place} has no images in a form that is read; expected {FORMS}")


def of_split(place: Path, names: Sequence[str], split: str) -> list[str]:
    """The names that belong to a part of a set; where none is named for a part, all of them are for training."""
    told = {name: split_of(name) for name in names}
    if not any(told.values()):
        if SPLITS.get(split, split) != "train":
            raise DataError(f"{place} has no parts, so there is no {split!r} to read; it has: {', '.join(names)}")
        return list(names)
    found = [name for name, part in told.items() if part == SPLITS.get(split, split)]
    if not found:
        raise DataError(f"{place} has nothing for split={split!r}; it has: {', '.join(names)}")
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


def _folders(place: Path) -> list[Path]:
    return sorted(folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _split_folder(place: Path, split: str) -> Path:
    """The folder of a part where folders are parts, else the place itself."""
    folders = _folders(place)
    parts = {SPLITS[folder.name.lower()] for folder in folders if folder.name.lower() in SPLITS}
    # a folder `train` among others may well have pictures of trains
    if len(parts) < 2 and not all(folder.name.lower() in SPLITS for folder in folders):
        if SPLITS.get(split, split) != "train":
            raise DataError(f"{place} has a folder for each class and no parts, so there is no {split!r} to read")
        return place
    found = of_split(place, [folder.name for folder in folders], split)
    if len(found) > 1:
        raise DataError(f"{place} has several folders for {split!r}: {', '.join(found)}; give one of them")
    return place / found[0]
