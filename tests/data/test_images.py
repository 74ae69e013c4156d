"""Sets of images in every form that is read give the same images, and every fault is named."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.base.errors import DataError
from regard.data.digits import digits, read_digits
from regard.data.images import Images, read_images

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HUNDRED = [f"thing_{number}" for number in range(100)]


def some(count: int, seed: int = 0, classes: int = 10) -> tuple[Tensor, list[int]]:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return pixels, torch.randint(classes, (count,), generator=draw).tolist()


def binary(pixels: Tensor, labels: list[int], coarse: int | None = None) -> bytes:
    head = [] if coarse is None else [coarse]
    return b"".join(
        bytes([*head, label]) + image.numpy().tobytes() for image, label in zip(pixels, labels, strict=True)
    )


def batch(pixels: Tensor, labels: list[int], field: str = "labels", protocol: int = 2) -> bytes:
    data = pixels.flatten(1).numpy()
    return pickle.dumps({"data": data, field: labels, "filenames": ["a.png"] * len(labels)}, protocol)


def check(found: Images, pixels: Tensor, labels: list[int], classes: list[str]) -> None:
    assert found.pixels.dtype == torch.uint8
    assert torch.equal(found.pixels, pixels)
    assert found.labels.tolist() == labels
    assert found.classes == tuple(classes)


def cifar10(form: str, folder: Path) -> None:
    """Five training batches of two and a test batch, as binary files or as Python batches."""
    for number in range(6):
        pixels, labels = some(2, number)
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        data = binary(pixels, labels) if form == "binary" else batch(pixels, labels)
        (folder / (f"{name}.bin" if form == "binary" else name)).write_bytes(data)
    if form == "binary":
        (folder / "batches.meta.txt").write_text("\n".join([*TEN, ""]))
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": TEN, "num_vis": 3072}, 2))
    (folder / "readme.html").write_text("<html>")


def cifar100(form: str, folder: Path) -> None:
    for number, name in enumerate(["train", "test"]):
        pixels, labels = some(5 - number, number, 100)
        data = binary(pixels, labels, 7) if form == "binary" else batch(pixels, labels, "fine_labels")
        (folder / (f"{name}.bin" if form == "binary" else name)).write_bytes(data)
    if form == "binary":
        (folder / "fine_label_names.txt").write_text("\n".join([*HUNDRED, ""]))
    else:
        (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": HUNDRED, "coarse_label_names": ["x"]}, 2))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar_10_is_read_as_it_is_distributed(form: str, place: Path) -> None:
    cifar10(form, place)
    parts = [some(2, number) for number in range(5)]
    train = torch.cat([pixels for pixels, _ in parts]), [label for _, labels in parts for label in labels]
    check(read_images(place), *train, TEN)
    check(read_images(place, "test"), *some(2, 5), TEN)
    with pytest.raises(DataError, match=r"nothing for split='val'; it has: data_batch_1.*, test_batch"):
        read_images(place, "val")
    batch_2 = next(file for file in place.iterdir() if "data_batch_2" in file.name)
    copied = batch_2.with_name(batch_2.name.replace("2", "2 (1)")) if form == "binary" else place / "data_batch_2_1"
    copied.write_bytes(batch_2.read_bytes())
    with pytest.raises(DataError, match=r"has the batches 1, 2, 2, 3, 4, 5; expected those from 1 to 5, each once"):
        read_images(place)
    copied.unlink()
    batch_2.unlink()
    with pytest.raises(DataError, match=r"has the batches 1, 3, 4, 5; expected those from 1 to 5, each once"):
        read_images(place)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar_10_without_its_last_batch_is_not_whole(form: str, place: Path, tmp_path: Path) -> None:
    cifar10(form, place)
    last = next(file for file in place.iterdir() if "data_batch_5" in file.name)
    sixth = last.with_name(last.name.replace("5", "6"))
    sixth.write_bytes(last.read_bytes())
    assert len(read_images(place)) == 12  # more than CIFAR-10 has is another set, which is whole
    sixth.unlink()
    last.unlink()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(place, "cifar")
    for path in (place, tmp_path / "a.tar"):
        with pytest.raises(DataError, match=r"has the batches 1, 2, 3, 4; expected those from 1 to 5, each once"):
            read_images(path)
        check(read_images(path, "test"), *some(2, 5), TEN)
    check(read_images(next(file for file in place.iterdir() if "data_batch_4" in file.name)), *some(2, 3), TEN)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar_100_is_read_with_its_fine_labels(form: str, place: Path) -> None:
    cifar100(form, place)
    check(read_images(place), *some(5, 0, 100), HUNDRED)
    check(read_images(place, "test"), *some(4, 1, 100), HUNDRED)


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("make", [cifar10, cifar100])
def test_archives_and_the_folders_around_them_are_read(
    form: str, make: Callable[[str, Path], None], tmp_path: Path, place: Path
) -> None:
    make(form, place)
    wanted = read_images(place, "test")
    outer = tmp_path / "outer"
    outer.mkdir()
    with tarfile.open(outer / "cifar.tar.gz", "w:gz") as tar:
        tar.add(place, "cifar-batches")
    for path in (outer / "cifar.tar.gz", outer, tmp_path):  # the last has the unpacked folder beside
        check(read_images(path, "test"), wanted.pixels, wanted.labels.tolist(), list(wanted.classes))


def test_one_file_is_read_alone_with_the_names_beside_it(place: Path) -> None:
    cifar10("binary", place)
    check(read_images(place / "data_batch_3.bin"), *some(2, 2), TEN)
    (place / "batches.meta.txt").unlink()
    check(read_images(place / "data_batch_3.bin"), *some(2, 2), [str(number) for number in range(10)])
    (place / "alone").write_bytes(batch(*some(3, 4)))
    check(read_images(place / "alone"), *some(3, 4), [str(number) for number in range(10)])


@pytest.mark.parametrize("protocol", range(6))
def test_batches_of_every_protocol_are_read(protocol: int, place: Path) -> None:
    (place / "train").write_bytes(batch(*some(3, 1, 100), "fine_labels", protocol))
    for path in (place, place / "train"):
        check(read_images(path), *some(3, 1, 100), [str(number) for number in range(100)])


def test_a_batch_that_was_copied_is_not_read_twice(place: Path) -> None:
    cifar100("binary", place)
    for copied in ("train (1).bin", "train"):
        (place / copied).write_bytes((place / "train.bin").read_bytes())
        with pytest.raises(DataError, match=r"set has train.* and train.*, which are one batch twice; leave one of th"):
            read_images(place)
        (place / copied).unlink()


def test_a_cut_binary_file_is_named_with_its_record_and_byte(place: Path) -> None:
    cifar10("binary", place)
    file = place / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(
        DataError, match=r"data_batch_2\.bin ends inside record 1: at byte 3073 it has 3068 of the 3073"
    ):
        read_images(place)
    (place / "batches.meta.txt").unlink()
    with pytest.raises(
        DataError, match=r"has 6141 bytes: 3068 bytes more than whole CIFAR-10 images of 3073 and 3067 "
    ):
        read_images(file)


def test_labels_out_of_range_are_named_with_their_record(place: Path) -> None:
    cifar10("binary", place)
    data = bytearray((place / "data_batch_2.bin").read_bytes())
    data[3073] = 12
    (place / "data_batch_2.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"data_batch_2\.bin: record 1 \(byte 3073\) has label 12; expected 0 to 9"):
        read_images(place)
    (place / "alone").write_bytes(batch(some(2)[0], [3, -1]))
    with pytest.raises(DataError, match=r"alone: record 1 has label -1; expected 0 to 9"):
        read_images(place / "alone")


@pytest.mark.parametrize("named", [True, False])
def test_coarse_labels_out_of_range_are_named_with_their_record(named: bool, place: Path) -> None:
    cifar100("binary", place)
    if not named:
        (place / "fine_label_names.txt").unlink()
    data = bytearray((place / "train.bin").read_bytes())
    data[3 * 3074] = 250
    (place / "train.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"train\.bin: record 3 \(byte 9222\) has coarse label 250; expected 0 to 19"):
        read_images(place)


def test_unfit_batches_are_named(place: Path) -> None:
    pixels, labels = some(3)
    for content, words in [
        (batch(pixels, labels[:2]), r"has 3 images, but 2 labels"),
        (batch(pixels[..., :31], labels), r"'data' should be an array \(images, 3072\), not an array \(3, 2976\)"),
        (pickle.dumps({"labels": labels}, 2), r"'data' should be an array \(images, 3072\), not NoneType"),
        (batch(pixels, labels, "classes"), r"'labels' or 'fine_labels' should be a list of whole numbers"),
        (pickle.dumps([1, 2], 2), r"should hold a dictionary with 'data' and 'labels', not a list"),
        (batch(pixels, labels)[:-2000], r"is damaged"),
        (pickle.dumps({"data": 0.5}, 2), r"opcode BINFLOAT at byte"),
        (b"", r"train is empty; expected CIFAR images"),
    ]:
        (place / "train").write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_images(place)


def test_names_that_do_not_fit_are_refused(place: Path) -> None:
    cifar10("binary", place)
    (place / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"batches\.meta\.txt names 2 classes; expected 10"):
        read_images(place)
    (place / "batches.meta.txt").unlink()
    (place / "meta").write_bytes(pickle.dumps({"names": TEN}, 2))
    with pytest.raises(DataError, match=r"meta should list 'label_names' or 'fine_label_names'"):
        read_images(place)


def mosaic(pixels: Tensor, labels: list[int], across: int, classes: list[str] = HUNDRED) -> dict[str, bytes]:
    down, side = len(pixels) // across, pixels.shape[-1]
    whole = pixels.reshape(down, across, 3, side, side).permute(0, 3, 1, 4, 2).reshape(down * side, across * side, 3)
    image, array = io.BytesIO(), io.BytesIO()
    Image.fromarray(whole.numpy()).save(image, "webp", lossless=True)
    np.save(array, np.array(labels, dtype=np.uint8))
    names = "\n".join(f"{number}.png" for number in range(len(pixels)))
    return {
        "images.webp": image.getvalue(),
        "labels.npy": array.getvalue(),
        "names.txt": names.encode(),
        "classes.json": json.dumps(classes).encode(),
    }


def put(files: dict[str, bytes], place: Path) -> None:
    if place.suffix.lower() == ".zip":
        with zipfile.ZipFile(place, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        for name, data in files.items():
            (place / name).write_bytes(data)


def test_a_mosaic_is_read_from_a_folder_and_from_a_zip(place: Path, tmp_path: Path) -> None:
    pixels, labels = some(15, 3, 100)
    put(mosaic(pixels, labels, across=5), place)
    check(read_images(place), pixels, labels, HUNDRED)
    for name in ("a.zip", "b.ZIP"):
        put(mosaic(pixels, labels, across=3), tmp_path / name)
        check(read_images(tmp_path / name), pixels, labels, HUNDRED)


def test_a_single_file_is_no_part_that_it_is_not_named_for(tmp_path: Path) -> None:
    put(mosaic(*some(2), across=2), tmp_path / "set_test.zip")
    put(mosaic(*some(2), across=2), tmp_path / "a.zip")
    assert len(read_images(tmp_path / "set_test.zip")) == len(read_images(tmp_path / "set_test.zip", "test")) == 2
    with pytest.raises(DataError, match=r"a\.zip has no parts and is not named for one, so there is no 'test' to read"):
        read_images(tmp_path / "a.zip", "test")


def test_tiles_of_any_size_are_told_by_the_number_of_labels(place: Path) -> None:
    pixels, labels = some(6)
    small = pixels[..., :9, :9].contiguous()
    put(mosaic(small, labels, across=2), place)
    check(read_images(place), small, labels, HUNDRED)


def test_several_zips_are_parts_of_one_set(place: Path) -> None:
    first, second, third = (some(6 - number, number, 100) for number in range(3))
    put(mosaic(*first, across=2), place / "set_train_a.zip")
    put(mosaic(*second, across=1), place / "set_train_b.ZIP")
    put(mosaic(*third, across=4), place / "set_test.zip")
    check(read_images(place), torch.cat([first[0], second[0]]), first[1] + second[1], HUNDRED)
    check(read_images(place, "test"), *third, HUNDRED)


@pytest.mark.parametrize(
    "copied",
    [
        "set_train_a (1).zip",
        "set_train_a(2).zip",
        "set_train_a - Copy.zip",
        "set_train_a copy 2.zip",
        "set_train_a (3).ZIP",
    ],
)
def test_a_zip_that_was_fetched_twice_is_not_read_twice(copied: str, place: Path) -> None:
    for name in ("set_train_a.zip", "set_train_b.zip", "set_test.zip", "set_test (1).zip"):
        put(mosaic(*some(2), across=2), place / name)
    assert len(read_images(place)) == 4  # the copy is of another part
    put(mosaic(*some(2), across=2), place / copied)
    with pytest.raises(
        DataError, match=r"set has set_tr.*\.(zip|ZIP) and set_tr.*, which are one part of a set twice; l"
    ):
        read_images(place)


@pytest.mark.parametrize(
    "name", ["set_train_b.zip.part", "set_train_b.zip.crdownload", "set_train_b.zip.download", "Unconfirmed 7.PARTIAL"]
)
@pytest.mark.parametrize("form", ["zip", "batches"])
def test_a_download_that_has_not_ended_is_named(name: str, form: str, place: Path) -> None:
    if form == "zip":
        put(mosaic(*some(2), across=2), place / "set_train_a.zip")
    else:
        cifar100("binary", place)
    (place / "set_test.zip.part").write_bytes(b"PK")
    assert len(read_images(place)) == (2 if form == "zip" else 5)  # what has not come is of another part
    (place / name).mkdir() if name.endswith(".download") else (place / name).write_bytes(b"PK")
    with pytest.raises(
        DataError, match=rf"set/{name} is a download that has not come to its end, so .*; finish it, or"
    ):
        read_images(place)


def test_parts_of_different_sets_are_not_joined(place: Path) -> None:
    put(mosaic(*some(2), across=2), place / "a.zip")
    put(mosaic(*some(2), across=2, classes=TEN), place / "b.zip")
    with pytest.raises(DataError, match=r"b\.zip has other classes than .*a\.zip"):
        read_images(place)
    put(mosaic(some(2)[0][..., :8, :8].contiguous(), [1, 2], across=2), place / "b.zip")
    with pytest.raises(DataError, match=r"b\.zip has images of \(3, 8, 8\).* but .*a\.zip of \(3, 32, 32\)"):
        read_images(place)
    with pytest.raises(DataError, match=r"has no parts, so there is no 'test' to read; it has: a\.zip, b\.zip"):
        read_images(place, "test")


def saved(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("labels.npy", saved([1, 2, 3, 4, 5]), r"names\.txt has 6 lines, but .*labels\.npy has 5 labels"),
        (
            "labels.npy",
            saved([1, 2, 100, 4, 5, 6]),
            r"labels\.npy: record 2 has label 100, but classes\.json names 100",
        ),
        ("labels.npy", saved([[1, 2, 3, 4, 5, 6]]), r"one whole number for each image, not an array of int64 \(1, 6\)"),
        ("labels.npy", saved([0.5] * 6), r"one whole number for each image, not an array of float64"),
        ("labels.npy", saved([None] * 6), r"labels\.npy is no array of numbers: .*allow_pickle=False"),
        ("labels.npy", saved([1, 2])[:-3], r"labels\.npy is no array of numbers"),
        ("labels.npy", b"", r"labels\.npy is no array of numbers"),
        ("labels.npy", b"1 2 3 4 5 6", r"labels\.npy is no array of numbers: it is no \.npy file"),
        ("labels.npy", b"PK\x05\x06" + bytes(18), r"labels\.npy is no array of numbers: it is no \.npy file"),
        ("classes.json", b'["a",\n', r"classes\.json, line 2: Expecting value"),
        ("classes.json", b'{"a": 1}', r"classes\.json should be a list of the classes' names"),
        ("classes.json", b"[]", r"classes\.json should be a list of the classes' names"),
        ("images.webp", b"RIFF no image", r"images\.webp cannot be read as an image"),
        ("images.webp", None, r"has no images\.webp; a mosaic needs images\.webp, labels\.npy and classes\.json"),
        ("classes.json", None, r"has no classes\.json; a mosaic needs"),
    ],
)
def test_faults_of_a_mosaic_are_named(name: str, data: bytes | None, words: str, tmp_path: Path) -> None:
    files = mosaic(*some(6), across=2)
    if data is None:
        del files[name]
    else:
        files[name] = data
    put(files, tmp_path / "a.zip")
    with pytest.raises(DataError, match=words):
        read_images(tmp_path / "a.zip")


def test_a_mosaic_that_the_labels_do_not_fill_is_named(place: Path) -> None:
    files = mosaic(*some(6), across=2)
    files["labels.npy"] = saved([1, 2, 3, 4, 5])
    del files["names.txt"]
    put(files, place)
    with pytest.raises(DataError, match=r"images\.webp is 96 x 64, which 5 square images of one size do not fill"):
        read_images(place)


def test_a_damaged_image_or_archive_is_named(place: Path, tmp_path: Path) -> None:
    files = mosaic(*some(6), across=2)
    put(files, tmp_path / "a.zip")
    whole = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"a\.zip is damaged or no archive"):
        read_images(tmp_path / "a.zip")
    middle = len(whole) // 2
    (tmp_path / "a.zip").write_bytes(whole[:middle] + b"xxxx" + whole[middle + 4 :])
    with pytest.raises(DataError, match=r"a\.zip:images\.webp is damaged and cannot be unpacked: Bad CRC-32"):
        read_images(tmp_path / "a.zip")
    files["images.webp"] = files["images.webp"][:2000]
    put(files, place)
    with pytest.raises(DataError, match=r"images\.webp cannot be read as an image"):
        read_images(place)


def test_a_flipped_byte_in_an_archive_of_the_lzma_kind_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as archive:
        for name, data in mosaic(*some(6), across=2).items():
            archive.writestr(name, data)
    packed = bytearray((tmp_path / "a.zip").read_bytes())
    packed[len(packed) - 800] ^= 0x55
    (tmp_path / "a.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.zip:\w+\.\w+ is damaged and cannot be unpacked"):
        read_images(tmp_path / "a.zip")


@pytest.mark.parametrize("length", [9, 3000, 20_000])
def test_a_cut_archive_is_named(length: int, tmp_path: Path, place: Path) -> None:
    cifar10("binary", place)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(place, "cifar")
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[:length])
    with pytest.raises(DataError, match=r"a\.tar\.gz.* is damaged"):
        read_images(tmp_path / "a.tar.gz")


@pytest.mark.parametrize("packing", ["", "gz"])
def test_a_tar_with_a_damaged_header_loses_no_batch_unseen(packing: str, tmp_path: Path, place: Path) -> None:
    cifar10("binary", place)
    unpacked, archive = tmp_path / "a.tar", tmp_path / ("a.tar.gz" if packing else "a.TAR")
    with tarfile.open(unpacked, "w", format=tarfile.GNU_FORMAT) as tar:
        for file in sorted(place.iterdir()):
            tar.add(file, f"cifar/{file.name}")
    whole = unpacked.read_bytes()
    header = whole.index(b"cifar/data_batch_3.bin")
    end = len(whole.rstrip(b"\0")) + 511 & ~511

    def read(data: bytes) -> Images:
        archive.write_bytes(gzip.compress(data) if packing else data)
        return read_images(archive)

    for complete in (whole, whole[: end + 512]):  # one block of zeros is enough
        assert len(read(complete)) == 10
    for damaged, byte, rest in [
        (whole[:header] + b"X" + whole[header + 1 :], header, f"{len(whole) - header} bytes, not all zero"),
        (whole[:header] + bytes(512) + whole[header + 512 :], header, f"{len(whole) - header} bytes, not all zero"),
        (whole[:header], header, "0 bytes"),
        (whole[: header + 100], header, "100 bytes, not all zero"),
        (whole[:end], end, "0 bytes"),
        (whole[: end + 511], end, "511 bytes"),
        (whole + whole, end, f"{2 * len(whole) - end} bytes, not all zero"),
    ]:
        with pytest.raises(
            DataError,
            match=rf"{archive.name} is damaged or cut off: what can be read of it ends at byte {byte} \(unpacked\); "
            rf"expected at least 512 zeros and nothing else from there on, but there are {rest}; fetch it again",
        ):
            read(damaged)


def tree(place: Path, sizes: tuple[int, int] = (5, 7)) -> dict[str, np.ndarray]:
    """Three classes with images, in files that keep every pixel."""
    draw = np.random.default_rng(3)
    made = {}
    for name in ("bird/b.png", "bird/a.bmp", "cat/x.PNG", "train/1.webp"):
        made[name] = draw.integers(256, size=(*sizes, 3), dtype=np.uint8)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(made[name]).save(place / name, lossless=True)
    (place / "bird" / ".DS_Store").write_bytes(b"x")
    return made


def test_folders_are_classes(place: Path) -> None:
    made = tree(place)
    (place / "README.md").write_text("about")
    found = read_images(place)
    assert found.classes == ("bird", "cat", "train")
    assert found.labels.tolist() == [0, 0, 1, 2]
    wanted = np.stack([made[name] for name in ("bird/a.bmp", "bird/b.png", "cat/x.PNG", "train/1.webp")])
    assert torch.equal(found.pixels, torch.from_numpy(wanted).permute(0, 3, 1, 2))
    with pytest.raises(DataError, match=r"has a folder for each class and no parts, so there is no 'test' to read"):
        read_images(place, "test")


def test_folders_of_parts_hold_folders_of_classes(place: Path) -> None:
    tree(place / "train")
    made = tree(place / "test", (3, 9))
    (place / "extra").mkdir()
    assert read_images(place).pixels.shape == (4, 3, 5, 7)
    found = read_images(place, "test")
    assert torch.equal(found.pixels[2], torch.from_numpy(made["cat/x.PNG"]).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"nothing for split='val'; it has: extra, test, train"):
        read_images(place, "val")


def test_grey_and_transparent_images_become_red_green_and_blue(place: Path) -> None:
    (place / "one").mkdir()
    grey = np.arange(35, dtype=np.uint8).reshape(5, 7)
    Image.fromarray(grey).save(place / "one" / "grey.png")
    Image.fromarray(np.dstack([grey] * 3 + [grey // 2])).save(place / "one" / "seen_through.png")
    found = read_images(place).pixels
    assert torch.equal(found, torch.from_numpy(grey).expand(2, 3, 5, 7))


def test_images_of_different_sizes_are_brought_to_one_where_asked(place: Path) -> None:
    tree(place)
    Image.new("RGB", (9, 11), (10, 200, 30)).save(place / "cat" / "y.png")
    with pytest.raises(
        DataError,
        match=r"cat/y\.png is 11 x 9, but .*bird/a\.bmp is 5 x 7 \(height x width\); bring the files to one size, or "
        r"read them with read_images\(path, size=\(height, width\)\), as `regard train vision --set size=32` does",
    ):
        read_images(place)
    found = read_images(place, size=(4, 6)).pixels
    assert found.shape == (5, 3, 4, 6)
    assert torch.equal(found[3], torch.tensor([10, 200, 30], dtype=torch.uint8)[:, None, None].expand(3, 4, 6))


def test_images_of_one_size_are_brought_to_another_however_they_are_kept(place: Path, tmp_path: Path) -> None:
    pixels, labels = some(3)
    put(mosaic(pixels, labels, across=1), place)
    found = read_images(place, size=(9, 7))
    for number, image in enumerate(pixels):
        (tmp_path / "files" / f"c{number}").mkdir(parents=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "files" / f"c{number}" / "a.png")
    assert torch.equal(found.pixels, read_images(tmp_path / "files", size=(9, 7)).pixels)
    assert found.pixels.shape == (3, 3, 9, 7)
    check(read_images(place, size=(32, 32)), pixels, labels, HUNDRED)


def test_what_systems_leave_is_no_class_and_no_batch(place: Path, tmp_path: Path) -> None:
    tree(place)
    (place / "__MACOSX" / "cat").mkdir(parents=True)
    (place / "__MACOSX" / "cat" / "._x.PNG").write_bytes(b"x")
    assert read_images(place).classes == ("bird", "cat", "train")
    batches = tmp_path / "batches"
    batches.mkdir()
    cifar10("python", batches)
    (batches / "._test_batch").write_bytes(b"x")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(batches, ".")
    for path in (batches, tmp_path / "a.tar"):
        check(read_images(path, "test"), *some(2, 5), TEN)


def test_images_beside_the_folders_of_parts_are_named(place: Path) -> None:
    tree(place / "train")
    tree(place / "test")
    (place / "loose.heic").write_bytes(b"some")
    with pytest.raises(DataError, match=r"set/loose\.heic lies in no class's folder; expected train/CLASS/loose\.heic"):
        read_images(place)


def test_a_set_is_never_read_in_part(place: Path) -> None:
    cifar10("binary", place)
    (place / "data_batch_6.bin.gz").write_bytes(b"some")
    with pytest.raises(
        DataError, match=r"data_batch_6\.bin\.gz has the name of a batch, but not its form; unpack it or"
    ):
        read_images(place)
    assert len(read_images(place, "test")) == 2
    (place / "data_batch_6.bin.gz").rename(place / "data_batch_1.bin.md5")
    assert len(read_images(place)) == 10
    (place / "extra.BIN").write_bytes(binary(*some(2)))
    with pytest.raises(
        DataError, match=r"set/extra\.BIN does not say of which part it is, as data_batch_1\.bin does; na"
    ):
        read_images(place)
    (place / "extra.BIN").unlink()
    put(mosaic(*some(2), across=2), place)
    with pytest.raises(
        DataError, match=r"has several sets: images\.webp, data_batch_1\.bin; put each into a folder of"
    ):
        read_images(place)


def test_a_folder_with_more_images_beside_a_set_is_named(place: Path) -> None:
    put(mosaic(*some(2), across=2), place / "set_train_a.zip")
    (place / "set_train_a").mkdir()  # what was unpacked from the zip
    put(mosaic(*some(2), across=2), place / "set_train_a")
    (place / "set_test").mkdir()
    put(mosaic(*some(3), across=3), place / "set_test")
    assert len(read_images(place)) == 2
    (place / "set_train_b").mkdir()
    put(mosaic(*some(2), across=2), place / "set_train_b")
    with pytest.raises(
        DataError, match=r"set_train_b has images, too, but beside set_train_a\.zip they would not be read"
    ):
        read_images(place)


def test_a_file_that_is_no_image_never_vanishes(place: Path) -> None:
    tree(place)
    file = place / "cat" / "y.png"
    for data in (b"", b"not an image", (place / "cat" / "x.PNG").read_bytes()[:-25]):
        file.write_bytes(data)
        with pytest.raises(DataError, match=r"y\.png cannot be read as an image"):
            read_images(place)
    for length in (0, 5, 30):
        file.write_bytes((place / "cat" / "x.PNG").read_bytes()[:length])
        with pytest.raises(
            DataError,
            match=rf"y\.png cannot be read as an image: its {length} bytes are cut off, or none of the kinds that ar",
        ):
            read_images(place)
    Image.fromarray(np.full((5, 7), 40_000, dtype=np.uint16)).save(file)
    with pytest.raises(DataError, match=r"y\.png has pixels of kind 'I;16'; expected 8 bits a channel"):
        read_images(place)
    file.rename(place / "cat" / "notes.txt")
    with pytest.raises(DataError, match=r"notes\.txt is no image; expected files named \.bmp"):
        read_images(place)
    (place / "cat" / "notes.txt").rename(place / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png lies in no class's folder; expected set/CLASS/loose\.png"):
        read_images(place)
    (place / "loose.png").unlink()
    (place / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is empty; expected images of the class 'empty'"):
        read_images(place)


def test_what_is_not_recognised_is_told_with_what_would_be(place: Path) -> None:
    with pytest.raises(DataError, match=r"absent is not there; expected CIFAR files.*images\.webp with labels\.npy"):
        read_images(place / "absent")
    with pytest.raises(DataError, match=r"set has no images in a form that is read; expected CIFAR files"):
        read_images(place)
    (place / "a.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"a\.arrow is not recognised; expected CIFAR files"):
        read_images(place / "a.arrow")


def test_several_sets_in_one_folder_are_told_apart(place: Path) -> None:
    for name in ("cifar-10-batches-py", "cifar-100-python"):
        (place / name).mkdir()
    cifar10("python", place / "cifar-10-batches-py")
    cifar100("python", place / "cifar-100-python")
    with pytest.raises(DataError, match=r"has several sets: cifar-10-batches-py, cifar-100-python; give the folder of"):
        read_images(place)


def test_images_need_a_label_each_and_a_class_for_each_label() -> None:
    pixels = some(3)[0]
    with pytest.raises(DataError, match="3 images have 2 labels; each needs one"):
        Images(pixels, torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(DataError, match="image 1 has label 2, but there are 2 classes, counted from 0"):
        Images(pixels, torch.tensor([0, 2, 1]), ("a", "b"))


def test_some_images_can_be_chosen() -> None:
    pixels, labels = some(5)
    found = Images(pixels, torch.tensor(labels), tuple(TEN)).chosen(torch.tensor([3, 1]))
    check(found, pixels[[3, 1]], [labels[3], labels[1]], TEN)
    assert len(found) == 2


def test_the_built_in_digits_are_whole() -> None:
    found = digits()
    assert found.pixels.shape == (1797, 1, 8, 8)
    assert found.classes == tuple("0123456789")
    assert found.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (len(found.pixels.unique()), int(found.pixels.min()), int(found.pixels.max())) == (17, 0, 255)
    # a one is dark at the sides and bright in the middle
    ones = found.pixels[found.labels == 1].float().mean((0, 1, 2))
    assert ones[4] > 5 * ones[0]


def test_the_built_in_digits_are_those_of_scikit_learn() -> None:
    truth = pytest.importorskip("sklearn.datasets").load_digits()
    pixels, labels = read_digits()
    assert torch.equal(pixels.double(), torch.from_numpy(truth.images))
    assert labels.tolist() == truth.target.tolist()


@pytest.mark.real
def test_cifar_100_is_whole(real_data: Path) -> None:
    found = read_images(real_data / "cifar100")
    assert found.pixels.shape == (50_000, 3, 32, 32)
    assert torch.bincount(found.labels).tolist() == [500] * 100
    assert found.classes[0] == "apple"
    # the means of the channels as they are published
    means = found.pixels.double().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.5071, 0.4865, 0.4409], dtype=torch.float64), atol=1e-4)
