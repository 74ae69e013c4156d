"""Image data sets with one folder of image files for each class, as in torchvision's ImageFolder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.base.media_files import decode_image
from regard.data.folders import check_all_read, list_entries, list_files, list_folders
from regard.data.images import Images
from regard.data.plain_text import read_bytes

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class ImageCollector:
    """Collects decoded images of one size and their labels, and returns them as one data set.

    size  height and width to resize every image to; None requires images of one size
    """

    def __init__(self, size: tuple[int, int] | None = None) -> None:
        self.size = size
        self.labels: list[int] = []
        self._pixels: list[Pixels] = []
        self._first = ""

    def add(self, where: str, data: bytes, label: int) -> None:
        """Decode an image file and add it with its label.

        where  name of the image, for error messages
        data   bytes of the file
        """
        image = decode_pixels(where, data, self.size)
        if self._pixels and image.shape != self._pixels[0].shape:
            height, width, _ = self._pixels[0].shape
            raise DataError(
                f"{where} is {image.shape[0]} x {image.shape[1]}, but {self._first} is {height} x {width} (height x "
                "width); resize the files, or read them with read_images(path, size=(height, width)), as "
                "`regard train vision --set size=32` does"
            )
        self._first = self._first or where
        self._pixels.append(image)
        self.labels.append(label)

    def images(self, classes: tuple[str, ...]) -> Images:
        """Return all collected images as one data set."""
        stacked = torch.from_numpy(np.stack(self._pixels)).permute(0, 3, 1, 2).contiguous()
        return Images(stacked, torch.tensor(self.labels), classes)


def read_image_folder(folder: Path, size: tuple[int, int] | None = None) -> Images:
    """Read the images in the subfolders of a folder as RGB. Each subfolder is a class.

    Classes and images are in the order of their names.

    size  height and width to resize every image to; None requires images of one size
    """
    check_all_read([], list_files(folder), f"images in the folder of a class, such as {folder.name}/CLASS/image.png")
    classes = list_folders(folder)
    collector = ImageCollector(size)
    for label, subfolder in enumerate(classes):
        files = list_entries(subfolder)
        if not files:
            raise DataError(f"{subfolder} is empty; expected images of the class {subfolder.name!r}")
        for file in files:
            if file.suffix.lower() not in IMAGE_SUFFIXES or not file.is_file():
                supported = ", ".join(sorted(IMAGE_SUFFIXES))
                raise DataError(f"{file} is not an image; expected files named {supported} in {subfolder}")
            collector.add(str(file), read_bytes(file), label)
    return collector.images(tuple(subfolder.name for subfolder in classes))


def decode_pixels(where: str, data: bytes, size: tuple[int, int] | None = None) -> Pixels:
    """Decode an image file to an RGB array of shape (height, width, 3).

    where  name of the image, for error messages
    size   height and width to resize the image to; None keeps the size of the image
    """
    from PIL.Image import Resampling

    rgb = decode_image(where, data).convert("RGB")
    return np.asarray(rgb if size is None else rgb.resize((size[1], size[0]), Resampling.BICUBIC))


def resize_images(images: Images, size: tuple[int, int]) -> Images:
    """Resize all images of a data set to a height and width, with bicubic resampling."""
    from PIL import Image

    if tuple(images.pixels.shape[2:]) == tuple(size):
        return images
    planes = images.pixels.flatten(0, 1)  # each channel by itself
    resized = [
        np.asarray(Image.fromarray(plane.numpy()).resize(size[::-1], Image.Resampling.BICUBIC)) for plane in planes
    ]
    pixels = torch.from_numpy(np.stack(resized)).unflatten(0, images.pixels.shape[:2])
    return Images(pixels, images.labels, images.classes)
