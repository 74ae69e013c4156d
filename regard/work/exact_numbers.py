"""Numbers of a worked solution: fractions and roots stay exact, and only what is neither becomes a float."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from regard.base.formulas import Expression, Number, Product, Quotient, Root


@dataclass(frozen=True)
class Surd:
    """coefficient times the root of a whole number that no square divides: what 1/sqrt(d) makes of a fraction."""

    coefficient: Fraction
    radicand: int

    def __float__(self) -> float:
        return float(self.coefficient) * math.sqrt(self.radicand)


Value = Fraction | Surd | float
Grid = tuple[tuple[Value, ...], ...]

ZERO, ONE = Fraction(0), Fraction(1)
HIDDEN = -math.inf  # the score of a pair that a mask hides


def is_nothing(value: Value) -> bool:
    """Whether it is exactly 0; a float of 0.0 may be a number too small for float64."""
    return isinstance(value, Fraction) and value == 0


def times(a: Value, b: Value) -> Value:
    """The product; nothing times anything is nothing, exactly."""
    if is_nothing(a) or is_nothing(b):
        return ZERO
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return float(a) * float(b)


def plus(a: Value, b: Value) -> Value:
    """The sum, exact while both are fractions."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    if is_nothing(a) or is_nothing(b):
        return b if is_nothing(a) else a
    return float(a) + float(b)


def total(values: Iterable[Value]) -> Value:
    """All of them added up, from the first to the last."""
    found: Value = ZERO
    for value in values:
        found = plus(found, value)
    return found


def less(a: Value, b: Value) -> Value:
    """The difference; of equal numbers it is exactly nothing."""
    if a == b:
        return ZERO
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a - b
    if isinstance(a, Surd) and isinstance(b, Surd) and a.radicand == b.radicand:
        return Surd(a.coefficient - b.coefficient, a.radicand)
    return float(a) - float(b)


def over_root(value: Value, width: int) -> Value:
    """value / sqrt(width): a fraction where the width is a square, a surd otherwise."""
    if not isinstance(value, Fraction):
        return float(value) / math.sqrt(width)
    outside, inside = split_root(width)
    if inside == 1 or value == 0:
        return value / outside
    return Surd(value / (outside * inside), inside)


def split_root(width: int) -> tuple[int, int]:
    """a and b with sqrt(width) = a sqrt(b), and no square dividing b."""
    outside = max(a for a in range(1, math.isqrt(width) + 1) if width % (a * a) == 0)
    return outside, width // outside**2


def exponential(value: Value) -> Value:
    """e to the value: exactly 1 at 0, and exactly 0 for a hidden pair."""
    if value == 0:
        return ONE
    return ZERO if value == HIDDEN else math.exp(float(value))


def divided(a: Value, b: Value) -> Value:
    """The quotient, exact while both are fractions."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    return ZERO if is_nothing(a) else float(a) / float(b)


def format_value(value: Value) -> Expression:
    """The value as a formula: 5/2, 3/(2 sqrt(2)), or a decimal."""
    if not isinstance(value, Surd):
        return Number(value)
    whole = value.coefficient * value.radicand  # c sqrt(r) = c r / sqrt(r): the form in which it arose
    root = Root(Number(value.radicand))
    below: Expression = root if whole.denominator == 1 else Product((Number(whole.denominator), root), dot=False)
    return Quotient(Number(Fraction(whole.numerator)), below)


def is_exact(value: Value) -> bool:
    return isinstance(value, Fraction | Surd)


def counted(number: int, what: str) -> str:
    """How many there are: 1 token, 3 tokens."""
    return f"{number} {what}{'s' * (number != 1)}"


def transposed(grid: Grid) -> Grid:
    """Rows for columns."""
    return tuple(zip(*grid, strict=True))


def floats(grid: Grid) -> list[list[float]]:
    return [[float(value) for value in row] for row in grid]
