"""Parse matrices and problems: typed text, or JSON, CSV and NumPy files."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from regard.base import files
from regard.base.errors import ConfigError
from regard.base.validation import LARGEST_FLOAT
from regard.core.masks.algebra import Mask
from regard.work.exact_numbers import Matrix, Value, format_count
from regard.work.problem import BIASES, MATRICES, BiasPerHead, MatrixPerHead, mask_from_rows

SETTINGS = ("name", "convention", "scaled", "mask", "heads", "tokens")
SUFFIXES = (".json", ".csv", ".npy", ".npz")
MAX_EXACT_DIGITS = 9  # a number with more digits is a measurement and becomes a float
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_FRACTION = re.compile(r"[+-]?\d+\s*/\s*\d+")

MaskReader = Callable[[str], Mask]
ProblemFields = tuple[dict[str, MatrixPerHead], dict[str, BiasPerHead], dict[str, Any]]


class NumberText(str):
    """A number in a JSON file, kept as the text that was written, so that its digits are known."""


def normalize_number(written: object) -> str:
    """Return the text of a number with Python's minus sign and decimal point: "-0,5" becomes "-0.5"."""
    text = str(written).strip().replace("\u2212", "-")
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text


def parse_number(written: object, where: str) -> Value:
    """Parse a number as an exact Fraction, or as a float if it is a decimal of more than nine digits.

    where  describes the number in the error message
    """
    text = normalize_number(written)
    if _FRACTION.fullmatch(text):
        numerator, denominator = (int(part) for part in text.split("/"))
        if denominator:
            return Fraction(numerator, denominator)
    elif isinstance(written, str) and _NUMBER.fullmatch(text):
        digits = re.sub(r"e.*", "", text.lower()).lstrip("+-").replace(".", "").strip("0")
        value: Fraction | float = Fraction(text) if len(digits) <= MAX_EXACT_DIGITS else float(text)
        if -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
            return value
        raise ConfigError(f"{where} is {str(written)!r}, which is too large; the largest number is {LARGEST_FLOAT:.1e}")
    raise ConfigError(f"{where} is {str(written)!r}, but should be a number such as 3, -0.5 or -1/2")


def parse_matrix(text: str, where: str) -> Matrix:
    """Parse a matrix: numbers are separated by commas or spaces, rows by semicolons or line breaks.

    If numbers are separated by spaces, a comma between digits is a decimal comma: 0,5 1,5; 2 3,25.

    where  describes the matrix in the error message
    """
    lines = [line for line in re.split(r"[;\n]", text) if line.strip()]
    if not lines:
        raise ConfigError(f"{where} is empty; type a matrix such as '1,-1/2;0,1', or name a file")
    rows = [line.split() for line in lines]
    cells = [cell for row in rows for cell in row if "," in cell]
    if not cells or not all(map(_DECIMAL_COMMA.fullmatch, cells)) or min(map(len, rows)) == 1:
        rows = [re.split(r"\s*,\s*|\s+", line.strip()) for line in lines]
    return _parse_rows(rows, where)


def read_matrix(source: str, where: str) -> MatrixPerHead:
    """Read one matrix, or one per head, from typed text or from a .json, .csv or .npy file.

    source  the text of a matrix, or the path of a file
    where   describes the matrix in the error message
    """
    path = Path(source)
    if path.suffix.lower() not in SUFFIXES:
        return (parse_matrix(source, where),)
    if path.suffix.lower() == ".npz":
        raise ConfigError(f"{source} has several matrices; use it as the problem file, or a .npy file for {where}")
    if path.suffix.lower() == ".json":
        return _parse_heads(read_json(path), str(path))
    if path.suffix.lower() == ".npy":
        return _parse_heads(_load_numpy(path), str(path))
    blocks = _read_csv(path)
    if len(blocks) != 1:
        raise ConfigError(f"{source} has {len(blocks)} matrices ({', '.join(blocks)}), but {where} is one matrix")
    return (next(iter(blocks.values())),)


def read_fields(path: Path, read_mask: MaskReader | None = None) -> ProblemFields:
    """Read the matrices, biases and settings of a problem from a .json, .csv or .npz file.

    read_mask  function that converts the text of the setting "mask" to a mask
    """
    suffix = path.suffix.lower()
    if suffix == ".json":
        found = read_json(path)
        if not isinstance(found, dict):
            raise ConfigError(
                f"{path} should hold an object with names such as q, k and v, not {_describe_type(found)}"
            )
    elif suffix == ".npz":
        found = _load_numpy(path)
    elif suffix == ".csv":
        found = {name: [list(row) for row in matrix] for name, matrix in _read_csv(path).items()}
        settings = [name for name in SETTINGS if name in found and name != "mask"]
        if settings:
            raise ConfigError(f"{path} has {', '.join(settings)}, but a .csv file has matrices only; use a .json file")
    elif suffix == ".npy":
        raise ConfigError(f"{path} has one matrix; say which one it is, for example --q {path}")
    else:
        raise ConfigError(f"{path} should be a .json, .csv or .npz file; use --q, --inputs and so on for a .npy file")
    return parse_fields(found, str(path), read_mask)


def parse_fields(found: Mapping[str, Any], where: str, read_mask: MaskReader | None = None) -> ProblemFields:
    """Parse the matrices, biases and settings of a problem; an unknown name raises ConfigError.

    found      the values by name
    where      describes the source in the error message
    read_mask  function that converts the text of the setting "mask" to a mask
    """
    known = (*MATRICES, *BIASES, *SETTINGS)
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}, which is unknown; the names are: {', '.join(known)}")
    matrices = {name: _parse_heads(found[name], f"{where}: {name}") for name in MATRICES if name in found}
    biases = {name: _parse_bias(found[name], f"{where}: {name}") for name in BIASES if name in found}
    settings = {name: _parse_setting(name, found[name], where, read_mask) for name in SETTINGS if name in found}
    return matrices, biases, settings


def read_json(path: Path) -> Any:
    """Read a JSON file; numbers are kept as text, so that their digits are known."""
    text = files.read_text(path, ConfigError, files.MAX_JSON_BYTES)
    try:
        return files.parse_json(path, text, ConfigError, number=NumberText)
    except ConfigError as error:
        raise ConfigError(f'{error}; fractions are in quotes, "-1/2"') from None


def _parse_setting(name: str, value: Any, where: str, read_mask: MaskReader | None) -> Any:
    what = f"{where}: {name}"
    if name == "scaled":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{what} is true or false, not {value!r}")
    if name == "heads":
        if (isinstance(value, NumberText) and value.isdigit()) or type(value) is int:
            return int(value)
        raise ConfigError(f"{what} is a whole number, not {value!r}")
    if name == "tokens":
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(map(str, value))
        raise ConfigError(f"{what} is a list of words, not {value!r}")
    if name == "mask" and isinstance(value, list):
        rows = [[int(x) if isinstance(x, bool) else x for x in row] if isinstance(row, list) else row for row in value]
        (matrix,) = _parse_heads(rows, what)
        if not all(entry in (0, 1) for row in matrix for entry in row):
            raise ConfigError(f"{what} is a matrix of 0 (hidden) and 1 (visible), with a row for each query")
        return mask_from_rows(tuple(tuple(entry == 1 for entry in row) for row in matrix))
    if not isinstance(value, str) or isinstance(value, NumberText):
        raise ConfigError(f"{what} is a word, not {value!r}")
    if name == "mask":
        if read_mask is None:
            raise ConfigError(f"{what} is {value!r}; pass the mask itself, or write a matrix of 0 and 1")
        return read_mask(value)
    return value


def _parse_heads(value: Any, where: str) -> MatrixPerHead:
    """Parse one matrix, a list of rows, or a list of matrices, one per head.

    where  describes the value in the error message
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        found = _describe_type(value)
        raise ConfigError(f"{where} should be a matrix, a list of rows such as [[1, 0], [0, 1]], not {found}")
    if value[0] and isinstance(value[0][0], list):
        return tuple(_parse_rows(each, f"{where}, head {head}") for head, each in enumerate(value, 1))
    return (_parse_rows(value, where),)


def _parse_rows(value: Any, where: str) -> Matrix:
    rows: list[tuple[Value, ...]] = []
    for r, row in enumerate(value, 1):
        if not isinstance(row, list):
            raise ConfigError(f"{where}, row {r} should be a list of numbers, not {_describe_type(row)}")
        rows.append(
            tuple(
                cell if isinstance(cell, Fraction | float) else parse_number(cell, f"{where}, row {r}, column {c}")
                for c, cell in enumerate((NumberText(x) if type(x) is int else x for x in row), 1)
            )
        )
        if len(row) != len(rows[0]) or not row:
            raise ConfigError(
                f"{where}, row {r} has {format_count(len(row), 'number')}, but row 1 has {len(rows[0])}; "
                "all rows of a matrix need the same length and are not empty"
            )
    return tuple(rows)


def _parse_bias(value: Any, where: str) -> BiasPerHead:
    """Parse a bias: a list of numbers, or a column [[1], [2]]; for several heads a list of such biases.

    where  describes the value in the error message
    """
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} should be a list of numbers, not {_describe_type(value)}")
    if not isinstance(value[0], list):
        return _parse_rows([value], where)
    if value[0] and isinstance(value[0][0], list):
        return tuple(_parse_bias(each, f"{where}, head {head}")[0] for head, each in enumerate(value, 1))
    rows = _parse_rows(value, where)
    return (tuple(row[0] for row in rows),) if all(len(row) == 1 for row in rows) else rows


def _read_csv(path: Path) -> dict[str, Matrix]:
    """Read named matrices from a CSV file: a line with a name starts a matrix, the lines after it are its rows."""
    lines = files.read_text(path, ConfigError).splitlines()
    blocks: dict[str, list[tuple[Value, ...]]] = {}
    name = ""
    for number, line in enumerate(lines, 1):
        text = line.strip().strip(",;").strip()
        where = f"{path}, line {number}"
        if not text:
            continue
        if re.fullmatch(r"#?\s*[A-Za-z]\w*", text):
            name = text.lstrip("# ").lower()
            if name in blocks:
                raise ConfigError(f"{where} starts {name!r} a second time")
            blocks[name] = []
            continue
        # a spreadsheet that writes decimal commas separates cells by semicolons
        cells = [cell.strip() for cell in line.split(";" if ";" in line else ",")]
        row = tuple(parse_number(cell, f"{where}, column {column}") for column, cell in enumerate(cells, 1))
        rows = blocks.setdefault(name, [])
        if rows and len(row) != len(rows[0]):
            raise ConfigError(
                f"{where} has {format_count(len(row), 'number')}, but the rows above it have {len(rows[0])}"
            )
        rows.append(row)
    for each, rows in blocks.items():
        if not rows:
            raise ConfigError(f"{path} names {each!r}, but no row of numbers follows")
    if not blocks:
        raise ConfigError(f"{path} is empty; write a name such as q, then its rows, one per line")
    return {each: tuple(rows) for each, rows in blocks.items()}


def _load_numpy(path: Path) -> Any:
    """Load a .npy or .npz file as nested lists.

    Short numbers with a denominator of at most 1024, such as 0.5, become exact fractions; all others are floats.
    """
    from regard.base.array_files import read_arrays

    loaded = read_arrays(path, ConfigError)
    if isinstance(loaded, dict):
        return {name: _to_lists(array, f"{path}: {name}") for name, array in loaded.items()}
    return _to_lists(loaded, str(path))


def _to_lists(array: Any, where: str) -> Any:
    if array.ndim == 0 and array.dtype.kind in "biU":
        return array.item()
    if array.dtype.kind == "U":
        return array.tolist()
    if array.dtype.kind == "b":
        array = array.astype(int)
    if array.dtype.kind not in "iuf" or not array.ndim or not (abs(array) < float("inf")).all():
        raise ConfigError(f"{where} is {array.dtype} of shape {array.shape}, but should hold finite real numbers")

    def exact(value: Any) -> Any:
        if isinstance(value, list):
            return [exact(each) for each in value]
        fraction = Fraction(value)
        short = fraction.denominator <= 1024 and abs(fraction.numerator) < 10**MAX_EXACT_DIGITS
        return fraction if short else float(value)

    return exact(array.tolist())


def _describe_type(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
