"""The benchmark of Hugging Face models: it runs and checks correctness."""

import json

import pytest
import torch

from bench import huggingface
from bench.report import CorrectnessError


def test_every_mask_is_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = huggingface.time_alternating
    short = {"rounds": 1, "min_seconds": 0.0, "device": "cpu"}
    monkeypatch.setattr(huggingface, "time_alternating", lambda functions, **settings: usual(functions, **short))
    assert huggingface.main(["--quick", "--json"]) in (0, 1)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["name"], each["kernel"], each["peer"]) for each in results] == [
        ("causal", "sdpa", "sdpa"), ("sliding window", "blocked", "sdpa"),
    ]  # fmt: skip


def test_a_wrong_result_is_not_timed() -> None:
    with pytest.raises(CorrectnessError, match="window: hidden states differ by 1"):
        huggingface._check("window", torch.zeros(3), torch.ones(3))
