"""A test class for any project: one test a fact. `TestMine = conformance(my_attention, causal=True)`."""

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

from regard.conform.check import check, planned
from regard.conform.report import FAILED, PASSED, Report, explained


def conformance(fn: object, *, quick: bool = True, **settings: Any) -> type:
    """A class with one test for every fact, to be assigned or inherited from in a test file.

    The settings are those of `check`: what is declared, and `only` or `without` where not all facts are tested. One
    that makes no sense is refused here. The check runs once, when the first of its tests does. Facts that do not apply
    are skipped with their reason. pytest collects it, and nothing of pytest is needed to make it.
    """
    names = [each.name for each in planned(fn, quick=quick, **settings).facts]
    kept: list[Report] = []

    def test_of(name: str) -> Callable[[object], None]:
        def test(self: object) -> None:
            __tracebackhide__ = True  # what pytest shows is the story, not these lines
            if not kept:
                kept.append(check(fn, quick=quick, **settings))
            result = kept[0][name]
            if result.status == FAILED:
                raise AssertionError(explained(result))
            if result.status != PASSED:
                raise SkipTest(result.reason)

        return test

    tests = {f"test_{name.replace('-', '_')}": test_of(name) for name in names}
    return type("TestConformance", (), {"__doc__": "Every fact of attention, tested.", **tests})
