"""Image data sets in every format give the same images, and errors name the file and the record."""

import gzip
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regard.base.errors import DataError
from regard.data.digits import digits, read_digits
from regard.data.image_formats import read_images
from regard.data.images import Images

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
    with pytest.raises(DataError, match=r"has no split 'val'; it has data_batch_1.*, test_batch"):
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
def test_a_missing_last_batch_of_cifar_10_is_named(form: str, place: Path, tmp_path: Path) -> None:
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


def test_one_file_is_read_with_the_class_names_next_to_it(place: Path) -> None:
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


def test_a_copy_of_a_batch_is_refused(place: Path) -> None:
    cifar100("binary", place)
    for copied in ("train (1).bin", "train"):
        (place / copied).write_bytes((place / "train.bin").read_bytes())
        with pytest.raises(
            DataError, match=r"set has train.*, train.*; expected one file for a split, so pass or keep one of them"
        ):
            read_images(place)
        (place / copied).unlink()


def test_a_truncated_binary_file_is_named_with_its_record_and_byte(place: Path) -> None:
    cifar10("binary", place)
    file = place / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(
        DataError, match=r"data_batch_2\.bin is truncated or damaged: record 1 at byte 3073 has 3068 of the 3073"
    ):
        read_images(place)
    (place / "batches.meta.txt").unlink()
    with pytest.raises(DataError, match=r"has 6141 bytes, which is not a multiple of 3073 \(CIFAR-10\) or 3074"):
        read_images(file)


def test_labels_out_of_range_are_named_with_their_record(place: Path) -> None:
    cifar10("binary", place)
    data = bytearray((place / "data_batch_2.bin").read_bytes())
    data[3073] = 12
    (place / "data_batch_2.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"data_batch_2\.bin: record 1 has label 12; expected 0 to 9"):
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
    with pytest.raises(DataError, match=r"train\.bin: record 3 has coarse label 250; expected 0 to 19"):
        read_images(place)


def test_invalid_batches_are_named(place: Path) -> None:
    pixels, labels = some(3)
    for content, words in [
        (batch(pixels, labels[:2]), r"has 3 images, but 2 labels"),
        (batch(pixels[..., :31], labels), r"'data' should be an array \(images, 3072\), not an array \(3, 2976\)"),
        (pickle.dumps({"labels": labels}, 2), r"'data' should be an array \(images, 3072\), not NoneType"),
        (batch(pixels, labels, "classes"), r"'labels' or 'fine_labels' should be a list of integers"),
        (pickle.dumps([1, 2], 2), r"should be a dictionary with 'data' and 'labels', not a list"),
        (batch(pixels, labels)[:-2000], r"is damaged"),
        (pickle.dumps({"data": 0.5}, 2), r"opcode BINFLOAT at byte"),
        (b"", r"train is empty; expected CIFAR images"),
    ]:
        (place / "train").write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_images(place)


def test_the_wrong_number_of_class_names_is_refused(place: Path) -> None:
    cifar10("binary", place)
    (place / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"batches\.meta\.txt names 2 classes; expected 10"):
        read_images(place)
    (place / "batches.meta.txt").unlink()
    (place / "meta").write_bytes(pickle.dumps({"names": TEN}, 2))
    with pytest.raises(DataError, match=r"meta should list 'label_names' or 'fine_label_names'"):
        read_images(place)


def test_a_single_file_has_no_split_that_it_is_not_named_for(tmp_path: Path) -> None:
    for name in ("set_test.bin", "a.bin"):
        (tmp_path / name).write_bytes(binary(*some(2)))
    assert len(read_images(tmp_path / "set_test.bin")) == len(read_images(tmp_path / "set_test.bin", "test")) == 2
    with pytest.raises(DataError, match=r"a\.bin has no splits and is not named for one, so it has no 'test'"):
        read_images(tmp_path / "a.bin", "test")


@pytest.mark.parametrize("name", ["train_2.bin.part", "data_batch_6.bin.gz", "Unconfirmed 7.PARTIAL"])
def test_a_file_that_would_not_be_read_is_named(name: str, place: Path) -> None:
    cifar100("binary", place)
    (place / "train.bin.md5").write_bytes(b"x")
    assert len(read_images(place)) == 5
    (place / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"set/{name} would not be read; expected files such as data_batch_1\.bin"):
        read_images(place)


@pytest.mark.parametrize("length", [9, 3000, 20_000])
def test_a_truncated_archive_is_named(length: int, tmp_path: Path, place: Path) -> None:
    cifar10("binary", place)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(place, "cifar")
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[:length])
    with pytest.raises(DataError, match=r"a\.tar\.gz.* is damaged"):
        read_images(tmp_path / "a.tar.gz")


@pytest.mark.parametrize("packing", ["", "gz"])
def test_a_tar_with_a_damaged_header_is_refused(packing: str, tmp_path: Path, place: Path) -> None:
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
    for damaged, byte in [
        (whole[:header] + b"X" + whole[header + 1 :], header),
        (whole[:header] + bytes(512) + whole[header + 512 :], header),
        (whole[:header], header),
        (whole[: header + 100], header),
        (whole[:end], end),
        (whole[: end + 511], end),
        (whole + whole, end),
    ]:
        message = rf"{archive.name} is damaged or truncated at byte {byte} \(decompressed\); download it again"
        with pytest.raises(DataError, match=message):
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
    with pytest.raises(DataError, match=r"has a folder for each class and no splits, so it has no 'test'"):
        read_images(place, "test")


def test_folders_of_splits_have_folders_of_classes(place: Path) -> None:
    tree(place / "train")
    made = tree(place / "test", (3, 9))
    (place / "extra").mkdir()
    assert read_images(place).pixels.shape == (4, 3, 5, 7)
    found = read_images(place, "test")
    assert torch.equal(found.pixels[2], torch.from_numpy(made["cat/x.PNG"]).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"has no split 'val'; it has extra, test, train"):
        read_images(place, "val")


def test_grey_and_transparent_images_become_rgb(place: Path) -> None:
    (place / "one").mkdir()
    grey = np.arange(35, dtype=np.uint8).reshape(5, 7)
    Image.fromarray(grey).save(place / "one" / "grey.png")
    Image.fromarray(np.dstack([grey] * 3 + [grey // 2])).save(place / "one" / "seen_through.png")
    found = read_images(place).pixels
    assert torch.equal(found, torch.from_numpy(grey).expand(2, 3, 5, 7))


def test_images_of_different_sizes_are_resized(place: Path) -> None:
    tree(place)
    Image.new("RGB", (9, 11), (10, 200, 30)).save(place / "cat" / "y.png")
    with pytest.raises(
        DataError,
        match=r"cat/y\.png is 11 x 9, but .*bird/a\.bmp is 5 x 7 \(height x width\); resize the files, or "
        r"read them with read_images\(path, size=\(height, width\)\), as `regard train vision --set size=32` does",
    ):
        read_images(place)
    found = read_images(place, size=(4, 6)).pixels
    assert found.shape == (5, 3, 4, 6)
    assert torch.equal(found[3], torch.tensor([10, 200, 30], dtype=torch.uint8)[:, None, None].expand(3, 4, 6))


def test_resizing_does_not_depend_on_the_format(place: Path, tmp_path: Path) -> None:
    pixels, labels = some(3)
    (place / "train.bin").write_bytes(binary(pixels, labels))
    found = read_images(place, size=(9, 7))
    for number, image in enumerate(pixels):
        (tmp_path / "files" / f"c{number}").mkdir(parents=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "files" / f"c{number}" / "a.png")
    assert torch.equal(found.pixels, read_images(tmp_path / "files", size=(9, 7)).pixels)
    assert found.pixels.shape == (3, 3, 9, 7)
    check(read_images(place, size=(32, 32)), pixels, labels, [str(number) for number in range(10)])


def test_hidden_files_and_system_files_are_ignored(place: Path, tmp_path: Path) -> None:
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


def test_images_outside_of_class_folders_are_refused(place: Path) -> None:
    tree(place / "train")
    tree(place / "test")
    (place / "loose.heic").write_bytes(b"some")
    with pytest.raises(DataError, match=r"set/loose\.heic would not be read; expected images in the folders of cla"):
        read_images(place)


def test_several_data_sets_and_files_without_a_split_are_named(place: Path) -> None:
    cifar10("binary", place)
    (place / "extra.BIN").write_bytes(binary(*some(2)))
    with pytest.raises(DataError, match=r"set/extra\.BIN is not named for a split, as data_batch_1\.bin is; rename"):
        read_images(place)
    (place / "extra.BIN").unlink()
    (place / "train.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"has several data sets: data_batch_1\.bin, train\.parquet; put each into its"):
        read_images(place)


def test_a_subfolder_with_more_images_is_named(place: Path) -> None:
    cifar100("binary", place)
    (place / "my_test").mkdir()
    cifar100("binary", place / "my_test")
    assert len(read_images(place)) == 5
    (place / "my_train").mkdir()
    cifar100("binary", place / "my_train")
    with pytest.raises(DataError, match=r"my_train has images too, which would not be read beside test\.bin"):
        read_images(place)


def test_a_file_that_is_not_an_image_is_named(place: Path) -> None:
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
            match=rf"y\.png cannot be read as an image: its {length} bytes are truncated or of an unknown format",
        ):
            read_images(place)
    Image.fromarray(np.full((5, 7), 40_000, dtype=np.uint16)).save(file)
    with pytest.raises(DataError, match=r"y\.png has pixels of mode 'I;16'; expected 8 bits per channel"):
        read_images(place)
    file.rename(place / "cat" / "notes.txt")
    with pytest.raises(DataError, match=r"notes\.txt is not an image; expected files named \.bmp"):
        read_images(place)
    (place / "cat" / "notes.txt").rename(place / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png would not be read; expected images in the folders of classes"):
        read_images(place)
    (place / "loose.png").unlink()
    (place / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is empty; expected images of the class 'empty'"):
        read_images(place)


def test_an_unknown_format_is_refused_with_the_supported_ones(place: Path) -> None:
    with pytest.raises(
        DataError, match=r"absent does not exist; expected CIFAR files.*a folder of images for each class"
    ):
        read_images(place / "absent")
    with pytest.raises(DataError, match=r"set has no images in a known format; expected CIFAR files"):
        read_images(place)
    (place / "a.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"a\.arrow has an unknown format; expected CIFAR files"):
        read_images(place / "a.arrow")


def test_several_data_sets_in_one_folder_are_refused(place: Path) -> None:
    for name in ("cifar-10-batches-py", "cifar-100-python"):
        (place / name).mkdir()
    cifar10("python", place / "cifar-10-batches-py")
    cifar100("python", place / "cifar-100-python")
    with pytest.raises(
        DataError, match=r"has several data sets: cifar-10-batches-py, cifar-100-python; pass the folder of"
    ):
        read_images(place)


def test_images_need_a_label_each_and_a_class_for_each_label() -> None:
    pixels = some(3)[0]
    with pytest.raises(DataError, match="Images needs the same number of pixels, labels, but has 3 pixels, 2 labels"):
        Images(pixels, torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(DataError, match="image 1 has label 2, but there are 2 classes, counted from 0"):
        Images(pixels, torch.tensor([0, 2, 1]), ("a", "b"))


def test_select_gives_the_images_with_these_indices() -> None:
    pixels, labels = some(5)
    found = Images(pixels, torch.tensor(labels), tuple(TEN)).select(torch.tensor([3, 1]))
    check(found, pixels[[3, 1]], [labels[3], labels[1]], TEN)
    assert len(found) == 2


def test_the_built_in_digits_are_complete() -> None:
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
def test_cifar_100_is_complete(real_data: Path) -> None:
    found = read_images(real_data / "cifar100" / "binary")
    assert found.pixels.shape == (50_000, 3, 32, 32)
    assert torch.bincount(found.labels).tolist() == [500] * 100
    assert found.classes[0] == "apple"
    # the means of the channels as they are published
    means = found.pixels.double().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.5071, 0.4865, 0.4409], dtype=torch.float64), atol=1e-4)
