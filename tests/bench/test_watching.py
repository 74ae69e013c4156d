"""The benchmark of `watch`: correctness check, measurement and tables."""

import json

import pytest
import torch

import bench
from bench import watching
from bench.report import CorrectnessError
from bench.watching import LongCallResult, WatchedResult, WatchResult
from regard.see.watch import watch


def test_the_statistics_are_those_of_the_matrices() -> None:
    watching.check_statistics("cpu")


def test_a_wrong_statistic_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = watching.all_statistics
    monkeypatch.setattr(watching, "all_statistics", lambda *args: {name: x + 0.01 for name, x in usual(*args).items()})
    with pytest.raises(CorrectnessError, match=r"the error of .*entropy is 1\.0e-02"):
        watching.check_statistics("cpu")


@pytest.mark.parametrize("method", watching.METHODS)
def test_a_method_is_measured_in_its_own_process(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert watching.main(["--device", "cpu", "--method", method, "160"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert found["bytes"] >= 0


def test_tables_and_targets() -> None:
    lines = watching.markdown_table(
        [WatchResult(1024, 0.5, 10_000_000, 1.0, 40_000_000), WatchResult(32768, 2.0, 90_000_000, None, None)]
    )
    assert lines[2] == "| 1,024 | 0.5 | 10 | 1 | 40 | 2.00x | 4.00x |"
    assert "does not fit" in lines[3]
    good, slow, large = (
        LongCallResult("causal(), c=128", 100.0, 190.0, 1.9, 1 << 20),
        (1.0, 2.1, 2.1, 0),
        (1.0, 1.0, 1.0, 1 << 30),
    )
    assert good.reached
    assert not LongCallResult("full(), c=64", *slow).reached
    assert not LongCallResult("full(), c=64", *large).reached
    assert watching.long_call_table([good])[2] == "| `causal(), c=128` | 100.0 | 190.0 | 1.90 | 1 |"
    assert watching.long_call_table([]) == []


def test_a_watched_model_is_measured_beside_the_model_alone() -> None:
    (found,) = watching.measure_watched("cpu", (16,), layers=1, rounds=1)
    assert found.length == 16
    assert found.low == found.ratio == found.high > 0
    table = watching.watched_table([WatchedResult(256, 8.0, 1.25, 1.2, 1.4)])
    assert table[2] == "| 256 | 8.0 | 1.25 (1.20 to 1.40) |"
    assert watching.watched_table([]) == []
    assert WatchedResult(256, 8.0, 1.3, 1.2, 1.4).reached
    assert not WatchedResult(256, 8.0, 1.31, 1.2, 1.4).reached


def test_a_pass_that_is_not_recorded_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "watch", lambda model: watch(model, layers="lm_head"))
    with pytest.raises(CorrectnessError, match="0 of 1 attention calls were recorded"):
        watching.measure_watched("cpu", (16,), layers=1, rounds=1)


def test_a_filter_without_matches_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--quick", "--only", "nothing"]) == 2
    assert "no case has that name" in capsys.readouterr().err


@pytest.mark.cuda
def test_long_calls_are_measured_on_a_gpu() -> None:
    assert [type(each) for each in watching.measure_long_calls(4096)] == [LongCallResult] * 4
    torch.cuda.empty_cache()
