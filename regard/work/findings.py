"""What was found in a student's answer, in words and in terms of JSON."""

from dataclasses import dataclass
from typing import Any

from regard.base.maths import decimal

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


@dataclass(frozen=True)
class Finding:
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
        also = "".join(f" [{r},{c}]" for r, c in self.also)
        return (
            f"{self.place}: expected {decimal(self.expected)}{self._rounded()}, found {self.found}.\n"
            f"What it looks like: {self.name}. {self.words[0].upper()}{self.words[1:]}."
            + (f"\nAlso off in this step:{also}." if also else "")
        )

    def _rounded(self) -> str:
        digits = len(self.found.partition(".")[2])
        return f" ({self.expected:.{digits}f} to {digits} digits)" if 0 < digits < 6 and "e" not in self.found else ""


@dataclass(frozen=True)
class Review:
    """What was looked over, and every slip in order; the first is the one to put right."""

    name: str
    right: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        right = f"Right: {', '.join(self.right)}." if self.right else "Right: nothing so far."
        if self.ok:
            return f"{self.name}: every step is right.\n{right}"
        first, *more = map(str, self.findings)
        parts = [f"{self.name}: the first slip is at {self.findings[0].place}.", first, right]
        parts += [f"A further slip, judged on the numbers above it:\n{each}" for each in more]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The review in terms of JSON."""
        return {
            "problem": self.name,
            "ok": self.ok,
            "right": list(self.right),
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
