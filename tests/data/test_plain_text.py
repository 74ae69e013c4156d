"""Text is read as it is, and what is no text is named by file, line and byte."""

import gzip
from pathlib import Path

import pytest

from regard.base.errors import DataError
from regard.data.plain_text import read_lines, read_text


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("Grüße,\r\nnaïve\u2028café\n\n🙂".encode())
    assert read_text(file) == "Grüße,\nnaïve\u2028café\n\n🙂"
    assert read_text(str(file)) == read_text(file)


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfabc\n")
    assert read_text(file) == "abc\n"


def test_a_folder_is_the_text_of_its_files_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "inner" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "notes.md").write_text("not read")
    assert read_text(tmp_path) == "first\nsecond\nthird"


def test_compressed_text_is_not_skipped_and_system_files_are(tmp_path: Path) -> None:
    (tmp_path / "a.TXT").write_text("first\n")
    (tmp_path / "b.txt.GZ").write_bytes(gzip.compress(b"second"))
    (tmp_path / "__MACOSX").mkdir()
    for left in ("._a.txt", "__MACOSX/a.txt"):
        (tmp_path / left).write_bytes(b"\x00\xff")
    assert read_text(tmp_path) == "first\nsecond"
    (tmp_path / "c.txt.bz2").write_bytes(b"BZh9")
    with pytest.raises(
        DataError, match=r"c\.txt\.bz2 has an unsupported compression; decompress it, or compress it with"
    ):
        read_text(tmp_path)


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\u2028still one\x0bstill\n\nthree\n")
    assert read_lines(file) == ["one\u2028still one\x0bstill", "", "three"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8_is_named_by_line_and_byte(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(mark + b"one\ntwo\nth\xe9ee\n")
    byte = 10 + len(mark)
    with pytest.raises(DataError, match=rf"a\.txt, line 3, byte {byte}: 0xE9 is not UTF-8 \(invalid contin.*convert"):
        read_text(file)


def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.txt files; pass a file, or a folder that has some"):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a\.txt is empty"):
        read_text(tmp_path)


def test_a_missing_file_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt cannot be read: No such file"):
        read_text(tmp_path / "absent.txt")
    packed = gzip.compress(b"some text that is long enough" * 9)
    for damaged in (packed[:-9], b"no gzip", packed[:20] + b"\x00\x00\x00" + packed[23:]):
        (tmp_path / "a.txt.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.txt\.gz is damaged and cannot be decompressed: "):
            read_text(tmp_path / "a.txt.gz")
