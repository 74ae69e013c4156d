"""Image files in a folder for each class."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.data.images import Images
from regard.data.plain_text import content

KINDS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
LEFT_BY_SYSTEMS = {"thumbs.db", "desktop.ini"}
EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}


def read_folder(place: Path, size: tuple[int, int] | None = None) -> Images:
    """The images in the folders of a place, in the order of their names, as red, green and blue.

    Each folder is a class. All images have one size, unless `size` (height, width) is given to bring them to.
    """
    folders = sorted(folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    loose = [file.name for file in sorted(place.iterdir()) if file.suffix.lower() in KINDS]
    if loose:
        raise DataError(f"{place / loose[0]} lies in no class's folder; expected {place.name}/CLASS/{loose[0]}")
    pixels: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    labels: list[int] = []
    first: Path | None = None
    for label, folder in enumerate(folders):
        files = [file for file in sorted(folder.iterdir()) if not _left_by_system(file)]
        if not files:
            raise DataError(f"{folder} is empty; expected images of the class {folder.name!r}")
        for file in files:
            if file.suffix.lower() not in KINDS or not file.is_file():
                raise DataError(f"{file} is no image; expected files named {', '.join(sorted(KINDS))} in {folder}")
            image = pixels_of(str(file), content(file), size)
            if pixels and image.shape != pixels[0].shape:
                raise DataError(
                    f"{file} is {image.shape[0]} x {image.shape[1]}, but {first} is {pixels[0].shape[0]} x "
                    f"{pixels[0].shape[1]} (height x width); bring the files to one size, or read them with "
                    "read_images(path, size=(height, width))"
                )
            first = first or file
            pixels.append(image)
            labels.append(label)
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return Images(stacked, torch.tensor(labels), tuple(folder.name for folder in folders))


def pixels_of(where: str, data: bytes, size: tuple[int, int] | None = None) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """An image file as (height, width, 3); `where` names it in errors."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode not in EIGHT_BITS:
                raise DataError(f"{where} has pixels of kind {image.mode!r}; expected 8 bits a channel")
            plain = image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over
        raise DataError(f"{where} cannot be read as an image: {error}") from None
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(plain)


def _left_by_system(file: Path) -> bool:
    return file.name.startswith(".") or file.name.lower() in LEFT_BY_SYSTEMS
