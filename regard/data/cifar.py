"""CIFAR-10 and CIFAR-100 in their original formats: binary files and Python batches.

A binary record begins with one label byte (CIFAR-10), or a byte for the coarse and one for the fine label (CIFAR-100).
3072 bytes of pixels follow: red, then green, then blue, each row by row. Python batches are pickle files, which are
read without running code from them.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.base.plain_pickle import load_plain_pickle
from regard.data.archives import Archive
from regard.data.images import Images, concatenate_images, select_split, split_from_name
from regard.data.plain_text import decode_text, read_bytes

PIXELS = 3 * 32 * 32
LABEL_BYTES = {10: 1, 100: 2}  # bytes of the labels by the number of classes; the last byte is the class
COARSE_CLASSES = 20
META = {"batches.meta", "meta"}
CLASS_NAMES = {"batches.meta.txt": 10, "fine_label_names.txt": 100}
TRAINING_BATCHES = 5  # number of training batches of CIFAR-10
# first bytes of pickles of protocol 2 or later, 0 and 1; a binary file begins with a smaller byte, a label
PICKLE_PREFIXES = (b"\x80", b"(dp", b"}q")


def list_cifar_files(archive: Archive) -> list[str]:
    """Return the names of the CIFAR files in an archive."""
    return [
        name
        for name in archive
        if name.lower().endswith(".bin") or (Path(name).suffix == "" and split_from_name(name) and name not in META)
    ]


def is_cifar_file(file: Path) -> bool:
    """Return whether a file looks like a CIFAR file: the name ends in .bin, or the content begins like a pickle."""
    if file.suffix.lower() == ".bin":
        return True
    return read_bytes(file).startswith(PICKLE_PREFIXES)


def read_cifar(archive: Archive, split: str = "train") -> Images:
    """Read all CIFAR images of a split from a folder or an archive."""
    names = list_cifar_files(archive)
    if not names:
        raise DataError(f"{archive.path} has no CIFAR files; expected files such as data_batch_1.bin or train")
    chosen = select_split(archive.path, names, split)
    _check_batch_names(archive.path, chosen)
    archive.check_all_read({*names, *META}, "files such as data_batch_1.bin or, as Python batches, data_batch_1")
    classes = _read_class_names(archive)
    return concatenate_images(
        [_read_batch(archive.full_path(name), archive.read(name), classes) for name in chosen],
        [archive.full_path(name) for name in chosen],
    )


def _check_batch_names(folder: Path, names: list[str]) -> None:
    """Raise DataError unless batch files such as data_batch_1 have all numbers from 1 to the last, each once."""
    found = sorted(int(number[1]) for name in names if (number := re.search(r"data_batch_(\d+)", name)))
    if not found and len(names) > 1:
        raise DataError(f"{folder} has {', '.join(names)}; expected one file for a split, so pass or keep one of them")
    last = max(TRAINING_BATCHES, *found) if found else 0
    if found != [*range(1, last + 1)]:
        raise DataError(
            f"{folder} has the batches {', '.join(map(str, found))}; expected those from 1 to {last}, each once"
        )


def read_cifar_file(file: Path) -> Images:
    """Read the images of one CIFAR file, and the class names from other files in the same folder, if there are any."""
    names = {each: each for each in (*META, *CLASS_NAMES) if (file.parent / each).is_file()}
    return _read_batch(str(file), read_bytes(file), _read_class_names(Archive(file.parent, names)))


def _read_batch(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    if not data:
        raise DataError(f"{where} is empty; expected CIFAR images")
    read = _read_pickle_batch if data.startswith(PICKLE_PREFIXES) else _read_binary
    return read(where, data, classes)


def _read_binary(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    count = len(classes) if classes else _infer_class_count(where, data)
    size = PIXELS + LABEL_BYTES[count]
    whole, rest = divmod(len(data), size)
    if rest:
        raise DataError(
            f"{where} is truncated or damaged: record {whole} at byte {whole * size} has {rest} of the {size} bytes of "
            f"a CIFAR-{count} image"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(whole, size)
    if count == 100:
        coarse = records[:, 0].astype(np.int64)
        _check_labels(where, coarse, COARSE_CLASSES, "coarse label")
    labels = records[:, LABEL_BYTES[count] - 1].astype(np.int64)
    _check_labels(where, labels, count)
    pixels = records[:, LABEL_BYTES[count] :].reshape(whole, 3, 32, 32)
    return Images(torch.from_numpy(pixels.copy()), torch.from_numpy(labels), classes or _number_classes(count))


def _infer_class_count(where: str, data: bytes) -> int:
    """Return the number of classes, 10 or 100, that fits the size of a binary file; DataError if both or none fit."""
    counts = [count for count, label_bytes in LABEL_BYTES.items() if not len(data) % (PIXELS + label_bytes)]
    if len(counts) == 1:
        return counts[0]
    raise DataError(
        f"{where} has {len(data)} bytes, which is not a multiple of 3073 (CIFAR-10) or 3074 (CIFAR-100) alone; the "
        f"file is damaged, or needs {' or '.join(CLASS_NAMES)} next to it"
    )


def _read_pickle_batch(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    batch = load_plain_pickle(where, data)
    if not isinstance(batch, dict):
        raise DataError(f"{where} should be a dictionary with 'data' and 'labels', not a {type(batch).__name__}")
    fields = {_to_text(key): value for key, value in batch.items()}
    pixels = fields.get("data")
    labels = fields.get("fine_labels", fields.get("labels"))
    count = 100 if "fine_labels" in fields else 10
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        found = f"an array {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{where}: 'data' should be an array (images, {PIXELS}), not {found}")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 62 for label in labels):
        raise DataError(f"{where}: 'labels' or 'fine_labels' should be a list of integers")
    if len(labels) != len(pixels):
        raise DataError(f"{where} has {len(pixels)} images, but {len(labels)} labels")
    if classes and len(classes) != count:
        raise DataError(f"{where} is CIFAR-{count}, but there are names for {len(classes)} classes")
    array = np.array(labels, dtype=np.int64)
    _check_labels(where, array, count)
    return Images(
        torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()),
        torch.from_numpy(array),
        classes or _number_classes(count),
    )


def _check_labels(where: str, labels: Any, count: int, kind: str = "label") -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= count))
    if len(wrong):
        raise DataError(f"{where}: record {wrong[0]} has {kind} {labels[wrong[0]]}; expected 0 to {count - 1}")


def _read_class_names(archive: Archive) -> tuple[str, ...] | None:
    """Return the class names from a file such as batches.meta.txt or meta; None if there is no such file."""
    for name, count in CLASS_NAMES.items():
        if name in archive:
            text = decode_text(archive.full_path(name), archive.read(name))
            return _check_class_count(archive.full_path(name), tuple(text.split()), count)
    for name in sorted(META):
        if name in archive:
            meta = load_plain_pickle(archive.full_path(name), archive.read(name))
            fields = {_to_text(key): value for key, value in meta.items()} if isinstance(meta, dict) else {}
            listed = fields.get("fine_label_names", fields.get("label_names"))
            if not isinstance(listed, list):
                raise DataError(f"{archive.full_path(name)} should list 'label_names' or 'fine_label_names'")
            count = 100 if "fine_label_names" in fields else 10
            return _check_class_count(archive.full_path(name), tuple(map(_to_text, listed)), count)
    return None


def _check_class_count(where: str, names: tuple[str, ...], count: int) -> tuple[str, ...]:
    if len(names) != count:
        raise DataError(f"{where} names {len(names)} classes; expected {count}")
    return names


def _number_classes(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _to_text(value: Any) -> str:
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) else f"a {type(text).__name__}"
