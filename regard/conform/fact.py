"""A fact: a rule that every attention keeps, in the words of a student and of an engineer, and its test."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry

# the grade of a finding: a wrong result; rounding beyond the tolerance; a choice that other projects make differently
BROKEN, INEXACT, POLICY = "broken", "inexact", "differs from our policy"


@dataclass(frozen=True)
class Failure:
    """A broken rule: what was found, and the smallest input that shows it."""

    found: str
    example: str = ""  # Python code
    declare: str = ""  # the options that make it right, if it is on purpose
    grade: str = ""  # if it is not that of the fact
    fatal: bool = False  # later facts cannot be measured, though the fact is not fatal in general


def first_failure(found: Iterable[Failure | None]) -> Failure | None:
    """The first failure, if there is one."""
    return next((each for each in found if each is not None), None)


class NotApplicableError(Exception):
    """The fact does not apply to this attention; the message says why."""


FactTest = Callable[[Any], Failure | None]


@dataclass(frozen=True)
class Fact:
    """A rule.

    student, engineer  the rule in two wordings
    cause              the usual mistakes that break it
    fatal              if it is broken, later facts cannot be measured and are reported as explained by it
    grade              "broken", "inexact" or "differs from our policy"
    explained_by       names of other facts that break this one too
    slow               left out by `quick=True`
    """

    name: str
    student: str
    engineer: str
    cause: str
    test: FactTest
    fatal: bool = False
    grade: str = BROKEN
    explained_by: str = ""
    slow: bool = False


def fact(registry: Registry[Fact], name: str, **settings: Any) -> Callable[[FactTest], FactTest]:
    """Register a test as a fact. Facts are tested in the order in which they are registered.

    The docstring of the test has three paragraphs: the rule for a student, the rule for an engineer, and the usual
    causes after "Usual causes: ".
    """

    def register(test: FactTest) -> FactTest:
        student, engineer, cause = (" ".join(part.split()) for part in (test.__doc__ or "\n\n\n\n").split("\n\n"))
        registry.add(name)(Fact(name, student, engineer, cause.removeprefix("Usual causes: "), test, **settings))
        return test

    return register
