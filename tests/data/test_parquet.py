"""Parquet files of images, as Hugging Face keeps them, give the images that are in them, and every fault is named."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.base.errors import ConfigError, DataError
from regard.data.image_formats import read_images

TEN = [f"kind_{number}" for number in range(10)]
HUNDRED = [f"thing_{number}" for number in range(100)]
TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


def some(count: int, seed: int = 0, classes: int = 100, size: tuple[int, int] = (32, 32)) -> tuple[Tensor, list[int]]:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, *size), generator=draw, dtype=torch.uint8)
    return pixels, torch.randint(classes, (count,), generator=draw).tolist()


def png(image: Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "png")
    return file.getvalue()


def columns(pixels: Tensor, labels: list[Any], image: str = "img", label: str = "fine_label") -> dict[str, list[Any]]:
    files = [{"bytes": png(each), "path": f"{number}.png"} for number, each in enumerate(pixels)]
    return {image: files, label: labels}


def write(file: Path, table: dict[str, list[Any]], names: dict[str, Any] | None = None, **how: Any) -> None:
    """A file as the library `datasets` writes it: what columns mean stands in the metadata."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = arrow.table(table)
    if names is not None:
        features = {name: {"names": listed, "_type": "ClassLabel"} for name, listed in names.items()}
        about = {"info": {"features": {"img": {"_type": "Image"}, **features}}}
        made = made.replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(made, file, **how)


def cifar100(folder: Path) -> None:
    for name, count, seed in ((TRAIN, 7, 0), (TEST, 3, 1)):
        pixels, labels = some(count, seed)
        table = columns(pixels, labels) | {"coarse_label": [label // 5 for label in labels]}
        write(folder / name, table, {"fine_label": HUNDRED, "coarse_label": TEN * 2})


def check(path: Path, split: str, pixels: Tensor, labels: list[int], classes: list[str]) -> None:
    found = read_images(path, split)
    assert torch.equal(found.pixels, pixels)
    assert found.labels.tolist() == labels
    assert found.classes == tuple(classes)


@pytest.mark.parametrize("inside", ["", "data", "cifar100"])
def test_cifar_100_is_read_with_its_fine_labels(inside: str, tmp_path: Path) -> None:
    cifar100(tmp_path / inside)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".cache").mkdir()
    check(tmp_path, "train", *some(7, 0), HUNDRED)
    check(tmp_path, "test", *some(3, 1), HUNDRED)
    check(tmp_path / inside / TEST, "test", *some(3, 1), HUNDRED)
    with pytest.raises(DataError, match=r"has no split 'val'; it has test-.*, train-"):
        read_images(tmp_path, "val")


def test_cifar_10_is_read_from_columns_of_other_names(tmp_path: Path) -> None:
    pixels, labels = some(5, 2, 10)
    write(tmp_path / "plain_text" / TRAIN, columns(pixels, labels, "img", "label"), {"label": TEN})
    check(tmp_path, "train", pixels, labels, TEN)
    write(tmp_path / "plain_text" / TRAIN, columns(pixels, labels, "image", "label"), {"label": TEN})
    check(tmp_path, "train", pixels, labels, TEN)
    plain = {"image": [png(each) for each in pixels], "label": labels}
    write(tmp_path / "plain_text" / TRAIN, plain, {"label": TEN})
    check(tmp_path, "train", pixels, labels, TEN)


def test_classes_without_names_are_numbered(tmp_path: Path) -> None:
    pixels, _ = some(3)
    write(tmp_path / TRAIN, columns(pixels, [4, 99, 0]))
    check(tmp_path, "train", pixels, [4, 99, 0], [str(number) for number in range(100)])
    write(tmp_path / TRAIN, columns(pixels, [4, 6, 0], label="label"))
    check(tmp_path, "train", pixels, [4, 6, 0], [str(number) for number in range(7)])


def test_several_files_are_one_set_and_none_may_be_missing(tmp_path: Path) -> None:
    first, second = some(4, 0), some(3, 1)
    for number, part in enumerate((first, second)):
        write(tmp_path / f"train-0000{number}-of-00002-7a15.parquet", columns(*part), {"fine_label": HUNDRED})
    check(tmp_path, "train", torch.cat([first[0], second[0]]), first[1] + second[1], HUNDRED)
    again = tmp_path / "train-00001-of-00002 (1).parquet"
    again.write_bytes((tmp_path / "train-00001-of-00002-7a15.parquet").read_bytes())
    with pytest.raises(DataError, match=r"; expected 2 files, numbered from 0, each once"):
        read_images(tmp_path)
    again.unlink()
    (tmp_path / "train-00000-of-00002-7a15.parquet").unlink()
    with pytest.raises(DataError, match=r"has train-00001-of-00002-7a15\.parquet; expected 2 files, numbered from 0"):
        read_images(tmp_path)
    write(tmp_path / "train-00000-of-00002.parquet", columns(*some(2)), {"fine_label": HUNDRED[::-1]})
    with pytest.raises(DataError, match=r"train-00001.* has other classes than .*train-00000.*, so they are not parts"):
        read_images(tmp_path)


def test_folders_may_be_parts(tmp_path: Path) -> None:
    for name, seed in (("train", 0), ("test", 1)):
        write(tmp_path / name / "0000.parquet", columns(*some(3 - seed, seed)), {"fine_label": HUNDRED})
    check(tmp_path, "train", *some(3, 0), HUNDRED)
    check(tmp_path, "test", *some(2, 1), HUNDRED)
    check(tmp_path / "test", "test", *some(2, 1), HUNDRED)
    with pytest.raises(DataError, match=r"test has no splits, so it has no 'val'; its files are 0000\.parquet"):
        read_images(tmp_path / "test", "val")
    with pytest.raises(DataError, match=r"has no split 'val'; it has test, train"):
        read_images(tmp_path, "val")
    (tmp_path / "train" / "0000.parquet").unlink()
    with pytest.raises(DataError, match=r"has no split 'train'; it has test"):
        read_images(tmp_path)


def test_sets_are_told_apart(tmp_path: Path) -> None:
    cifar100(tmp_path / "cifar100")
    cifar100(tmp_path / "other")
    with pytest.raises(DataError, match=r"has several data sets: cifar100, other; pass the folder of one"):
        read_images(tmp_path)
    write(tmp_path / TRAIN, columns(*some(2)))
    with pytest.raises(DataError, match=r"cifar100 has images too, which would not be read beside train-0.*; put al"):
        read_images(tmp_path)


def test_images_are_brought_to_one_size_where_asked(tmp_path: Path) -> None:
    small, large = some(2, 0, size=(5, 7)), some(1, 1, size=(11, 9))
    write(tmp_path / "train-00000-of-00002.parquet", columns(*small))
    write(tmp_path / "train-00001-of-00002.parquet", columns(*large))
    with pytest.raises(
        DataError,
        match=r"train-00001-of-00002\.parquet, row 0 is 11 x 9, but .*train-00000-of-00002\.parquet, row 0 is 5 x 7 "
        r"\(height x width\); resize the files, or read .* as `regard train vision --set size=32` does",
    ):
        read_images(tmp_path)
    assert read_images(tmp_path, size=(4, 6)).pixels.shape == (3, 3, 4, 6)


def test_grey_images_become_red_green_and_blue(tmp_path: Path) -> None:
    grey, file = np.arange(35, dtype=np.uint8).reshape(5, 7), io.BytesIO()
    Image.fromarray(grey).save(file, "png")
    write(tmp_path / TRAIN, {"image": [{"bytes": file.getvalue(), "path": None}], "label": [0]})
    assert torch.equal(read_images(tmp_path).pixels, torch.from_numpy(grey).expand(1, 3, 5, 7))


GOOD = columns(*some(3))


@pytest.mark.parametrize(
    ("table", "names", "words"),
    [
        ({"fine_label": [1]}, None, r"has no column of images; expected img or image, but it has fine_label"),
        ({"img": GOOD["img"]}, None, r"has no column of labels; expected fine_label or label, but it has img"),
        (GOOD | {"fine_label": ["a", "b", "c"]}, None, r": 'fine_label' should be integers, not string"),
        (GOOD | {"fine_label": [1, 2, 100]}, HUNDRED, r", row 2 has fine_label 100; expected 0 to 99"),
        (GOOD | {"fine_label": [1, 100, 2]}, None, r", row 1 has fine_label 100; expected 0 to 99"),
        (GOOD | {"fine_label": [1, 3, 2]}, TEN[:3], r", row 1 has fine_label 3; expected 0 to 2"),
        (GOOD | {"fine_label": [1, None, 2]}, HUNDRED, r", row 1 has no fine_label"),
        ({"img": GOOD["img"], "label": [1, 2, -1]}, None, r", row 2 has label -1; expected 0 or more"),
        (GOOD | {"img": [*GOOD["img"][:2], {"bytes": b"no", "path": ""}]}, None, r", row 2 cannot be read as an image"),
        (
            GOOD | {"img": [GOOD["img"][0], {"bytes": GOOD["img"][1]["bytes"][:-900], "path": ""}, GOOD["img"][2]]},
            None,
            r", row 1 cannot be read as an image",
        ),
        (
            GOOD | {"img": [{"bytes": None, "path": "a.png"}, *GOOD["img"][1:]]},
            None,
            r", row 0 has no bytes in img, only the path 'a\.png'; images must be stored in the parquet file",
        ),
        (GOOD | {"img": [GOOD["img"][0], None, GOOD["img"][2]]}, None, r", row 1 has no bytes in img$"),
        (GOOD, "one, two", r": the class names should be a list of strings, not one, two"),
        (GOOD, [], r": the class names should be a list of strings, not \[\]"),
    ],
)
def test_faults_are_named_with_file_and_row(table: Any, names: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / TRAIN, table, None if names is None else {"fine_label": names})
    with pytest.raises(DataError, match=rf"train-00000-of-00001\.parquet{words if words[0] in ',:' else f' {words}'}"):
        read_images(tmp_path)


def test_a_file_without_rows_or_with_metadata_that_nobody_can_read_is_named(tmp_path: Path) -> None:
    made = arrow.table(GOOD)
    parquet.write_table(made.slice(0, 0), tmp_path / TRAIN)
    with pytest.raises(DataError, match=r"parquet has no rows"):
        read_images(tmp_path)
    for about in ("{", "[]", '{"info": {"features": {"label": {}}}}'):
        parquet.write_table(made.replace_schema_metadata({"huggingface": about}), tmp_path / TRAIN)
        with pytest.raises(
            DataError, match=r"the metadata 'huggingface' should be JSON with info\.features\.fine_label"
        ):
            read_images(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / TRAIN
    write(file, GOOD, write_page_checksum=True, compression="none")
    whole = file.read_bytes()
    for data in (b"", b"PAR1", whole[:-5], whole[: len(whole) // 2], b"plain text\n" * 9):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet is damaged or not a parquet file: "):
            read_images(tmp_path)
    middle = whole.index(b"IDAT") + 500
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet is damaged from row 0 on: "):
        read_images(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(
        DataError, match=r"parquet is a git-lfs pointer, not the file itself; fetch the file with `git lfs"
    ):
        read_images(tmp_path)


def test_without_pyarrow_it_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar100(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"parquet needs the package pyarrow, .*pip install 'regard\[parquet\]'"):
        read_images(tmp_path)
