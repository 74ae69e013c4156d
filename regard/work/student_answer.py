"""A student's answer: some of the intermediate results, with the digits in which they were written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError, ShapeError
from regard.work.exact_numbers import counted
from regard.work.files import Written, number, read_json
from regard.work.solution import Solution

KEYS = ("q", "k", "v", "scores", "scaled", "weights", "output", "result")
LEAST_DIGITS = 1  # a whole number where a decimal is due is read as one with one digit


@dataclass(frozen=True)
class StudentAnswer:
    """One number as the student wrote it."""

    text: str
    value: float
    digits: int | None  # decimals after the point; None for a fraction, which is exact

    @property
    def slack(self) -> float:
        """How far the true number may be away: half a unit of the last digit, and what float64 leaves open."""
        open_in_float64 = 1e-9 * max(1.0, abs(self.value))
        return open_in_float64 + (0.0 if self.digits is None else 0.5 * 10.0 ** -max(self.digits, LEAST_DIGITS))

    def matches(self, true: float) -> bool:
        return abs(self.value - true) <= self.slack

    def cuts_off(self, true: float) -> bool:
        """Whether this is the true number with its further digits left out."""
        return bool(self.digits) and abs(self.value - _cut(true, self.digits or 0)) <= 1e-9 * max(1.0, abs(true))


def _cut(true: float, digits: int) -> float:
    return math.trunc(true * 10.0**digits) / 10.0**digits


Sheet = tuple[tuple[StudentAnswer | None, ...], ...]  # None where the student left a gap
Answer = Mapping[tuple[str, int | None], Sheet]


def read_answer(path: Path, solution: Solution) -> Answer:
    """The answer that a JSON file holds."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} should hold an object with some of {', '.join(KEYS)}, not {found!r}")
    return as_answer(found, solution, str(path))


def as_answer(found: Mapping[str, Any], solution: Solution, where: str = "the answer") -> Answer:
    """The answer meant by named matrices; where there are several heads, a matrix for each under one name."""
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}, which is no step; there are: {', '.join(KEYS)}")
    if not found:
        raise ConfigError(f"{where} is empty; give some of {', '.join(KEYS)}")
    heads = len(solution.problem.heads)
    answer: dict[tuple[str, int | None], Sheet] = {}
    for key in KEYS:
        if key not in found:
            continue
        what = f"{where}: {key}"
        _check_step(key, solution, what)
        value = found[key]
        if heads == 1 or key == "result":
            answer[key, None] = _sheet(value, what, _shape(solution, key, None))
            continue
        if not isinstance(value, list | tuple) or len(value) != heads:
            raise ShapeError(f"{what} should be a list of {heads} matrices, one for each head")
        for at, each in enumerate(value, 1):
            answer[key, at] = _sheet(each, f"{what}, head {at}", _shape(solution, key, at))
    written = {at: sheet for at, sheet in answer.items() if any(cell is not None for row in sheet for cell in row)}
    if not written:
        raise ConfigError(f"{where} holds nothing but gaps, so there is nothing to check; write some numbers")
    return written


def _check_step(key: str, solution: Solution, what: str) -> None:
    if key == "scaled" and not solution.problem.scaled:
        raise ConfigError(f"{what} is no step here: these scores are not scaled; solve the problem with --scaled")
    if key == "result" and not (solution.has("result") or solution.has("joined")):
        raise ConfigError(f"{what} is no step here: with one head and no mixing, write output")
    if key in ("q", "k", "v") and not solution.has(key):
        raise ConfigError(f"{what} is no step here: it was given; leave it out")


def _shape(solution: Solution, key: str, head: int | None) -> tuple[int, int]:
    return solution.steps[-1].shape if key == "result" else solution.step(key, head).shape


def _sheet(value: Any, what: str, shape: tuple[int, int]) -> Sheet:
    rows, columns = shape
    if not isinstance(value, list | tuple) or not all(isinstance(row, list | tuple) for row in value):
        raise ConfigError(f"{what} should be a matrix, a list of {rows} rows of {columns} numbers")
    came = (len(value), len(value[0]) if value else 0)
    if any(len(row) != came[1] for row in value) or came not in (shape, shape[::-1]):
        lengths = " and ".join(map(str, sorted({len(row) for row in value})))
        given = counted(len(value), "row")
        raise ShapeError(
            f"{what} has {given} of {lengths or 0} numbers, but should have {rows} rows of {columns}; "
            "write null where a number is left out"
        )
    return tuple(
        tuple(_given(cell, f"{what}, row {r}, column {c}") for c, cell in enumerate(row, 1))
        for r, row in enumerate(value, 1)
    )


def _given(cell: Any, where: str) -> StudentAnswer | None:
    if cell is None:
        return None
    if isinstance(cell, int | float | Fraction) and not isinstance(cell, bool):
        cell = Written(cell)
    words = str(cell).strip().replace("\u2212", "-")
    value = float(number(Written(words) if isinstance(cell, str) else cell, where))
    if "/" in words:
        return StudentAnswer(words, value, None)
    exponent = Decimal(words).as_tuple().exponent
    assert isinstance(exponent, int)
    return StudentAnswer(words, value, max(0, -exponent))
