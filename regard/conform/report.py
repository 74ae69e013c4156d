"""What a check found: conventions by name, and every fact passed, failed, explained by another or not applicable."""

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from xml.etree import ElementTree

from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.conform.fact import Fact, Failure
from regard.conform.inputs import LONGEST

PASSED, FAILED, EXPLAINED, NOT_APPLICABLE = "passed", "failed", "explained", "not applicable"
MARKS = {PASSED: "ok", FAILED: "FAILED", EXPLAINED: "explained", NOT_APPLICABLE: "-"}


@dataclass(frozen=True)
class Result:
    """One fact, and how it went."""

    fact: Fact
    status: str
    reason: str = ""
    failure: Failure | None = None

    @property
    def name(self) -> str:
        return self.fact.name


@dataclass(frozen=True)
class Convention:
    """Something that attention leaves open: what was found, and whether it was declared so."""

    name: str
    value: str
    declared: str | None = None


@dataclass(frozen=True)
class Report:
    """The outcome of a check."""

    subject: str
    kind: str  # attention or decoder
    facts: tuple[Result, ...]
    conventions: tuple[Convention, ...]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(result for result in self.facts if result.status == FAILED)

    def __getitem__(self, name: str) -> Result:
        """The result of one fact."""
        for result in self.facts:
            if result.name == name:
                return result
        raise KeyError(f"no fact {name!r} was tested; there are: {', '.join(each.name for each in self.facts)}")

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines(100))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Lines of the width there is. Those of an example are whole: print with soft_wrap=True to keep them so."""
        yield from self._lines(options.max_width)

    def _lines(self, width: int) -> list[Text]:
        parts = [Text(f"{self.subject} ({self.kind})", style="bold")]
        for each in self.conventions:
            said = "" if each.declared is None else f" (declared: {each.declared})"
            parts += _folded(f"  {each.name:<18} ", f"{each.value}{said}", width)
        for result in self.failed:
            parts += [Text(), *_story(result, width)]
        counts = {status: sum(result.status == status for result in self.facts) for status in MARKS}
        broken = ", ".join(result.name for result in self.failed)
        held = "1 fact holds" if counts[PASSED] == 1 else f"{counts[PASSED]} facts hold"
        summary = f"{held}, {counts[FAILED]} broken" + (f" ({broken})" if broken else "")
        if counts[EXPLAINED]:
            summary += f", {counts[EXPLAINED]} explained by {'this' if counts[FAILED] == 1 else 'these'}"
        summary += f", {counts[NOT_APPLICABLE]} {'does' if counts[NOT_APPLICABLE] == 1 else 'do'} not apply"
        parts += [Text(), *_folded("", summary, width, "bold green" if self.ok else "bold red")]
        return parts

    def json(self) -> str:
        """The report as JSON text."""
        return json_format.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_dict(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "conventions": {each.name: each.value for each in self.conventions},
            "facts": [
                {
                    "name": result.name,
                    "status": result.status,
                    "reason": result.reason,
                    "student": result.fact.student,
                    "engineer": result.fact.engineer,
                    **(
                        {}
                        if result.failure is None
                        else {
                            "found": result.failure.found,
                            "cause": result.fact.cause,
                            "example": result.failure.example,
                            "declare": result.failure.declare,
                        }
                    ),
                }
                for result in self.facts
            ],
        }

    def junit(self) -> str:
        """The report as JUnit XML: one test case a fact."""
        suite = ElementTree.Element(
            "testsuite",
            name=f"regard check {self.subject}",
            tests=str(len(self.facts)),
            failures=str(len(self.failed)),
            skipped=str(sum(result.status in (EXPLAINED, NOT_APPLICABLE) for result in self.facts)),
        )
        for result in self.facts:
            case = ElementTree.SubElement(suite, "testcase", classname=self.subject, name=result.name)
            if result.failure is not None:
                failure = ElementTree.SubElement(case, "failure", message=_printable(result.failure.found))
                failure.text = _printable(explained(result))
            elif result.status != PASSED:
                ElementTree.SubElement(case, "skipped", message=_printable(result.reason))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(words: str) -> str:
    """Without the control characters that XML may not hold."""
    return "".join(letter for letter in words if letter in "\n\t" or letter >= " ")


def explained(result: Result) -> str:
    """The story of a broken fact as plain text."""
    return "\n".join(str(part) for part in _story(result))


def _folded(start: str, words: str, width: int, style: str = "") -> list[Text]:
    """Words after a start, folded under themselves."""
    lines = wrap(words, max(width - len(start), 20), break_long_words=False) or [""]
    return [Text(f"{start if not n else ' ' * len(start)}{line}", style=style) for n, line in enumerate(lines)]


def _cut(line: str) -> str:
    """A line of an example as it is printed: of a long one the beginning, and how much is left out."""
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]} ...  # {len(line) - LONGEST} more characters, which .json() has"


def _story(result: Result, width: int = 100) -> list[Text]:
    fact, failure = result.fact, result.failure
    assert failure is not None
    lines = [
        *_folded("✗ ", f"{fact.name}: {failure.found}", width, "bold red"),
        *_folded("  in a student's words   ", fact.student, width),
        *_folded("  in an engineer's words ", fact.engineer, width),
        *_folded("  usual causes           ", fact.cause, width),
    ]
    if failure.example:
        lines.append(Text("  smallest input found"))
        lines += [Text(f"    {_cut(line)}", style="cyan") for line in failure.example.splitlines()]
    if failure.declare:
        lines += _folded("  if it is meant so      ", f"declare {failure.declare}", width)
    return lines
