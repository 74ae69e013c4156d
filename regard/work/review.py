"""What was found in a student's answer, in words and in terms of JSON."""

from dataclasses import dataclass
from typing import Any

from regard.base.formulas import decimal

PLACES = {
    "q": "the queries",
    "k": "the keys",
    "v": "the values",
    "scores": "the scores",
    "scaled": "the scaled scores",
    "weights": "the weights",
    "output": "the outputs",
    "result": "the result",
}

MOST_NAMED = 9  # further entries that are named one by one


@dataclass(frozen=True)
class ReviewComment:
    """One slip: at which step and entry, what was expected and found there, and what it looks like."""

    step: str
    head: int | None
    row: int  # counted from 1, as the matrix is written
    column: int
    expected: float
    found: str
    name: str
    words: str
    also: tuple[tuple[int, int], ...]  # further entries of this step that are off

    @property
    def place(self) -> str:
        """`output[3,1]`, and the head where there are several."""
        head = "" if self.head is None else f" of head {self.head}"
        return f"{self.step}[{self.row},{self.column}]{head}"

    def __str__(self) -> str:
        also = "".join(f" [{r},{c}]" for r, c in self.also[:MOST_NAMED])
        more = len(self.also) - MOST_NAMED
        also += f" and {more} more" if more > 0 else ""
        return (
            f"{self.place}: expected {self._told()}{self._rounded()}, found {self.found}.\n"
            f"What it looks like: {self.name}. {self.words[0].upper()}{self.words[1:]}."
            + (f"\nAlso off in this step:{also}." if also else "")
        )

    def _told(self) -> str:
        """What was expected: 2.5 where that is all of it, six decimals otherwise."""
        short = f"{self.expected:g}"
        return short if float(short) == self.expected and "e" not in short else decimal(self.expected)

    def _rounded(self) -> str:
        digits = len(self.found.partition(".")[2])
        rounded = f"{self.expected:.{digits}f}"
        if not 0 < digits < 6 or "e" in self.found or float(rounded) == self.expected:
            return ""
        return f" ({rounded} to {digits} {'digit' if digits == 1 else 'digits'})"


@dataclass(frozen=True)
class Review:
    """What was looked over, and every slip in order; the first is the one to put right."""

    name: str
    right: tuple[str, ...]
    follows: tuple[str, ...]  # steps without a slip of their own whose numbers come of an earlier one
    findings: tuple[ReviewComment, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        right = f"Right: {', '.join(self.right)}." if self.right else "Right: nothing so far."
        if self.ok:
            return f"{self.name}: every step that is written is right.\n{right}"
        first, *more = map(str, self.findings)
        parts = [f"{self.name}: the first slip is at {self.findings[0].place}.", first, right]
        parts += [f"Follows from the slip: {', '.join(self.follows)}."] if self.follows else []
        parts += [f"A further slip, judged on the numbers above it:\n{each}" for each in more]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The review in terms of JSON."""
        return {
            "problem": self.name,
            "ok": self.ok,
            "right": list(self.right),
            "follows": list(self.follows),
            "slips": [
                {
                    "step": each.step,
                    "head": each.head,
                    "entry": [each.row, each.column],
                    "expected": each.expected,
                    "found": each.found,
                    "slip": each.name,
                    "words": each.words,
                    "also": [list(entry) for entry in each.also],
                }
                for each in self.findings
            ],
        }
