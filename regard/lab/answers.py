"""Answers to the questions of the course sheets: Markdown files that take their numbers from the claims of the lab.

A file in `sheets/answers` answers one question, or the same question of several sheets. Its header is TOML between
two lines of +++:

    questions  the text of each question; its key is the number of the sheet and of the question: "000 1.1a" = "..."
    claims     claims whose runs measure the numbers of the answer
    figure     the claim whose figure is shown [default: the first]; "" shows none
    command    the command line that computes the answer, such as "regard lab run beta"
    view       where else to look: another command, an exercise, a page

The sections `## Definition`, `## Formula` ($$ LaTeX $$ and sizes), `## Why` and `## Measured` follow. The text is a
jinja2 template: `n("beta")` returns the numbers of a claim, `setup("beta")` its settings, and `finding("beta")` the
sentence of its verdict. `estimate("several-heads", "accuracy")` returns means over seeds, which are printed with
their confidence intervals. `measured("positions-when")` returns the section *Measured* of another file.
"""

import re
import tomllib
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.base.errors import ConfigError, UnknownNameError
from regard.base.formulas import parse_latex, text
from regard.lab.claim import claims
from regard.lab.errata import Erratum, errata, wrong_answers
from regard.lab.results import Result
from regard.lab.seeds_interval import estimates
from regard.lab.templates import render

FOLDER = Path(__file__).parent / "sheets"
SECTIONS = ("Definition", "Formula", "Why", "Measured")
PLACE = re.compile(r"(\d+)\s+(.+)")


@dataclass(frozen=True)
class SheetAnswer:
    """The answer to questions of a course's exercise sheets: one Markdown file with a template.

    name       the file's name without its suffix
    questions  the text of each question; its key is the number of the sheet and of the question, such as "000 1.1a"
    claims     ids of the lab claims whose runs measure the numbers of the answer
    figure     id of the claim whose figure is shown; empty for none
    command    the command line that computes the answer, such as "regard lab run beta"
    view       where else to look: another command, an exercise, a page
    sections   the template of each section; its key is the heading
    """

    name: str
    questions: dict[str, str]
    claims: tuple[str, ...]
    figure: str
    command: str
    view: str
    sections: dict[str, str]

    @property
    def formulas(self) -> list[str]:
        """The LaTeX formulas of the section `Formula`."""
        return re.findall(r"\$\$(.+?)\$\$", self.sections.get("Formula", ""), re.S)

    def body(self, result: Callable[[str], Result]) -> str:
        """Return the answer as Markdown, with measured numbers and findings filled in.

        result  function that returns the result of the lab claim with a given id
        """
        values: dict[str, Callable[..., Any]] = {
            "n": lambda name: result(name).numbers,
            "setup": lambda name: result(name).setup,
            "finding": lambda name: result(name).verdict.sentence,
            "estimate": lambda name, key: estimates(result(name).numbers, key),
            "measured": lambda name: render(_by_name(name).sections["Measured"], **values),
        }
        parts = [f"## {title}\n\n{part}" for title, part in self.sections.items()]
        return render("\n\n".join(parts), **values)

    def errata(self, place: str, result: Callable[[str], Result]) -> list[Erratum]:
        """Return the errata of the exercise sheets that concern one of the questions of this answer.

        If no erratum concerns the question at `place`, return the errata of all questions of this answer, which are the
        same question on other sheets.

        place   number of the sheet and of the question, such as "000 1.1a"
        result  function that returns the result of the lab claim with a given id
        """
        several = [answer for answer in wrong_answers() if _concerns(answer.source, self.questions)]
        found = errata(result(name) for name in dict.fromkeys(answer.claim for answer in several))
        found = [each for each in found if _concerns(each.source, self.questions)]
        return [each for each in found if _concerns(each.source, {place})] or found


def _concerns(source: str, questions: Container[str]) -> bool:
    """Return whether the source of an erratum, such as "000 1.1c, 001 1a", names one of these questions."""
    return any(place in questions for place in source.split(", "))


def _by_name(name: str) -> SheetAnswer:
    """Return the answer in the file `sheets/answers/NAME.md`."""
    return next(answer for answer in sheet_answers() if answer.name == name)


@cache
def sheet_answers() -> tuple[SheetAnswer, ...]:
    """Return the answers of all exercise sheets, one for each answer file."""
    return tuple(_read(path) for path in sorted((FOLDER / "answers").glob("*.md")))


def _read(path: Path) -> SheetAnswer:
    _, header, body = path.read_text(encoding="utf-8").split("+++\n", 2)
    fields = tomllib.loads(header)
    titles = re.split(r"^## (.+)\n", body, flags=re.M)[1:]
    sections = {title: part.strip() for title, part in zip(titles[::2], titles[1::2], strict=True)}
    figure = fields.get("figure", fields["claims"][0])
    unknown = [name for name in (*fields["claims"], figure) if name and name not in claims()]
    if unknown or list(sections) != [title for title in SECTIONS if title in sections]:
        raise ConfigError(f"{path.name} has unknown claims or sections: {unknown}, {list(sections)}")
    return SheetAnswer(
        name=path.stem,
        questions=fields["questions"],
        claims=tuple(fields["claims"]),
        figure=figure,
        command=fields["command"],
        view=fields.get("view", ""),
        sections=sections,
    )


@cache
def sheet_titles() -> dict[str, str]:
    """Return the titles of all exercise sheets; the keys are the numbers of the sheets, such as "000"."""
    titles: dict[str, str] = tomllib.loads((FOLDER / "sheets.toml").read_text(encoding="utf-8"))["sheets"]
    return titles


def sheet_questions(sheet: str) -> dict[str, SheetAnswer]:
    """Return the answers to the questions of an exercise sheet, in the order of the sheet.

    The keys of the dictionary are the sheet and the number of each question, such as "000 1.1a".

    sheet  number of the sheet, such as "000"
    """
    if sheet not in sheet_titles():
        raise UnknownNameError(f"there is no sheet {sheet!r}; there are {', '.join(sheet_titles())}")
    found = {place: answer for answer in sheet_answers() for place in answer.questions if place.startswith(f"{sheet} ")}
    return dict(sorted(found.items(), key=lambda each: _natural(each[0])))


def _natural(place: str) -> list[tuple[bool, int, str]]:
    """Return a sort key for numbers of questions: 12.9 comes before 12.10, and "review" before numbered questions."""
    parts = re.findall(r"\d+|[^\d\s.]+", place)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def find_answer(place: str) -> tuple[str, SheetAnswer]:
    """Find the answer to a question. Returns the key of the question in `sheet_questions`, and the answer.

    place  number of the sheet and of the question, such as "002 1.2a"; case, hyphens, parentheses and additional spaces
           do not matter
    """
    match = PLACE.fullmatch(place.strip())
    questions = sheet_questions(match[1]) if match else {}
    for known, answer in questions.items():
        if _letters(known) == _letters(place):
            return known, answer
    if not match:
        raise UnknownNameError(f"a question is a sheet and a number, such as 002 1.2a, not {place!r}")
    numbers = ", ".join(known.split(" ", 1)[1] for known in questions)
    raise UnknownNameError(f"sheet {match[1]} has no question {match[2]!r}; it has {numbers}")


def _letters(place: str) -> str:
    """Normalise the number of a question: lower case, without spaces, hyphens and parentheses."""
    return re.sub(r"[\s()-]", "", place.lower())


def formulas_as_text(markdown: str) -> str:
    """Replace the LaTeX formulas of a Markdown text by code blocks with plain-text formulas."""
    return re.sub(r"\$\$(.+?)\$\$", lambda match: f"```\n{text(parse_latex(match[1]))}\n```", markdown, flags=re.S)
