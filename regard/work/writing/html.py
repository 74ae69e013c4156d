"""Write a worked solution as an HTML page that works offline, with MathML formulas."""

from regard.base import formulas
from regard.base.html import Markup, render_page, tag
from regard.work.map_picture import render_table
from regard.work.writing.document import Block, Formula, FormulaList, Heading, MapFigure, Paragraph


def write(blocks: list[Block], digits: int) -> str:
    """Return the blocks of a document as one HTML page.

    digits  decimals to show
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    return render_page(title, *(_block(block, digits) for block in blocks))


def _block(block: Block, digits: int) -> Markup:
    match block:
        case Heading(text, level):
            return tag(f"h{level}", text)
        case Paragraph(text):
            return tag("p", text)
        case Formula(expression):
            return tag("div", Markup(formulas.mathml(expression, digits)), class_="formula")
        case FormulaList(expressions):
            lines = (tag("div", Markup(formulas.mathml(each, digits, block=False))) for each in expressions)
            return tag("div", *lines, class_="lines")
        case MapFigure(attention_map):
            return render_table(attention_map)
