"""Formulas as trees: written once, shown as terminal text, LaTeX or MathML.

A tree holds numbers, symbols and what is done with them; nothing in it is computed. How many decimals a rounded
number shows is asked for when it is written, so one tree serves every precision.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

DIGITS = 6  # decimals of a rounded number, unless told otherwise
LONGEST = 100_000  # a fraction with a larger numerator or denominator is shown as a decimal, a whole number never

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_GREEK = {"Ω": r"\Omega", "β": r"\beta"}
_MINUS, _TIMES, _TURNED, _APPLIED = "\u2212", "\u00d7", "\u22a4", "\u2061"
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{each: f"\\{each}" for each in "$&#_%"},
}
_RELATIONS = {"=": "=", "≈": r"\approx", "≠": r"\neq", "<": "<", ">": ">"}


@dataclass(frozen=True)
class Number:
    """A number: a fraction is shown as one while it is short, a float is rounded where it is shown."""

    value: int | Fraction | float


@dataclass(frozen=True)
class Symbol:
    """A letter, perhaps with a name below it and a head's number above it: W_Q of head 2."""

    letter: str
    below: str = ""
    above: int | None = None


@dataclass(frozen=True)
class Word:
    """Upright text inside a formula, such as the name of a function."""

    text: str


@dataclass(frozen=True)
class Entry:
    """One entry of a matrix: Q[1,3], counted from 1."""

    of: Symbol
    places: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """Terms added up; there is at least one."""

    terms: tuple["Expression", ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum has at least one term")


@dataclass(frozen=True)
class Difference:
    """The first less the second."""

    first: "Expression"
    second: "Expression"


@dataclass(frozen=True)
class Product:
    """Factors side by side; with a dot between them where they are numbers."""

    factors: tuple["Expression", ...]
    dot: bool = True


@dataclass(frozen=True)
class Quotient:
    """The top over the bottom."""

    top: "Expression"
    bottom: "Expression"


@dataclass(frozen=True)
class Root:
    """The square root."""

    inside: "Expression"


@dataclass(frozen=True)
class Power:
    """The base to the exponent."""

    base: "Expression"
    exponent: "Expression"


@dataclass(frozen=True)
class Transpose:
    """Rows for columns."""

    of: "Expression"


@dataclass(frozen=True)
class FunctionCall:
    """A named function of its arguments."""

    name: str
    arguments: tuple["Expression", ...]


@dataclass(frozen=True)
class MatrixLiteral:
    """Numbers in rows and columns."""

    rows: tuple[tuple["Expression", ...], ...]


@dataclass(frozen=True)
class Chain:
    """Sides joined by relations: a = b ≈ c. One relation stands before each side but the first."""

    sides: tuple["Expression", ...]
    relations: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.sides) != len(self.relations) + 1:
            raise ValueError(f"{len(self.sides)} sides take {len(self.sides) - 1} relations, not {self.relations}")


Expression = (
    Number
    | Symbol
    | Word
    | Entry
    | Sum
    | Difference
    | Product
    | Quotient
    | Root
    | Power
    | Transpose
    | FunctionCall
    | MatrixLiteral
    | Chain
)


def format_exactly(value: int | Fraction | float, digits: int = DIGITS) -> bool:
    """Whether what is shown of a number is the number itself."""
    if isinstance(value, float):
        return math.isinf(value)
    return _is_short(Fraction(value)) or Fraction(value) * 10**digits % 1 == 0


def decimal(value: int | Fraction | float, digits: int = DIGITS) -> str:
    """The number rounded to so many decimals; in powers of ten where they would show too little of it."""
    number = float(value)
    if math.isinf(number):
        return "-∞" if number < 0 else "∞"
    # of a smaller one fewer than four digits would be left, and steps would not follow from what is shown
    if number and not 10.0 ** min(-1, 3 - digits) <= abs(number) < 1e9:
        return f"{number:.{digits}e}"
    rounded = f"{number:.{digits}f}"
    return rounded.removeprefix("-") if float(rounded) == 0 else rounded


def _is_short(value: Fraction) -> bool:
    return value.denominator == 1 or (abs(value.numerator) <= LONGEST and value.denominator <= LONGEST)


def _parts(value: int | Fraction | float, digits: int) -> tuple[bool, str, str]:
    """Whether it is negative, its numerator or decimals, and its denominator where there is one."""
    if isinstance(value, float) or not _is_short(Fraction(value)):
        shown = decimal(value, digits)
        return shown.startswith("-"), shown.removeprefix("-"), ""
    exact = Fraction(value)
    return exact < 0, str(abs(exact.numerator)), "" if exact.denominator == 1 else str(exact.denominator)


# how tightly an expression holds together; one inside another that holds tighter stands in brackets
_LOOSE, _ADDED, _MULTIPLIED, _TIGHT = range(4)


def _hold(each: Expression, flat: bool) -> int:
    match each:
        case Chain():
            return _LOOSE
        case Sum() | Difference():
            return _ADDED
        case Number(value):
            if value < 0:
                return _ADDED
            return _MULTIPLIED if flat and isinstance(value, Fraction) and value.denominator != 1 else _TIGHT
        case Product():
            return _MULTIPLIED
        case Quotient(Number(value)) if value < 0:
            return _ADDED
        case Quotient():
            return _MULTIPLIED if flat else _TIGHT
        case Power():
            return _MULTIPLIED
    return _TIGHT


@dataclass(frozen=True)
class _Box:
    """Lines of text of one length, and which of them a formula's line goes through."""

    lines: tuple[str, ...]
    middle: int = 0

    def beside(self, other: "_Box") -> "_Box":
        above = max(self.middle, other.middle)
        below = max(len(self.lines) - self.middle, len(other.lines) - other.middle)
        pieces = []
        for box in (self, other):
            blank = " " * len(box.lines[0])
            top = [blank] * (above - box.middle)
            pieces.append([*top, *box.lines, *[blank] * (below - len(box.lines) + box.middle)])
        return _Box(tuple(left + right for left, right in zip(*pieces, strict=True)), above)


def _row(parts: "Sequence[_Box | str]") -> _Box:
    whole = _Box(("",))
    for part in parts:
        whole = whole.beside(_Box((part,)) if isinstance(part, str) else part)
    return whole


def text(expression: Expression, digits: int = DIGITS) -> str:
    """For a terminal: one line, or several where there is a matrix."""
    return "\n".join(line.rstrip() for line in _box(expression, digits).lines)


def _box(expression: Expression, digits: int) -> _Box:
    match expression:
        case Number(value):
            negative, top, bottom = _parts(value, digits)
            return _Box((f"{'-' if negative else ''}{top}{bottom and '/'}{bottom}",))
        case Symbol(letter, below, above):
            raised = "" if above is None else f"⁽{str(above).translate(_RAISED)}⁾"
            return _Box((f"{letter}{below and '_'}{below}{raised}",))
        case Word(words):
            return _Box((words,))
        case Entry(of, places):
            return _row([_boxed(of, _LOOSE, digits), f"[{','.join(map(str, places))}]"])
        case Sum(terms):
            parts = [part for sign, term in _signed(terms) for part in (f" {sign} ", _boxed(term, _ADDED, digits))]
            return _row(parts[1:])
        case Difference(first, second):
            return _row([_boxed(first, _ADDED, digits), " - ", _boxed(second, _MULTIPLIED, digits)])
        case Product(factors, dot):
            shown = [_boxed(each, _TIGHT if dot else _MULTIPLIED, digits) for each in factors]
            touching = isinstance(factors[0], Number) and isinstance(factors[-1], Root)  # 2√2
            return _row(_between(shown, "·" if dot else "" if touching else " "))
        case Quotient(top, bottom):
            plain = isinstance(top, Number) and float(top.value).is_integer()  # -5/√2 needs no brackets
            return _row([_boxed(top, _LOOSE if plain else _TIGHT, digits), "/", _boxed(bottom, _TIGHT, digits)])
        case Root(inside):
            return _row(["√", _boxed(inside, _TIGHT, digits)])
        case Power(base, exponent):
            return _row([_boxed(base, _TIGHT, digits), "^", _boxed(exponent, _TIGHT, digits)])
        case Transpose(of):
            return _row([_boxed(of, _TIGHT, digits), "ᵀ"])
        case FunctionCall(name, arguments):
            return _row([name, "(", *_between([_boxed(each, _LOOSE, digits) for each in arguments], ", "), ")"])
        case MatrixLiteral(rows):
            return _bracketed([[text(each, digits) for each in row] for row in rows])
        case Chain(sides, relations):
            parts = [_boxed(sides[0], _LOOSE, digits)]
            for relation, side in zip(relations, sides[1:], strict=True):
                parts += [_Box((f" {relation} ",)), _boxed(side, _LOOSE, digits)]
            return _row(parts)


def _boxed(each: Expression, least: int, digits: int) -> _Box:
    box = _box(each, digits)
    return box if _hold(each, flat=True) >= least else _row(["(", box, ")"])


def _signed(terms: Sequence[Expression]) -> list[tuple[str, Expression]]:
    """Terms with the sign before each; a negative number after the first is subtracted."""
    later = [
        ("-", Number(-term.value)) if isinstance(term, Number) and term.value < 0 else ("+", term) for term in terms[1:]
    ]
    return [("+", terms[0]), *later]


def _between(parts: Sequence[_Box], mark: str) -> list[_Box | str]:
    spread: list[_Box | str] = []
    for part in parts:
        spread += [mark, part] if spread else [part]
    return spread


def _bracketed(cells: Sequence[Sequence[str]]) -> _Box:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if len(rows) == 1:
        return _Box((f"[ {rows[0]} ]",))
    ends = [("⎡", "⎤"), *[("⎢", "⎥")] * (len(rows) - 2), ("⎣", "⎦")]
    lines = tuple(f"{left} {row} {right}" for (left, right), row in zip(ends, rows, strict=True))
    return _Box(lines, (len(rows) - 1) // 2)


def escape_latex(words: str) -> str:
    """Plain text as LaTeX takes it."""
    return "".join(_SPECIAL.get(each, each) for each in words)


def latex(expression: Expression, digits: int = DIGITS) -> str:
    """For LaTeX with amsmath, without the dollar signs."""

    match expression:
        case Number(value):
            negative, top, bottom = _parts(value, digits)
            sign = "-" if negative else ""
            if bottom:
                return rf"{sign}\tfrac{{{top}}}{{{bottom}}}"
            mantissa, power, exponent = top.partition("e")
            if power:
                return rf"{sign}{mantissa} \times 10^{{{int(exponent)}}}"
            return sign + top.replace("∞", r"\infty")
        case Symbol(letter, below, above):
            under = f"_{{{escape_latex(below)}}}" if below else ""
            over = f"^{{({above})}}" if above is not None else ""
            return f"{_GREEK.get(letter, escape_latex(letter))}{under}{over}"
        case Word(words):
            return rf"\text{{{escape_latex(words)}}}"
        case Entry(of, places):
            below = ",".join([*([of.below] if of.below else []), *map(str, places)])
            return latex(Symbol(of.letter, below, of.above), digits)
        case Sum(terms):
            return "".join(f" {sign} {_braced(term, _ADDED, digits)}" for sign, term in _signed(terms)).removeprefix(
                " + "
            )
        case Difference(first, second):
            return f"{_braced(first, _ADDED, digits)} - {_braced(second, _MULTIPLIED, digits)}"
        case Product(factors, dot):
            mark = r" \cdot " if dot else r"\,"
            return mark.join(_braced(each, _TIGHT if dot else _MULTIPLIED, digits) for each in factors)
        case Quotient(top_part, bottom_part):
            return rf"\frac{{{_braced(top_part, _LOOSE, digits)}}}{{{_braced(bottom_part, _LOOSE, digits)}}}"
        case Root(inside):
            return rf"\sqrt{{{_braced(inside, _LOOSE, digits)}}}"
        case Power(base, exponent_part):
            return f"{_braced(base, _TIGHT, digits)}^{{{_braced(exponent_part, _LOOSE, digits)}}}"
        case Transpose(of_part):
            return rf"{{{_braced(of_part, _TIGHT, digits)}}}^{{\top}}"
        case FunctionCall(name, arguments):
            listed = ", ".join(_braced(each, _LOOSE, digits) for each in arguments)
            return rf"\operatorname{{{escape_latex(name)}}}\left({listed}\right)"
        case MatrixLiteral(rows):
            body = r" \\ ".join(" & ".join(_braced(each, _LOOSE, digits) for each in row) for row in rows)
            return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"
        case Chain(sides, relations):
            shown = _braced(sides[0], _LOOSE, digits)
            for relation, side in zip(relations, sides[1:], strict=True):
                shown += f" {_RELATIONS[relation]} {_braced(side, _LOOSE, digits)}"
            return shown


def _braced(each: Expression, least: int, digits: int) -> str:
    shown = latex(each, digits)
    return shown if _hold(each, flat=False) >= least else rf"\left({shown}\right)"


def mathml(expression: Expression, digits: int = DIGITS, *, block: bool = True) -> str:
    """A `math` element for a page, on lines of its own or inside one."""
    display = ' display="block"' if block else ""
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML"{display}>{_ml(expression, digits)}</math>'


def _tag(name: str, *inside: str) -> str:
    return f"<{name}>{''.join(inside)}</{name}>"


def _mo(sign: str) -> str:
    return _tag("mo", html.escape(sign))


def _ml(expression: Expression, digits: int) -> str:
    match expression:
        case Number(value):
            negative, top, bottom = _parts(value, digits)
            mantissa, power, exponent = top.partition("e")
            shown = _tag("mfrac", _tag("mn", top), _tag("mn", bottom)) if bottom else _tag("mn", mantissa)
            if power:
                ten = _tag("msup", _tag("mn", "10"), _ml(Number(int(exponent)), digits))
                shown = _tag("mrow", shown, _mo(_TIMES), ten)
            return _tag("mrow", _mo(_MINUS), shown) if negative else shown
        case Symbol(letter, below, above):
            shown = _tag("mi", html.escape(letter))
            if below and above is not None:
                return _tag("msubsup", shown, _tag("mi", html.escape(below)), _tag("mtext", f"({above})"))
            if below:
                return _tag("msub", shown, _tag("mi", html.escape(below)))
            return shown if above is None else _tag("msup", shown, _tag("mtext", f"({above})"))
        case Word(words):
            return _tag("mtext", html.escape(words))
        case Entry(of, places):
            below = ",".join([*([of.below] if of.below else []), *map(str, places)])
            return _ml(Symbol(of.letter, below, of.above), digits)
        case Sum(terms):
            signs = {"+": _mo("+"), "-": _mo(_MINUS)}
            parts = [part for sign, term in _signed(terms) for part in (signs[sign], _rowed(term, _ADDED, digits))]
            return _tag("mrow", *parts[1:])
        case Difference(first, second):
            return _tag("mrow", _rowed(first, _ADDED, digits), _mo(_MINUS), _rowed(second, _MULTIPLIED, digits))
        case Product(factors, dot):
            mark = _mo("⋅") if dot else '<mspace width="0.17em"/>'
            return _tag("mrow", mark.join(_rowed(each, _TIGHT if dot else _MULTIPLIED, digits) for each in factors))
        case Quotient(top_part, bottom_part):
            return _tag("mfrac", _rowed(top_part, _LOOSE, digits), _rowed(bottom_part, _LOOSE, digits))
        case Root(inside):
            return _tag("msqrt", _rowed(inside, _LOOSE, digits))
        case Power(base, exponent_part):
            return _tag("msup", _rowed(base, _TIGHT, digits), _rowed(exponent_part, _LOOSE, digits))
        case Transpose(of_part):
            return _tag("msup", _rowed(of_part, _TIGHT, digits), _tag("mi", _TURNED))
        case FunctionCall(name, arguments):
            listed = _mo(",").join(_rowed(each, _LOOSE, digits) for each in arguments)
            return _tag("mrow", _tag("mi", html.escape(name)), _mo(_APPLIED), _mo("("), listed, _mo(")"))
        case MatrixLiteral(rows):
            body = [_tag("mtr", *(_tag("mtd", _rowed(each, _LOOSE, digits)) for each in row)) for row in rows]
            return _tag("mrow", _mo("["), _tag("mtable", *body), _mo("]"))
        case Chain(sides, relations):
            parts = [_rowed(sides[0], _LOOSE, digits)]
            for relation, side in zip(relations, sides[1:], strict=True):
                parts += [_mo(relation), _rowed(side, _LOOSE, digits)]
            return _tag("mrow", *parts)


def _rowed(each: Expression, least: int, digits: int) -> str:
    shown = _ml(each, digits)
    return shown if _hold(each, flat=False) >= least else _tag("mrow", _mo("("), shown, _mo(")"))
