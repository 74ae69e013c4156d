"""Read image data sets: detect CIFAR files, parquet files, archives, or a folder for each class."""

import os
from collections.abc import Mapping
from pathlib import Path

from regard.base.errors import DataError
from regard.base.files import exists
from regard.data.archives import Archive, is_tar, open_archive
from regard.data.cifar import is_cifar_file, list_cifar_files, read_cifar, read_cifar_file
from regard.data.folders import check_all_read, list_files, list_folders
from regard.data.image_folder import read_image_folder, resize_images
from regard.data.images import SPLIT_NAMES, Images, names_of_split, select_split, split_from_name
from regard.data.parquet import list_parquet_files, read_parquet, read_parquet_files

SUPPORTED_FORMATS = (
    "CIFAR files (.bin, or Python batches such as data_batch_1), archives of these (.tar.gz), parquet files of "
    "Hugging Face (train-00000-of-00001.parquet), or a folder of images for each class"
)
Size = tuple[int, int] | None  # height and width


def read_images(path: str | os.PathLike[str], split: str = "train", *, size: Size = None) -> Images:
    """Read an image data set. The format is detected from the files.

    split  "train", "test" or "val". Data sets whose files and folders are not named for splits have only "train"
    size   height and width to resize all images to; None requires images of one size

    Here the folder of the class `cat` has one image, 6 pixels wide and 4 high:

    >>> Path("images/cat").mkdir(parents=True)
    >>> Image.new("RGB", (6, 4)).save("images/cat/0.png")
    >>> read_images("images").pixels.shape
    torch.Size([1, 3, 4, 6])
    """
    place, split = Path(path), SPLIT_NAMES.get(split, split)
    if not exists(place):
        raise DataError(f"{place} does not exist; expected {SUPPORTED_FORMATS}")
    found = _read_file(place, split, size) if place.is_file() else _read_folder(place, split, size)
    return found if size is None else resize_images(found, size)


def _read_file(file: Path, split: str, size: Size) -> Images:
    if is_tar(file):
        return read_cifar(open_archive(file), split)
    if split not in ("train", split_from_name(file.name)):
        raise DataError(f"{file} has no splits and is not named for one, so it has no {split!r}")
    if file.suffix.lower() == ".parquet":
        return read_parquet_files([file], size)
    if is_cifar_file(file):
        return read_cifar_file(file)
    raise DataError(f"{file} has an unknown format; expected {SUPPORTED_FORMATS}")


def _read_folder(folder: Path, split: str, size: Size) -> Images:
    archive = open_archive(folder)
    here = _image_files(archive)
    inner = {each: opened for each in list_folders(folder) if _image_files(opened := open_archive(each))}
    if here:
        for each in inner:
            if split_from_name(each.name) in (None, split):
                raise DataError(
                    f"{each} has images too, which would not be read beside {here[0]}; put all files into one folder, "
                    "or pass one of the folders"
                )
        return _read_image_files(archive, split, size)
    if inner:
        return _read_subfolder(folder, {each.name: opened for each, opened in inner.items()}, split, size)
    tars = [name for name in archive if is_tar(folder / name)]
    if len(tars) > 1:
        raise DataError(f"{folder} has several archives: {', '.join(tars)}; pass one of them")
    if tars:
        return read_cifar(open_archive(folder / tars[0]), split)
    if list_folders(folder):
        check_all_read([], list_files(folder), "images in the folders of classes")
        return read_image_folder(_find_split_folder(folder, split), size)
    raise DataError(f"{folder} has no images in a known format; expected {SUPPORTED_FORMATS}")


def _image_files(archive: Archive) -> list[str]:
    """Return the names of the CIFAR and parquet files of a folder."""
    return list_cifar_files(archive) + list_parquet_files(archive)


def _read_image_files(archive: Archive, split: str, size: Size) -> Images:
    """Read the CIFAR or parquet files of a split from a folder. Raises DataError if the folder has both formats."""
    batches, tables = list_cifar_files(archive), list_parquet_files(archive)
    if batches and tables:
        raise DataError(
            f"{archive.path} has several data sets: {batches[0]}, {tables[0]}; put each into its own folder"
        )
    if split_from_name(archive.path.name) == split and not any(map(split_from_name, _image_files(archive))):
        split = "train"  # the folder is named for the split and its files are not: all of them belong to it
    return read_cifar(archive, split) if batches else read_parquet(archive, split, size)


def _read_subfolder(folder: Path, inner: Mapping[str, Archive], split: str, size: Size) -> Images:
    """Read the CIFAR or parquet files of a subfolder: the one named for the split, or the only one that has such files.

    inner  the files of each subfolder with CIFAR or parquet files, by the name of the subfolder
    """
    named = any(split_from_name(file) for archive in inner.values() for file in _image_files(archive))
    names = [*inner]
    if not named and all(name.lower() in SPLIT_NAMES for name in names):
        names = select_split(folder, names, split)
    if len(names) > 1:
        raise DataError(f"{folder} has several data sets: {', '.join(names)}; pass the folder of one")
    return _read_image_files(inner[names[0]], split, size)


def _find_split_folder(folder: Path, split: str) -> Path:
    """Return the folder of a split: a subfolder of `folder`, or `folder` itself if its subfolders are classes."""
    names = [each.name for each in list_folders(folder)]
    splits = {SPLIT_NAMES[name.lower()] for name in names if name.lower() in SPLIT_NAMES}
    # a single folder `train` among others may be a class of pictures of trains
    if len(splits) < 2 and not all(name.lower() in SPLIT_NAMES for name in names):
        if split != "train":
            raise DataError(f"{folder} has a folder for each class and no splits, so it has no {split!r}")
        return folder
    found = names_of_split(folder, {name: split_from_name(name) for name in names}, split)
    if len(found) > 1:
        raise DataError(f"{folder} has several folders for {split!r}: {', '.join(found)}; pass one of them")
    return folder / found[0]
