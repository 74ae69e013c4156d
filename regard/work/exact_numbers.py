"""Exact numbers of a worked solution: fractions and square roots stay exact, everything else is a float."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from regard.base.formulas import Expression, Number, Operator, Product, Quotient, Root, Row


@dataclass(frozen=True)
class Surd:
    """The exact number coefficient * sqrt(radicand), with a square-free radicand.

    Dividing a fraction by a square root gives such a number.
    """

    coefficient: Fraction
    radicand: int

    def __float__(self) -> float:
        return float(self.coefficient) * math.sqrt(self.radicand)


Value = Fraction | Surd | float
Matrix = tuple[tuple[Value, ...], ...]

ZERO, ONE = Fraction(0), Fraction(1)
HIDDEN = -math.inf  # the score of a masked pair


def is_exact_zero(value: Value) -> bool:
    """Return whether a value is exactly 0. A float of 0.0 is not, because it can be a number that underflowed."""
    return isinstance(value, Fraction) and value == 0


def multiply(a: Value, b: Value) -> Value:
    """Return the product; it is exact if both numbers are fractions or one is exactly 0."""
    if is_exact_zero(a) or is_exact_zero(b):
        return ZERO
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return float(a) * float(b)


def add(a: Value, b: Value) -> Value:
    """Return the sum; it is exact if both numbers are fractions or one is exactly 0."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    if is_exact_zero(a) or is_exact_zero(b):
        return b if is_exact_zero(a) else a
    return float(a) + float(b)


def sum_values(values: Iterable[Value]) -> Value:
    """Return the sum of all values, added from first to last."""
    total: Value = ZERO
    for value in values:
        total = add(total, value)
    return total


def subtract(a: Value, b: Value) -> Value:
    """Return the difference; it is exact for fractions, for surds of the same radicand, and for equal numbers."""
    if a == b:
        return ZERO
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a - b
    if isinstance(a, Surd) and isinstance(b, Surd) and a.radicand == b.radicand:
        return Surd(a.coefficient - b.coefficient, a.radicand)
    return float(a) - float(b)


def divide_by_sqrt(value: Value, width: int) -> Value:
    """Return value / sqrt(width).

    If the value is a fraction, the result is exact: a fraction if the width is a square, otherwise a surd. If the
    value is a surd or a float, the result is a float.
    """
    if not isinstance(value, Fraction):
        return float(value) / math.sqrt(width)
    outside, inside = simplify_sqrt(width)
    if inside == 1 or value == 0:
        return value / outside
    return Surd(value / (outside * inside), inside)


def simplify_sqrt(width: int) -> tuple[int, int]:
    """Return integers (a, b) with sqrt(width) = a * sqrt(b), where b is square-free."""
    outside = max(a for a in range(1, math.isqrt(width) + 1) if width % (a * a) == 0)
    return outside, width // outside**2


def exp(value: Value) -> Value:
    """Return e to the power of the value; it is exactly 1 at 0, and exactly 0 for a hidden score."""
    if value == 0:
        return ONE
    return ZERO if value == HIDDEN else math.exp(float(value))


def divide(a: Value, b: Value) -> Value:
    """Return the quotient; it is exact if both numbers are fractions or the first is exactly 0."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    return ZERO if is_exact_zero(a) else float(a) / float(b)


def format_value(value: Value) -> Expression:
    """Return the value as a formula: 5/2, 3/(2 sqrt(2)), 4 sqrt(2), or a decimal."""
    if not isinstance(value, Surd):
        return Number(value)
    whole = value.coefficient * value.radicand  # c sqrt(r) = c r / sqrt(r), the form in which it arose
    root = Root(Number(value.radicand))
    if math.gcd(whole.numerator, value.radicand) > 1:  # 8/sqrt(2) is 4 sqrt(2)
        top, bottom = abs(value.coefficient.numerator), value.coefficient.denominator
        product: Expression = root if top == 1 else Product((Number(top), root), dot=False)
        product = product if bottom == 1 else Quotient(product, Number(bottom))
        return Row((Operator("-"), product)) if value.coefficient < 0 else product
    below: Expression = root if whole.denominator == 1 else Product((Number(whole.denominator), root), dot=False)
    return Quotient(Number(Fraction(whole.numerator)), below)


def is_exact(value: Value) -> bool:
    return isinstance(value, Fraction | Surd)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: "1 token", "3 tokens"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def transpose(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def to_floats(matrix: Matrix) -> list[list[float]]:
    return [[float(value) for value in row] for row in matrix]
