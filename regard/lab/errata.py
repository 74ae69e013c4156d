"""The sheets' wrong answers: what each says, the numbers that refute it, and what is right."""

from collections.abc import Iterable
from dataclasses import dataclass

from regard.lab.claim import REFUTED, Claim
from regard.lab.results import Result


@dataclass(frozen=True)
class Erratum:
    """One wrong answer. `verdict` is what a run said of it: were it not refuted, it would be no erratum."""

    id: str
    question: str
    source: str
    says: str
    verdict: str
    counter_example: str
    right: str
    command: str

    @property
    def stands(self) -> bool:
        return self.verdict == REFUTED


def errata(found: Iterable[tuple[Claim, Result]]) -> list[Erratum]:
    """Every wrong answer that these claims are about, judged by the numbers of these runs."""
    return [
        Erratum(
            id=claim.id,
            question=claim.question,
            source=sheet.source,
            says=sheet.says,
            verdict=verdict.word,
            counter_example=verdict.sentence,
            right=sheet.right,
            command=result.command,
        )
        for claim, result in found
        for sheet, verdict in result.sheet(claim)
    ]
