"""`Fact`: a rule that a correct attention follows, in one wording for students and one for engineers, with its test."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry

# the grade of a finding: a wrong result; rounding beyond the tolerance; a choice that other projects make differently
BROKEN, INEXACT, POLICY = "broken", "inexact", "differs from our policy"


@dataclass(frozen=True)
class Failure:
    """A failed fact: what was found, and Python code with the smallest input that shows it.

    found    text that describes what was found
    example  Python code that reproduces the failure
    declare  options of `check` that declare this behaviour as intended
    grade    grade of the failure, if it differs from the grade of the fact
    fatal    whether facts that come later in the order of tests cannot be tested
    """

    found: str
    example: str = ""  # Python code
    declare: str = ""  # options of `check` that declare this behaviour as intended
    grade: str = ""  # grade of this failure, if not that of the fact
    fatal: bool = False  # whether later facts cannot be measured


def first_failure(found: Iterable[Failure | None]) -> Failure | None:
    """Return the first failure in the results of several tests; None if all passed."""
    return next((each for each in found if each is not None), None)


class NotApplicableError(Exception):
    """Raised if a fact does not apply to the tested attention or decoder; the message says why."""


FactTest = Callable[[Any], Failure | None]


@dataclass(frozen=True)
class Fact:
    """A rule that a correct attention or decoder follows, with the function that tests it.

    student, engineer  the rule, worded for students and for engineers
    cause              text that names the usual mistakes that break the rule
    test               function that returns a `Failure`, or None if the rule holds
    fatal              whether later facts cannot be tested if this rule is broken; they are then reported as
                       explained by this fact
    grade              grade of a failure: "broken", "inexact" or "differs from our policy" (the choice of regard where
                       other projects choose differently)
    explained_by       names of other facts, separated by blanks; if one of them is broken, it explains a failure of
                       this fact
    slow               whether `quick=True` leaves the fact out
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
    """Register a test function as a fact (decorator). Facts are tested in the order of registration.

    The docstring of the test function must have three paragraphs: the rule for a student, the rule for an
    engineer, and the usual causes after "Usual causes: ".
    """

    def register(test: FactTest) -> FactTest:
        student, engineer, cause = (" ".join(part.split()) for part in (test.__doc__ or "\n\n\n\n").split("\n\n"))
        registry.add(name)(Fact(name, student, engineer, cause.removeprefix("Usual causes: "), test, **settings))
        return test

    return register
