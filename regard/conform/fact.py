"""A fact: a rule that every attention keeps, in the words of a student and of an engineer, and its test."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry


@dataclass(frozen=True)
class Failure:
    """A broken rule: what was found, and the smallest input that shows it."""

    found: str
    example: str = ""  # Python code
    declare: str = ""  # the options that make it right, if it is on purpose


class NotApplicableError(Exception):
    """The fact does not apply to this attention; the message says why."""


FactTest = Callable[[Any], Failure | None]


@dataclass(frozen=True)
class Fact:
    """A rule.

    student, engineer  the rule in two wordings
    cause              the usual mistakes that break it
    fatal              if it is broken, later facts cannot be measured and are reported as explained by it
    explained_by       other facts that break this one too
    slow               left out by `quick=True`
    """

    name: str
    student: str
    engineer: str
    cause: str
    test: FactTest
    fatal: bool = False
    explained_by: tuple[str, ...] = ()
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
