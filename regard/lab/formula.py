# ruff: noqa: RUF001 (signs of mathematics that look like letters are what this file is about)
r"""The little TeX of formulas, as MathML that browsers draw and as text for a terminal.

    mathml(r"a_j = \frac{\exp(\beta s_j)}{\sum_l \exp(\beta s_l)}")     <math display="block">...
    plain(r"a_j = \frac{\exp(\beta s_j)}{\sum_l \exp(\beta s_l)}")      aⱼ = exp(β sⱼ) / (Σₗ exp(β sₗ))

A command that is not known is an error that names it: nothing is dropped from a formula.
"""

import html
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from regard.base.errors import ConfigError


@dataclass(frozen=True)
class Symbol:
    """A sign. `kind` is letter, number, word, sign, operator, relation, comma, open, close, big or text."""

    text: str
    kind: str


@dataclass(frozen=True)
class Space:
    """A gap, in em."""

    width: float


@dataclass(frozen=True)
class Row:
    """Things side by side; `apart` says which of them stood after a space in the source."""

    items: "tuple[Node, ...]"
    apart: tuple[bool, ...]


@dataclass(frozen=True)
class Fraction:
    over: "Node"
    under: "Node"


@dataclass(frozen=True)
class Root:
    inside: "Node"
    index: "Node | None"


@dataclass(frozen=True)
class Scripts:
    """Something with an index below, above or both."""

    base: "Node"
    below: "Node | None"
    above: "Node | None"


@dataclass(frozen=True)
class Fence:
    """Brackets that grow with what they hold."""

    left: str
    inside: "Node"
    right: str


@dataclass(frozen=True)
class Accent:
    """A mark over something, and the character that puts it over one letter of text."""

    base: "Node"
    mark: str
    combining: str


@dataclass(frozen=True)
class Grid:
    """A matrix, cases, or lines one below the other."""

    rows: "tuple[tuple[Node, ...], ...]"
    left: str
    right: str


Node = Symbol | Space | Row | Fraction | Root | Scripts | Fence | Accent | Grid

_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "zeta": "ζ", "eta": "η", "theta": "θ",
    "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ",
    "tau": "τ", "phi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ",
    "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "varepsilon": "ε",
    "vartheta": "ϑ", "varphi": "φ", "ell": "ℓ",
}  # fmt: skip
_WORDS = (
    "exp", "log", "ln", "max", "min", "arg", "argmax", "argmin", "sup", "inf", "lim", "sin", "cos", "tan", "tanh",
    "det", "dim", "Pr", "softmax", "softargmax", "Cov", "Var", "rank", "tr",
)  # fmt: skip
_KINDS = {
    "relation": {
        "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "equiv": "≡", "sim": "∼",
        "propto": "∝", "in": "∈", "notin": "∉", "subset": "⊂", "to": "→", "rightarrow": "→", "mapsto": "↦", "ll": "≪",
        "gg": "≫", "Rightarrow": "⇒", "Leftrightarrow": "⇔", "iff": "⇔", "implies": "⇒", "mid": "∣",
    },
    "operator": {
        "cdot": "·", "times": "×", "pm": "±", "mp": "∓", "odot": "⊙", "otimes": "⊗", "oplus": "⊕", "circ": "∘",
        "ast": "∗", "div": "÷", "cap": "∩", "cup": "∪", "wedge": "∧", "vee": "∨", "setminus": "∖", "bmod": "mod",
    },
    "sign": {
        "top": "⊤", "partial": "∂", "nabla": "∇", "infty": "∞", "dots": "…", "ldots": "…", "cdots": "⋯", "vdots": "⋮",
        "forall": "∀", "exists": "∃", "emptyset": "∅", "prime": "′", "%": "%", "_": "_", "#": "#", "&": "&", "$": "$",
    },
    "big": {"sum": "∑", "prod": "∏", "int": "∫"},
    "open": {"{": "{", "lfloor": "⌊", "lceil": "⌈", "langle": "⟨", "lvert": "|", "lVert": "‖"},
    "close": {"}": "}", "rfloor": "⌋", "rceil": "⌉", "rangle": "⟩", "rvert": "|", "rVert": "‖"},
}  # fmt: skip
_SYMBOLS = {name: Symbol(text, kind) for kind, named in _KINDS.items() for name, text in named.items()}
_SYMBOLS |= {name: Symbol(letter, "letter") for name, letter in _GREEK.items()}
_SYMBOLS |= {name: Symbol(name, "word") for name in _WORDS}
_SYMBOLS |= {"|": Symbol("‖", "sign"), "Vert": Symbol("‖", "sign"), "vert": Symbol("|", "sign")}
_SPACES = {"quad": 1.0, "qquad": 2.0, ",": 0.17, ";": 0.28, ":": 0.22, "!": 0.0, " ": 0.33}
_ACCENTS = {"hat": ("^", "\u0302"), "bar": ("¯", "\u0304"), "tilde": ("~", "\u0303"), "vec": ("→", "\u20d7"),
            "dot": ("˙", "\u0307"), "overline": ("¯", "\u0304")}  # fmt: skip
_GRIDS = {"matrix": ("", ""), "pmatrix": ("(", ")"), "bmatrix": ("[", "]"), "vmatrix": ("|", "|"), "cases": ("{", ""),
          "aligned": ("", "")}  # fmt: skip
_PLAIN = {
    sign: kind
    for kind, signs in {
        "operator": "+-*/", "relation": "=<>", "comma": ",;:", "open": "([", "close": ")]", "sign": "|!.?%@",
    }.items()
    for sign in signs
}  # fmt: skip


def _styled(capital: int, small: int | None, exceptions: str = "") -> Callable[[str], str]:
    """Letters of another alphabet: a browser's MathML has them as characters of their own."""
    odd = dict(zip(exceptions[::2], exceptions[1::2], strict=True))

    def letter(sign: str) -> str:
        if sign in odd:
            return odd[sign]
        if "A" <= sign <= "Z":
            return chr(capital + ord(sign) - ord("A"))
        return chr(small + ord(sign) - ord("a")) if small is not None and "a" <= sign <= "z" else sign

    return lambda text: "".join(map(letter, text))


_ALPHABETS: dict[str, Callable[[str], str]] = {
    "mathbf": _styled(0x1D400, 0x1D41A),
    "mathbb": _styled(0x1D538, 0x1D552, "CℂHℍNℕPℙQℚRℝZℤ"),
    "mathcal": _styled(0x1D49C, None, "BℬEℰFℱHℋIℐLℒMℳRℛ"),
}
_TEXTS = ("mathrm", "operatorname", "text", "textrm", "mathsf", "mathtt")
_STRUCTURES = ("frac", "tfrac", "dfrac", "sqrt", "left", "right", "begin", "end", "\\")
COMMANDS = sorted({*_SYMBOLS, *_SPACES, *_ACCENTS, *_ALPHABETS, *_TEXTS, *_STRUCTURES})

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.S)


class _Reader:
    """The tokens of a formula, one after the other."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = _TOKEN.findall(source)
        self.at = 0

    def error(self, words: str) -> ConfigError:
        return ConfigError(f"{words} in the formula {self.source}")

    def peek(self) -> str | None:
        """The next token that is no space, if there is one."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if token is None or (wanted and token not in wanted):
            expected = f"{' or '.join(wanted)} was expected, but " if wanted else ""
            raise self.error(f"{expected}{'it ends' if token is None else f'{token} comes'}")
        self.at += 1
        return token

    def row(self, *ends: str | None) -> Node:
        """Everything up to one of the ends, which is left to be taken."""
        items: list[Node] = []
        apart: list[bool] = []
        while True:
            token = self.peek()
            spaced = self.at > 0 and self.tokens[self.at - 1].isspace()
            if token in ends:
                break
            if token is None:
                raise self.error(f"{' or '.join(filter(None, ends))} is missing at the end")
            apart.append(spaced)
            if token in ("_", "^", "'"):
                items.append(self.scripts(items.pop() if items else Row((), ())))
                apart.pop()
            else:
                items.append(self.one())
        return items[0] if len(items) == 1 else Row(tuple(items), tuple(apart))

    def scripts(self, base: Node) -> Node:
        found: dict[str, Node | None] = {"_": None, "^": None}
        while (token := self.peek()) in ("_", "^", "'"):
            self.take()
            side = "^" if token == "'" else str(token)
            if found[side] is not None:
                raise self.error(f"two {side} follow each other; put the first part in braces")
            found[side] = Symbol("′", "sign") if token == "'" else self.argument()
        return Scripts(base, found["_"], found["^"])

    def argument(self) -> Node:
        """What a command or an index takes: braces, or one sign."""
        token = self.peek()
        if token is not None and token[0].isdigit() and len(token) > 1:
            raise self.error(f"TeX would take only the first digit of {token}: put it in braces")
        return self.one()

    def one(self) -> Node:
        token = self.take()
        if token == "{":
            inside = self.row("}")
            self.take("}")
            return inside
        if token[0] == "\\":
            return self.command(token[1:])
        if token[0].isdigit():
            return Symbol(token, "number")
        if token.isalpha():
            return Symbol(token, "letter")
        if token in _PLAIN:
            return Symbol(token, _PLAIN[token])
        raise self.error(f"{token} has no meaning here")

    def command(self, name: str) -> Node:
        if name in _SYMBOLS:
            return _SYMBOLS[name]
        if name in _SPACES:
            return Space(_SPACES[name])
        if name in _TEXTS:
            words = self.words()
            return Symbol(words, "text" if name.startswith("text") or " " in words else "word")
        if name in _ALPHABETS:
            return Symbol(_ALPHABETS[name](self.words()), "letter")
        if name in _ACCENTS:
            return Accent(self.argument(), *_ACCENTS[name])
        if name in ("frac", "tfrac", "dfrac"):
            over = self.argument()
            return Fraction(over, self.argument())
        if name == "sqrt":
            index = None
            if self.peek() == "[":
                self.take()
                index = self.row("]")
                self.take("]")
            return Root(self.argument(), index)
        if name == "left":
            left = self.bracket()
            inside = self.row("\\right")
            self.take("\\right")
            return Fence(left, inside, self.bracket())
        if name == "begin":
            return self.grid(self.words())
        if name in ("right", "end", "\\"):
            raise self.error(f"\\{name} stands where nothing was begun")
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean \\{near[0]}?" if near else ""
        raise self.error(f"unknown command \\{name}{hint}")

    def words(self) -> str:
        """The text between braces, spaces kept."""
        self.take("{")
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at] != "}":
            if self.tokens[self.at][0] == "\\" and self.tokens[self.at][1:] not in _KINDS["sign"]:
                raise self.error(f"{self.tokens[self.at]} cannot stand inside text")
            self.at += 1
        text = "".join(self.tokens[start : self.at])
        self.take("}")
        return text.replace("\\", "")

    def bracket(self) -> str:
        token = self.take()
        if token == ".":
            return ""
        name = token.removeprefix("\\")
        symbol = _SYMBOLS.get(name) if token != name else None
        if symbol is None and token not in "()[]|/":
            raise self.error(f"{token} is no bracket")
        return token if symbol is None else symbol.text

    def grid(self, name: str) -> Node:
        if name not in _GRIDS:
            raise self.error(f"unknown \\begin{{{name}}}; there are {', '.join(_GRIDS)}")
        rows = self.lines("\\end")
        self.take("\\end")
        if (closed := self.words()) != name:
            raise self.error(f"\\begin{{{name}}} ends with \\end{{{closed}}}")
        return Grid(rows, *_GRIDS[name])

    def lines(self, end: str | None) -> tuple[tuple[Node, ...], ...]:
        rows: list[tuple[Node, ...]] = []
        cells: list[Node] = []
        while True:
            cells.append(self.row("&", "\\\\", end))
            token = self.peek()
            if token != "&":
                rows.append(tuple(cells))
                cells = []
            if token == end:
                return tuple(rows)
            self.take()


def read(source: str) -> Node:
    """The formula as a tree."""
    reader = _Reader(source)
    rows = reader.lines(None)
    if any(len(row) > 1 for row in rows):
        raise reader.error("& stands outside of a \\begin")
    return rows[0][0] if len(rows) == 1 else Grid(rows, "", "")


_FACTORS = ("letter", "number", "word", "sign", "thing", "big", "text")
_THIN = '<mspace width="0.2em"></mspace>'


def _kind(node: Node | None) -> str:
    """What a thing is to its neighbours."""
    match node:
        case None:
            return "nothing"
        case Symbol(_, kind):
            return kind
        case Space():
            return "space"
        case Scripts(base, _, _):
            return _kind(base)
    return "thing"


def _is_sign(before: Node | None) -> bool:
    """Whether a plus or minus after this belongs to what follows, as in -1."""
    return _kind(before) in ("nothing", "open", "operator", "relation", "comma", "space", "big")


def _walk(items: tuple[Node, ...]) -> Iterator[tuple[Node | None, Node, Node | None]]:
    """Each thing between its neighbours."""
    for at, item in enumerate(items):
        yield (items[at - 1] if at else None), item, (items[at + 1] if at + 1 < len(items) else None)


def mathml(source: str) -> str:
    """The formula as an element that browsers draw by themselves."""
    inside = _ml(_spread(read(source)))
    return f'<math display="block" alttext="{html.escape(formula_text(source))}"><mrow>{inside}</mrow></math>'


def _spread(node: Node) -> Node:
    """The formula with the equations in it, which commas part, moved away from each other."""
    if isinstance(node, Grid):
        return Grid(tuple(tuple(map(_spread, row)) for row in node.rows), node.left, node.right)
    if not isinstance(node, Row) or "relation" not in map(_kind, node.items):
        return node
    items: list[Node] = []
    depth = 0
    for item in node.items:
        depth += (_kind(item) == "open") - (_kind(item) == "close")
        items += [item, Space(1.0)] if _kind(item) == "comma" and not depth else [item]
    return Row(tuple(items), (False,) * len(items))


def _tag(name: str, text: str, look: str = "") -> str:
    return f"<{name}{look}>{html.escape(text)}</{name}>"


def _ml(node: Node) -> str:
    match node:
        case Symbol(text, kind):
            return _ml_symbol(text, kind)
        case Space(width):
            return f'<mspace width="{width}em"></mspace>'
        case Row(items, _):
            return f"<mrow>{''.join(_ml_item(*places) for places in _walk(items))}</mrow>"
        case Fraction(over, under):
            return f"<mfrac>{_ml(over)}{_ml(under)}</mfrac>"
        case Root(inside, index):
            return f"<msqrt>{_ml(inside)}</msqrt>" if index is None else f"<mroot>{_ml(inside)}{_ml(index)}</mroot>"
        case Scripts(base, below, above):
            stacked = isinstance(base, Symbol) and (base.kind == "big" or base.text in ("max", "min", "lim", "argmax"))
            names = ("munder", "mover", "munderover") if stacked else ("msub", "msup", "msubsup")
            name = names[2] if below and above else names[0] if below else names[1]
            return f"<{name}>{_ml(base)}{_ml(below) if below else ''}{_ml(above) if above else ''}</{name}>"
        case Fence(left, inside, right):
            return f"<mrow>{_ml_fence(left)}{_ml(inside)}{_ml_fence(right)}</mrow>"
        case Accent(base, mark, _):
            return f'<mover accent="true">{_ml(base)}{_tag("mo", mark)}</mover>'
        case Grid(rows, left, right):
            lines = "".join(f"<mtr>{''.join(f'<mtd>{_ml(cell)}</mtd>' for cell in row)}</mtr>" for row in rows)
            return f"<mrow>{_ml_fence(left)}<mtable>{lines}</mtable>{_ml_fence(right)}</mrow>"


def _ml_symbol(text: str, kind: str) -> str:
    if kind == "letter":
        return _tag("mi", text)
    if kind == "number":
        return _tag("mn", text)
    if kind == "word":
        return _tag("mi", text, ' mathvariant="normal"' if len(text) == 1 else "")
    if kind == "text":
        return _tag("mtext", text.replace(" ", "\u00a0")) if text else ""
    if kind in ("open", "close"):
        return _tag("mo", text, ' stretchy="false"')
    if kind == "sign":
        return _tag("mi" if text in "⊤∞∅…⋯" else "mo", text, "" if text != "|" else ' stretchy="false"')
    return _tag("mo", text.replace("-", "−").replace("*", "∗"))


def _ml_item(before: Node | None, node: Node, after: Node | None) -> str:
    if isinstance(node, Symbol) and node.text in ("+", "-", "±") and _is_sign(before):
        return _tag("mo", node.text.replace("-", "−"), ' form="prefix"')
    kind, left, right = _kind(node), _kind(before), _kind(after)
    # a browser sets letters and functions next to each other without any space
    ahead = _THIN if kind in ("word", "text") and left in (*_FACTORS, "close") else ""
    if kind == "word" and right in ("open", "letter", "number", "thing"):
        return f"{ahead}{_ml(node)}<mo>&#x2061;</mo>{'' if right == 'open' or isinstance(after, Fence) else _THIN}"
    return f"{ahead}{_ml(node)}{_THIN if kind == 'text' and right in (*_FACTORS, 'open') else ''}"


def _ml_fence(sign: str) -> str:
    return _tag("mo", sign, ' fence="true" stretchy="true"') if sign else ""


_BELOW = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
_ABOVE = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW⊤′∗*",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵀ′**",
        strict=True,
    )
)


def formula_text(source: str) -> str:
    """The formula as text for a terminal: indices small where such characters exist, else after _ and ^."""
    tree = read(source)
    if isinstance(tree, Grid) and not tree.left + tree.right:
        return "\n".join(" ".join(filter(None, map(_text, row))) for row in tree.rows)
    return _text(tree)


def _text(node: Node) -> str:
    match node:
        case Symbol("∑", "big"):
            return "Σ"
        case Symbol("∏", "big"):
            return "Π"
        case Symbol(text, _):
            return text
        case Space(width):
            return " " * math.ceil(width * 2)
        case Row(items, apart):
            return _text_row(items, apart)
        case Fraction(over, under):
            top, bottom = _grouped(over, factors=True), _grouped(under, factors=False)
            short = len(top) + len(bottom) < 5
            return f"{top}/{bottom}" if short else f"{top} / {bottom}"
        case Root(inside, index):
            return ("" if index is None else _script(index, _ABOVE, "")) + "√" + _grouped(inside, factors=False)
        case Scripts(base, below, above):
            whole = _text(base)
            shown = f"({whole})" if isinstance(base, Fraction | Root) or _compound(base, factors=False) else whole
            return shown + _script(below, _BELOW, "_") + _script(above, _ABOVE, "^")
        case Fence(left, inside, right):
            return f"{left}{_text(inside)}{right}"
        case Accent(base, _, combining):
            whole = _text(base)
            return unicodedata.normalize("NFC", whole + combining) if len(whole) == 1 else f"({whole}){combining}"
        case Grid(rows, left, right):
            return f"{left}{'; '.join('  '.join(map(_text, row)) for row in rows)}{right}"


def _script(node: Node | None, small: dict[str, str], mark: str) -> str:
    if node is None:
        return ""
    text = _text(node)
    packed = text.replace(" ", "")
    if packed and all(sign in small for sign in packed):
        return "".join(small[sign] for sign in packed)
    return mark + (text if len(text) == 1 or isinstance(node, Symbol) else f"({text})")


def _compound(node: Node, *, factors: bool) -> bool:
    """Whether a thing needs brackets to stay together; `factors` says that a product does not."""
    if not isinstance(node, Row):
        return False
    kinds = [_kind(item) for item in node.items]
    if _wrapped(kinds) or (len(kinds) == 2 and _is_prefix(node.items[0])):
        return False
    depth, outside = 0, []
    for kind in kinds:
        depth -= kind == "close"
        if depth == 0:
            outside.append(kind)
        depth += kind == "open"
    loose = any(kind in ("operator", "relation", "comma", "space") for kind in outside)
    # a function with its argument, exp(x), holds together by itself
    call = len(kinds) > 1 and kinds[0] in ("word", "letter") and _wrapped(kinds[1:])
    return loose or (not factors and not call and len(kinds) > 1)


def _wrapped(kinds: list[str]) -> bool:
    """Whether the first bracket closes at the end."""
    depth = 0
    for at, kind in enumerate(kinds):
        depth += (kind == "open") - (kind == "close")
        if depth == 0:
            return at == len(kinds) - 1 and kinds[0] == "open"
    return False


def _is_prefix(node: Node | None) -> bool:
    """Whether this clings to what follows, as in a derivative."""
    return isinstance(node, Symbol) and node.text in ("∂", "∇", "Δ")


def _grouped(node: Node, *, factors: bool) -> str:
    text = _text(node)
    return f"({text})" if isinstance(node, Fraction) or _compound(node, factors=factors) else text


def _text_row(items: tuple[Node, ...], apart: tuple[bool, ...]) -> str:
    out = ""
    for (before, item, after), spaced in zip(_walk(items), apart, strict=True):
        kind, left = _kind(item), _kind(before)
        text = _text(item)
        product = any(isinstance(each, Symbol) and each.text in ("·", "×", "/", "⊙", "*") for each in (before, after))
        touching = product or left in (*_FACTORS, "close") or _kind(after) in (*_FACTORS, "open")
        if isinstance(item, Fraction) and touching:
            text = f"({text})"
        if kind in ("operator", "relation"):
            signed = isinstance(item, Symbol) and item.text in ("+", "-", "±") and _is_sign(before)
            tight = isinstance(item, Symbol) and item.text == "/" and not spaced
            out = out + text if signed or tight else f"{out.rstrip(' ')} {text} "
        elif kind == "comma":
            out = f"{out.rstrip(' ')}{text} "
        elif kind in ("close", "space") or left in ("nothing", "open", "space") or " " in (out[-1:], text[:1]):
            out += text
        else:
            out += (" " if _gap(before, item, out, spaced) else "") + text
    return out.rstrip(" ") if _kind(items[-1] if items else None) != "space" else out


def _gap(before: Node | None, item: Node, out: str, spaced: bool) -> bool:
    """Whether two factors must or should stand apart."""
    left, right = _kind(before), _kind(item)
    if left not in (*_FACTORS, "close"):
        return False
    if _is_prefix(before):
        return False
    if right == "open" or isinstance(item, Fence):
        return left == "big"
    marked = isinstance(before, Scripts) and bool(re.search(r"[_^]\(?[^\s]*$", out)) and right in _FACTORS
    wordy = {left, right} & {"word", "big"} or (left == "text") != (right == "text")
    return spaced or marked or bool(wordy)
