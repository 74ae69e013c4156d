"""The benchmark of host time: a row for each case and setting, and which of two calls counts as ours."""

import sys
import time

import pytest

from bench import calls


def test_it_prints_a_row_for_each_setting(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.calls", "--device", "cpu", "--rounds=2", "--repeats=1", "--only=causal()"])
    calls.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    names = {row.split(" | ")[0] for row in rows}
    assert len(names) == 5
    assert {row.split(" | ")[1] for row in rows} == {"forward", "forward, for gradients", "forward + backward"}
    assert len(rows) == 3 * len(names)


@pytest.mark.parametrize("rounds", [2, 3])
def test_the_ratio_is_our_time_by_the_other(rounds, monkeypatch):
    """Whoever comes first in a round."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def take(seconds: float) -> None:
        now[0] += seconds

    cells = calls.compare(lambda: take(6e-6), lambda: take(2e-6), rounds, 4, "cpu")
    assert cells == "6.0 | 2.0 | 3.00 (3.00 to 3.00) | 4.0"
