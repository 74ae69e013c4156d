"""The lab as one HTML page: questions, formulas, verdicts, figures, and numbers with the Python that computes them."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import regard
from regard.base.formulas import mathml
from regard.base.html import Markup, join_html, render_page, tag
from regard.base.markdown import markdown_html, typeset_symbols
from regard.lab.answers import SheetAnswer
from regard.lab.claim import CHAPTERS, Claim, claims
from regard.lab.errata import Erratum, errata
from regard.lab.results import NOT_RUN, OUTDATED, Result, verdict_word
from regard.lab.verdict import REFUTED, Numbers

IMPORT = "from regard.lab.claim import claims"
MOST_VALUES = 24  # longer lists are folded
ClaimResult = tuple[Claim, Result | None]


def figure_svg(claim: Claim, numbers: Numbers, fonts: str = "path") -> str:
    """Draw a lab claim's figure and return it as SVG text; the same numbers always give the same text.

    numbers  the measured numbers of the claim, by name
    fonts    "path" draws letters as paths, so that no font is needed; "none" leaves them as text in the
             viewer's fonts
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": claim.id, "svg.fonttype": fonts}):
        claim.draw(numbers).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def inline_svg(claim: Claim, numbers: Numbers) -> Markup:
    """Draw a lab claim's figure and return it as an <svg> element with a title for screen readers."""
    text = figure_svg(claim, numbers)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.S)
    # ids must be unique in a page with several figures: prefix those in use with the claim, remove the others
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r'\sid="([^"]*)"', lambda name: f' id="{claim.id}-{name[1]}"' if name[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{claim.id}-", text).replace("xlink:href", "href")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    look = 'role="img" stroke-linejoin="round" stroke-linecap="butt"'
    return Markup(f"{opening} {look}>{tag('title', f'Figure: {claim.question}')}{rest}")


def claims_page(found: Sequence[ClaimResult], title: str = "The lab") -> str:
    """Return an HTML page that shows lab claims with their results."""
    chapters = {chapter: [each for each in found if each[0].chapter == chapter] for chapter in CHAPTERS}
    words = [verdict_word(result) for _, result in found]
    counts = ", ".join(f"{words.count(each)} {each}" for each in dict.fromkeys(words))
    header = tag(
        "header",
        tag("h1", title),
        tag("p", f"{len(found)} claims: {counts}. regard {regard.__version__}."),
        tag("p", "Next to every number is the Python that computes it. It starts with"),
        tag("pre", tag("code", IMPORT)),
        _contents(chapters),
    )
    sections = (_chapter(chapter, several) for chapter, several in chapters.items() if several)
    return render_page(title, header, *sections)


def errata_page(found: Sequence[Erratum]) -> str:
    """Return an HTML page that lists wrong answers of the exercise sheets, each with the numbers that refute it."""
    return render_page(
        "Errata",
        tag("h1", "Errata"),
        tag("p", f"{len(found)} wrong answers of the source sheets, each with the numbers that refute it."),
        *(_erratum(each) for each in found),
    )


def _contents(chapters: dict[str, list[ClaimResult]]) -> Markup:
    parts = []
    for chapter, several in chapters.items():
        lines = [
            tag("li", tag("a", typeset_symbols(claim.question), href=f"#{claim.id}"), " ", _badge(verdict_word(result)))
            for claim, result in several
        ]
        if lines:
            parts += [tag("h3", tag("a", CHAPTERS[chapter], href=f"#chapter-{chapter}")), tag("ol", *lines)]
    return tag("nav", tag("h2", "Contents"), *parts)


def _chapter(chapter: str, several: list[ClaimResult]) -> Markup:
    return tag("section", tag("h2", CHAPTERS[chapter], id=f"chapter-{chapter}"), *(_claim(*each) for each in several))


def _claim(claim: Claim, result: Result | None) -> Markup:
    now = verdict_word(result)
    facts = {"claim": claim.claim, "measures": claim.measures, "source": claim.source}
    parts: list[Markup] = [
        tag("h3", typeset_symbols(claim.question), " ", _badge(now)),
        Markup(mathml(claim.formula)),
        tag(
            "dl",
            *(part for name, words in facts.items() for part in (tag("dt", name), tag("dd", typeset_symbols(words)))),
        ),
    ]
    if result is None:
        parts.append(tag("p", f"Not run yet: regard lab run {claim.id}", class_="note"))
    elif now == OUTDATED:
        words = f"Its code has changed since it was run. Run it again: regard lab run {claim.id}"
        parts.append(tag("p", words, class_="note"))
    else:
        parts += _outcome(claim, result)
    return tag("article", *parts, id=claim.id)


def _outcome(claim: Claim, result: Result) -> list[Markup]:
    how = f"{result.seconds:.1f} s with {result.threads} threads, torch {result.torch_version}, {result.created}"
    return [
        tag("p", typeset_symbols(result.verdict.sentence), class_=f"verdict {result.verdict.word}"),
        tag("figure", inline_svg(claim, result.numbers)),
        *(_wrong_answer(each) for each in errata([result])),
        _numbers(result),
        tag("p", tag("code", result.command), f" took {how}.", class_="made"),
    ]


def _erratum(found: Erratum) -> Markup:
    command = tag("p", tag("code", found.command), class_="made")
    return tag("article", tag("h3", typeset_symbols(found.question)), _wrong_answer(found), command)


def _wrong_answer(found: Erratum) -> Markup:
    return tag(
        "aside",
        tag("p", tag("strong", f"Sheet {found.source}, ", typeset_symbols(found.place), ": "), tag("q", found.quote)),
        tag("p", _badge(found.verdict, found.status), " ", typeset_symbols(found.counter_example)),
        tag("p", tag("strong", "Correct: "), typeset_symbols(found.right)),
    )


def answer_markdown(place: str, answer: SheetAnswer, result: Callable[[str], Result]) -> str:
    """Return the answer to one exercise-sheet question as Markdown.

    The text also has the errata of this question, the command that computes the answer, and where else to look.

    place   the place of the question, such as "000 1.1a"
    result  function that returns the result of the lab claim with a given id
    """
    errata = "".join(
        f"\n\n> {each.quote}\n\nSheet {each.source}, {each.place} ({each.status}). {each.counter_example} "
        f"Correct: {each.right}"
        for each in answer.errata(place, result)
    )
    view = f"\n\nSee also: {answer.view}" if answer.view else ""
    return f"# Sheet {place}: {answer.questions[place]}\n\n{answer.body(result)}{errata}\n\n`{answer.command}`{view}"


def answers_page(title: str, shown: Sequence[tuple[str, SheetAnswer]], result: Callable[[str], Result]) -> str:
    """Return an HTML page with the answers to exercise-sheet questions.

    shown   pairs of the place of a question, such as "000 1.1a", and its answer
    result  function that returns the result of the lab claim with a given id
    """
    contents = [
        tag("li", tag("a", typeset_symbols(f"{place}: {answer.questions[place]}"), href=f"#{_anchor(place)}"))
        for place, answer in shown
    ]
    head = [tag("h1", title)] + ([tag("nav", tag("ul", *contents))] if len(contents) > 1 else [])
    figures: dict[str, str] = {}  # the question that shows a figure: once, because its ids must be unique in the page
    return render_page(title, *head, *(_answer(*each, result, figures) for each in shown))


def _anchor(place: str) -> str:
    return "question-" + place.replace(" ", "-")


def _answer(place: str, answer: SheetAnswer, result: Callable[[str], Result], figures: dict[str, str]) -> Markup:
    name = answer.figure
    shown = figures.setdefault(name, place)
    figure: list[Markup] = []
    if name and shown == place:
        figure = [tag("figure", inline_svg(claims()[name], result(name).numbers))]
    elif name:
        figure = [tag("p", "Figure: see ", tag("a", shown, href=f"#{_anchor(shown)}"), ".")]
    view = [tag("p", "See also: ", answer.view, class_="made")] if answer.view else []
    return tag(
        "article",
        tag("h2", typeset_symbols(f"{place}: {answer.questions[place]}")),
        markdown_html(answer.body(result)),
        *figure,
        *(_wrong_answer(each) for each in answer.errata(place, result)),
        tag("p", tag("code", answer.command), class_="made"),
        *view,
        id=_anchor(place),
    )


def _badge(now: str, status: str = "") -> Markup:
    """Return an HTML badge with a verdict.

    now     the verdict's word
    status  status of a wrong answer, such as "partly right", which the badge shows instead of "refuted"
    """
    kind = "none" if now in (NOT_RUN, OUTDATED) else now
    return tag("span", status if status and now == REFUTED else now, class_=f"badge {kind}")


def _numbers(result: Result) -> Markup:
    rows = []
    for name, value in result.numbers.items():
        code = tag("code", number_call(result, name))
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", value_html(value)), tag("td", code)))
    header = tag("tr", *(tag("th", name, scope="col") for name in ("number", "value", "Python")))
    return tag("table", tag("thead", header), tag("tbody", *rows))


def number_call(result: Result, name: str) -> str:
    """Return Python code that recomputes one measured number of a claim's result.

    name  the name of the number
    """
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{IMPORT}; {result.call}.numbers[{quoted}]"


def value_html(value: Any) -> Markup:
    """Convert a measured value of a claim (a number, a list, a table or a dictionary) to HTML.

    Long lists are collapsed. A number that is shown rounded has all digits in its tooltip.
    """
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        lines = [tag("tr", *(tag("td", value_html(item)) for item in row)) for row in value]
        return _fold(tag("table", *lines, class_="values"), f"{len(value)} rows", sum(map(len, value)))
    if isinstance(value, list):
        parts = [part for item in value for part in (Markup(", "), value_html(item))][1:]
        return _fold(join_html(parts), f"{len(value)} values", len(value))
    if isinstance(value, dict):
        parts = [part for name, item in value.items() for part in (tag("dt", name), tag("dd", value_html(item)))]
        return _fold(tag("dl", *parts), f"{len(value)} names", len(value))
    if isinstance(value, float):
        short = f"{value:.6g}"
        return tag("span", short, title=None if float(short) == value else repr(value))
    return join_html([f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)])


def _fold(inside: Markup, summary: str, size: int) -> Markup:
    return inside if size <= MOST_VALUES else tag("details", tag("summary", summary), inside)
