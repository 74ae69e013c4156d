"""The benchmark of seeing: its gate bites, and its tables say what was measured."""

import json

import pytest
import torch

from bench import report, seeing
from bench.cases import GateError
from bench.seeing import Line, Long


def test_the_statistics_are_those_of_the_matrices() -> None:
    seeing.gate("cpu")


def test_a_wrong_statistic_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = seeing.everything
    monkeypatch.setattr(seeing, "everything", lambda *given: {name: x + 0.01 for name, x in usual(*given).items()})
    with pytest.raises(GateError, match=r"entropy is off by 1\.0e-02"):
        seeing.gate("cpu")


@pytest.mark.parametrize("way", seeing.WAYS)
def test_a_way_is_measured_in_its_own_process(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert seeing.main(["--one", way, "160", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert found["bytes"] >= 0


def test_tables_say_what_did_not_fit_and_what_was_missed() -> None:
    lines = seeing.table([Line(1024, 0.5, 10_000_000, 1.0, 40_000_000), Line(32768, 2.0, 90_000_000, None, None)])
    assert lines[2] == "| 1,024 | 0.5 | 10 | 1 | 40 | 2.00x | 4.00x |"
    assert "does not fit" in lines[3]
    good, slow, fat = Long("causal(), c=128", 100.0, 190.0, 1.9, 1 << 20), (1.0, 2.1, 2.1, 0), (1.0, 1.0, 1.0, 1 << 30)
    assert good.reached
    assert not Long("full(), c=64", *slow).reached
    assert not Long("full(), c=64", *fat).reached
    assert seeing.long_table([good])[2] == "| `causal(), c=128` | 100.0 | 190.0 | 1.90 | 1 |"
    assert seeing.long_table([]) == []


def test_a_filter_that_leaves_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        report.main(["--device", "cpu", "--quick", "--only", "seeing"])
    assert ended.value.code == 2
    assert "no mask contains 'seeing'; models and seeing are bench.models and bench.seeing" in capsys.readouterr().err


@pytest.mark.cuda
def test_long_calls_are_measured_on_a_gpu() -> None:
    assert [type(each) for each in seeing.long_calls(4096)] == [Long] * 4
    torch.cuda.empty_cache()
