"""`conformance`: create a pytest class with one test per fact, for the tests of any project."""

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

from regard.conform.checker import check, plan_check
from regard.conform.report import FAILED, PASSED, Report, failure_text


def conformance(fn: object, *, quick: bool = True, **options: Any) -> type:
    """Create a pytest class with one test per fact, to be assigned or inherited from in a test file.

    options  options of `check`, such as causal=True or only=["scale"]; an invalid option raises an error
             immediately

    The check runs once, when the first test runs. The tests of facts that do not apply, or that differ from our
    policy, are skipped with the reason.

    >>> TestMine = conformance(torch.nn.functional.scaled_dot_product_attention, only=["scale"])
    >>> [name for name in dir(TestMine) if name.startswith("test_")]
    ['test_scale']
    """
    names = [each.name for each in plan_check(fn, quick=quick, **options).facts]
    reports: list[Report] = []

    def make_test(name: str) -> Callable[[object], None]:
        def test(self: object) -> None:
            __tracebackhide__ = True  # pytest shows the message only
            if not reports:
                reports.append(check(fn, quick=quick, **options))
            result = reports[0][name]
            if result.status == FAILED:
                raise AssertionError(failure_text(result))
            if result.status != PASSED:
                raise SkipTest(f"{result.grade}: {result.reason}" if result.grade else result.reason)

        return test

    tests = {f"test_{name.replace('-', '_')}": make_test(name) for name in names}
    return type("TestConformance", (), {"__doc__": "One test per fact of attention.", **tests})
