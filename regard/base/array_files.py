"""Bounded readers of numpy arrays: .npy and .npz files, without pickles."""

import io
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy

from regard.base.errors import DataError
from regard.base.files import Error, describe, max_expanded, read_bytes

MAX_ENTRIES = 10_000  # arrays in an .npz file
NPY_PREFIX, ZIP_PREFIXES = b"\x93NUMPY", (b"PK\x03\x04", b"PK\x05\x06")
Array = numpy.ndarray[Any, numpy.dtype[Any]]


def read_arrays(path: Path, error: Error = DataError, names: Sequence[str] | None = None) -> Array | dict[str, Array]:
    """Read an .npy file as one array, or an .npz file as a dictionary of arrays by name.

    error  class of the exception that is raised if the file cannot be read
    names  the arrays to read from an .npz file; raises `error` if one is missing. None reads all arrays
    """
    data = read_bytes(path, error)
    try:
        if data.startswith(NPY_PREFIX):
            return decode_npy(data)
        if not data.startswith(ZIP_PREFIXES):
            raise ValueError("it is not an .npy or .npz file")
        return _decode_npz(data, names)
    except Exception as failure:  # each compression method raises errors of its own
        raise error(f"{path} cannot be read as arrays: {describe(failure)}") from None


def decode_npy(data: bytes) -> Array:
    """Decode the bytes of an .npy file. Raises ValueError if they are damaged, or hold Python objects."""
    stream = io.BytesIO(data)
    version = numpy.lib.format.read_magic(stream)
    read_header = {
        (1, 0): numpy.lib.format.read_array_header_1_0,
        (2, 0): numpy.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"its version {version} is unknown")
    shape, fortran_order, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are pickled (allow_pickle=False)")
    # numpy would allocate what the header says before it reads the data
    rest = data[stream.tell() :]
    if any(size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(rest) or not dtype.itemsize:
        raise ValueError(f"an array of {dtype} and shape {str(shape)[:60]} does not have {len(rest)} bytes")
    flat = numpy.frombuffer(rest, dtype)
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)


def _decode_npz(data: bytes, names: Sequence[str] | None) -> dict[str, Array]:
    room = max_expanded(len(data))
    found: dict[str, Array] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        listed = {name.removesuffix(".npy"): name for name in archive.namelist()}
        if len(listed) > MAX_ENTRIES:
            raise ValueError(f"it has {len(listed):,} entries, more than {MAX_ENTRIES:,}")
        missing = [name for name in names or () if name not in listed]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        for name in listed if names is None else names:
            with archive.open(listed[name]) as member:
                content = member.read(room + 1)
            room -= len(content)
            if room < 0:
                raise ValueError("it decompresses to far more than its size")
            if not content.startswith(NPY_PREFIX):
                raise ValueError(f"{name} is not an array")
            found[name] = decode_npy(content)
    return found
