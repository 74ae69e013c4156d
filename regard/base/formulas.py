# ruff: noqa: RUF001 (mathematical signs that look like letters)
"""Formulas as trees, written as terminal text, LaTeX or MathML; `parse_latex` reads a subset of LaTeX.

A tree consists of numbers, symbols and operations. It is only written, not evaluated. The functions `text`, `latex` and
`mathml` write a tree; their argument `digits` is the number of decimals.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from regard.base.errors import ConfigError

DIGITS = 6  # default number of decimals of a rounded number
LONGEST = 100_000  # a fraction with a larger numerator or denominator is written as a decimal

_COMMANDS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η", "mu": "μ", "sigma": "σ",
    "Delta": "Δ", "Omega": "Ω", "partial": "∂", "infty": "∞", "top": "⊤", "dots": "…", "sum": "∑", "prod": "∏",
    "cdot": "·", "times": "×", "le": "≤", "ge": "≥", "neq": "≠", "approx": "≈", "sim": "∼", "in": "∈", "to": "→",
    "|": "‖",
}  # fmt: skip
_LATEX = {character: f"\\{name}" for name, character in _COMMANDS.items()}
_FUNCTIONS = ("exp", "log", "ln", "max", "min", "argmax", "cos", "sin", "tanh")
_SUBSCRIPTS = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
_SUPERSCRIPTS = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW⊤",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵀ",
        strict=True,
    )
)
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{each: f"\\{each}" for each in "$&#_%"},
}


@dataclass(frozen=True)
class Number:
    """A number in a formula.

    A fraction is written as a fraction if its numerator and denominator are short, else as a rounded decimal. A float
    is always written as a rounded decimal.
    """

    value: int | Fraction | float


@dataclass(frozen=True)
class Symbol:
    """A letter in a formula, such as W_Q of head 2, with an optional subscript and an optional head number.

    The head number is written as a superscript.
    """

    letter: str
    below: str = ""
    above: int | None = None


@dataclass(frozen=True)
class Word:
    """Upright text in a formula, such as the name of a function."""

    text: str


@dataclass(frozen=True)
class Entry:
    """An entry of a matrix in a formula, with indices from 1, such as Q[1,3]."""

    of: Symbol
    places: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """A sum of terms in a formula."""

    terms: tuple["Expression", ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum has at least one term")


@dataclass(frozen=True)
class Difference:
    """The difference of two expressions in a formula."""

    first: "Expression"
    second: "Expression"


@dataclass(frozen=True)
class Product:
    """A product in a formula.

    dot  whether a multiplication dot is written between the factors
    """

    factors: tuple["Expression", ...]
    dot: bool = True


@dataclass(frozen=True)
class Quotient:
    """A fraction in a formula: one expression over another."""

    top: "Expression"
    bottom: "Expression"


@dataclass(frozen=True)
class Root:
    """A square root in a formula."""

    inside: "Expression"


@dataclass(frozen=True)
class Power:
    """A power in a formula: a base and an exponent."""

    base: "Expression"
    exponent: "Expression"


@dataclass(frozen=True)
class Transpose:
    """The transpose of a matrix in a formula."""

    of: "Expression"


@dataclass(frozen=True)
class FunctionCall:
    """A function call in a formula, such as exp(x)."""

    name: str
    arguments: tuple["Expression", ...]


@dataclass(frozen=True)
class MatrixLiteral:
    """A matrix in a formula, written out in rows and columns."""

    rows: tuple[tuple["Expression", ...], ...]


@dataclass(frozen=True)
class Chain:
    """Expressions joined by relation signs, such as a = b ≈ c.

    sides      the expressions
    relations  the signs between them, one fewer than there are sides
    """

    sides: tuple["Expression", ...]
    relations: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.sides) != len(self.relations) + 1:
            raise ValueError(f"{len(self.sides)} sides take {len(self.sides) - 1} relations, not {self.relations}")


@dataclass(frozen=True)
class Operator:
    """An operator, relation sign, bracket, comma or space in a parsed formula."""

    sign: str


@dataclass(frozen=True)
class Script:
    """An expression in a formula with a subscript, a superscript or both."""

    base: "Expression"
    below: "Expression | None"
    above: "Expression | None"


@dataclass(frozen=True)
class Row:
    """A sequence of expressions, operators and spaces in a parsed formula, written side by side."""

    parts: tuple["Expression", ...]


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
    | Operator
    | Script
    | Row
)


SPACE, WIDE_SPACE = Operator(" "), Operator("   ")
_MINUS = "\u2212"


def is_written_exactly(value: int | Fraction | float, digits: int = DIGITS) -> bool:
    """Return whether a formula shows a number without rounding: as a short fraction, or exactly in `digits` decimals.

    False for every finite float, because a float may be rounded already.
    """
    if isinstance(value, float):
        return math.isinf(value)
    return _is_short(Fraction(value)) or Fraction(value) * 10**digits % 1 == 0


def decimal(value: int | Fraction | float, digits: int = DIGITS) -> str:
    """Format a number with `digits` decimals. Very small and very large numbers are in scientific notation."""
    number = float(value)
    if math.isinf(number):
        return "-∞" if number < 0 else "∞"
    # keep at least four digits of a small number, so that the next step follows from what is written
    if number and not 10.0 ** min(-1, 3 - digits) <= abs(number) < 1e9:
        return f"{number:.{digits}e}"
    rounded = f"{number:.{digits}f}"
    return rounded.removeprefix("-") if float(rounded) == 0 else rounded


def _is_short(value: Fraction) -> bool:
    return value.denominator == 1 or (abs(value.numerator) <= LONGEST and value.denominator <= LONGEST)


def _split_number(value: int | Fraction | float, digits: int) -> tuple[bool, str, str]:
    """Split a number for printing. Returns (is negative, numerator, denominator), the last two as text without sign.

    A short fraction such as 2/3 has a denominator. For any other number, the denominator is "" and the numerator is the
    number itself: all digits of an integer, else `digits` decimals.
    """
    if isinstance(value, float) or not _is_short(Fraction(value)):
        shown = decimal(value, digits)
        return shown.startswith("-"), shown.removeprefix("-"), ""
    exact = Fraction(value)
    return exact < 0, str(abs(exact.numerator)), "" if exact.denominator == 1 else str(exact.denominator)


# precedence of operators: an expression is written in brackets where a higher precedence than its own is required
_LOWEST, _SUM, _PRODUCT, _ATOM = range(4)


def _precedence(each: Expression, flat: bool) -> int:
    match each:
        case Chain():
            return _LOWEST
        case Sum() | Difference():
            return _SUM
        case Number(value):
            if value < 0:
                return _SUM
            return _PRODUCT if flat and isinstance(value, Fraction) and value.denominator != 1 else _ATOM
        case Product():
            return _PRODUCT
        case Quotient(Number(value)) if value < 0:
            return _SUM
        case Quotient():
            return _PRODUCT if flat else _ATOM
        case Power():
            return _PRODUCT
        case Row(parts) if SPACE in parts:
            return _LOWEST
        case Row((Operator("-"), *_)):
            return _SUM
        case Row(parts) if Operator("/") in parts:
            return _PRODUCT
    return _ATOM


@dataclass(frozen=True)
class _Box:
    """A rectangle of text: one part of a formula, in lines of equal length.

    If boxes are written next to each other, their lines with the index `middle` are on the same line of the terminal.
    """

    lines: tuple[str, ...]
    middle: int = 0

    def join(self, other: "_Box") -> "_Box":
        above = max(self.middle, other.middle)
        below = max(len(self.lines) - self.middle, len(other.lines) - other.middle)
        pieces = []
        for box in (self, other):
            blank = " " * len(box.lines[0])
            top = [blank] * (above - box.middle)
            pieces.append([*top, *box.lines, *[blank] * (below - len(box.lines) + box.middle)])
        return _Box(tuple(left + right for left, right in zip(*pieces, strict=True)), above)


def _join_boxes(parts: "Sequence[_Box | str]") -> _Box:
    whole = _Box(("",))
    for part in parts:
        whole = whole.join(_Box((part,)) if isinstance(part, str) else part)
    return whole


def text(expression: Expression, digits: int = DIGITS) -> str:
    """Format a formula as text for a terminal: one line, or several lines if it contains a matrix."""
    return "\n".join(line.rstrip() for line in _box(expression, digits).lines)


def _box(expression: Expression, digits: int) -> _Box:
    match expression:
        case Number(value):
            negative, top, bottom = _split_number(value, digits)
            return _Box((f"{'-' if negative else ''}{top}{bottom and '/'}{bottom}",))
        case Symbol(letter, below, above):
            raised = "" if above is None else "".join(_SUPERSCRIPTS[each] for each in f"({above})")
            return _Box((f"{letter}{below and '_'}{below}{raised}",))
        case Word(words):
            return _Box((words.strip(),))
        case Entry(of, places):
            return _join_boxes([_text_part(of, _LOWEST, digits), f"[{','.join(map(str, places))}]"])
        case Sum(terms):
            parts = [
                part for sign, term in _with_signs(terms) for part in (f" {sign} ", _text_part(term, _SUM, digits))
            ]
            return _join_boxes(parts[1:])
        case Difference(first, second):
            return _join_boxes([_text_part(first, _SUM, digits), " - ", _text_part(second, _PRODUCT, digits)])
        case Product(factors, dot):
            shown = [_text_part(each, _ATOM if dot else _PRODUCT, digits) for each in factors]
            touching = isinstance(factors[0], Number) and isinstance(factors[-1], Root)  # 2√2
            return _join_boxes(_interleave(shown, "·" if dot else "" if touching else " "))
        case Quotient(top, bottom):
            plain = isinstance(top, Number) and float(top.value).is_integer()  # -5/√2 needs no brackets
            return _join_boxes(
                [_text_part(top, _LOWEST if plain else _ATOM, digits), "/", _text_part(bottom, _ATOM, digits)]
            )
        case Root(inside):
            return _join_boxes(["√", _text_part(inside, _ATOM, digits)])
        case Power(base, exponent):
            return _join_boxes([_text_part(base, _ATOM, digits), "^", _text_part(exponent, _ATOM, digits)])
        case Transpose(of):
            return _join_boxes([_text_part(of, _ATOM, digits), "ᵀ"])
        case FunctionCall(name, arguments):
            return _join_boxes(
                [name, "(", *_interleave([_text_part(each, _LOWEST, digits) for each in arguments], ", "), ")"]
            )
        case MatrixLiteral(rows):
            return _matrix_box([[text(each, digits) for each in row] for row in rows])
        case Chain(sides, relations):
            parts = [_text_part(sides[0], _LOWEST, digits)]
            for relation, side in zip(relations, sides[1:], strict=True):
                parts += [_Box((f" {relation} ",)), _text_part(side, _LOWEST, digits)]
            return _join_boxes(parts)
        case Operator(sign):
            return _Box(({"∑": "Σ", "∏": "Π"}.get(sign, sign),))
        case Script(base, below_part, above_part):
            small = _small(below_part, _SUBSCRIPTS, "_") + _small(above_part, _SUPERSCRIPTS, "^")
            return _join_boxes([_text_part(base, _ATOM, digits), small])
        case Row(row):
            return _join_boxes([_text_part(each, _row_precedence(row, at), digits) for at, each in enumerate(row)])


def _row_precedence(row: Sequence[Expression], at: int) -> int:
    """Return the precedence that element `at` of a parsed formula (`Row`) needs to be printed without brackets.

    A fraction next to a factor needs the highest precedence, which it does not have, so it gets brackets: (a/b) c. Any
    other element needs only the lowest precedence, so it gets no brackets.
    """
    near = [*[each for each in row[:at] if each != SPACE][-1:], *[each for each in row[at + 1 :] if each != SPACE][:1]]
    factor = any(not isinstance(each, Operator) for each in near)
    return _ATOM if isinstance(row[at], Quotient) and factor else _LOWEST


def _small(each: Expression | None, characters: dict[str, str], mark: str) -> str:
    """Format a subscript or superscript with small Unicode characters; "" if `each` is None.

    If one of its characters has no small form, the whole text is written at normal size after `mark`.

    characters  the small form of each character
    mark        "_" or "^"
    """
    shown = "" if each is None else text(each)
    packed = shown.replace(" ", "")
    if all(character in characters for character in packed):
        return "".join(characters[character] for character in packed)
    return mark + (shown if len(shown) == 1 or isinstance(each, Word) else f"({shown})")


def _text_part(each: Expression, least: int, digits: int) -> _Box:
    box = _box(each, digits)
    return box if _precedence(each, flat=True) >= least else _join_boxes(["(", box, ")"])


def _with_signs(terms: Sequence[Expression]) -> list[tuple[str, Expression]]:
    """Return a (sign, term) pair for each term of a sum.

    A negative number becomes ("-", its absolute value). The first term is not changed; its sign is "+".
    """
    later = [
        ("-", Number(-term.value)) if isinstance(term, Number) and term.value < 0 else ("+", term) for term in terms[1:]
    ]
    return [("+", terms[0]), *later]


def _interleave(parts: Sequence[_Box], mark: str) -> list[_Box | str]:
    spread: list[_Box | str] = []
    for part in parts:
        spread += [mark, part] if spread else [part]
    return spread


def _matrix_box(cells: Sequence[Sequence[str]]) -> _Box:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if len(rows) == 1:
        return _Box((f"[ {rows[0]} ]",))
    ends = [("⎡", "⎤"), *[("⎢", "⎥")] * (len(rows) - 2), ("⎣", "⎦")]
    lines = tuple(f"{left} {row} {right}" for (left, right), row in zip(ends, rows, strict=True))
    return _Box(lines, (len(rows) - 1) // 2)


def escape_latex(words: str) -> str:
    """Escape plain text for LaTeX."""
    return "".join(_SPECIAL.get(each, each) for each in words)


def latex(expression: Expression, digits: int = DIGITS) -> str:
    """Format a formula as LaTeX code for amsmath, without dollar signs."""
    match expression:
        case Number(value):
            negative, top, bottom = _split_number(value, digits)
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
            return f"{_LATEX.get(letter, escape_latex(letter))}{under}{over}"
        case Word(words):
            return rf"\text{{{escape_latex(words)}}}"
        case Entry(of, places):
            below = ",".join([*([of.below] if of.below else []), *map(str, places)])
            return latex(Symbol(of.letter, below, of.above), digits)
        case Sum(terms):
            return "".join(
                f" {sign} {_latex_part(term, _SUM, digits)}" for sign, term in _with_signs(terms)
            ).removeprefix(" + ")
        case Difference(first, second):
            return f"{_latex_part(first, _SUM, digits)} - {_latex_part(second, _PRODUCT, digits)}"
        case Product(factors, dot):
            mark = r" \cdot " if dot else r"\,"
            return mark.join(_latex_part(each, _ATOM if dot else _PRODUCT, digits) for each in factors)
        case Quotient(top_part, bottom_part):
            return rf"\frac{{{_latex_part(top_part, _LOWEST, digits)}}}{{{_latex_part(bottom_part, _LOWEST, digits)}}}"
        case Root(inside):
            return rf"\sqrt{{{_latex_part(inside, _LOWEST, digits)}}}"
        case Power(base, exponent_part):
            return latex(Script(base, None, exponent_part), digits)
        case Transpose(of_part):
            return rf"{{{_latex_part(of_part, _ATOM, digits)}}}^{{\top}}"
        case FunctionCall(name, arguments):
            listed = ", ".join(_latex_part(each, _LOWEST, digits) for each in arguments)
            return rf"\operatorname{{{escape_latex(name)}}}\left({listed}\right)"
        case MatrixLiteral(rows):
            body = r" \\ ".join(" & ".join(_latex_part(each, _LOWEST, digits) for each in row) for row in rows)
            return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"
        case Chain(sides, relations):
            shown = _latex_part(sides[0], _LOWEST, digits)
            for relation, side in zip(relations, sides[1:], strict=True):
                shown += f" {_LATEX.get(relation, relation)} {_latex_part(side, _LOWEST, digits)}"
            return shown
        case Operator(sign):
            return r" \quad " if sign == WIDE_SPACE.sign else _LATEX.get(sign, sign)
        case Script(base, below_part, above_part):
            scripts = [
                f"{mark}{{{latex(each, digits)}}}" for mark, each in (("_", below_part), ("^", above_part)) if each
            ]
            return _latex_part(base, _ATOM, digits) + "".join(scripts)
        case Row(row):
            shown = "".join(f"{latex(each, digits)}\0" for each in row)
            return re.sub(r"(\\[A-Za-z]+)\0(?=[A-Za-z])", r"\1 ", shown).replace("\0", "")


def _latex_part(each: Expression, least: int, digits: int) -> str:
    shown = latex(each, digits)
    return shown if _precedence(each, flat=False) >= least else rf"\left({shown}\right)"


def mathml(expression: Expression, digits: int = DIGITS, *, block: bool = True) -> str:
    """Format a formula as an HTML <math> element (MathML).

    block  whether the formula is on a line of its own instead of inline
    """
    display = ' display="block"' if block else ""
    return f"<math{display}>{_mathml(expression, digits)}</math>"


def _tag(name: str, *inside: str) -> str:
    return f"<{name}>{''.join(inside)}</{name}>"


def _mo(sign: str) -> str:
    return _tag("mo", html.escape(sign))


def _mathml(expression: Expression, digits: int) -> str:
    match expression:
        case Number(value):
            negative, top, bottom = _split_number(value, digits)
            mantissa, power, exponent = top.partition("e")
            shown = _tag("mfrac", _tag("mn", top), _tag("mn", bottom)) if bottom else _tag("mn", mantissa)
            if power:
                ten = _tag("msup", _tag("mn", "10"), _mathml(Number(int(exponent)), digits))
                shown = _tag("mrow", shown, _mo("×"), ten)
            return _tag("mrow", _mo(_MINUS), shown) if negative else shown
        case Symbol(letter, below, above):
            shown = _tag("mn" if letter[0].isdigit() else "mi", html.escape(letter))
            if below and above is not None:
                return _tag("msubsup", shown, _tag("mi", html.escape(below)), _tag("mtext", f"({above})"))
            if below:
                return _tag("msub", shown, _tag("mi", html.escape(below)))
            return shown if above is None else _tag("msup", shown, _tag("mtext", f"({above})"))
        case Word(words):
            # MathML removes plain spaces at the ends
            return _tag("mtext", html.escape(re.sub(r"^ | $", "\u00a0", words)))
        case Entry(of, places):
            below = ",".join([*([of.below] if of.below else []), *map(str, places)])
            return _mathml(Symbol(of.letter, below, of.above), digits)
        case Sum(terms):
            signs = {"+": _mo("+"), "-": _mo(_MINUS)}
            parts = [
                part for sign, term in _with_signs(terms) for part in (signs[sign], _mathml_part(term, _SUM, digits))
            ]
            return _tag("mrow", *parts[1:])
        case Difference(first, second):
            return _tag("mrow", _mathml_part(first, _SUM, digits), _mo(_MINUS), _mathml_part(second, _PRODUCT, digits))
        case Product(factors, dot):
            mark = _mo("⋅") if dot else '<mspace width="0.17em"/>'
            return _tag("mrow", mark.join(_mathml_part(each, _ATOM if dot else _PRODUCT, digits) for each in factors))
        case Quotient(top_part, bottom_part):
            return _tag("mfrac", _mathml_part(top_part, _LOWEST, digits), _mathml_part(bottom_part, _LOWEST, digits))
        case Root(inside):
            return _tag("msqrt", _mathml_part(inside, _LOWEST, digits))
        case Power(base, exponent_part):
            return _mathml(Script(base, None, exponent_part), digits)
        case Transpose(of_part):
            return _mathml(Script(of_part, None, Symbol("⊤")), digits)
        case FunctionCall(name, arguments):
            listed = _mo(",").join(_mathml_part(each, _LOWEST, digits) for each in arguments)
            return _tag("mrow", _tag("mi", html.escape(name)), _mo("\u2061"), _mo("("), listed, _mo(")"))
        case MatrixLiteral(rows):
            body = [_tag("mtr", *(_tag("mtd", _mathml_part(each, _LOWEST, digits)) for each in row)) for row in rows]
            return _tag("mrow", _mo("["), _tag("mtable", *body), _mo("]"))
        case Chain(sides, relations):
            parts = [_mathml_part(sides[0], _LOWEST, digits)]
            for relation, side in zip(relations, sides[1:], strict=True):
                parts += [_mo(relation), _mathml_part(side, _LOWEST, digits)]
            return _tag("mrow", *parts)
        case Operator(sign):
            return (
                f'<mspace width="{0.2 if sign == " " else 1}em"/>' if sign.isspace() else _mo(sign.replace("-", _MINUS))
            )
        case Script(base, below_part, above_part):
            kind = ("munder", "mover") if isinstance(base, Operator) and base.sign in "∑∏" else ("msub", "msup")
            given = {name: each for name, each in zip(kind, (below_part, above_part), strict=True) if each}
            name = "".join(given) if len(given) == 1 else f"{kind[0]}{kind[1][1:]}"
            return _tag(name, _mathml_part(base, _ATOM, digits), *(_mathml(each, digits) for each in given.values()))
        case Row(row):
            return _tag("mrow", *(_mathml(each, digits) for each in row))


def _mathml_part(each: Expression, least: int, digits: int) -> str:
    shown = _mathml(each, digits)
    return shown if _precedence(each, flat=False) >= least else _tag("mrow", _mo("("), shown, _mo(")"))


_TOKEN = re.compile(r"\s*\\quad\s*|\\(?:partial|Delta)\s*|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.S)
_BRACKETS = {"(": ")", "[": "]"}


def parse_latex(source: str) -> Expression:
    r"""Parse a formula in a subset of LaTeX.

    source  letters, numbers, operators, brackets, _ and ^, \frac, \sqrt, \mathrm, \quad, functions such as \exp, Greek
            letters and common signs; spaces are kept in text. Anything else raises a `ConfigError`.

    >>> text(parse_latex(r"a_j = \frac{\exp(s_j)}{\sum_l \exp(s_l)}"))
    'aⱼ = exp(sⱼ)/(Σₗ exp(sₗ))'
    """
    tokens = _TOKEN.findall(source.strip())[::-1]
    try:
        return _parse_row(tokens, "")
    except ValueError as error:
        raise ConfigError(f"{error} in the formula {source}") from None


def _parse_row(tokens: list[str], end: str) -> Expression:
    """Parse LaTeX tokens up to the token `end` and remove them from `tokens`. An empty `end` parses all tokens.

    tokens  the remaining tokens in reverse order
    """
    parts: list[Expression] = []
    while tokens and tokens[-1] != end:
        token = tokens.pop()
        if token not in ("_", "^"):
            parts.append(_parse_token(token, tokens))
            continue
        base = parts.pop() if parts else Row(())
        below, above = (base.below, base.above) if isinstance(base, Script) else (None, None)
        if (below if token == "_" else above) is not None:
            raise ValueError(f"two {token} follow each other; use braces")
        inner = base.base if isinstance(base, Script) else base
        argument = _parse_argument(tokens)
        parts.append(Script(inner, argument, above) if token == "_" else Script(inner, below, argument))
    if end and not tokens:
        raise ValueError(f"{end} is missing at the end")
    if end:
        tokens.pop()
    return parts[0] if len(parts) == 1 else Row(tuple(parts))


def _parse_argument(tokens: list[str]) -> Expression:
    while tokens and tokens[-1].isspace():
        tokens.pop()
    if not tokens:
        raise ValueError("an argument is missing at the end")
    if tokens[-1].isdecimal() and len(tokens[-1]) > 1:
        raise ValueError(f"LaTeX takes only the first digit of {tokens[-1]}; use braces")
    return _parse_token(tokens.pop(), tokens)


def _parse_token(token: str, tokens: list[str]) -> Expression:
    name = token.strip().removeprefix("\\")
    if token.isspace():
        return SPACE
    if token in _BRACKETS:
        return Row((Operator(token), _parse_row(tokens, _BRACKETS[token]), Operator(_BRACKETS[token])))
    if token == "{":
        return _parse_row(tokens, "}")
    if name == token and (token.isalpha() or token[0].isdigit()):
        return Symbol(token)
    if name == token and token in "+-*/=<>,;:|!":
        return Operator(token)
    if name == "quad":
        return WIDE_SPACE
    if name == "frac":
        top = _parse_argument(tokens)
        return Quotient(top, _parse_argument(tokens))
    if name == "sqrt":
        return Root(_parse_argument(tokens))
    if name in ("mathrm", "text"):
        words = []
        while tokens and tokens[-1] != "}":
            words.append(tokens.pop())
        if not tokens or words[:1] != ["{"]:
            raise ValueError(f"\\{name} needs text in braces")
        tokens.pop()
        return Word("".join(words[1:]))
    if name in _FUNCTIONS:
        return Word(name)
    if name != token.strip() and name in _COMMANDS:
        character = _COMMANDS[name]
        return Symbol(character) if character.isalpha() else Operator(character)
    near = get_close_matches(name, (*_COMMANDS, *_FUNCTIONS, "frac", "sqrt", "mathrm", "quad"), n=1)
    raise ValueError(f"unknown {token}" + (f"; did you mean \\{near[0]}?" if near else ""))
