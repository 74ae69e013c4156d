"""A report can be read by people, by programs and by a CI, and gives tests to any project."""

import json
from dataclasses import replace
from unittest import SkipTest
from xml.etree import ElementTree

import pytest
from torch import nn

from regard.base.errors import RegardError
from regard.conform import check, conformance
from regard.conform.facts.numbers import off_by
from regard.conform.report import Report
from regard.core.attend import attend
from tests.conform import mutants


@pytest.fixture(scope="module")
def report() -> Report:
    return check(mutants.scales_twice, quick=True)


def test_a_report_has_two_wordings_causes_and_an_example(report: Report) -> None:
    text = str(report)
    assert text.startswith("scales_twice (attention)\n")
    for words in (
        "✗ scale: q . k is multiplied by 1/c (applied twice), not by 1/sqrt(c)",
        "for a student     Wider vectors have larger dot products",
        "for an engineer   The factor of q . k is 1/sqrt(c)",
        "usual causes      scaled twice",
        "out = scales_twice(q, k, v)",
        "# should be torch.tensor(",
        "if on purpose     declare scale=0.25",
        "1 failed (scale)",
    ):
        assert words in text


def test_a_report_without_failures_says_so() -> None:
    text = str(check(mutants.right_causal, causal=True, quick=True))
    assert "0 failed," in text
    assert "✗" not in text


def test_json_holds_everything(report: Report) -> None:
    values = json.loads(report.json())
    assert (values["subject"], values["kind"], values["ok"]) == ("scales_twice", "attention", False)
    assert values["conventions"]["scale"] == "1/c (applied twice)"
    scale = next(each for each in values["facts"] if each["name"] == "scale")
    assert scale["status"] == "failed"
    assert scale["example"].count("\n") >= 4
    assert {each["status"] for each in values["facts"]} == {"passed", "failed", "not applicable"}


def test_junit_has_a_case_for_every_fact(report: Report) -> None:
    suite = ElementTree.fromstring(report.junit())
    assert suite.get("tests") == str(len(suite)) == str(len(report.facts))
    assert suite.get("failures") == "1"
    failed = [case for case in suite if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == ["scale"]
    assert "applied twice" in str(failed[0].find("failure").text)  # type: ignore[union-attr]
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped") or 0) > 5
    assert {case.get("file") for case in suite} == {report.file}
    assert report.file is not None
    assert report.file.endswith("mutants.py")
    assert float(suite.get("time") or 0) == pytest.approx(sum(float(case.get("time") or 0) for case in suite), abs=0.1)
    assert float(failed[0].get("time") or 0) > 0
    assert failed[0].find("failure").get("type") == "broken"  # type: ignore[union-attr]


def test_a_fact_is_looked_up_by_name(report: Report) -> None:
    assert report["runs"].status == "passed"
    with pytest.raises(KeyError, match="no fact 'scales' was tested"):
        report["scales"]


def test_progress_is_called_with_each_fact() -> None:
    values: list[str] = []
    check(mutants.right, only=["runs", "scale"], progress=values.append)
    assert values == ["runs", "scale"]


class TestRight(conformance(mutants.right_causal, causal=True, without=["compile"])):  # type: ignore[misc]
    """The class that a project inherits from, at work."""


def test_a_broken_fact_fails_its_test_with_the_full_description() -> None:
    broken = conformance(mutants.scales_twice)()
    with pytest.raises(AssertionError, match=r"(?s)scale: q . k is multiplied.*usual causes"):
        broken.test_scale()
    broken.test_runs()
    with pytest.raises(SkipTest, match="no rotary"):
        broken.test_rotary_pairing()


def test_a_decoder_gets_the_tests_of_a_decoder() -> None:
    tests = vars(conformance(mutants.TinyDecoder(), without=["cache"]))
    assert "test_left_padding" in tests
    assert "test_cache" not in tests
    assert "test_scale" not in tests


def test_a_class_has_the_tests_of_only() -> None:
    tests = [name for name in vars(conformance(mutants.scales_twice, only=["scale"])) if name.startswith("test_")]
    assert tests == ["test_scale"]
    with pytest.raises(AssertionError, match=r"scale: q . k is multiplied"):
        conformance(mutants.scales_twice, only="scale")().test_scale()


@pytest.mark.parametrize(
    ("fn", "settings", "words"),
    [
        (mutants.right, {"casual": True}, "check has no option 'casual'; did you mean 'causal'?"),
        (mutants.right, {"without": ["extreme-score"]}, "unknown fact 'extreme-score'; did you mean 'extreme-scores'"),
        (mutants.right, {"kind": "encoder"}, "kind is one of 'attention', 'decoder', not 'encoder'"),
        (3, {}, "check takes a function of q, k and v, an nn.Module or a decoder, not 3"),
    ],
)
def test_wrong_options_raise_when_the_class_is_made(fn: object, settings: dict[str, object], words: str) -> None:
    with pytest.raises(RegardError) as error:
        conformance(fn, **settings)
    assert words in str(error.value)


def test_findings_are_graded() -> None:
    grades = {"scales_twice": "broken", "rounds_the_output_to_bfloat16": "inexact", "sums_in_half_precision": "inexact"}
    grades |= dict.fromkeys(("tiles_grouped_heads", "trusts_zero_times_nan"), "differs from our policy")
    for name, grade in grades.items():
        mutant = mutants.MUTANTS[name]
        report = check(mutant.fn, only=mutant.breaks)
        assert [result.grade for result in report.findings] == [grade]
        assert report.ok == (grade == "differs from our policy")
        assert bool(report.policy_differences) == report.ok
        assert report.exit_code() == (3 if report.ok else 1)
        assert report.exit_code(ignore_policy=True) == (0 if report.ok else 1)
        assert json.loads(report.json())["facts"][0]["grade"] == grade


def test_torch_breaks_nothing_and_differs_in_hidden_nan() -> None:
    report = check(nn.functional.scaled_dot_product_attention, quick=True)
    assert report.ok, report
    assert [result.name for result in report.policy_differences] == ["nan-in-masked-input"]
    assert report.exit_code() == 3


def test_the_summary_counts_facts() -> None:
    assert str(check(attend, only=["runs"])).endswith("1 fact passed, 0 failed, 0 not applicable")
    assert str(check(attend, only=["runs", "scale", "window"])).endswith("2 facts passed, 0 failed, 1 not applicable")


def test_long_lines_are_truncated_but_not_in_json(report: Report) -> None:
    failed = report.failures[0]
    assert failed.failure is not None
    long = replace(failed, failure=replace(failed.failure, example=f"q = {'1' * 3000}"))
    values = str(replace(report, facts=(long,)))
    assert f"    q = {'1' * 1196} ...  # 1804 more characters, see .json()" in values
    assert max(map(len, values.splitlines())) < 1300
    assert "1" * 3000 in replace(report, facts=(long,)).json()


def test_close_numbers_are_printed_with_more_digits() -> None:
    assert off_by(0.01321, 0.01319) == "off by 1.321e-02, 1.319e-02 is allowed"
    assert off_by(0.5, 0.013) == "off by 5.0e-01, 1.3e-02 is allowed"
