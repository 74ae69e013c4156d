"""Write a worked solution as Markdown, with LaTeX formulas between dollar signs."""

import re

from regard.base import formulas
from regard.work.map_picture import render_text
from regard.work.writing.document import Block, Formula, FormulaList, Heading, MapFigure, Paragraph
from regard.work.writing.latex import align_rows


def write(blocks: list[Block], digits: int) -> str:
    """Return the blocks of a document as Markdown; an attention map is shaded text in a code block.

    digits  decimals to show
    """
    return "\n\n".join(_block(block, digits) for block in blocks) + "\n"


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Paragraph(text):
            return escape_markdown(text)
        case Formula(expression):
            return f"$$\n{formulas.latex(expression, digits)}\n$$"
        case FormulaList(expressions):
            return f"$$\n\\begin{{aligned}}\n{align_rows(expressions, digits)}\n\\end{{aligned}}\n$$"
        case MapFigure(attention_map):
            text = render_text(attention_map)
            # a token can have backticks; a fence ends at as many of them as it begins with
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
            return f"{fence}text\n{text}\n{fence}"


def escape_markdown(text: str) -> str:
    """Put a backslash before every character that Markdown interprets."""
    return re.sub(r"([\\`*_{}\[\]<>#$|])", r"\\\1", text)
