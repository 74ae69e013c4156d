"""A test class for any project: one test a fact. `TestMine = conformance(my_attention, causal=True)`."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import SkipTest

from regard.conform.check import check, facts
from regard.conform.decoder import looks_like_a_decoder
from regard.conform.report import FAILED, PASSED, Report, explained


def conformance(
    fn: object, *, kind: str | None = None, without: Iterable[str] = (), quick: bool = True, **declared: Any
) -> type:
    """A class with one test for every fact, to be assigned or inherited from in a test file.

    The check runs once, when the first of its tests does. Facts that do not apply are skipped with their reason.
    pytest collects it, and nothing of pytest is needed to make it.
    """
    kind = kind or ("decoder" if looks_like_a_decoder(fn) else "attention")
    left_out = set(without)
    names = [each.name for each in facts()[kind] if each.name not in left_out and not (quick and each.slow)]
    kept: list[Report] = []

    def test_of(name: str) -> Callable[[object], None]:
        def test(self: object) -> None:
            __tracebackhide__ = True  # what pytest shows is the story, not these lines
            if not kept:
                kept.append(check(fn, kind=kind, without=left_out, quick=quick, **declared))
            result = kept[0][name]
            if result.status == FAILED:
                raise AssertionError(explained(result))
            if result.status != PASSED:
                raise SkipTest(result.reason)

        return test

    tests = {f"test_{name.replace('-', '_')}": test_of(name) for name in names}
    return type("TestConformance", (), {"__doc__": "Every fact of attention, tested.", **tests})
