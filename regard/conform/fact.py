"""What a fact of attention is: a rule, in the words of a student and of an engineer, and a test of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.base.registry import Registry


@dataclass(frozen=True)
class Failure:
    """How a rule was broken: in words, and with the smallest input that shows it."""

    found: str
    example: str = ""  # python that shows it
    declare: str = ""  # what to declare if it is meant so


class NotApplicableError(Exception):
    """The fact has nothing to say here, and why."""


@dataclass(frozen=True)
class Fact:
    """A rule.

    fatal         where it is broken, nothing after it can be measured, so all of that is explained by it
    explained_by  rules that, broken, break this one too
    """

    name: str
    student: str
    engineer: str
    cause: str
    test: Callable[[Any], Failure | None]
    fatal: bool = False
    explained_by: tuple[str, ...] = ()
    slow: bool = False


def fact(
    kept: Registry[Fact],
    name: str,
    *,
    student: str,
    engineer: str,
    cause: str,
    fatal: bool = False,
    explained_by: tuple[str, ...] = (),
    slow: bool = False,
) -> Callable[[Callable[[Any], Failure | None]], Callable[[Any], Failure | None]]:
    """Keep a test as the fact of that name. Facts of one registry are tested in the order in which they are kept."""

    def keep(test: Callable[[Any], Failure | None]) -> Callable[[Any], Failure | None]:
        kept.add(name)(Fact(name, student, engineer, cause, test, fatal, explained_by, slow))
        return test

    return keep
