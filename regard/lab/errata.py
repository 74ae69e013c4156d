"""Errata: the sheets' wrong answers, the numbers that refute each, and the correct answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from regard.lab.claim import REFUTED
from regard.lab.results import Result


@dataclass(frozen=True)
class Erratum:
    """One wrong answer and the verdict of a run on it; an erratum must be refuted."""

    id: str
    question: str
    source: str
    says: str
    verdict: str
    counter_example: str
    right: str
    command: str

    @property
    def refuted(self) -> bool:
        return self.verdict == REFUTED


def errata(results: Iterable[Result]) -> list[Erratum]:
    """Judge every wrong answer of the claims with the numbers of these results."""
    return [
        Erratum(
            id=result.id,
            question=result.claim.question,
            source=answer.source,
            says=answer.says,
            verdict=verdict.word,
            counter_example=verdict.sentence,
            right=answer.right,
            command=result.command,
        )
        for result in results
        for answer, verdict in result.wrong_answers
    ]
