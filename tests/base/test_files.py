"""Bounded readers refuse devices, deep JSON, bombs and damaged files with our errors, and read everything else."""

import gzip
import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.base.array_files import MAX_ENTRIES, read_arrays
from regard.base.errors import CheckpointError, ConfigError, DataError
from regard.base.files import (
    BLOCK,
    decompress,
    exists,
    file_digest,
    is_file,
    is_folder,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)
from regard.base.media_files import decode_image, read_wav


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero", "pipe"])
def test_a_device_and_a_pipe_are_not_read(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_bytes, read_text, read_json, read_arrays, read_wav):
        with pytest.raises(DataError, match=rf"{path} is a device or a pipe; pass a file"):
            read(tmp_path / path)


def test_a_folder_a_missing_file_and_a_large_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; pass a file"):
        read_bytes(tmp_path, ConfigError)
    with pytest.raises(ConfigError, match="absent cannot be read: No such file or directory"):
        read_bytes(tmp_path / "absent", ConfigError)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        read_bytes(Path("a\0b"), ConfigError)
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(DataError, match="a has more than 4 bytes"):
        read_bytes(tmp_path / "a", most=4)


def test_text_is_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe")
    assert read_text(tmp_path / "a") == "Grüße"
    (tmp_path / "a").write_bytes(b"Gr\xfc\xdfe")
    with pytest.raises(DataError, match=r"a is not UTF-8 text: .* position 2"):
        read_text(tmp_path / "a")


def test_json_is_read_as_python_reads_it(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, 1e300, True, None, "x"], "b": {"c": {}}}
    (tmp_path / "a").write_text(json.dumps(value))
    assert read_json(tmp_path / "a", CheckpointError, "a", "b") == value
    assert parse_json("f", "[1, 2.50, NaN]", number=str) == ["1", "2.50", "NaN"]
    assert parse_json("f", '{"a": {"b": 1}}', object_hook=lambda found: sorted(found)) == ["a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is not valid JSON: it is nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "is not valid JSON: it is nested more than 100 deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "is not valid JSON: it is nested more than 100 deep"),
        ("9" * 1001, "is not valid JSON: a number has 1,001 characters, more than 1,000"),
        ("1." + "9" * 5000, "is not valid JSON: a number has 5,002 characters"),
        ('{"a": 1,\n "b" 2}', "f, line 2, column 6 is not JSON: Expecting ':' delimiter"),
        ("", "f, line 1, column 1 is not JSON: Expecting value"),
    ],
)
def test_deep_long_and_damaged_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_json("f", text, CheckpointError)
    assert parse_json("f", "[" * 100 + "]" * 100)


def test_missing_fields_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"b": 1}')
    with pytest.raises(CheckpointError, match="a is damaged: c is missing"):
        read_json(tmp_path / "a", CheckpointError, "b", "c")
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(CheckpointError, match="a is damaged: it is not a JSON object"):
        read_json(tmp_path / "a", CheckpointError, "b")


def test_a_gzip_bomb_is_refused() -> None:
    text = b"some text, " * 1000
    assert decompress("f", gzip.compress(text)) == text
    with pytest.raises(DataError, match="f decompresses to more than 200 times its size, which is refused"):
        decompress("f", gzip.compress(bytes(1 << 26)))
    for damaged in (
        gzip.compress(text)[:-9],
        b"no gzip",
        gzip.compress(text)[:40] + b"\0\0" + gzip.compress(text)[42:],
    ):
        with pytest.raises(DataError, match="f is damaged and cannot be decompressed"):
            decompress("f", damaged)


def npz(path: Path, *, compress: int = zipfile.ZIP_DEFLATED, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "value",
    [
        *(np.arange(35.0).reshape(5, 7), np.array(3), np.array(["ab", "c"]), np.zeros((0, 3)), np.array([True, False])),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
)
def test_arrays_are_read_as_numpy_reads_them(value: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", value)
    np.savez(tmp_path / "a.npz", one=value, two=np.arange(3))
    alone, several = read_arrays(tmp_path / "a.npy"), read_arrays(tmp_path / "a.npz")
    assert isinstance(several, dict)
    assert set(several) == {"one", "two"}
    for found in (alone, several["one"]):
        assert isinstance(found, np.ndarray)
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
    assert set(read_arrays(tmp_path / "a.npz", names=["two"])) == {"two"}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a": npy(np.zeros(3))[:-8]}, r"an array of float64 and shape \(3,\) does not have 16 bytes"),
        ({"a": npy(np.zeros(3)).replace(b"(3,)", b"(9999999999,)")}, r"cannot be read as arrays"),
        ({"a": npy(np.array([None]))}, "holds Python objects"),
        ({"a": b"4 0 9"}, "a is not an array"),
        ({"a": npy(np.zeros(1 << 23))}, "it decompresses to far more than its size"),
        ({f"a{number}": b"" for number in range(MAX_ENTRIES + 1)}, "it has 10,001 entries, more than 10,000"),
        ({"b": npy(3)}, "a is missing"),
    ],
)
def test_damaged_and_oversized_arrays_are_refused(members: dict[str, bytes], words: str, tmp_path: Path) -> None:
    npz(tmp_path / "a.npz", **members)
    with pytest.raises(ConfigError, match=words):
        read_arrays(tmp_path / "a.npz", ConfigError, names=["a"])


def test_an_array_header_cannot_allocate_memory(tmp_path: Path) -> None:
    header = npy(np.zeros(3)).replace(b"(3,), }          ", b"(99999999999,), }")
    (tmp_path / "a.npy").write_bytes(header)
    with pytest.raises(DataError, match=r"shape \(99999999999,\) does not have 24 bytes"):
        read_arrays(tmp_path / "a.npy")


def png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "png")
    return file.getvalue()


def test_a_small_file_of_many_pixels_is_refused() -> None:
    bomb = png(11_000)
    assert len(bomb) < 21_000
    with pytest.raises(ConfigError, match="f has 11,000 x 11,000 pixels, more than 40,000,000; make it smaller"):
        decode_image("f", bomb, ConfigError)
    assert decode_image("f", png(31)).size == (31, 31)


def test_images_are_turned_upright() -> None:
    file = io.BytesIO()
    image = Image.new("RGB", (7, 5))
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by a quarter
    image.save(file, "jpeg", exif=exif)
    assert decode_image("f", file.getvalue()).size == (5, 7)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(DataError, match="a has more than 17,179,869,184 bytes, which is too large"):
        read_bytes(tmp_path / "a")


def test_the_checksum_of_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a device or a pipe"):
        file_digest(tmp_path / "pipe")
    (tmp_path / "a").write_bytes(b"12345" * BLOCK)
    assert file_digest(tmp_path / "a") == hashlib.sha256(b"12345" * BLOCK).hexdigest()


def test_a_path_that_cannot_be_looked_up_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, why in ((tmp_path / ("x" * 300), "File name too long"), (tmp_path / "loop", "Too many levels")):
        for ask in (exists, is_file, is_folder):
            with pytest.raises(CheckpointError, match=f"cannot be read: {why}"):
                ask(path, CheckpointError)
    assert exists(tmp_path)
    assert is_folder(tmp_path)
    assert not any(ask(Path("a\0b")) or ask(tmp_path / "absent") for ask in (exists, is_file, is_folder))
