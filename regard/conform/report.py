"""`Report`: the measured conventions, and for every fact whether it passed, failed or does not apply."""

import json as json_format
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from xml.etree import ElementTree  # only used to write XML  # nosec B405

from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.base.display import TextDisplay
from regard.conform.fact import Fact, Failure
from regard.conform.inputs import MAX_LINE

PASSED, FAILED, DIFFERS, EXPLAINED, NOT_APPLICABLE = "passed", "failed", "differs", "explained", "not applicable"


@dataclass(frozen=True)
class FactResult:
    """The result of testing one fact.

    status   "passed", "failed", "differs" (from our policy), "explained" (by the failure of another fact) or
             "not applicable"
    reason   describes what was found, or why the fact does not apply
    failure  the failure with its example; None if there is none
    seconds  duration of the test in seconds
    """

    fact: Fact
    # "passed"; "failed"; "differs" from our policy; "explained" by the finding of another fact; or "not applicable"
    status: str
    reason: str = ""
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.fact.name

    @property
    def grade(self) -> str | None:
        """The grade of the failure: "broken", "inexact" or "differs from our policy"; None if there is no failure."""
        return None if self.failure is None else self.failure.grade or self.fact.grade


@dataclass(frozen=True)
class Convention:
    """A choice that implementations of attention make differently, such as the scale.

    name      name of the choice, such as "scale"
    value     the measured choice
    declared  the choice that the options declare; None if the options declare no choice
    """

    name: str
    value: str
    declared: str | None = None


@dataclass(frozen=True)
class Report(TextDisplay):
    """The result of `check`. `print(report)` shows it.

    subject      name of the checked attention or decoder
    kind         "attention" or "decoder"
    facts        the result of each tested fact
    conventions  the measured conventions
    file, line   where the subject is defined

    >>> report = check(torch.nn.functional.scaled_dot_product_attention, only=["scale"])
    >>> report.ok, len(report.failures)
    (True, 0)
    """

    subject: str
    kind: str  # attention or decoder
    facts: tuple[FactResult, ...]
    conventions: tuple[Convention, ...]
    file: str | None = None  # where the subject is defined
    line: int = 1

    def exit_code(self, ignore_policy: bool = False) -> int:
        """Return the exit code: 1 if a fact is broken or inexact, 3 if facts only differ from our policy, else 0.

        ignore_policy  return 0 in place of 3
        """
        return 1 if not self.ok else 3 if self.policy_differences and not ignore_policy else 0

    @property
    def ok(self) -> bool:
        """Whether no fact is broken or inexact; facts that differ from our policy do not count."""
        return not self.failures

    @property
    def failures(self) -> tuple[FactResult, ...]:
        """The results of the facts that are broken or inexact."""
        return tuple(result for result in self.facts if result.status == FAILED)

    @property
    def policy_differences(self) -> tuple[FactResult, ...]:
        """The results of the facts that differ from our policy.

        Our policy is what regard does where other projects do something else, such as zeros for a row that sees no key.
        """
        return tuple(result for result in self.facts if result.status == DIFFERS)

    @property
    def findings(self) -> tuple[FactResult, ...]:
        """The results of all failed facts: the failures, then the differences from our policy."""
        return self.failures + self.policy_differences

    def __getitem__(self, name: str) -> FactResult:
        """Return the result of the fact with this name; raise KeyError if the fact was not tested."""
        for result in self.facts:
            if result.name == name:
                return result
        raise KeyError(f"no fact {name!r} was tested; tested were: {', '.join(each.name for each in self.facts)}")

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines(100))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the report as lines for rich, wrapped to the console width; lines of code examples are not wrapped.

        Print with soft_wrap=True to keep these long lines.
        """
        yield from self._lines(options.max_width)

    def _lines(self, width: int) -> list[Text]:
        parts = [Text(f"{self.subject} ({self.kind})", style="bold")]
        for each in self.conventions:
            declared = "" if each.declared is None else f" (declared: {each.declared})"
            parts += _wrap(f"  {each.name:<18} ", f"{each.value}{declared}", width)
        for result in self.findings:
            parts += [Text(), *_failure_lines(result, width)]
        return [*parts, Text(), *_wrap("", self.summary, width, "bold green" if self.ok else "bold red")]

    @property
    def summary(self) -> str:
        """Return one line with the number of facts that passed, failed and so on."""
        counts = Counter(result.status for result in self.facts)

        def names(results: tuple[FactResult, ...]) -> str:
            return f" ({', '.join(result.name for result in results)})" if results else ""

        parts = [f"{counts[PASSED]} fact{'s' * (counts[PASSED] != 1)} passed"]
        parts += [f"{len(self.failures)} failed{names(self.failures)}"]
        if self.policy_differences:
            parts += [f"{counts[DIFFERS]} differ from our policy{names(self.policy_differences)}"]
        if counts[EXPLAINED]:
            parts += [f"{counts[EXPLAINED]} explained by {'this' if len(self.findings) == 1 else 'these'}"]
        return ", ".join([*parts, f"{counts[NOT_APPLICABLE]} not applicable"])

    def json(self) -> str:
        """Return the report as JSON text."""
        return json_format.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_dict(self) -> dict[str, object]:
        """Return the report as a dictionary of values that JSON can represent."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "file": self.file,
            "line": self.line,
            "conventions": {each.name: each.value for each in self.conventions},
            "facts": [_result_dict(result) for result in self.facts],
        }

    def junit(self) -> str:
        """Return the report as JUnit XML, with one test case per fact."""
        place = {} if self.file is None else {"file": self.file, "line": str(self.line)}
        suite = ElementTree.Element(
            "testsuite",
            name=f"regard check {self.subject}",
            tests=str(len(self.facts)),
            failures=str(len(self.failures)),
            skipped=str(sum(result.status not in (PASSED, FAILED) for result in self.facts)),
            time=f"{sum(result.seconds for result in self.facts):.3f}",
        )
        for result in self.facts:
            case = ElementTree.SubElement(
                suite, "testcase", {"time": f"{result.seconds:.3f}", **place}, classname=self.subject, name=result.name
            )
            if result.status == FAILED and result.failure is not None:
                failure = ElementTree.SubElement(case, "failure", message=_printable(result.failure.found))
                failure.set("type", str(result.grade))
                failure.text = _printable(failure_text(result))
            elif result.status != PASSED:
                reason = f"{result.grade}: {result.reason}" if result.grade else result.reason
                ElementTree.SubElement(case, "skipped", message=_printable(reason))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)

    def annotations(self) -> list[str]:
        """Return GitHub annotations: an error for each failure, a warning for each difference from our policy."""

        def escape(words: str, more: str = "") -> str:
            for letter in f"%\r\n{more}":
                words = words.replace(letter, f"%{ord(letter):02X}")
            return words

        file = "" if self.file is None else f"file={escape(self.file, ':,')},line={self.line},"
        return [
            f"::{'error' if result.status == FAILED else 'warning'} {file}title={escape(result.name, ':,')}"
            f"::{escape(f'{self.subject}: {result.reason} ({result.grade})')}"
            for result in self.findings
        ]


def _result_dict(result: FactResult) -> dict[str, object]:
    fact, failure = result.fact, result.failure
    values: dict[str, object] = {"name": fact.name, "status": result.status, "reason": result.reason}
    values |= {"grade": result.grade, "student": fact.student, "engineer": fact.engineer}
    if failure is not None:
        values |= {"found": failure.found, "cause": fact.cause, "example": failure.example, "declare": failure.declare}
    return values


def _printable(words: str) -> str:
    """Return the text without control characters, which XML does not allow."""
    return "".join(letter for letter in words if letter in "\n\t" or letter >= " ")


def failure_text(result: FactResult) -> str:
    """Return the description and the code example of a failed fact as plain text."""
    return "\n".join(str(part) for part in _failure_lines(result))


def _wrap(start: str, words: str, width: int, style: str = "") -> list[Text]:
    """Wrap text after a label at a width; the following lines are indented by the width of the label.

    start  the label
    words  the text
    width  largest number of characters of a line
    """
    lines = wrap(words, max(width - len(start), 20), break_long_words=False) or [""]
    return [Text(f"{start if not n else ' ' * len(start)}{line}", style=style) for n, line in enumerate(lines)]


def _truncate(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    return f"{line[:MAX_LINE]} ...  # {len(line) - MAX_LINE} more characters, see .json()"


def _failure_lines(result: FactResult, width: int = 100) -> list[Text]:
    fact, failure = result.fact, result.failure
    assert failure is not None
    style = "bold red" if result.status == FAILED else "bold yellow"
    lines = [
        *_wrap("✗ " if result.status == FAILED else "≠ ", f"{fact.name}: {failure.found}", width, style),
        *_wrap("  grade             ", str(result.grade), width),
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
