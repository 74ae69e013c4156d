"""Image data sets in the parquet format of Hugging Face: a column of image files and a column of labels.

Files have names such as train-00000-of-00002.parquet. Class names are in the metadata of the schema.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.base.errors import DataError
from regard.base.extras import import_optional
from regard.base.files import parse_json
from regard.data.archives import Archive
from regard.data.image_folder import ImageCollector
from regard.data.images import Images, select_split
from regard.data.plain_text import read_bytes

IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("fine_label", "label")
FINE_CLASSES = 100  # classes of CIFAR-100, whose label column is "fine_label"
SHARD = re.compile(r"-(\d+)-of-(\d+)")
LFS_POINTER = b"version https://git-lfs"
BATCH_ROWS = 1024  # rows


def list_parquet_files(archive: Archive) -> list[str]:
    """Return the names of the parquet files in an archive."""
    return [name for name in archive if name.lower().endswith(".parquet")]


def read_parquet(archive: Archive, split: str = "train", size: tuple[int, int] | None = None) -> Images:
    """Read all images of a split from the parquet files of a folder.

    size  height and width to resize all images to; None requires images of one size
    """
    chosen = select_split(archive.path, list_parquet_files(archive), split)
    _check_shards(archive.path, chosen)
    archive.check_all_read(list_parquet_files(archive), "files such as train-00000-of-00001.parquet")
    return read_parquet_files([archive.path / name for name in chosen], size)


def read_parquet_files(files: Sequence[Path], size: tuple[int, int] | None = None) -> Images:
    """Read the images of several parquet files into one data set.

    size  height and width to resize all images to; None requires images of one size
    """
    collector = ImageCollector(size)
    column, classes = LABEL_COLUMNS[0], None
    for file in files:
        table = _ParquetReader(file)
        if file == files[0]:
            column, classes = table.label, table.classes
        if (table.label, table.classes) != (column, classes):
            raise DataError(f"{file} has other classes than {files[0]}, so they are not parts of one data set")
        for row, (image, label) in enumerate(table.rows()):
            where = f"{file}, row {row}"
            checked = _check_label(where, label, column, classes)
            collector.add(where, _image_bytes(where, image, table.image), checked)
    count = FINE_CLASSES if column == LABEL_COLUMNS[0] else max(collector.labels) + 1
    return collector.images(classes or tuple(map(str, range(count))))


class _ParquetReader:
    """Reads one parquet file of images: finds the image and label columns and the class names."""

    def __init__(self, file: Path) -> None:
        self.file = file
        arrow, parquet = (import_optional(name, "parquet", str(file)) for name in ("pyarrow", "pyarrow.parquet"))
        data = read_bytes(file)
        if data.startswith(LFS_POINTER):
            raise DataError(f"{file} is a git-lfs pointer, not the file itself; fetch the file with `git lfs pull`")
        try:
            self._opened = parquet.ParquetFile(arrow.BufferReader(data), page_checksum_verification=True)
            schema = self._opened.schema_arrow
        except Exception as error:  # pyarrow raises errors of many kinds
            raise DataError(f"{file} is damaged or not a parquet file: {error}") from None
        if not self._opened.metadata.num_rows:
            raise DataError(f"{file} has no rows")
        self.image = self._column(schema, IMAGE_COLUMNS, "images")
        self.label = self._column(schema, LABEL_COLUMNS, "labels")
        if not arrow.types.is_integer(schema.field(self.label).type):
            raise DataError(f"{file}: {self.label!r} should be integers, not {schema.field(self.label).type}")
        self.classes = self._classes(schema.metadata or {})

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """Yield the image and the label of each row; the image is an undecoded cell of the table."""
        batches = self._opened.iter_batches(BATCH_ROWS, columns=[self.image, self.label])
        row = 0
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                images, labels = (batch.column(name).to_pylist() for name in (self.image, self.label))
            except Exception as error:  # pyarrow raises errors of many kinds
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
        """Return the class names in the Hugging Face metadata of the file; None if there are none."""
        if b"huggingface" not in metadata:
            return None
        try:
            about = parse_json(self.file, metadata[b"huggingface"].decode("utf-8", errors="replace"))
            names = about["info"]["features"][self.label].get("names")
        except (DataError, LookupError, TypeError, AttributeError):
            raise DataError(
                f"{self.file}: the metadata 'huggingface' should be JSON with info.features.{self.label}"
            ) from None
        if names is None:
            return None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise DataError(f"{self.file}: the class names should be a list of strings, not {str(names)[:60]}")
        return tuple(names)


def _check_label(where: str, label: Any, column: str, classes: tuple[str, ...] | None) -> int:
    if label is None:
        raise DataError(f"{where} has no {column}")
    count = len(classes) if classes else FINE_CLASSES if column == LABEL_COLUMNS[0] else None
    if label < 0 or (count is not None and label >= count):
        raise DataError(
            f"{where} has {column} {label}; expected {'0 or more' if count is None else f'0 to {count - 1}'}"
        )
    return int(label)


def _image_bytes(where: str, image: Any, column: str) -> bytes:
    """Return the bytes of an image file from a table cell, which is these bytes or a dict with the key "bytes"."""
    data = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(data, bytes):
        return data
    path = image.get("path") if isinstance(image, dict) else None
    raise DataError(
        f"{where} has no bytes in {column}"
        + (f", only the path {path!r}; images must be stored in the parquet file" if path else "")
    )


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    """Check that no file is missing of those numbered as train-00000-of-00002.parquet, else raise DataError."""
    numbered = {name: found for name in names if (found := SHARD.search(name))}
    if not numbered:
        return
    totals = sorted({int(found[2]) for found in numbered.values()})
    there = sorted(int(found[1]) for found in numbered.values())
    if len(numbered) < len(names) or len(totals) > 1 or there != [*range(totals[0])]:
        raise DataError(
            f"{folder} has {', '.join(names)}; expected {' or '.join(map(str, totals))} files, numbered from 0, "
            "each once"
        )
