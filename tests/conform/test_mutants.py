"""Every faulty attention and decoder is diagnosed under its right name, and nothing else is called a fault."""

from functools import cache

import pytest
import torch

from regard.conform import Report, check
from regard.conform.facts import ATTENTION, DECODER
from tests.conform.mutants import MUTANTS, Mutant, TinyDecoder


@cache
def examined(name: str) -> Report:
    mutant = MUTANTS[name]
    fn = mutant.fn() if isinstance(mutant.fn, type) else mutant.fn
    return check(fn, quick=mutant.breaks != "compile", **mutant.declared)


def is_decoder(mutant: Mutant) -> bool:
    return isinstance(mutant.fn, type) and issubclass(mutant.fn, TinyDecoder)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_diagnosed_under_its_name_and_no_other(name: str) -> None:
    mutant, report = MUTANTS[name], examined(name)
    assert [result.name for result in report.failed] == [mutant.breaks], report
    assert mutant.words in report.failed[0].reason
    assert not report.ok


def test_every_fact_has_a_mutant_that_breaks_it() -> None:
    assert len(MUTANTS) >= 40
    for registry, decoders in ((ATTENTION, False), (DECODER, True)):
        broken = {mutant.breaks for mutant in MUTANTS.values() if is_decoder(mutant) == decoders}
        assert broken == set(registry)


def test_an_example_is_small() -> None:
    failure = examined("scales_twice").failed[0].failure
    assert failure is not None
    space = {"torch": torch, "scales_twice": MUTANTS["scales_twice"].fn}
    exec(failure.example, space)
    assert tuple(space["q"].shape) == (1, 1, 1, 2)  # at width 1 no scale can be wrong
    assert space["k"].shape[2] == 2  # one key leaves nothing to choose


def test_a_second_fault_is_found_beside_the_first() -> None:
    def tiles_and_scales_twice(q, k, v):
        return MUTANTS["tiles_grouped_heads"].fn(q / q.shape[-1] ** 0.5, k, v)

    assert [result.name for result in check(tiles_and_scales_twice, quick=True).failed] == ["grouping", "scale"]


def test_what_follows_from_a_fault_is_explained_by_it() -> None:
    report = examined("runs_softmax_over_the_queries")
    assert report["outputs"].status == "explained"
    assert report["outputs"].reason == "explained by softmax-over-the-other-axis"
    assert report["runs"].status == "passed"
