"""Every fact is broken by a faulty attention or decoder, and kept by a correct one."""

from functools import cache
from typing import Any

import pytest
import torch

from regard.conform import Report, check
from regard.conform.facts import ATTENTION, DECODER
from tests.conform import mutants
from tests.conform.mutants import MUTANTS, Mutant, TinyDecoder
from tests.conform.run_example import assert_example_holds

CORRECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "right": (mutants.right, {"mask_polarity": "keep"}),
    "causal": (mutants.right_causal, {"causal": True, "alignment": "bottom-right"}),
    "window": (mutants.right_window, {"causal": True, "window_before": 4}),
    "rotary": (mutants.right_rotary, {"causal": True, "rotary": "half"}),
    "all keys": (mutants.attend, {"causal": False}),
    "padding": (mutants.right_padding, {}),
    "cross": (mutants.RightCross(), {}),
    "dropout": (mutants.RightDropping(), {}),
    "decoder": (mutants.TinyDecoder(), {}),
}
FACTS = [(kind, name) for kind, registry in (("attention", ATTENTION), ("decoder", DECODER)) for name in registry]


# the first mutant of each fact is tested on all facts, so that no other is reported; the others on their fact alone
FIRST = {(each.breaks, isinstance(each.fn, type)): name for name, each in reversed(MUTANTS.items())}.values()


@cache
def check_mutant(name: str) -> Report:
    """The report of a mutant: on all facts if it is the first of its fact."""
    mutant = MUTANTS[name]
    fn = mutant.fn() if isinstance(mutant.fn, type) else mutant.fn
    only = [] if name in FIRST else [mutant.breaks]
    return check(fn, quick=mutant.breaks != "compile", only=only, **mutant.declared)


@cache
def check_correct(name: str) -> Report:
    fn, declared = CORRECT[name]
    return check(fn, quick=name != "right", **declared)


def is_decoder(mutant: Mutant) -> bool:
    return isinstance(mutant.fn, type) and issubclass(mutant.fn, TinyDecoder)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_reported_under_its_name_alone_with_an_example_that_runs(name: str) -> None:
    mutant, findings = MUTANTS[name], check_mutant(name).findings
    assert [result.name for result in findings] == [mutant.breaks], check_mutant(name)
    assert mutant.words in findings[0].reason
    failure = findings[0].failure
    assert failure is not None
    assert_example_holds(failure.example, mutant.fn() if isinstance(mutant.fn, type) else mutant.fn)


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_attention_breaks_no_fact(name: str) -> None:
    assert check_correct(name).ok, check_correct(name)


@pytest.mark.parametrize(("kind", "fact"), FACTS)
def test_every_fact_has_a_mutant_that_breaks_it_and_a_correct_attention_that_keeps_it(kind: str, fact: str) -> None:
    broken = [name for name, each in MUTANTS.items() if each.breaks == fact and is_decoder(each) == (kind == "decoder")]
    assert broken, f"no mutant breaks {fact}"
    assert fact in [result.name for result in check_mutant(broken[0]).findings]
    reports = (check_correct(name) for name in CORRECT)
    passed = [report.subject for report in reports if report.kind == kind and report_status(report, fact) == "passed"]
    assert passed, f"{fact} does not apply to any correct attention"


def report_status(report: Report, fact: str) -> str | None:
    return next((result.status for result in report.facts if result.name == fact), None)


def test_an_example_is_small() -> None:
    failure = check_mutant("scales_twice").failures[0].failure
    assert failure is not None
    space = {"torch": torch, "scales_twice": MUTANTS["scales_twice"].fn}
    exec(failure.example, space)
    assert tuple(space["q"].shape) == (1, 1, 1, 2)  # at width 1 no scale can be wrong
    assert space["k"].shape[2] == 2  # one key has weight 1 under any scale


def test_a_second_fault_is_found_besides_the_first() -> None:
    def tiles_and_scales_twice(q, k, v):
        return MUTANTS["tiles_grouped_heads"].fn(q / q.shape[-1] ** 0.5, k, v)

    assert [result.name for result in check(tiles_and_scales_twice, quick=True).findings] == ["scale", "grouping"]


def test_what_follows_from_a_fault_is_explained_by_it() -> None:
    report = check_mutant("runs_softmax_over_the_queries")
    assert report["outputs"].status == "explained"
    assert report["outputs"].reason == "explained by softmax-over-the-other-axis"
    assert report["runs"].status == "passed"
