"""CIFAR-10 and CIFAR-100 as their authors distribute them: binary files and Python batches.

A binary record is one label byte (CIFAR-10), or a coarse and a fine one (CIFAR-100), and 3072 bytes of pixels: red,
then green, then blue, each row by row. Python batches are pickles; they are read as plain values.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import DataError
from regard.data.archives import Bundle, check_copies
from regard.data.images import Images, joined, of_split, split_of
from regard.data.plain_pickle import plain_pickle
from regard.data.plain_text import decode_text, read_bytes

PIXELS = 3 * 32 * 32
LABEL_BYTES = {10: 1, 100: 2}  # by the number of classes; the last one is the class
COARSE = 20
META = {"batches.meta", "meta"}
CLASS_NAMES = {"batches.meta.txt": 10, "fine_label_names.txt": 100}
BESIDE = {".txt", ".md", ".html", ".md5", ".sha1", ".sha256"}  # what may lie beside a batch and have its name
TRAINING = 5  # batches of CIFAR-10
PICKLED = (b"\x80", b"(dp", b"}q")  # of protocol 2 or later, 0 and 1; no binary file begins with as large a label


def batches(bundle: Bundle) -> list[str]:
    """The files of a bundle that hold images, by their names."""
    return [
        name
        for name in bundle
        if name.lower().endswith(".bin") or (Path(name).suffix == "" and split_of(name) and name not in META)
    ]


def is_batch(file: Path) -> bool:
    """Whether a file can be one of CIFAR's: named .bin, or a pickle."""
    if file.suffix.lower() == ".bin":
        return True
    with file.open("rb") as opened:
        return opened.read(3).startswith(PICKLED)


def read_cifar(bundle: Bundle, split: str = "train") -> Images:
    """All images of a split, from the files of a folder or an archive."""
    names = batches(bundle)
    if not names:
        raise DataError(f"{bundle.place} has no CIFAR files; expected some such as data_batch_1.bin or train")
    chosen = of_split(bundle.place, names, split)
    _check_names(bundle.place, chosen)
    for name in bundle:
        batch = re.match(r"(data|test)_batch", name) and name not in names and Path(name).suffix.lower() not in BESIDE
        if batch and split_of(name) == split_of(chosen[0]):
            raise DataError(
                f"{bundle.where(name)} has the name of a batch, but not its form; unpack it or move it away: expected "
                "files such as data_batch_1.bin or, as Python batches, data_batch_1"
            )
    classes = _classes(bundle)
    return joined(
        [_read(bundle.where(name), bundle.read(name), classes) for name in chosen],
        [bundle.where(name) for name in chosen],
    )


def _check_names(place: Path, names: list[str]) -> None:
    """Raise where a numbered batch is missing, or any is there twice."""
    found = sorted(int(number[1]) for name in names if (number := re.search(r"data_batch_(\d+)", name)))
    last = max(TRAINING, *found) if found else 0
    if found != [*range(1, last + 1)]:
        raise DataError(
            f"{place} has the batches {', '.join(map(str, found))}; expected those from 1 to {last}, each once"
        )
    check_copies(place, names, "batch")


def read_file(file: Path) -> Images:
    """The images of one file, with the names of classes that lie beside it."""
    beside = [*META, *CLASS_NAMES]
    names = {each: each for each in beside if (file.parent / each).is_file()}
    return _read(str(file), read_bytes(file), _classes(Bundle(file.parent, names)))


def _read(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    if not data:
        raise DataError(f"{where} is empty; expected CIFAR images")
    return _from_batch(where, data, classes) if data.startswith(PICKLED) else _from_binary(where, data, classes)


def _from_binary(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    count = len(classes) if classes else _class_count(where, data)
    size = PIXELS + LABEL_BYTES[count]
    whole, rest = divmod(len(data), size)
    if rest:
        raise DataError(
            f"{where} ends inside record {whole}: at byte {whole * size} it has {rest} of the {size} bytes of a "
            f"CIFAR-{count} image; the file is cut off or damaged"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(whole, size)
    if count == 100:
        coarse = records[:, 0].astype(np.int64)
        _check_labels(where, coarse, COARSE, byte=lambda record: record * size, kind="coarse label")
    labels = records[:, LABEL_BYTES[count] - 1].astype(np.int64)
    _check_labels(where, labels, count, byte=lambda record: record * size + LABEL_BYTES[count] - 1)
    pixels = records[:, LABEL_BYTES[count] :].reshape(whole, 3, 32, 32)
    return Images(torch.from_numpy(pixels.copy()), torch.from_numpy(labels), classes or _numbered(count))


def _class_count(where: str, data: bytes) -> int:
    """10 or 100, from the size of the file and the labels in it."""
    fitting = [
        count
        for count, label_bytes in LABEL_BYTES.items()
        if not len(data) % (PIXELS + label_bytes) and _labels_fit(data, count)
    ]
    if len(fitting) == 1:
        return fitting[0]
    divides = [count for count, label_bytes in LABEL_BYTES.items() if not len(data) % (PIXELS + label_bytes)]
    if len(divides) == 1:
        return divides[0]  # some label is wrong, and the reader of records says which
    sizes = " and ".join(
        f"{len(data) % (PIXELS + label_bytes)} bytes more than whole CIFAR-{count} images of {PIXELS + label_bytes}"
        for count, label_bytes in LABEL_BYTES.items()
    )
    raise DataError(
        f"{where} has {len(data)} bytes: {sizes}; the file is cut off or no CIFAR file"
        if not divides
        else f"{where} could be CIFAR-10 or CIFAR-100; put {' or '.join(CLASS_NAMES)} beside it"
    )


def _labels_fit(data: bytes, count: int) -> bool:
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, PIXELS + LABEL_BYTES[count])
    coarse_fits = count == 10 or bool((records[:, 0] < COARSE).all())
    return coarse_fits and bool((records[:, LABEL_BYTES[count] - 1] < count).all())


def _from_batch(where: str, data: bytes, classes: tuple[str, ...] | None) -> Images:
    batch = plain_pickle(where, data)
    if not isinstance(batch, dict):
        raise DataError(f"{where} should hold a dictionary with 'data' and 'labels', not a {type(batch).__name__}")
    fields = {_text(key): value for key, value in batch.items()}
    pixels = fields.get("data")
    labels = fields.get("fine_labels", fields.get("labels"))
    count = 100 if "fine_labels" in fields else 10
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        found = f"an array {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{where}: 'data' should be an array (images, {PIXELS}), not {found}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{where}: 'labels' or 'fine_labels' should be a list of whole numbers")
    if len(labels) != len(pixels):
        raise DataError(f"{where} has {len(pixels)} images, but {len(labels)} labels")
    if classes and len(classes) != count:
        raise DataError(f"{where} is CIFAR-{count}, but the names beside it are those of {len(classes)} classes")
    told = np.array(labels, dtype=np.int64)
    _check_labels(where, told, count)
    return Images(
        torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(told), classes or _numbered(count)
    )


def _check_labels(where: str, labels: Any, count: int, byte: Any = None, kind: str = "label") -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= count))
    if len(wrong):
        record = int(wrong[0])
        place = f" (byte {byte(record)})" if byte else ""
        raise DataError(f"{where}: record {record}{place} has {kind} {labels[record]}; expected 0 to {count - 1}")


def _classes(bundle: Bundle) -> tuple[str, ...] | None:
    """The names of classes, where a file of the distribution tells them."""
    for name, count in CLASS_NAMES.items():
        if name in bundle:
            text = decode_text(bundle.where(name), bundle.read(name))
            return _counted(bundle.where(name), tuple(text.split()), count)
    for name in sorted(META):
        if name in bundle:
            meta = plain_pickle(bundle.where(name), bundle.read(name))
            fields = {_text(key): value for key, value in meta.items()} if isinstance(meta, dict) else {}
            listed = fields.get("fine_label_names", fields.get("label_names"))
            if not isinstance(listed, list):
                raise DataError(f"{bundle.where(name)} should list 'label_names' or 'fine_label_names'")
            count = 100 if "fine_label_names" in fields else 10
            return _counted(bundle.where(name), tuple(map(_text, listed)), count)
    return None


def _counted(where: str, names: tuple[str, ...], count: int) -> tuple[str, ...]:
    if len(names) != count:
        raise DataError(f"{where} names {len(names)} classes; expected {count}")
    return names


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
