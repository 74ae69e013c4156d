"""A worked solution as one LaTeX document that needs amsmath and xcolor alone."""

import re

from regard.base import formulas
from regard.base.formulas import escape_latex
from regard.work.map_picture import Map
from regard.work.writing.document import Block, Formula, Heading, Lines, Picture, Words

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
    """The blocks as a document ready for pdflatex."""
    body = "\n\n".join(_block(block, digits) for block in blocks)
    return _OPENING % _widest(body) + body + "\n\n\\end{document}\n"


def _widest(body: str) -> int:
    """The columns of the widest matrix: amsmath has room for ten unless told."""
    matrices: list[str] = re.findall(r"\\begin{bmatrix}(.*?)\\end{bmatrix}", body, re.DOTALL)
    return max([10, *(row.count("&") + 1 for matrix in matrices for row in matrix.split(r"\\"))])


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(words, level):
            command = {1: "section*", 2: "subsection*", 3: "subsubsection*"}[level]
            return f"\\{command}{{{escape_latex(words)}}}"
        case Words(words):
            return escape_latex(words)
        case Formula(expression):
            return f"\\[\n{formulas.latex(expression, digits)}\n\\]"
        case Lines(expressions):
            rows = " \\\\\n".join(_aligned(each, digits) for each in expressions)
            return f"\\begin{{align*}}\n{rows}\n\\end{{align*}}"
        case Picture(drawn):
            return _table(drawn)


def _aligned(each: formulas.Expression, digits: int) -> str:
    return formulas.latex(each, digits).replace(" = ", " &= ", 1)


def _table(drawn: Map) -> str:
    """The map as a table whose cells are shaded by their weights."""
    head = " & ".join(["", *map(escape_latex, drawn.columns)])
    rows = [f"{head} \\\\ \\hline"]
    for name, row in zip(drawn.rows, drawn.weights, strict=True):
        rows.append(" & ".join([escape_latex(name), *map(_cell, row)]) + r" \\")
    body = "\n".join(rows)
    label = escape_latex(f"{drawn.title}; down: {drawn.down}, across: {drawn.across}")
    table = f"\\begin{{tabular}}{{r|{'c' * len(drawn.columns)}}}\n{body}\n\\end{{tabular}}"
    return f"\\begin{{center}}\n{label}\\\\[1ex]\n{table}\n\\end{{center}}"


def _cell(weight: float) -> str:
    ink = r"\textcolor{white}" if weight > 0.5 else ""
    return rf"\cellcolor{{blue!{round(80 * weight)}}}{ink}{{{weight:.2f}}}"
