"""The report of a check: the conventions, and for every fact whether it passed, failed or does not apply."""

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from xml.etree import ElementTree

from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.base.display import TextDisplay
from regard.conform.fact import Fact, Failure
from regard.conform.inputs import MAX_LINE

PASSED, FAILED, EXPLAINED, NOT_APPLICABLE = "passed", "failed", "explained", "not applicable"


@dataclass(frozen=True)
class FactResult:
    """One fact and its result."""

    fact: Fact
    status: str  # "passed", "failed", "explained" (by another broken fact) or "not applicable"
    reason: str = ""
    failure: Failure | None = None

    @property
    def name(self) -> str:
        return self.fact.name


@dataclass(frozen=True)
class Convention:
    """A choice that attention leaves open: the measured value, and the declared one."""

    name: str
    value: str
    declared: str | None = None


@dataclass(frozen=True)
class Report(TextDisplay):
    """The result of a check. `print` it to read it."""

    subject: str
    kind: str  # attention or decoder
    facts: tuple[FactResult, ...]
    conventions: tuple[Convention, ...]

    @property
    def ok(self) -> bool:
        """Whether no fact failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[FactResult, ...]:
        """The results of the facts that failed."""
        return tuple(result for result in self.facts if result.status == FAILED)

    def __getitem__(self, name: str) -> FactResult:
        """The result of one fact."""
        for result in self.facts:
            if result.name == name:
                return result
        raise KeyError(f"no fact {name!r} was tested; tested were: {', '.join(each.name for each in self.facts)}")

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines(100))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Lines of the width of the console. Example lines are not wrapped: print with soft_wrap=True."""
        yield from self._lines(options.max_width)

    def _lines(self, width: int) -> list[Text]:
        parts = [Text(f"{self.subject} ({self.kind})", style="bold")]
        for each in self.conventions:
            declared = "" if each.declared is None else f" (declared: {each.declared})"
            parts += _wrap(f"  {each.name:<18} ", f"{each.value}{declared}", width)
        for result in self.failures:
            parts += [Text(), *_failure_lines(result, width)]
        statuses = (PASSED, FAILED, EXPLAINED, NOT_APPLICABLE)
        passed, failed, explained, other = (sum(each.status == status for each in self.facts) for status in statuses)
        names = ", ".join(result.name for result in self.failures)
        summary = f"{passed} fact{'s' * (passed != 1)} passed, {failed} failed" + (f" ({names})" if names else "")
        if explained:
            summary += f", {explained} explained by {'this' if failed == 1 else 'these'}"
        summary += f", {other} not applicable"
        return [*parts, Text(), *_wrap("", summary, width, "bold green" if self.ok else "bold red")]

    def json(self) -> str:
        """The report as JSON text."""
        return json_format.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_dict(self) -> dict[str, object]:
        """The report as a dictionary of plain values."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "conventions": {each.name: each.value for each in self.conventions},
            "facts": [_result_dict(result) for result in self.facts],
        }

    def junit(self) -> str:
        """The report as JUnit XML: one test case per fact."""
        suite = ElementTree.Element(
            "testsuite",
            name=f"regard check {self.subject}",
            tests=str(len(self.facts)),
            failures=str(len(self.failures)),
            skipped=str(sum(result.status in (EXPLAINED, NOT_APPLICABLE) for result in self.facts)),
        )
        for result in self.facts:
            case = ElementTree.SubElement(suite, "testcase", classname=self.subject, name=result.name)
            if result.failure is not None:
                failure = ElementTree.SubElement(case, "failure", message=_printable(result.failure.found))
                failure.text = _printable(failure_text(result))
            elif result.status != PASSED:
                ElementTree.SubElement(case, "skipped", message=_printable(result.reason))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _result_dict(result: FactResult) -> dict[str, object]:
    fact, failure = result.fact, result.failure
    values: dict[str, object] = {"name": fact.name, "status": result.status, "reason": result.reason}
    values |= {"student": fact.student, "engineer": fact.engineer}
    if failure is not None:
        values |= {"found": failure.found, "cause": fact.cause, "example": failure.example, "declare": failure.declare}
    return values


def _printable(words: str) -> str:
    """Without the control characters that XML does not allow."""
    return "".join(letter for letter in words if letter in "\n\t" or letter >= " ")


def failure_text(result: FactResult) -> str:
    """The description of a failed fact as plain text."""
    return "\n".join(str(part) for part in _failure_lines(result))


def _wrap(start: str, words: str, width: int, style: str = "") -> list[Text]:
    """Words after a label, wrapped and indented by the width of the label."""
    lines = wrap(words, max(width - len(start), 20), break_long_words=False) or [""]
    return [Text(f"{start if not n else ' ' * len(start)}{line}", style=style) for n, line in enumerate(lines)]


def _truncate(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    return f"{line[:MAX_LINE]} ...  # {len(line) - MAX_LINE} more characters, see .json()"


def _failure_lines(result: FactResult, width: int = 100) -> list[Text]:
    fact, failure = result.fact, result.failure
    assert failure is not None
    lines = [
        *_wrap("✗ ", f"{fact.name}: {failure.found}", width, "bold red"),
        *_wrap("  for a student     ", fact.student, width),
        *_wrap("  for an engineer   ", fact.engineer, width),
        *_wrap("  usual causes      ", fact.cause, width),
    ]
    if failure.example:
        lines.append(Text("  smallest input found"))
        lines += [Text(f"    {_truncate(line)}", style="cyan") for line in failure.example.splitlines()]
    if failure.declare:
        lines += _wrap("  if on purpose     ", f"declare {failure.declare}", width)
    return lines
