"""The benchmark itself: it runs, says what it found, measures nothing that is wrong, and divides rightly."""

import gc
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import bench
from bench import cases, peers, race, report
from bench.cases import GateError, Result
from bench.race import Race, Ratio
from regard import attend, causal, full, global_tokens, window

COLUMNS = {
    "name": str,
    "shape": str,
    "kernel": str,
    "milliseconds": float,
    "peer": str,
    "peer_milliseconds": float,
    "ratio": float,
    "low": float,
    "high": float,
    "target": float,
    "megabytes": None,
    "peer_megabytes": None,
    "reached": bool,
}


def line(**changes: object) -> Result:
    usual = {
        "name": "causal(), forward",
        "shape": "1 x 8 x 512 x 64",
        "kernel": "sdpa",
        "milliseconds": 2.0,
        "peer": "torch sdpa",
        "peer_milliseconds": 3.0,
        "ratio": 1.5,
        "low": 1.25,
        "high": 1.75,
        "target": 0.97,
    }
    return Result(**usual | changes)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is over after one call."""
    usual = race.race
    monkeypatch.setattr(
        cases, "race", lambda runs, *, rounds, least, device: usual(runs, rounds=2, least=0.0, device=device)
    )


def test_results_come_as_json(hasty, capsys):
    code = bench.main(["--quick", "--device", "cpu", "--json"])
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert set(told) == {"machine", "results", "notes"}
    assert told["machine"].startswith(
        f"torch {torch.__version__} on CPU, {torch.get_num_threads()} threads; ratio = peer's"
    )
    assert told["notes"] == []
    assert [(result["name"], result["shape"], result["kernel"], result["peer"]) for result in told["results"]] == [
        ("full(), forward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("full(), forward + backward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("causal(), forward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("causal(), forward + backward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("window(before=255), forward", "1 x 2 x 1024 x 64", "blocked", "eager"),
        ("window(before=255), forward + backward", "1 x 2 x 1024 x 64", "blocked", "eager"),
    ]
    for result in told["results"]:
        assert set(result) == set(COLUMNS)
        assert all(kind is None or isinstance(result[name], kind) for name, kind in COLUMNS.items())
        assert result["low"] <= result["ratio"] <= result["high"]
        assert result["milliseconds"] > 0
        assert result["reached"] == (result["ratio"] >= result["target"])
        assert f"{result['name']} [{result['shape']}]: {result['ratio']:.2f}x {result['peer']}" in printed.err
    missed = [result for result in told["results"] if not result["reached"]]
    assert code == (1 if missed else 0)
    assert ("missed:" in printed.err) == bool(missed)


def test_only_the_masks_that_were_asked_for(hasty, capsys):
    bench.main(["--quick", "--device", "cpu", "--json", "--only", "causal"])
    told = json.loads(capsys.readouterr().out)
    assert {result["name"].split(",")[0] for result in told["results"]} == {"causal()"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the cases are to have found."""
    results: list[Result] = []

    def found(quick: bool, only: str = "") -> Iterator[Result]:
        yield from results

    monkeypatch.setattr(report, "on_cpu", found)
    return results


def test_without_json_it_is_a_table(measured, capsys):
    measured += [line(), line(name="a | b, forward", target=0.0, megabytes=12.4, peer_megabytes=99.6)]
    assert bench.main(["--quick", "--device", "cpu"]) == 0
    machine, _, *rows = capsys.readouterr().out.splitlines()
    assert machine == report.machine("cpu")
    assert rows[:4] == [
        "| case | shape b x h x n x c | kernel | ms | peer | ms | ratio (range) | target | MB | peer MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `causal(), forward` | 1 x 8 x 512 x 64 | sdpa | 2 | torch sdpa | 3 | 1.50 (1.25 to 1.75) | >= 0.97 |  |  |",
        r"| `a \| b, forward` | 1 x 8 x 512 x 64 | sdpa | 2 | torch sdpa | 3 | 1.50 (1.25 to 1.75) |  | 12 | 100 |",
    ]


def test_a_target_that_is_missed_is_named_and_fails(measured, capsys):
    measured += [line(), line(name="full(), forward", ratio=0.5)]
    assert bench.main(["--quick", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.endswith("missed:\n  full(), forward [1 x 8 x 512 x 64]: 0.50x\n")


@pytest.mark.parametrize(("power", "code"), [(1.0, 0), (1.5, 1)])
def test_the_growth_of_a_window_is_told_and_judged(power, code, measured, capsys):
    for kind in ("forward", "forward + backward"):
        for n in (1024, 4096, 16384):
            measured.append(
                line(
                    name=f"window(before=255), {kind}",
                    shape=f"1 x 2 x {n} x 64",
                    milliseconds=(n / 1024) ** power,
                    target=0.0,
                )
            )
    assert bench.main(["--device", "cpu"]) == code
    printed = capsys.readouterr()
    assert f"window(before=255), forward: time grows as n^{power:.2f} from 1k to 16k" in printed.out
    assert ("missed:" in printed.err) == bool(code)
    assert cases.growth(measured, "window(before=255), forward") == pytest.approx(power)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "there is no GPU here" in capsys.readouterr().err


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bench", run_name="__main__")
    assert ended.value.code == 0
    assert "few rounds and small sizes" in capsys.readouterr().out


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sees all": lambda q, k, v: attend(q, k, v),
    "sees itself only": lambda q, k, v: attend(q, k, v, mask=window(before=0)),
    "is a little off": lambda q, k, v: attend(q, k, v, mask=causal()) * 1.0001,
    "is off in its last row": lambda q, k, v: torch.cat(
        [attend(q, k, v, mask=causal())[:, :, :-1], 0 * v[:, :, :1]], 2
    ),
    "is NaN": lambda q, k, v: q * torch.nan,
    "has another temperature": lambda q, k, v: attend(q, k, v, mask=causal(), beta=0.2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_attention_is_not_measured(name, monkeypatch):
    monkeypatch.setattr(
        cases, "_ours", lambda mask: WRONG[name] if mask == causal() else lambda *x: attend(*x, mask=mask)
    )
    raced = []

    def noted(runs: dict, **rest: object) -> Race:
        raced.append(sorted(runs))
        return Race({who: [1.0] for who in runs})

    monkeypatch.setattr(cases, "race", noted)
    with pytest.raises(GateError, match=r"causal\(\): error .* of outputs against float64, the naive method has"):
        list(cases.on_cpu(quick=True))
    assert raced == [["regard", "torch sdpa"]] * 2  # full(), which is right, and nothing after it


def test_a_right_attention_passes_the_gate_in_every_precision():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (50, 200):
            q, k, v, grad = torch.randn(4, 2, 4, n, 16, dtype=torch.float32).to(dtype)
            for mask in (full(), causal(), causal() & window(before=9) | global_tokens(3)):
                cases._gate(mask, partial(attend, mask=mask), q, k, v, grad)


def wrong(out: Tensor, where: str) -> Tensor:
    """An output, or its gradient, that is wrong in one place."""
    row, head = {"first row": (0, 0), "a middle row": (297, 3), "last head": (450, -1)}[where]
    spoiled = out.clone()
    spoiled[:, head, row] += 1
    return spoiled


@pytest.mark.parametrize("where", ["first row", "a middle row", "last head"])
def test_a_wrong_output_in_any_part_is_stopped(where):
    q, k, v, grad = torch.randn(4, 1, 4, 600, 16)
    with pytest.raises(GateError, match="of outputs"):
        cases._gate(full(), lambda *x: wrong(attend(*x), where), q, k, v, grad)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_a_wrong_gradient_is_stopped(which):
    q, k, v, grad = torch.randn(4, 1, 4, 600, 16)

    def doubled(*inputs: Tensor) -> Tensor:
        inputs = list(inputs)
        inputs[which] = 2 * inputs[which] - inputs[which].detach()
        return attend(*inputs)

    with pytest.raises(GateError, match=f"gradients of {'qkv'[which]}"):
        cases._gate(full(), doubled, q, k, v, grad)


def test_peers_compute_what_we_do():
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    for mask in (full(), causal()):
        expected = attend(q, k, v, mask=mask)
        assert torch.allclose(peers.sdpa(causal=mask == causal())(q, k, v), expected, atol=1e-6)
        assert torch.allclose(peers.eager(mask.dense(70))(q, k, v), expected, atol=1e-6)


@pytest.mark.parametrize(
    "mask", [causal(), causal() & window(before=255), causal() & window(before=255) | global_tokens(64)], ids=repr
)
def test_a_peer_is_asked_about_the_same_mask(mask):
    n = 700
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    assert torch.equal(peers.predicate(mask)(0, 0, i, j), mask.dense(n))


def test_a_ratio_is_taken_within_each_round():
    """Ours 1, 2, 4 seconds and the peer's 3, 3, 3: 3, 1.5 and 0.75 times as fast, whatever the medians are."""
    timed = Race({"regard": [1.0, 2.0, 4.0], "one": [3.0, 3.0, 3.0], "two": [9.0, 9.0, 1.0]})
    assert timed.ratio("one") == Ratio("one", median=1.5, low=0.75, high=3.0)
    assert timed.ratio("two") == Ratio("two", median=4.5, low=0.25, high=9.0)
    assert timed.typical("regard") == 2.0
    assert timed.typical("two") == 9.0
    assert timed.best_peer() == "one"


def test_the_best_peer_is_the_fastest_and_never_ours():
    timed = Race({"regard": [1.0], "slow": [5.0], "quick": [2.0], "middle": [3.0]})
    assert timed.best_peer() == "quick"


def test_contestants_take_turns_in_another_order_each_round(monkeypatch):
    ran, asked = [], []

    def clock(run: Callable[[], str], repeats: int) -> float:
        name = run()
        asked.append((name, repeats))
        return {"a": 0.5, "b": 0.002, "c": 3.0}[name]

    monkeypatch.setattr(race, "_cpu_seconds", clock)
    contestants = {name: lambda name=name: ran.append(name) or name for name in "abc"}
    timed = race.race(contestants, rounds=4, least=1.0, device="cpu")
    assert "".join(ran[:9]) == "aabbccabc"  # twice to warm up, once to see how long it takes
    assert "".join(ran[9:]) == "abc" + "bca" + "cab" + "abc"
    assert asked[:3] == [("a", 1), ("b", 1), ("c", 1)]
    assert set(asked[3:]) == {("a", 2), ("b", 500), ("c", 1)}  # a turn lasts a second, or one call
    assert timed.seconds == {"a": [0.5] * 4, "b": [0.002] * 4, "c": [3.0] * 4}


def test_seconds_are_per_call(monkeypatch):
    now = iter([10.0, 16.0])
    monkeypatch.setattr(race.time, "perf_counter", lambda: next(now))
    calls = []
    assert race._cpu_seconds(lambda: calls.append(1), 4) == 1.5
    assert len(calls) == 4


def test_rubbish_is_collected_between_races_and_not_within(monkeypatch):
    states = []

    def clock(run: Callable[[], object], repeats: int) -> float:
        states.append(gc.isenabled())
        if len(states) == 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(race, "_cpu_seconds", clock)
    with pytest.raises(KeyboardInterrupt):
        race.race({"regard": int, "peer": int}, rounds=3, least=0.0, device="cpu")
    assert states == [True, True, False, False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({}, True),
        ({"ratio": 0.97}, True),
        ({"ratio": 0.96}, False),
        ({"megabytes": 5.0, "peer_megabytes": 5.0}, True),
        ({"megabytes": 5.1, "peer_megabytes": 5.0}, False),
        ({"megabytes": 5.1}, True),
    ],
    ids=str,
)
def test_a_target_is_speed_and_memory(changes, reached):
    assert line(**changes).reached == reached


@pytest.mark.cuda
def test_it_runs_on_a_gpu(capsys):
    code = bench.main(["--quick", "--device", "cuda", "--json", "--only", "causal()"])
    told = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert all(result["megabytes"] is not None for result in told["results"])
