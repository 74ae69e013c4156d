"""A worked solution for a terminal."""

import textwrap

from regard.base import formulas
from regard.work.map_picture import shades
from regard.work.writing.document import Block, Formula, Heading, Lines, Picture, Words

WIDTH = 80


def write(blocks: list[Block], digits: int) -> str:
    """The blocks as plain text; formulas are not broken, so a long sum may be a long line."""
    return "\n\n".join(_block(block, digits) for block in blocks) + "\n"


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(words, level):
            return f"{words}\n{'=' * len(words)}" if level == 1 else f"{words}\n{'-' * len(words)}"
        case Words(words):
            return textwrap.fill(words, WIDTH)
        case Formula(expression):
            return textwrap.indent(formulas.text(expression, digits), "  ")
        case Lines(expressions):
            return "\n".join(f"  {formulas.text(each, digits)}" for each in expressions)
        case Picture(drawn):
            return textwrap.indent(shades(drawn), "  ")
