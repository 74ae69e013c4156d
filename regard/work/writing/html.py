"""A worked solution as one page that needs nothing else: MathML for formulas, a drawing for the map, no script."""

from html import escape

from regard.base import formulas
from regard.work.map_picture import svg
from regard.work.writing.document import Block, Formula, Heading, Lines, Picture, Words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    ".formula,.lines{overflow-x:auto;margin:.7rem 0}.lines{padding-left:1.2rem}.lines div{margin:.25rem 0}"
    "math{font-size:1.05em}mtd{padding:.15em .5em;text-align:right}"
    "svg{max-width:100%;height:auto;background:#fff;font:13px system-ui,sans-serif}h3{margin-bottom:.3rem}"
)


def write(blocks: list[Block], digits: int) -> str:
    """The blocks as a page."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = "\n".join(_block(block, digits) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _block(block: Block, digits: int) -> str:
    match block:
        case Heading(words, level):
            return f"<h{level}>{escape(words)}</h{level}>"
        case Words(words):
            return f"<p>{escape(words)}</p>"
        case Formula(expression):
            return f'<div class="formula">{formulas.mathml(expression, digits)}</div>'
        case Lines(expressions):
            inside = "".join(f"<div>{formulas.mathml(each, digits, block=False)}</div>" for each in expressions)
            return f'<div class="lines">{inside}</div>'
        case Picture(drawn):
            return f"<figure>{svg(drawn)}<figcaption>{escape(drawn.title)}</figcaption></figure>"
