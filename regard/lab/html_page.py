"""The lab as one HTML page that needs nothing else: no script, no network, no second file.

Every claim stands there with its question, its formula as MathML, its verdict as a word and a colour, its figure as
SVG, and a table of its numbers, each beside the Python that makes it.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import regard
from regard.base.html import Markup, join_html, render_page, tag
from regard.lab.claim import CHAPTERS, Claim, Numbers, Sheet, Verdict
from regard.lab.errata import Erratum
from regard.lab.formula import mathml
from regard.lab.results import AGAIN, NOT_RUN, Result, verdict_word

IMPORT = "from regard.lab.claim import claims"
LONG = 24  # values of a list that stand in the table; more are folded away
Found = tuple[Claim, Result | None]


def svg(claim: Claim, numbers: Numbers) -> str:
    """The claim's figure as an SVG file; the same numbers give the same text."""
    import matplotlib

    file = io.StringIO()
    # letters as outlines: the page looks the same where a font is missing
    with matplotlib.rc_context({"svg.hashsalt": claim.id, "svg.fonttype": "path"}):
        claim.draw(numbers).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def inline_svg(claim: Claim, numbers: Numbers) -> Markup:
    """The claim's figure as an element of a page, with words for those who do not see it."""
    text = svg(claim, numbers)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.S)
    # several figures share a page: every name gets its claim in front, so that none means another's, and names that
    # nothing refers to go, since two pictures alike share one
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r'\sid="([^"]*)"', lambda name: f' id="{claim.id}-{name[1]}"' if name[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{claim.id}-", text).replace("xlink:href", "href")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    label = f"Figure: {claim.question}"
    look = 'role="img" stroke-linejoin="round" stroke-linecap="butt"'
    return Markup(f"{opening} {look}>{tag('title', label)}{rest}")


def page(found: Sequence[Found], title: str = "The lab") -> str:
    """Claims with what came of them, as one page."""
    chapters = {chapter: [each for each in found if each[0].chapter == chapter] for chapter in CHAPTERS}
    sections = [_chapter(chapter, several) for chapter, several in chapters.items() if several]
    counted = [verdict_word(claim, result) for claim, result in found]
    tally = ", ".join(f"{counted.count(each)} {each}" for each in dict.fromkeys(counted))
    opening = tag(
        "header",
        tag("h1", title),
        tag("p", f"{len(found)} claims: {tally}. regard {regard.__version__}."),
        tag("p", "Every number stands beside the Python that makes it; it begins with"),
        tag("pre", tag("code", IMPORT)),
        _contents(chapters),
    )
    return render_page(title, opening, *sections)


def errata_page(found: Sequence[Erratum]) -> str:
    """The sheets' wrong answers as one page."""
    return render_page(
        "Errata",
        tag("h1", "Errata"),
        tag("p", f"{len(found)} wrong answers of the source sheets, each with the numbers that refute it."),
        *(_erratum(each) for each in found),
    )


def _contents(chapters: dict[str, list[Found]]) -> Markup:
    parts = []
    for chapter, several in chapters.items():
        lines = [
            tag("li", tag("a", claim.question, href=f"#{claim.id}"), " ", _badge(verdict_word(claim, result)))
            for claim, result in several
        ]
        parts += (
            [tag("h3", tag("a", CHAPTERS[chapter], href=f"#chapter-{chapter}")), tag("ol", *lines)] if lines else []
        )
    return tag("nav", tag("h2", "Contents"), *parts)


def _chapter(chapter: str, several: list[Found]) -> Markup:
    return tag("section", tag("h2", CHAPTERS[chapter], id=f"chapter-{chapter}"), *(_claim(*each) for each in several))


def _claim(claim: Claim, result: Result | None) -> Markup:
    now = verdict_word(claim, result)
    facts = {"claim": claim.claim, "measures": claim.measures, "source": claim.source}
    parts: list[Markup] = [
        tag("h3", claim.question, " ", _badge(now)),
        Markup(mathml(claim.maths)),
        tag("dl", *(part for name, words in facts.items() for part in (tag("dt", name), tag("dd", words)))),
    ]
    if result is None:
        parts.append(tag("p", f"Not run yet: regard lab run {claim.id}", class_="note"))
    elif now == AGAIN:
        words = f"Its file has changed since it was run. To be run again: regard lab run {claim.id}"
        parts.append(tag("p", words, class_="note"))
    else:
        parts += _outcome(claim, result)
    return tag("article", *parts, id=claim.id)


def _outcome(claim: Claim, result: Result) -> list[Markup]:
    how = f"{result.seconds:.1f} s with {result.threads} threads, torch {result.torch_version}, {result.made}"
    return [
        tag("p", result.verdict.sentence, class_=f"verdict {result.verdict.word}"),
        tag("figure", inline_svg(claim, result.numbers)),
        *(_sheet(*each) for each in result.sheet(claim)),
        _numbers(result),
        tag("p", tag("code", result.command), f" took {how}.", class_="made"),
    ]


def _sheet(sheet: Sheet, verdict: Verdict) -> Markup:
    return _wrong(sheet.source, sheet.says, verdict.word, verdict.sentence, sheet.right)


def _erratum(found: Erratum) -> Markup:
    return tag(
        "article",
        tag("h3", found.question),
        _wrong(found.source, found.says, found.verdict, found.counter_example, found.right),
        tag("p", tag("code", found.command), class_="made"),
    )


def _wrong(source: str, says: str, verdict: str, counter_example: str, right: str) -> Markup:
    return tag(
        "aside",
        tag("p", tag("strong", f"Sheet {source} says: "), tag("q", says), " ", _badge(verdict)),
        tag("p", counter_example),
        tag("p", tag("strong", "Right is: "), right),
    )


def _badge(now: str) -> Markup:
    kind = "none" if now in (NOT_RUN, AGAIN) else now
    return tag("span", now, class_=f"badge {kind}")


def _numbers(result: Result) -> Markup:
    rows = []
    for name, value in result.numbers.items():
        code = tag("code", number_call(result, name))
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", written(value)), tag("td", code)))
    header = tag("tr", *(tag("th", name, scope="col") for name in ("number", "value", "made by")))
    return tag("table", tag("thead", header), tag("tbody", *rows))


def number_call(result: Result, name: str) -> str:
    """The Python that makes one number, whole."""
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{IMPORT}; {result.call}.numbers[{quoted}]"


def written(value: Any) -> Markup:
    """A number, a list or a table of them. What is shown short tells all its digits on hovering."""
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        lines = [tag("tr", *(tag("td", written(item)) for item in row)) for row in value]
        return _folded(tag("table", *lines, class_="values"), f"{len(value)} rows", sum(map(len, value)))
    if isinstance(value, list):
        parts = [part for item in value for part in (Markup(", "), written(item))][1:]
        return _folded(join_html(parts), f"{len(value)} values", len(value))
    if isinstance(value, dict):
        parts = [part for name, item in value.items() for part in (tag("dt", name), tag("dd", written(item)))]
        return _folded(tag("dl", *parts), f"{len(value)} names", len(value))
    if isinstance(value, float):
        short = f"{value:.6g}"
        return tag("span", short, title=None if float(short) == value else repr(value))
    return join_html([f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)])


def _folded(inside: Markup, summary: str, size: int) -> Markup:
    return inside if size <= LONG else tag("details", tag("summary", summary), inside)
