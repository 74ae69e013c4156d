"""The review of a student's answer, as text and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from regard.base.formulas import decimal

STEP_NOUNS = {
    "q": "the queries",
    "k": "the keys",
    "v": "the values",
    "scores": "the scores",
    "scaled": "the scaled scores",
    "weights": "the weights",
    "output": "the outputs",
    "result": "the result",
}

MAX_LISTED = 9  # further wrong entries that are listed one by one


@dataclass(frozen=True)
class ReviewComment:
    """A mistake in one step of a student's calculation.

    step         name of the step
    head         number of the head, counted from 1; None if there is only one
    row, column  position of the first wrong entry, counted from 1
    expected     the number that should be there, calculated from the student's earlier steps
    found        what the student wrote there
    mistake      name of the mistake
    explanation  sentence for the student
    also         the further wrong entries of the step as (row, column), counted from 1
    """

    step: str
    head: int | None
    row: int  # counted from 1, as the matrix is written
    column: int
    expected: float
    found: str
    mistake: str
    explanation: str
    also: tuple[tuple[int, int], ...]  # further wrong entries of this step

    @property
    def location(self) -> str:
        """The step and the entry of the mistake, such as `output[3,1]`, and the head if there are several."""
        head = "" if self.head is None else f" of head {self.head}"
        return f"{self.step}[{self.row},{self.column}]{head}"

    def __str__(self) -> str:
        also = "".join(f" [{r},{c}]" for r, c in self.also[:MAX_LISTED])
        more = len(self.also) - MAX_LISTED
        also += f" and {more} more" if more > 0 else ""
        return (
            f"{self.location}: expected {self._format_expected()}, found {self.found}.\n"
            f"Probable mistake: {self.mistake}. {self.explanation[0].upper()}{self.explanation[1:]}."
            + (f"\nAlso wrong in this step:{also}." if also else "")
        )

    def _format_expected(self) -> str:
        """Format the expected number: short, such as 2.5, if that is exact, otherwise with six decimals.

        If the student wrote one to five decimals, the number rounded to as many decimals is added.
        """
        short = f"{self.expected:g}"
        text = short if float(short) == self.expected and "e" not in short else decimal(self.expected)
        digits = len(self.found.partition(".")[2])
        rounded = f"{self.expected:.{digits}f}"
        if not 0 < digits < 6 or "e" in self.found or float(rounded) == self.expected:
            return text
        return f"{text} ({rounded} to {digits} {'digit' if digits == 1 else 'digits'})"


@dataclass(frozen=True)
class Review:
    """The review of a student's calculation.

    correct          names of the correct steps
    carried_forward  names of the steps that are calculated correctly, but from the wrong numbers of an earlier step
    comments         all mistakes in order; the first is the one to correct first
    """

    problem: str
    scaled: bool
    correct: tuple[str, ...]
    carried_forward: tuple[str, ...]  # steps without a mistake of their own that use the numbers of an earlier mistake
    comments: tuple[ReviewComment, ...]

    @property
    def ok(self) -> bool:
        return not self.comments

    def __str__(self) -> str:
        correct = f"Correct: {', '.join(self.correct)}." if self.correct else "Correct: nothing so far."
        name = f"{self.problem} ({'scaled' if self.scaled else 'not scaled'})"
        if self.ok:
            return f"{name}: every step that is written is correct.\n{correct}"
        first, *more = map(str, self.comments)
        parts = [f"{name}: the first mistake is at {self.comments[0].location}.", first, correct]
        parts += [f"Follows from the mistake: {', '.join(self.carried_forward)}."] if self.carried_forward else []
        parts += [f"Another mistake, given the numbers above it:\n{each}" for each in more]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the review as values that JSON can represent."""
        return {
            "problem": self.problem,
            "scaled": self.scaled,
            "ok": self.ok,
            "correct": list(self.correct),
            "carried_forward": list(self.carried_forward),
            "mistakes": [asdict(comment) for comment in self.comments],
        }
