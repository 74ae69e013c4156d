"""Write a worked solution as plain text for a terminal."""

import textwrap

from regard.base import formulas
from regard.work.map_picture import render_text
from regard.work.writing.document import Block, Formula, FormulaList, Heading, MapFigure, Paragraph

WIDTH = 80


def write(blocks: list[Block], digits: int) -> str:
    """Return the blocks of a document as plain text. Formulas are not wrapped, so lines can be long.

    digits  decimals to show
    """
    return "\n\n".join(_block(block, digits) for block in blocks) + "\n"


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(text, level):
            return f"{text}\n{'=' * len(text)}" if level == 1 else f"{text}\n{'-' * len(text)}"
        case Paragraph(text):
            return textwrap.fill(text, WIDTH)
        case Formula(expression):
            return textwrap.indent(formulas.text(expression, digits), "  ")
        case FormulaList(expressions):
            return "\n".join(f"  {formulas.text(each, digits)}" for each in expressions)
        case MapFigure(attention_map):
            return textwrap.indent(render_text(attention_map), "  ")
