"""Write a worked solution as a LaTeX document that needs only amsmath and xcolor."""

import re
from collections.abc import Iterable

from regard.base import formulas
from regard.base.formulas import escape_latex
from regard.work.map_picture import AttentionMap
from regard.work.writing.document import Block, Formula, FormulaList, Heading, MapFigure, Paragraph

_OPENING = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage[a4paper,margin=20mm]{geometry}
\usepackage{amsmath}
\usepackage[table]{xcolor}
\setcounter{MaxMatrixCols}{%d}
\allowdisplaybreaks
\begin{document}
"""


def write(blocks: list[Block], digits: int) -> str:
    """Return the blocks of a document as LaTeX for pdflatex.

    digits  decimals to show
    """
    body = "\n\n".join(_block(block, digits) for block in blocks)
    return _OPENING % _max_columns(body) + body + "\n\n\\end{document}\n"


def _max_columns(body: str) -> int:
    """Return the number of columns of the widest matrix, at least 10, the default limit of amsmath."""
    matrices: list[str] = re.findall(r"\\begin{bmatrix}(.*?)\\end{bmatrix}", body, re.DOTALL)
    return max([10, *(row.count("&") + 1 for matrix in matrices for row in matrix.split(r"\\"))])


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(text, level):
            command = {1: "section*", 2: "subsection*", 3: "subsubsection*"}[level]
            return f"\\{command}{{{escape_latex(text)}}}"
        case Paragraph(text):
            return escape_latex(text)
        case Formula(expression):
            return f"\\[\n{formulas.latex(expression, digits)}\n\\]"
        case FormulaList(expressions):
            return f"\\begin{{align*}}\n{align_rows(expressions, digits)}\n\\end{{align*}}"
        case MapFigure(attention_map):
            return _table(attention_map)


def align_rows(expressions: Iterable[formulas.Expression], digits: int) -> str:
    """Return the LaTeX of formulas one below the other, aligned at the first equals sign."""
    return " \\\\\n".join(formulas.latex(each, digits).replace(" = ", " &= ", 1) for each in expressions)


def _table(attention_map: AttentionMap) -> str:
    """Return an attention map as a LaTeX table with shaded cells."""
    head = " & ".join(["", *map(escape_latex, attention_map.columns)])
    rows = [f"{head} \\\\ \\hline"]
    for name, row in zip(attention_map.rows, attention_map.weights, strict=True):
        rows.append(" & ".join([escape_latex(name), *map(_cell, row)]) + r" \\")
    body = "\n".join(rows)
    label = escape_latex(f"{attention_map.title}; rows: {attention_map.row_kind}, columns: {attention_map.column_kind}")
    table = f"\\begin{{tabular}}{{r|{'c' * len(attention_map.columns)}}}\n{body}\n\\end{{tabular}}"
    return f"\\begin{{center}}\n{label}\\\\[1ex]\n{table}\n\\end{{center}}"


def _cell(weight: float) -> str:
    ink = r"\textcolor{white}" if weight > 0.5 else ""
    return rf"\cellcolor{{blue!{round(80 * weight)}}}{ink}{{{weight:.2f}}}"
