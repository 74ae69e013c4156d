"""The benchmark of attention: output, correctness checks, timing and ratios."""

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
from bench import attention, peers, report, timing
from bench.report import BenchmarkResult, CorrectnessError
from bench.timing import Ratio, Timings
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


def line(**changes: object) -> BenchmarkResult:
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
    return BenchmarkResult(**usual | changes)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of one call."""
    usual = timing.time_alternating
    short = {"rounds": 2, "min_seconds": 0.0, "device": "cpu"}
    monkeypatch.setattr(attention, "time_alternating", lambda functions, **settings: usual(functions, **short))


def test_results_are_printed_as_json(fast, capsys):
    code = bench.main(["--quick", "--device", "cpu", "--json"])
    printed = capsys.readouterr()
    printed_ = json.loads(printed.out)
    assert set(printed_) == {"machine", "results", "notes"}
    assert printed_["machine"].startswith(
        f"torch {torch.__version__} on CPU, {torch.get_num_threads()} threads; ratio = peer's"
    )
    assert printed_["notes"] == []
    inside = "causal() & window(before=255) inside torch.compile"
    assert [(result["name"], result["shape"], result["kernel"], result["peer"]) for result in printed_["results"]] == [
        ("full(), forward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("full(), forward + backward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("causal(), forward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("causal(), forward + backward", "1 x 8 x 256 x 64", "sdpa", "torch sdpa"),
        ("window(before=255), forward", "1 x 2 x 1024 x 64", "blocked", "eager"),
        ("window(before=255), forward + backward", "1 x 2 x 1024 x 64", "blocked", "eager"),
        (f"{inside}, forward", "1 x 2 x 1024 x 64", "blocked", "not compiled"),
        (f"{inside}, forward + backward", "1 x 2 x 1024 x 64", "blocked", "not compiled"),
        (f"{inside}, dynamic, forward", "1 x 2 x 1024 x 64", "blocked", "not compiled"),
        (f"{inside}, dynamic, forward + backward", "1 x 2 x 1024 x 64", "blocked", "not compiled"),
    ]
    for result in printed_["results"]:
        assert set(result) == set(COLUMNS)
        assert all(kind is None or isinstance(result[name], kind) for name, kind in COLUMNS.items())
        assert result["low"] <= result["ratio"] <= result["high"]
        assert result["milliseconds"] > 0
        assert result["reached"] == (result["ratio"] >= result["target"])
        assert f"{result['name']} [{result['shape']}]: {result['ratio']:.2f}x {result['peer']}" in printed.err
    missed = [result for result in printed_["results"] if not result["reached"]]
    assert code == (1 if missed else 0)
    assert ("missed:" in printed.err) == bool(missed)


def test_only_selects_masks(fast, capsys):
    bench.main(["--quick", "--device", "cpu", "--json", "--only", "full"])  # the others compile for seconds
    printed_ = json.loads(capsys.readouterr().out)
    assert {result["name"].split(",")[0] for result in printed_["results"]} == {"full()"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[BenchmarkResult]:
    """The results of the benchmark in these tests."""
    results: list[BenchmarkResult] = []

    def fake(quick: bool, only: str = "") -> Iterator[BenchmarkResult]:
        yield from results

    monkeypatch.setattr(attention, "cpu_results", fake)
    monkeypatch.setattr(attention, "describe_overhead", lambda only: {})
    return results


def test_results_are_printed_as_a_table(measured, capsys):
    measured += [line(), line(name="a | b, forward", target=0.0, megabytes=12.4, peer_megabytes=99.6)]
    assert bench.main(["--quick", "--device", "cpu"]) == 0
    machine, _, *rows = capsys.readouterr().out.splitlines()
    assert machine == report.describe_machine("cpu")
    assert rows[:4] == [
        "| case | shape b x h x n x c | kernel | ms | peer | ms | ratio (range) | target | MB | peer MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `causal(), forward` | 1 x 8 x 512 x 64 | sdpa | 2 | torch sdpa | 3 | 1.50 (1.25 to 1.75) | >= 0.97 |  |  |",
        r"| `a \| b, forward` | 1 x 8 x 512 x 64 | sdpa | 2 | torch sdpa | 3 | 1.50 (1.25 to 1.75) |  | 12 | 100 |",
    ]


def test_a_missed_target_is_printed_and_gives_exit_code_1(measured, capsys):
    measured += [line(), line(name="full(), forward", ratio=0.5)]
    assert bench.main(["--quick", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.endswith("missed:\n  full(), forward [1 x 8 x 512 x 64]: 0.50x torch sdpa\n")


@pytest.mark.parametrize(("power", "code"), [(1.0, 0), (1.5, 1)])
def test_the_growth_of_a_window_has_a_target(power, code, measured, capsys):
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
    assert attention.growth_power(measured, "window(before=255), forward") == pytest.approx(power)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--device", "cuda"])
    assert exit_.value.code == 2
    assert "this machine has no GPU" in capsys.readouterr().err


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("bench", run_name="__main__")
    assert exit_.value.code == 0
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
def test_a_wrong_attention_is_not_timed(name, monkeypatch):
    monkeypatch.setattr(
        attention,
        "_regard_attention",
        lambda mask: WRONG[name] if mask == causal() else lambda *x: attend(*x, mask=mask),
    )
    timed = []

    def fake(functions: dict, **settings: object) -> Timings:
        timed.append(sorted(functions))
        return Timings({name: [1.0] for name in functions})

    monkeypatch.setattr(attention, "time_alternating", fake)
    with pytest.raises(
        CorrectnessError, match=r"causal\(\): error .* of outputs against float64, the naive method has"
    ):
        list(attention.cpu_results(quick=True))
    assert timed == [["regard", "torch sdpa"]] * 2  # full(), which is correct, and nothing after it


def test_a_correct_attention_passes_the_check_in_every_precision():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (50, 200):
            q, k, v, grad = torch.randn(4, 2, 4, n, 16, dtype=torch.float32).to(dtype)
            for mask in (full(), causal(), causal() & window(before=9) | global_tokens(3)):
                attention.check_attention(mask, partial(attend, mask=mask), q, k, v, grad)


def change(out: Tensor, where: str) -> Tensor:
    """Change one row of an output."""
    row, head = {"first row": (0, 0), "a middle row": (297, 3), "last head": (450, -1)}[where]
    changed = out.clone()
    changed[:, head, row] += 1
    return changed


@pytest.mark.parametrize("where", ["first row", "a middle row", "last head"])
def test_a_wrong_output_in_any_row_or_head_is_found(where):
    q, k, v, grad = torch.randn(4, 1, 4, 600, 16)
    with pytest.raises(CorrectnessError, match="of outputs"):
        attention.check_attention(full(), lambda *x: change(attend(*x), where), q, k, v, grad)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_a_wrong_gradient_is_found(which):
    q, k, v, grad = torch.randn(4, 1, 4, 600, 16)

    def doubled(*inputs: Tensor) -> Tensor:
        inputs = list(inputs)
        inputs[which] = 2 * inputs[which] - inputs[which].detach()
        return attend(*inputs)

    with pytest.raises(CorrectnessError, match=f"gradients of {'qkv'[which]}"):
        attention.check_attention(full(), doubled, q, k, v, grad)


def test_peers_give_our_result():
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    for mask in (full(), causal()):
        expected = attend(q, k, v, mask=mask)
        assert torch.allclose(peers.sdpa(causal=mask == causal())(q, k, v), expected, atol=1e-6)
        assert torch.allclose(peers.eager(mask.dense(70))(q, k, v), expected, atol=1e-6)


@pytest.mark.parametrize(
    "mask", [causal(), causal() & window(before=255), causal() & window(before=255) | global_tokens(64)], ids=repr
)
def test_flex_predicates_are_the_same_masks(mask):
    n = 700
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    assert torch.equal(peers.flex_predicate(mask)(0, 0, i, j), mask.dense(n))


def test_ratios_are_computed_within_each_round():
    """We take 1, 2, 4 seconds and the peer 3, 3, 3, so we are 3, 1.5 and 0.75 times as fast."""
    timings = Timings({"regard": [1.0, 2.0, 4.0], "one": [3.0, 3.0, 3.0], "two": [9.0, 9.0, 1.0]})
    assert timings.ratio("one") == Ratio(median=1.5, low=0.75, high=3.0)
    assert timings.ratio("two") == Ratio(median=4.5, low=0.25, high=9.0)
    assert timings.median("regard") == 2.0
    assert timings.median("two") == 9.0
    assert timings.fastest_peer() == "one"


def test_the_fastest_peer_is_never_ours():
    timings = Timings({"regard": [1.0], "slow": [5.0], "quick": [2.0], "middle": [3.0]})
    assert timings.fastest_peer() == "quick"


def test_functions_take_turns_in_another_order_each_round(monkeypatch):
    ran, timed = [], []

    def clock(run: Callable[[], str], repeats: int) -> float:
        name = run()
        timed.append((name, repeats))
        return {"a": 0.5, "b": 0.002, "c": 3.0}[name]

    monkeypatch.setattr(timing, "_cpu_seconds", clock)
    functions = {name: lambda name=name: ran.append(name) or name for name in "abc"}
    timings = timing.time_alternating(functions, rounds=4, min_seconds=1.0, device="cpu")
    assert "".join(ran[:9]) == "aabbccabc"  # twice to warm up, once to measure the repeats
    assert "".join(ran[9:]) == "abc" + "bca" + "cab" + "abc"
    assert timed[:3] == [("a", 1), ("b", 1), ("c", 1)]
    assert set(timed[3:]) == {("a", 2), ("b", 500), ("c", 1)}  # a turn takes a second, or one call
    assert timings.seconds == {"a": [0.5] * 4, "b": [0.002] * 4, "c": [3.0] * 4}


def test_seconds_are_per_call(monkeypatch):
    now = iter([10.0, 16.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    calls = []
    assert timing._cpu_seconds(lambda: calls.append(1), 4) == 1.5
    assert len(calls) == 4


def test_garbage_is_not_collected_while_functions_are_timed(monkeypatch):
    states = []

    def clock(run: Callable[[], object], repeats: int) -> float:
        states.append(gc.isenabled())
        if len(states) == 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(timing, "_cpu_seconds", clock)
    with pytest.raises(KeyboardInterrupt):
        timing.time_alternating({"regard": int, "peer": int}, rounds=3, min_seconds=0.0, device="cpu")
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
def test_a_target_includes_memory(changes, reached):
    assert line(**changes).reached == reached


@pytest.mark.cuda
def test_it_runs_on_a_gpu(capsys):
    code = bench.main(["--quick", "--device", "cuda", "--json", "--only", "causal()"])
    printed_ = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert all(result["megabytes"] is not None for result in printed_["results"])
