"""A student's answer: matrices of some steps, and the number of digits written for each entry."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError, ShapeError
from regard.work.attention_steps import STEPS, Array
from regard.work.exact_numbers import format_count
from regard.work.files import NumberText, normalize_number, parse_number, read_json
from regard.work.problem import ROLES
from regard.work.solution import Solution

KEYS = (*STEPS, "result")
MIN_DIGITS = 1  # a whole number where a decimal is expected counts as one with one digit


@dataclass(frozen=True)
class WrittenNumber:
    """One number as the student wrote it.

    text    the text that was written
    value   the number
    digits  decimals after the point; None for a fraction, which is exact
    """

    text: str
    value: float
    digits: int | None  # decimals after the point; None for a fraction, which is exact

    @property
    def tolerance(self) -> float:
        """The largest difference between the correct number and the written one that counts as correct.

        For a decimal number this is half a unit of the last decimal, or of decimal MIN_DIGITS if fewer were written,
        plus a small float error. For a fraction it is the float error only.
        """
        rounding = 1e-9 * max(1.0, abs(self.value))
        return rounding + (0.0 if self.digits is None else 0.5 * 10.0 ** -max(self.digits, MIN_DIGITS))

    def matches(self, true: float) -> bool:
        """Return whether the correct number equals the written one within `tolerance`."""
        return abs(self.value - true) <= self.tolerance

    def truncates(self, true: float) -> bool:
        """Return whether the written number is the correct number, truncated instead of rounded."""
        scale = 10.0 ** (self.digits or 0)
        cut = math.trunc(true * scale) / scale
        return bool(self.digits) and abs(self.value - cut) <= 1e-9 * max(1.0, abs(true))


@dataclass(frozen=True)
class StudentMatrix:
    """A matrix of a student's answer; an entry that the student left empty is None."""

    cells: tuple[tuple[WrittenNumber | None, ...], ...]

    def __iter__(self) -> Iterator[tuple[int, int, WrittenNumber]]:
        for r, row in enumerate(self.cells):
            for c, cell in enumerate(row):
                if cell is not None:
                    yield r, c, cell

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0])

    @property
    def transposed(self) -> "StudentMatrix":
        return StudentMatrix(tuple(zip(*self.cells, strict=True)))

    @property
    def row_digits(self) -> tuple[int, ...]:
        """For each row, the largest number of decimals written in one of its entries."""
        return tuple(max((0 if cell is None else cell.digits or 0 for cell in row), default=0) for row in self.cells)

    def cell(self, entry: tuple[int, int]) -> WrittenNumber:
        """Return the number at an entry (row, column), which must not be empty."""
        found = self.cells[entry[0]][entry[1]]
        assert found is not None
        return found

    def wrong_entries(self, true: Array) -> list[tuple[int, int]]:
        """Return the entries (row, column) that do not match the correct numbers within the digits written."""
        return [(r, c) for r, c, cell in self if not cell.matches(float(true[r, c]))]

    def matches(self, true: Array) -> bool:
        """Return whether the shape is correct and every number written matches the correct one within its digits."""
        return true.shape == self.shape and not self.wrong_entries(true)

    def fill_gaps(self, true: Array) -> Array:
        """Return the student's matrix as numbers, with correct numbers in the entries left empty."""
        found = true.copy()
        for r, c, cell in self:
            found[r, c] = cell.value
        return found


# keys are (step, head); head is None if there is only one
StudentSteps = Mapping[tuple[str, int | None], StudentMatrix]


def read_answer(path: Path, solution: Solution) -> StudentSteps:
    """Read a student's answer from a JSON file that has the matrices of some steps by name."""
    if path.suffix.lower() != ".json":
        raise ConfigError(f"{path} is not a .json file; an answer is a .json file with some of {', '.join(KEYS)}")
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} should hold an object with some of {', '.join(KEYS)}, not {found!r}")
    return parse_answer(found, solution, str(path))


def parse_answer(found: Mapping[str, Any], solution: Solution, where: str = "the answer") -> StudentSteps:
    """Parse a student's answer: matrices by name of the step, or lists of one matrix per head.

    found  the matrices by name
    where  describes the answer in the error message
    """
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}, which is not a step; the steps are: {', '.join(KEYS)}")
    if not found:
        raise ConfigError(f"{where} is empty; give some of {', '.join(KEYS)}")
    heads = len(solution.problem.heads)
    answer: dict[tuple[str, int | None], StudentMatrix] = {}
    for key in KEYS:
        if key not in found:
            continue
        what = f"{where}: {key}"
        _check_step(key, solution, what)
        value = found[key]
        if heads == 1 or key == "result":
            last = solution.steps[-1] if key == "result" else solution.step(key)
            answer[key, None] = _parse_matrix(value, what, last.shape)
            continue
        if not isinstance(value, list | tuple) or len(value) != heads:
            raise ShapeError(f"{what} should be a list of {heads} matrices, one for each head")
        for head, each in enumerate(value, 1):
            answer[key, head] = _parse_matrix(each, f"{what}, head {head}", solution.step(key, head).shape)
    written = {step: matrix for step, matrix in answer.items() if any(True for _ in matrix)}
    if not written:
        raise ConfigError(f"{where} has only gaps, so there is nothing to check; write some numbers")
    return written


def _check_step(key: str, solution: Solution, what: str) -> None:
    if key == "scaled" and not solution.problem.scaled:
        raise ConfigError(f"{what} is not a step here: the scores are not scaled; solve the problem with --scaled")
    if key == "result" and not (solution.has("result") or solution.has("concat")):
        raise ConfigError(f"{what} is not a step here: with one head and no output projection, write output")
    if key in ROLES and not solution.has(key):
        raise ConfigError(f"{what} is not a step here: the problem states it; leave it out")


def _parse_matrix(value: Any, what: str, shape: tuple[int, int]) -> StudentMatrix:
    rows, columns = shape
    if not isinstance(value, list | tuple) or not all(isinstance(row, list | tuple) for row in value):
        raise ConfigError(f"{what} should be a matrix, a list of {rows} rows of {columns} numbers")
    found = (len(value), len(value[0]) if value else 0)
    if any(len(row) != found[1] for row in value) or found not in (shape, shape[::-1]):
        lengths = " and ".join(map(str, sorted({len(row) for row in value})))
        raise ShapeError(
            f"{what} has {format_count(len(value), 'row')} of {lengths or 0} numbers, but should have {rows} rows of "
            f"{columns}; write null for a number that you leave out"
        )
    return StudentMatrix(
        tuple(
            tuple(_parse_cell(cell, f"{what}, row {r}, column {c}") for c, cell in enumerate(row, 1))
            for r, row in enumerate(value, 1)
        )
    )


def _parse_cell(cell: Any, where: str) -> WrittenNumber | None:
    if cell is None:
        return None
    if isinstance(cell, int | float | Fraction) and not isinstance(cell, bool):
        cell = NumberText(cell)
    text = normalize_number(cell)
    value = float(parse_number(NumberText(text) if isinstance(cell, str) else cell, where))
    if "/" in text:
        return WrittenNumber(text, value, None)
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)
    return WrittenNumber(text, value, max(0, -exponent))
