"""The benchmark of causal linear attention: correctness check, rows and the line about growth."""

import json

import pytest
import torch
from torch import Tensor

from bench import linear, timing
from bench.report import BenchmarkResult, CorrectnessError
from regard.core.linear import elu_plus_one


def test_it_compares_with_softmax_attention_and_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = timing.time_alternating
    short = {"rounds": 1, "min_seconds": 0.0, "device": "cpu"}
    monkeypatch.setattr(linear, "time_alternating", lambda functions, **settings: usual(functions, **short))
    assert linear.main(["--device", "cpu", "--quick", "--only", "squared", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    names = [f"squared_relu, {title}" for title in ("forward", "backward")]
    assert [(row["name"], row["peer"]) for row in rows] == [
        (name, peer) for name in names for peer in ("torch sdpa, causal", linear.BYTES)
    ]
    assert {row["kernel"] for row in rows} == {"torch"}


@pytest.mark.parametrize("wrong", ["outputs", "gradients of q", "gradients of k", "gradients of v"])
def test_a_wrong_result_is_not_timed(wrong: str) -> None:
    q, k, v, grad = (torch.randn(1, 2, 37, 5, generator=torch.Generator().manual_seed(n)) for n in range(4))
    right = linear._linear(elu_plus_one(), None)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = {"gradients of q": q, "gradients of k": k, "gradients of v": v}
        # the value of the added term is zero, its gradient is not
        added = sum((x - x.detach()).sum() for name, x in inputs.items() if name == wrong)
        return right(q, k, v) + (0.01 if wrong == "outputs" else 0.0) + added

    linear.check(elu_plus_one(), right, q, k, v, grad)
    with pytest.raises(CorrectnessError, match=f"error .* of {wrong} against float64"):
        linear.check(elu_plus_one(), attention, q, k, v, grad)


def test_growth_is_fitted_from_the_second_length_on() -> None:
    def rows(*times: float) -> list[BenchmarkResult]:
        sizes = (f"1 x 16 x {n} x 64" for n in (1000, 2000, 16000))
        return [
            BenchmarkResult("relu, forward", size, "triton", time, "copy", 1.0, 1.0, 1.0, 1.0, 0.0)
            for size, time in zip(sizes, times, strict=True)
        ]

    line = "relu, forward: time grows as n^{} from 2,000 to 16,000 tokens"
    assert linear.describe_growth(rows(9.0, 2.0, 16.0)) == {line.format("1.00"): True}
    assert linear.describe_growth(rows(9.0, 2.0, 128.0)) == {line.format("2.00"): False}
    assert linear.describe_growth(rows(9.0, 2.0, 16.0)[:2]) == {}
