"""Errata: wrong answers of the course sheets, quoted word for word, the numbers that refute each, and what is right."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regard.lab.templates import evaluate, render
from regard.lab.verdict import REFUTED, SUPPORTED, UNCLEAR, Numbers, Verdict, judge_finite

if TYPE_CHECKING:
    from regard.lab.results import Result

FILE = Path(__file__).parent / "sheets" / "errata.toml"


@dataclass(frozen=True, kw_only=True)
class WrongAnswer:
    """A wrong or partly wrong answer of an exercise sheet, an entry of `sheets/errata.toml`.

    claim    id of the lab claim whose numbers refute the answer
    source   the sheet and the exercise, such as "000 1.1b"
    place    where on the sheet the quotation is
    quote    the answer, word for word
    says     the answer in plain words
    status   "wrong", "partly right", "unsupported" (the reasons that the answer gives do not show it), or "slip" (a
             minor inaccuracy)
    refuted  a jinja2 expression on the numbers n of a run that is true if the numbers contradict the answer
    counter  the counter-example, a jinja2 template on the numbers n
    right    the correct answer
    when     a jinja2 expression on n that is true if the run used the setup that the answer is about
    """

    claim: str
    source: str
    place: str
    quote: str
    says: str
    status: str
    refuted: str
    counter: str
    right: str
    when: str = "true"

    def applies(self, numbers: Numbers) -> bool:
        """Return whether the measured numbers are from a setup to which the wrong answer applies."""
        return bool(evaluate(self.when, n=numbers))

    def verdict(self, numbers: Numbers) -> Verdict:
        """Judge this wrong answer by measured numbers. The `sentence` of the verdict is the counter-example."""
        word = REFUTED if evaluate(self.refuted, n=numbers) else SUPPORTED
        return Verdict(word, render(self.counter, n=numbers))


@cache
def wrong_answers() -> tuple[WrongAnswer, ...]:
    """Return all wrong answers of the exercise sheets, in the order of `sheets/errata.toml`."""
    return tuple(WrongAnswer(**each) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["erratum"])


def judge_wrong_answers(claim: str, numbers: Numbers, verdict: Verdict) -> list[tuple[WrongAnswer, Verdict]]:
    """Return the wrong answers that belong to a lab claim, each with the verdict of the measured numbers.

    Answers about another setup are left out. The list is empty if the verdict on the claim is "unclear".

    claim    id of the claim
    numbers  the measured numbers of the claim, by name
    verdict  the verdict on the claim
    """
    own = [answer for answer in wrong_answers() if answer.claim == claim and verdict.word != UNCLEAR]
    return [(answer, judge_finite(answer.verdict, numbers)) for answer in own if answer.applies(numbers)]


@dataclass(frozen=True)
class Erratum:
    """A wrong answer of an exercise sheet with the verdict on it, which should be "refuted".

    The fields that are not listed are those of `WrongAnswer`.

    id, question     id and question of the lab claim whose numbers decide
    verdict          the word of the verdict on the wrong answer
    counter_example  the counter-example with its numbers
    command          the command line that reproduces the numbers
    """

    id: str
    question: str
    source: str
    place: str
    quote: str
    says: str
    status: str
    verdict: str
    counter_example: str
    right: str
    command: str

    @property
    def refuted(self) -> bool:
        return self.verdict == REFUTED


def errata(results: "Iterable[Result]") -> list[Erratum]:
    """Return an erratum for every wrong answer of the exercise sheets that these lab results can judge."""
    return [
        Erratum(
            id=result.id,
            question=result.claim.question,
            source=answer.source,
            place=answer.place,
            quote=answer.quote,
            says=answer.says,
            status=answer.status,
            verdict=verdict.word,
            counter_example=verdict.sentence,
            right=answer.right,
            command=result.command,
        )
        for result in results
        for answer, verdict in result.wrong_answers
    ]
