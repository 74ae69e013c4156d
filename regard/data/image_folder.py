"""Image files in a folder for each class."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.data.folders import entries, files, folders
from regard.data.images import Images
from regard.data.plain_text import read_bytes

KINDS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
UNREAD = {".avif", ".heic", ".heif", ".jfif", ".jp2", ".j2k", ".jxl", ".pbm", ".pnm", ".tga", ".dng"}
TO_ONE_SIZE = (
    "bring the files to one size, or read them with read_images(path, size=(height, width)), as "
    "`regard train vision --set size=32` does"
)
EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}


def read_folder(place: Path, size: tuple[int, int] | None = None) -> Images:
    """The images in the folders of a place, in the order of their names, as red, green and blue.

    Each folder is a class. All images have one size, unless `size` (height, width) is given to bring them to.
    """
    check_loose(place, place)
    classes = folders(place)
    pixels: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    labels: list[int] = []
    first: Path | None = None
    for label, folder in enumerate(classes):
        images = entries(folder)
        if not images:
            raise DataError(f"{folder} is empty; expected images of the class {folder.name!r}")
        for file in images:
            if file.suffix.lower() not in KINDS or not file.is_file():
                raise DataError(f"{file} is no image; expected files named {', '.join(sorted(KINDS))} in {folder}")
            image = pixels_of(str(file), read_bytes(file), size)
            if pixels and image.shape != pixels[0].shape:
                raise DataError(
                    f"{file} is {image.shape[0]} x {image.shape[1]}, but {first} is {pixels[0].shape[0]} x "
                    f"{pixels[0].shape[1]} (height x width); {TO_ONE_SIZE}"
                )
            first = first or file
            pixels.append(image)
            labels.append(label)
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Images(stacked, torch.tensor(labels), tuple(folder.name for folder in classes))


def check_loose(place: Path, part: Path) -> None:
    """Raise where an image lies beside the folders of a place; `part` is the folder that has those of classes."""
    for file in files(place):
        if file.suffix.lower() in KINDS | UNREAD:
            raise DataError(f"{file} lies in no class's folder; expected {part.name}/CLASS/{file.name}")


def pixels_of(where: str, data: bytes, size: tuple[int, int] | None = None) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """An image file as (height, width, 3); `where` names it in errors."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode not in EIGHT_BITS:
                raise DataError(f"{where} has pixels of kind {image.mode!r}; expected 8 bits a channel")
            plain = image.convert("RGB")
    except DataError:
        raise
    except UnidentifiedImageError:  # its own words are about an object in memory
        raise DataError(
            f"{where} cannot be read as an image: its {len(data)} bytes are cut off, or none of the kinds that are read"
        ) from None
    except Exception as error:  # decoders raise whatever they stumble over
        raise DataError(f"{where} cannot be read as an image: {error}") from None
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(plain)


def resize_image(images: Images, size: tuple[int, int]) -> Images:
    """Images brought to a height and width."""
    from PIL import Image

    if tuple(images.pixels.shape[2:]) == tuple(size):
        return images
    planes = images.pixels.flatten(0, 1)  # each channel by itself is what an image of several does too
    made = [np.asarray(Image.fromarray(plane.numpy()).resize(size[::-1], Image.Resampling.BICUBIC)) for plane in planes]
    pixels = torch.from_numpy(np.stack(made)).unflatten(0, images.pixels.shape[:2])
    return Images(pixels, images.labels, images.classes)
