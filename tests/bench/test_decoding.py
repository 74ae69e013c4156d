"""The benchmark of text generation: its peer writes our texts, and wrong texts are not timed."""

import json
from dataclasses import replace

import pytest
import torch

from bench import decoding
from bench.plain_decoding import PlainDecoder
from bench.report import CorrectnessError
from regard.models.gpt import GPT


def test_greedy_decoding_is_compared_with_a_plain_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = decoding.time_alternating
    short = {"rounds": 1, "min_seconds": 0.0, "device": "cpu"}
    monkeypatch.setattr(decoding, "time_alternating", lambda functions, **settings: usual(functions, **short))
    assert decoding.main(["--quick", "--json", "--only", "greedy"]) in (0, 1)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["name"], each["peer"].split(",")[0]) for each in results] == [
        *[("GPT-2, greedy", "compiled step")] * 2,
        *[("Llama-style, greedy", "plain path")] * 2,
        *[("T5-style, greedy", "plain path")] * 2,
    ]


def test_the_plain_step_writes_the_texts_of_our_model() -> None:
    model = decoding.build(decoding.QUICK.gpt, "cpu")
    prompt = decoding.make_prompts(model, 8, 3, "cpu")
    texts = PlainDecoder(model, prompt, 9, compiled=False)()
    assert texts == [list(text.tokens) for text in model.generate(prompt, max_new_tokens=9)]


def test_wrong_texts_and_inexact_log_probabilities_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(decoding.QUICK, new=8)
    usual = GPT.generate

    def wrong(model: GPT, *args: object, capture: bool | None = None, **options: object) -> object:
        texts = usual(model, *args, **options)  # type: ignore[arg-type]
        if capture is False:
            return texts
        return [
            replace(text, tokens=tuple(token ^ 1 for token in text.tokens), log_probabilities=(-9.0,) * 8)
            for text in texts
        ]

    monkeypatch.setattr(GPT, "generate", wrong)
    with pytest.raises(CorrectnessError, match="3 of 3 texts differ from those of the plain path"):
        decoding.check_texts("GPT", sizes.gpt, sizes, {}, 3, "cpu")
    model = decoding.build(sizes.gpt, "cpu", torch.float32)
    with pytest.raises(CorrectnessError, match="log-probabilities are wrong by"):
        decoding.check_exactness("GPT", model, sizes, 3, "cpu")
