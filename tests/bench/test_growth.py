"""The benchmark of growth: exponents, measured peaks, and a run of every mechanism."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import growth, main
from bench.growth import MECHANISMS, check, cpu_peak_bytes, fit_exponent
from bench.report import CorrectnessError


def test_the_exponent_of_a_power_is_its_power() -> None:
    lengths = (64, 128, 512, 1024)
    for power in (0.0, 1.0, 1.5, 2.0):
        assert fit_exponent(lengths, tuple(3e-6 * n**power for n in lengths)) == pytest.approx(power, abs=1e-9)


def test_the_peak_is_that_of_what_is_allocated_at_the_same_time() -> None:
    def run() -> Tensor:
        first = torch.empty(1000, dtype=torch.float64)  # freed before the second
        del first
        second = torch.empty(3000, dtype=torch.float64)
        return second[:1].clone()

    assert 24_000 <= cpu_peak_bytes(run) <= 24_000 + 64


def test_every_mechanism_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "growth.png"
    assert main(["growth", "--quick", "--json", "--picture", str(picture)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["name"] for each in results] == list(MECHANISMS)
    for each in results:
        assert len(each["lengths"]) == len(each["seconds"]) == len(each["peak_bytes"]) == 3
        # the output alone is linear in the length
        assert all(peak >= 4 * 2 * 64 * n for n, peak in zip(each["lengths"], each["peak_bytes"], strict=True))
    memory = {each["name"]: each["memory_exponent"] for each in results}
    assert memory["causal(), kernel eager"] > 1.8
    assert memory["causal()"] < 1.1
    assert picture.stat().st_size > 10_000


def test_the_table_names_the_longest_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--quick", "--only", "channel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| mechanism | ms at 512 | time grows as | peak MB at 512 | memory grows as |"
    assert lines[4].startswith("| `channel_attend` | ")
    with pytest.raises(SystemExit, match="2"):
        growth.main(["--quick", "--only", "nothing"])


def test_a_wrong_mechanism_is_not_timed() -> None:
    with pytest.raises(CorrectnessError, match=r"wrong: error .* against float64"):
        check("wrong", lambda q, k, v, **how: v if how else v + 1, "cpu")
