"""Pickles are read as plain values, and nothing that they name is ever run."""

import os
import pickle
import pickletools
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.base.errors import DataError
from regard.base.plain_pickle import load_plain_pickle

PLAIN = {
    b"labels": [3, 0, 255, 256, 70_000, -1, 2**40],
    "text": ("Grüße", b"\x00\xff", None, True, False),
    "deep": [[], {}, (), (1,), (1, 2), (1, 2, 3), {"a": [b"b" * 300]}],
    7: "x" * 300,
}

# as Python 2 wrote CIFAR's batches: text is bytes, and numpy lies at its old address
OLD = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq"
    b"\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff"
    b"\xffK\x00tb\x89U\x06\x01\x02\x03\x04\x05\xfftbU\x06labelsq\x08]q\t(K\x06K\x09eu."
)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back(protocol: int) -> None:
    value = {key: item for key, item in PLAIN.items() if protocol >= 3 or key != b"labels"}
    if protocol < 3:
        value["text"] = ("Grüße", None, True)  # before, Python 3 writes bytes by a call
        value["deep"] = [[], {}, (), (1,), (1, 2), (1, 2, 3)]
    assert load_plain_pickle("f", pickle.dumps(value, protocol)) == value


def test_bytes_that_python_3_writes_for_python_2_come_back() -> None:
    assert load_plain_pickle("f", pickle.dumps(b"\x00ab\xff", 2)) == b"\x00ab\xff"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_bytes_come_back(protocol: int) -> None:
    array = np.arange(35, dtype=np.uint8).reshape(5, 7)
    found = load_plain_pickle("f", pickle.dumps({"data": array, "again": [array]}, protocol))
    assert found["data"].dtype == np.uint8
    np.testing.assert_array_equal(found["data"], array)
    np.testing.assert_array_equal(found["again"][0], array)


def test_the_oldest_form_comes_back() -> None:
    found = load_plain_pickle("f", OLD)
    np.testing.assert_array_equal(found[b"data"], [[1, 2, 3], [4, 5, 255]])
    assert found[b"labels"] == [6, 9]


class Runs:
    """What an attacker would write."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    harmful = pickle.dumps({"data": Runs(os.mkdir, str(trace))}, protocol)
    with pytest.raises(
        DataError, match=r"batch: opcode (STACK_)?GLOBAL at byte \d+ names \w+\.mkdir, which could run co"
    ):
        load_plain_pickle("batch", harmful)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("value", "opcode"),
    [
        (1.5, "BINFLOAT at byte 11 is not supported"),
        ({1, 2}, "EMPTY_SET"),
        (OrderedDict(a=1), r"STACK_GLOBAL at byte \d+ names collections\.OrderedDict"),
        (np.arange(3, dtype=np.int64), r"REDUCE at byte \d+ makes an array of 'i8'"),
        (np.array([None]), r"REDUCE at byte \d+ makes an array of 'O8'"),
        (np.float32, r"STACK_GLOBAL at byte \d+ names numpy\.float32"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_opcode(value: Any, opcode: str) -> None:
    with pytest.raises(DataError, match=rf"f: opcode {opcode}.*a pickle may hold dictionaries, lists, strings"):
        load_plain_pickle("f", pickle.dumps(value, 4))


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02cnumpy\ndtype\n(K\x01tR.",  # a type without a name
        b"\x80\x02cnumpy\nndarray\n(K\x01tR.",  # an array by another way
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\n\x85R.",
        b"\x80\x02]K\x01\x85R.",  # a call of a list
        b"\x80\x02}K\x01b.",  # a state for a dictionary
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
        b"\x80\x02cnumpy\ndtype\n.",  # the name alone is no value
        b"\x80\x02(.",
        b"\x80\x02K\x01K\x02a.",  # append to a number
        b"\x80\x02h\x07.",  # a memory that was never set
        b"\x80\x02e.",
        b"\x80\x02R.",
        b"\x80\x02\x87.",
        b"\x80\x02}](u.",
        b"\x80\x02}(K\x01u.",  # a key without a value
        b"\x80\x02}(]K\x01u.",  # a list as a key
        b".",
        b"",
        b"\x80",
        b"\xff\xff",
    ],
)
def test_nonsense_is_an_error_and_never_a_crash(program: bytes) -> None:
    with pytest.raises(DataError, match=r"^f(:| is damaged)"):
        load_plain_pickle("f", program)


@pytest.mark.parametrize(("action", "words"), [("error", "invalid escape sequence"), ("ignore", "opcode GLOBAL")])
def test_an_escape_sequence_that_does_not_exist_is_refused(action: Any, words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(DataError, match=words):
            load_plain_pickle("f", b"\x80\x02cnumpy\n\\]\n.")


def test_every_cut_of_a_pickle_is_found() -> None:
    for whole in (OLD, pickle.dumps({"data": np.ones((3, 5), np.uint8), "labels": [1, 2, 3]}, 5)):
        for length in range(len(whole)):
            with pytest.raises(DataError, match="f is damaged"):
                load_plain_pickle("f", whole[:length])


def test_a_pickle_cannot_grow_without_bounds_or_end() -> None:
    doubled: list[object] = ["x"]
    for _ in range(60):
        doubled = [doubled, doubled]
    found = load_plain_pickle("f", pickle.dumps(doubled))
    assert found[0] is found[1]
    round_about: list[object] = []
    round_about.append(round_about)
    with pytest.raises(DataError, match=r"f is damaged after opcode STOP at byte \d+: maximum recursion"):
        load_plain_pickle("f", pickle.dumps(round_about))


NESTED = b")" + b"q\x00h\x00\x86" * 60  # a tuple of two tuples of two tuples ..., 2^60 of them, in 300 bytes


def test_a_nested_key_is_refused_before_it_is_hashed() -> None:
    for program in (b"}" + NESTED + b"K\x01s.", b"}(" + NESTED + b"K\x01u.", b"(" + NESTED + b"K\x01d."):
        with pytest.raises(DataError, match="a key is a tuple, not text, bytes or an integer"):
            load_plain_pickle("f", b"\x80\x02" + program)


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + NESTED
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x00tb.",
        b"cnumpy\ndtype\n" + NESTED + b"\x85R.",
        NESTED + NESTED + b"\x93.",
        b"X\x10\x27\x00\x00" + b"a" * 10_000 + b"X\x01\x00\x00\x00b\x93.",
    ],
)
def test_messages_are_short(program: bytes) -> None:
    with pytest.raises(DataError) as found:
        load_plain_pickle("f", b"\x80\x02" + program)
    assert len(str(found.value)) < 500


def test_the_same_bytes_are_made_once() -> None:
    text = b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x01X\x06\x00\x00\x00latin1\x86q\x02"
    call = b"c_codecs\nencode\nh\x02R"
    found = load_plain_pickle("f", b"\x80\x02" + text + b"0](".replace(b"0", b"q\x03") + call * 500 + b"e.")
    assert len({id(each) for each in found}) == 1


def test_every_opcode_there_is_is_read_or_refused() -> None:
    for opcode in pickletools.opcodes:
        with pytest.raises(DataError):
            load_plain_pickle("f", b"\x80\x02" + opcode.code.encode("latin-1"))


def test_an_array_that_does_not_fill_its_shape_is_found() -> None:
    with pytest.raises(DataError, match=r"f is damaged after opcode BUILD at byte .*cannot reshape"):
        load_plain_pickle("f", OLD.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"))
