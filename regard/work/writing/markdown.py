"""A worked solution as Markdown, with its formulas in LaTeX between dollar signs."""

import re

from regard.base import formulas
from regard.work.map_picture import shades
from regard.work.writing.document import Block, Formula, Heading, Lines, Picture, Words


def write(blocks: list[Block], digits: int) -> str:
    """The blocks as Markdown; the map is a block of shades, which every viewer shows alike."""
    return "\n\n".join(_block(block, digits) for block in blocks) + "\n"


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(words, level):
            return f"{'#' * level} {escaped(words)}"
        case Words(words):
            return escaped(words)
        case Formula(expression):
            return f"$$\n{formulas.latex(expression, digits)}\n$$"
        case Lines(expressions):
            rows = " \\\\\n".join(_aligned(each, digits) for each in expressions)
            return f"$$\n\\begin{{aligned}}\n{rows}\n\\end{{aligned}}\n$$"
        case Picture(drawn):
            return f"```text\n{shades(drawn)}\n```"


def _aligned(each: formulas.Expression, digits: int) -> str:
    return formulas.latex(each, digits).replace(" = ", " &= ", 1)


def escaped(words: str) -> str:
    """Text in which nothing is taken for a mark."""
    return re.sub(r"([\\`*_{}\[\]<>#$|])", r"\\\1", words)
