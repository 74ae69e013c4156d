"""Matrices and problems as people write them: typed, or in a JSON, CSV or NumPy file."""

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError
from regard.base.validation import LARGEST_FLOAT
from regard.core.masks.algebra import Mask
from regard.work.exact_numbers import Grid, Value, counted
from regard.work.problem import BIASES, MATRICES, Heads, Problem, build, mask_of

SETTINGS = ("name", "convention", "scaled", "mask", "heads", "tokens")
SUFFIXES = (".json", ".csv", ".npy", ".npz")
MOST_DIGITS = 9  # a number written with more is a measured one, and is not worth keeping as a fraction
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_FRACTION = re.compile(r"[+-]?\d+\s*/\s*\d+")

MaskReader = Callable[[str], Mask]


class Written(str):
    """A number of a JSON file as it was written there, so that no digit is lost or won."""


def number(written: object, where: str) -> Value:
    """The number that was written: a fraction while it is short, a float otherwise."""
    words = str(written).strip().replace("\u2212", "-")
    if _FRACTION.fullmatch(words):
        above, below = (int(part) for part in words.split("/"))
        if below:
            return Fraction(above, below)
    elif isinstance(written, str) and _NUMBER.fullmatch(words):
        digits = re.sub(r"e.*", "", words.lower()).lstrip("+-").replace(".", "").strip("0")
        value: Fraction | float = Fraction(words) if len(digits) <= MOST_DIGITS else float(words)
        if -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
            return value
        raise ConfigError(f"{where} is {str(written)!r}, which is too large: numbers go up to {LARGEST_FLOAT:.1e} here")
    raise ConfigError(f"{where} is {str(written)!r}, but should be a number such as 3, -0.5 or -1/2")


def typed(words: str, where: str) -> Grid:
    """A matrix typed in a line: numbers apart by commas or spaces, rows by semicolons or new lines."""
    lines = [line for line in re.split(r"[;\n]", words) if line.strip()]
    if not lines:
        raise ConfigError(f"{where} is empty; type a matrix such as '1,-1/2;0,1', or name a file of it")
    rows = [
        tuple(
            number(cell, f"{where}, row {at}, column {column}")
            for column, cell in enumerate(re.split(r"\s*,\s*|\s+", line.strip()), 1)
        )
        for at, line in enumerate(lines, 1)
    ]
    return _rectangle(rows, where)


def read_matrix(source: str, where: str) -> Heads:
    """One matrix, or one for every head: typed, or from a .json, .csv or .npy file."""
    path = Path(source)
    if path.suffix.lower() not in SUFFIXES:
        return (typed(source, where),)
    if path.suffix.lower() == ".npz":
        raise ConfigError(f"{source} holds several matrices; give it alone, or a .npy file for {where}")
    if path.suffix.lower() == ".json":
        return _nested(read_json(path), str(path))
    if path.suffix.lower() == ".npy":
        return _nested(_load_numpy(path), str(path))
    blocks = _csv_blocks(path)
    if len(blocks) != 1:
        raise ConfigError(f"{source} holds {len(blocks)} matrices ({', '.join(blocks)}), but {where} is one")
    return (next(iter(blocks.values())),)


def read_problem(path: Path, read_mask: MaskReader | None = None) -> Problem:
    """The problem that a file holds. `read_mask` reads a mask that is written as an expression."""
    matrices, biases, settings = read_fields(path, read_mask)
    return build(matrices=matrices, biases=biases, **{"name": path.stem, **settings})


Fields = tuple[dict[str, Heads], dict[str, tuple[tuple[Value, ...], ...]], dict[str, Any]]


def read_fields(path: Path, read_mask: MaskReader | None = None) -> Fields:
    """Matrices, biases and settings of a file, by name and not yet a problem."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        found = read_json(path)
        if not isinstance(found, dict):
            raise ConfigError(f"{path} should hold an object with names such as q, k and v, not {_kind(found)}")
    elif suffix == ".npz":
        found = _load_numpy(path)
    elif suffix == ".csv":
        found = {name: [list(row) for row in grid] for name, grid in _csv_blocks(path).items()}
        settings = [name for name in SETTINGS if name in found and name != "mask"]
        if settings:
            raise ConfigError(
                f"{path} has {', '.join(settings)}, but a .csv file holds matrices alone; use a .json file"
            )
    elif suffix == ".npy":
        raise ConfigError(f"{path} holds one matrix; say which it is, for instance --q {path}")
    else:
        raise ConfigError(f"{path} should be a .json, .csv or .npz file; a .npy file goes with --q, --inputs and so on")
    return fields(found, str(path), read_mask)


def fields(found: Mapping[str, Any], where: str, read_mask: MaskReader | None = None) -> Fields:
    """Matrices, biases and settings, each name known."""
    known = (*MATRICES, *BIASES, *SETTINGS)
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}, which is not known; there are: {', '.join(known)}")
    matrices = {name: _nested(found[name], f"{where}: {name}") for name in MATRICES if name in found}
    biases = {name: _rows_of(found[name], f"{where}: {name}") for name in BIASES if name in found}
    settings = {name: _setting(name, found[name], where, read_mask) for name in SETTINGS if name in found}
    return matrices, biases, settings


def read_json(path: Path) -> Any:
    """What a JSON file holds, its numbers as they are written."""
    try:
        return json.loads(
            path.read_text(encoding="utf-8"), parse_float=Written, parse_int=Written, parse_constant=Written
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno} is not JSON: {error.msg}; "
            'fractions stand in quotes, "-1/2"'
        ) from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _setting(name: str, value: Any, where: str, read_mask: MaskReader | None) -> Any:
    what = f"{where}: {name}"
    if name == "scaled":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{what} is true or false, not {value!r}")
    if name == "heads":
        if (isinstance(value, Written) and value.isdigit()) or type(value) is int:
            return int(value)
        raise ConfigError(f"{what} is a whole number, not {value!r}")
    if name == "tokens":
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(map(str, value))
        raise ConfigError(f"{what} is a list of words, not {value!r}")
    if name == "mask" and isinstance(value, list):
        plain = [[Written(int(x)) if isinstance(x, bool) else x for x in row] for row in value if isinstance(row, list)]
        (grid,) = _nested(plain if len(plain) == len(value) else value, what)
        if not all(entry in (0, 1) for row in grid for entry in row):
            raise ConfigError(f"{what} is a matrix of 0 (hidden) and 1 (visible), with a row for each query")
        return mask_of(tuple(tuple(entry == 1 for entry in row) for row in grid))
    if not isinstance(value, str) or isinstance(value, Written):
        raise ConfigError(f"{what} is a word, not {value!r}")
    if name == "mask":
        if read_mask is None:
            raise ConfigError(f"{what} is {value!r}; hand in the mask itself, or write a matrix of 0 and 1")
        return read_mask(value)
    return value


def _nested(value: Any, where: str) -> Heads:
    """A matrix as lists of rows, or a list of such matrices."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        raise ConfigError(f"{where} should be a matrix, a list of rows such as [[1, 0], [0, 1]], not {_kind(value)}")
    if value[0] and isinstance(value[0][0], list):
        return tuple(_one(each, f"{where}, head {at}") for at, each in enumerate(value, 1))
    return (_one(value, where),)


def _one(value: Any, where: str) -> Grid:
    rows = []
    for at, row in enumerate(value, 1):
        if not isinstance(row, list):
            raise ConfigError(f"{where}, row {at} should be a list of numbers, not {_kind(row)}")
        rows.append(tuple(_entry(cell, f"{where}, row {at}, column {column}") for column, cell in enumerate(row, 1)))
    return _rectangle(rows, where)


def _entry(cell: Any, where: str) -> Value:
    return cell if isinstance(cell, Fraction | float) else number(cell, where)


def _rows_of(value: Any, where: str) -> tuple[tuple[Value, ...], ...]:
    """A bias: a list of numbers or a column of them; for several heads, a list of such."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} should be a list of numbers, not {_kind(value)}")
    if not isinstance(value[0], list):
        return tuple(_one([value], where))
    if value[0] and isinstance(value[0][0], list):
        return tuple(_rows_of(each, f"{where}, head {at}")[0] for at, each in enumerate(value, 1))
    grid = _one(value, where)
    return (tuple(row[0] for row in grid),) if all(len(row) == 1 for row in grid) else grid


def _rectangle(rows: list[tuple[Value, ...]], where: str) -> Grid:
    for at, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or not row:
            raise ConfigError(
                f"{where}, row {at} has {counted(len(row), 'number')}, but row 1 has {len(rows[0])}; "
                "the rows of a matrix have one length and are not empty"
            )
    return tuple(rows)


def _csv_blocks(path: Path) -> dict[str, Grid]:
    """Matrices of a CSV file: a line with a name starts one, the lines after it are its rows."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    blocks: dict[str, list[tuple[Value, ...]]] = {}
    name = ""
    for at, line in enumerate(lines, 1):
        words = line.strip().strip(",").strip()
        where = f"{path}, line {at}"
        if not words:
            continue
        if re.fullmatch(r"#?\s*[A-Za-z]\w*", words):
            name = words.lstrip("# ").lower()
            if name in blocks:
                raise ConfigError(f"{where} starts {name!r} a second time")
            blocks[name] = []
            continue
        cells = [cell.strip() for cell in line.split(",")]
        row = tuple(number(cell, f"{where}, column {column}") for column, cell in enumerate(cells, 1))
        rows = blocks.setdefault(name, [])
        if rows and len(row) != len(rows[0]):
            raise ConfigError(f"{where} has {counted(len(row), 'number')}, but the rows above it have {len(rows[0])}")
        rows.append(row)
    for each, rows in blocks.items():
        if not rows:
            raise ConfigError(f"{path} names {each!r}, but no row of numbers follows it")
    if not blocks:
        raise ConfigError(f"{path} is empty; write a name such as q, then its rows, one a line")
    return {each: tuple(rows) for each, rows in blocks.items()}


def _load_numpy(path: Path) -> Any:
    """Arrays as nested lists; short binary fractions such as 0.5 stay exact."""
    import numpy

    try:
        loaded = numpy.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if isinstance(loaded, numpy.ndarray):
        return _plain(loaded, str(path))
    with loaded:
        return {name: _plain(loaded[name], f"{path}: {name}") for name in loaded.files}


def _plain(array: Any, where: str) -> Any:
    if array.ndim == 0 and array.dtype.kind in "biU":
        return array.item()
    if array.dtype.kind == "U":
        return array.tolist()
    if array.dtype.kind == "b":
        array = array.astype(int)
    if array.dtype.kind not in "iuf" or not array.ndim or not (abs(array) < float("inf")).all():
        raise ConfigError(f"{where} is {array.dtype} of shape {array.shape}, but should hold finite real numbers")

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        exact = Fraction(value)
        return exact if exact.denominator <= 1024 and abs(exact.numerator) < 10**MOST_DIGITS else float(value)

    return kept(array.tolist())


def _kind(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
