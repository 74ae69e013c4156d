"""Sets of images as Hugging Face keeps them: parquet files with a column of image files and one of labels.

A set has files such as train-00000-of-00002.parquet. Names of classes stand in the metadata of the schema.
"""

import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.base.errors import ConfigError, DataError
from regard.data.archives import Bundle
from regard.data.image_folder import TO_ONE_SIZE, pixels_of
from regard.data.images import Images, of_split
from regard.data.plain_text import read_bytes

IMAGES, LABELS = ("img", "image"), ("fine_label", "label")
FINE = 100  # classes of CIFAR-100, whose labels have a name of their own
SHARD = re.compile(r"-(\d+)-of-(\d+)")
POINTER = b"version https://git-lfs"
AT_ONCE = 1024  # rows


def tables(bundle: Bundle) -> list[str]:
    """The files of a bundle that are of this form, by their names."""
    return [name for name in bundle if name.lower().endswith(".parquet")]


def read_tables(bundle: Bundle, split: str = "train", size: tuple[int, int] | None = None) -> Images:
    """All images of a split, from the files of a folder."""
    chosen = of_split(bundle.place, tables(bundle), split)
    _check_shards(bundle.place, chosen)
    return read_files([bundle.place / name for name in chosen], size)


def read_files(files: Sequence[Path], size: tuple[int, int] | None = None) -> Images:
    """The images of some files in a row. All have one size, unless `size` (height, width) is given to bring them to."""
    pixels: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    labels: list[int] = []
    first = ""
    column, classes = LABELS[0], None
    for file in files:
        table = _Table(file)
        if file == files[0]:
            column, classes = table.label, table.classes
        if (table.label, table.classes) != (column, classes):
            raise DataError(f"{file} has other classes than {files[0]}, so they are not parts of one set")
        for row, (image, label) in enumerate(table.rows()):
            where = f"{file}, row {row}"
            labels.append(_checked(where, label, column, classes))
            found = pixels_of(where, _bytes(where, image, table.image), size)
            first = first or where
            if pixels and found.shape != pixels[0].shape:
                raise DataError(
                    f"{where} is {found.shape[0]} x {found.shape[1]}, but {first} is {pixels[0].shape[0]} x "
                    f"{pixels[0].shape[1]} (height x width); {TO_ONE_SIZE}"
                )
            pixels.append(found)
    stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    count = FINE if column == LABELS[0] else max(labels) + 1
    return Images(stacked, torch.tensor(labels), classes or tuple(map(str, range(count))))


class _Table:
    """One file: which of its columns hold images and labels, and what the labels are called."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                f"{file} is read by the package pyarrow, which is not installed: pip install pyarrow"
            ) from None
        data = read_bytes(file)
        if data.startswith(POINTER):
            raise DataError(f"{file} is a pointer of git-lfs in place of the file; fetch the file: git lfs pull")
        try:
            self._opened = parquet.ParquetFile(arrow.BufferReader(data), page_checksum_verification=True)
            schema = self._opened.schema_arrow
        except Exception as error:  # the library raises errors of many kinds
            raise DataError(f"{file} is damaged or no parquet file: {error}") from None
        if not self._opened.metadata.num_rows:
            raise DataError(f"{file} has no rows; expected an image in each")
        self.image = self._column(schema, IMAGES, "images")
        self.label = self._column(schema, LABELS, "labels")
        if not arrow.types.is_integer(schema.field(self.label).type):
            raise DataError(f"{file}: {self.label!r} should be whole numbers, not {schema.field(self.label).type}")
        self.classes = self._classes(schema.metadata or {})

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """The image and the label of each row, as they are kept."""
        batches = self._opened.iter_batches(AT_ONCE, columns=[self.image, self.label])
        row = 0
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                images, labels = (batch.column(name).to_pylist() for name in (self.image, self.label))
            except Exception as error:  # the library raises errors of many kinds
                raise DataError(f"{self.file} is damaged from row {row} on: {error}") from None
            row += len(labels)
            yield from zip(images, labels, strict=True)

    def _column(self, schema: Any, names: Sequence[str], what: str) -> str:
        there = [name for name in names if name in schema.names]
        if not there:
            raise DataError(
                f"{self.file} has no column of {what}; expected {' or '.join(names)}, but it has "
                f"{', '.join(schema.names)}"
            )
        return there[0]

    def _classes(self, metadata: dict[bytes, bytes]) -> tuple[str, ...] | None:
        """The names of classes, where the file tells them."""
        if b"huggingface" not in metadata:
            return None
        try:
            told = json.loads(metadata[b"huggingface"])["info"]["features"][self.label].get("names")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(
                f"{self.file}: the metadata 'huggingface' should be JSON with info.features.{self.label}"
            ) from None
        if told is None:
            return None
        if not isinstance(told, list) or not told or not all(isinstance(name, str) for name in told):
            raise DataError(f"{self.file}: the names of classes should be a list of words, not {str(told)[:60]}")
        return tuple(told)


def _checked(where: str, label: Any, column: str, classes: tuple[str, ...] | None) -> int:
    if label is None:
        raise DataError(f"{where} has no {column}")
    count = len(classes) if classes else FINE if column == LABELS[0] else None
    if label < 0 or (count is not None and label >= count):
        raise DataError(
            f"{where} has {column} {label}; expected {'0 or more' if count is None else f'0 to {count - 1}'}"
        )
    return int(label)


def _bytes(where: str, image: Any, column: str) -> bytes:
    """The file of an image, which stands alone or beside its path."""
    data = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(data, bytes):
        return data
    path = image.get("path") if isinstance(image, dict) else None
    raise DataError(
        f"{where} has no bytes in {column}" + (f", only the path {path!r}; keep images inside the file" if path else "")
    )


def _check_shards(place: Path, names: Sequence[str]) -> None:
    """Raise where a numbered file is missing, or any is there twice."""
    numbered = {name: found for name in names if (found := SHARD.search(name))}
    if not numbered:
        return
    totals = sorted({int(found[2]) for found in numbered.values()})
    there = sorted(int(found[1]) for found in numbered.values())
    if len(numbered) < len(names) or len(totals) > 1 or there != [*range(totals[0])]:
        raise DataError(
            f"{place} has {', '.join(names)}; expected {' or '.join(map(str, totals))} files, numbered from 0 on, and "
            "each once"
        )
