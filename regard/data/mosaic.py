"""A mosaic: all images of a set side by side in one lossless image, row by row, with their labels in a file."""

import io
import json
import math
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.data.archives import Bundle
from regard.data.image_folder import pixels_of
from regard.data.images import Images
from regard.data.plain_text import decode_text

PIXELS, LABELS, NAMES, CLASSES = "images.webp", "labels.npy", "names.txt", "classes.json"


def is_mosaic(bundle: Bundle) -> bool:
    """Whether files of a mosaic lie together; an image of that name may also be one of many."""
    return PIXELS in bundle and any(name in bundle for name in (LABELS, NAMES, CLASSES))


def read_mosaic(bundle: Bundle) -> Images:
    """The set in images.webp, labels.npy and classes.json; names.txt, where it is there, has a line for each image."""
    for name in (PIXELS, LABELS, CLASSES):
        if name not in bundle:
            raise DataError(f"{bundle.place} has no {name}; a mosaic needs {PIXELS}, {LABELS} and {CLASSES}")
    labels = _labels(bundle)
    classes = _classes(bundle)
    where = bundle.where(LABELS)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(wrong):
        raise DataError(
            f"{where}: record {wrong[0]} has label {labels[wrong[0]]}, but {CLASSES} names {len(classes)} classes, "
            "counted from 0"
        )
    if NAMES in bundle:
        names = decode_text(bundle.where(NAMES), bundle.read(NAMES)).removesuffix("\n").split("\n")
        if len(names) != len(labels):
            raise DataError(f"{bundle.where(NAMES)} has {len(names)} lines, but {where} has {len(labels)} labels")
    whole = pixels_of(bundle.where(PIXELS), bundle.read(PIXELS))
    height, width, _ = whole.shape
    side = math.isqrt(height * width // len(labels))
    if side * side * len(labels) != height * width or height % side or width % side:
        raise DataError(
            f"{bundle.where(PIXELS)} is {height} x {width}, which {len(labels)} square images of one size do not fill; "
            f"{where} has one label for each"
        )
    tiles = whole.reshape(height // side, side, width // side, side, 3).transpose(0, 2, 4, 1, 3)
    pixels = torch.from_numpy(np.array(tiles).reshape(-1, 3, side, side))
    return Images(pixels, torch.from_numpy(labels.astype(np.int64)), classes)


def _labels(bundle: Bundle) -> "np.ndarray[Any, np.dtype[Any]]":
    where, data = bundle.where(LABELS), bundle.read(LABELS)
    try:
        if not data.startswith(b"\x93NUMPY"):  # numpy would take it for a pickle
            raise ValueError("it is no .npy file")
        labels: np.ndarray[Any, np.dtype[Any]] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{where} is no array of numbers: {error}") from None
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise DataError(
            f"{where} should be one whole number for each image, not an array of {labels.dtype} {labels.shape}"
        )
    return labels


def _classes(bundle: Bundle) -> tuple[str, ...]:
    where = bundle.where(CLASSES)
    try:
        classes = json.loads(decode_text(where, bundle.read(CLASSES)))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, line {error.lineno}: {error.msg}") from None
    if not isinstance(classes, list) or not classes or not all(isinstance(each, str) for each in classes):
        raise DataError(f"{where} should be a list of the classes' names")
    return tuple(classes)
