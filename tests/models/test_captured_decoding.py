"""Captured decoding. On a CPU the same loop runs without a graph; it writes the same texts as the plain path."""

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import regard
from regard.base.errors import ConfigError, RegardError
from regard.core.masks import padding
from regard.core.positions import DynamicNTK, Rotary, YaRN
from regard.models import captured_decoding, generation
from regard.models.beam_search import BeamSearch
from regard.models.captured_decoding import capture_refusals, release_captured
from regard.models.decoding_ops import ALIGNED, unaligned_linear
from regard.models.generation import _prepare, collect_tokens, generate, stream_tokens
from regard.models.generation_adapters import DecoderAdapter, EncoderDecoderAdapter, make_adapter
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, DotProductAttention, GPTConfig, Sinusoidal, SyntheticAttention
from regard.models.hypothesis import GeneratedToken
from regard.models.presets import build_from_config
from regard.models.sampling import Greedy, KthLargest, Sample, StepwiseStrategy, Strategy
from regard.models.transformer import RelativeBuckets, Transformer, TransformerConfig
from regard.nn.int8 import quantize_int8

SMALL: dict[str, Any] = dict(vocab=29, context=23, width=24, depth=2, heads=3, ff_width=40)  # noqa: C408
LLAMA = GPTConfig(
    **{**SMALL, "heads": 4}, positions=Rotary(), norm="rms", activation="gated-silu", bias=False, tied=False,
    mixer=DotProductAttention(kv_heads=2, head_width=10, qk_norm="rms", query_key_value_bias=True),
)  # fmt: skip
GPTS = {
    "gpt-2": GPTConfig(**SMALL),
    "llama": LLAMA,
    "windowed": GPTConfig(**SMALL, window=3, positions=Rotary(pairing="interleaved", width=4), activation="gelu"),
    "sinusoidal": GPTConfig(**{**SMALL, "ff_width": 0}, positions=Sinusoidal()),
    "layer norm of heads": GPTConfig(**SMALL, positions=None, mixer=DotProductAttention(qk_norm="layer")),
    "yarn": GPTConfig(**SMALL, positions=Rotary(scaling=YaRN(2.0, original=300, attention_factor=1.1))),
}  # fmt: skip
PAIR: dict[str, Any] = dict(vocab=29, context=21, width=24, depth=2, heads=3, ff_width=40)  # noqa: C408
TRANSFORMERS = {
    "2017": TransformerConfig(**PAIR),
    "bart": TransformerConfig(**PAIR, positions="learned", embedding_norm=True, output_bias=True, activation="gelu"),
    "t5": TransformerConfig(
        **PAIR, order="pre", norm="rms", positions=RelativeBuckets(buckets=8, max_distance=13), bias=False, beta=1.0,
        scale_embedding=False, output_scale=24**-0.5, head_width=6, activation="gated-gelu-tanh", decoder_depth=1,
    ),
}  # fmt: skip
STRATEGIES: dict[str, Strategy] = {
    "greedy": Greedy(),
    "sample": Sample(seed=3),
    "nucleus": Sample(temperature=1.3, top_k=11, top_p=0.9, seed=40, stream=2),
    "kth": KthLargest(2),
    "beam": BeamSearch(3),
    "penalised": BeamSearch(4, 0.7, early_stopping="never"),
    "wide": BeamSearch(31, early_stopping=True),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2, 2]]
STOPS = [3, (1, 4), (20, 20, 7)]
SOURCES = torch.tensor([[5, 6, 7, 8, 0], [9, 3, 0, 0, 0], [2, 4, 6, 8, 10], [1, 0, 0, 0, 0]])
CUDA = torch.cuda.is_available()


def lively(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are large enough for its logits to differ clearly."""
    model = build_from_config(config, seed=1, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).to(dtype), alpha=0.2
            )
    return model


def adapter_of(model: Any) -> Any:
    if isinstance(model, GPT):
        return DecoderAdapter(model)
    return EncoderDecoderAdapter(model, SOURCES, padding([4, 2, 5, 1]))


def tokens_ahead(model: Any, prompts: Any, graph: bool = False, **options: Any) -> Iterator[GeneratedToken]:
    """The tokens of the device loop, without a graph on a CPU."""
    run = _prepare(model, prompts, capture=False, **options)
    return replace(run, reader=None, captured=graph).tokens()


def generate_ahead(model: Any, prompts: Any, graph: bool = False, **options: Any) -> list[GeneratedText]:
    new: list[list[GeneratedToken]] = [[] for _ in prompts]
    for token in tokens_ahead(model, prompts, graph, **options):
        new[token.prompt_index].append(token)
    return [collect_tokens(prompt, each, options.get("stop", ())) for prompt, each in zip(prompts, new, strict=True)]


def assert_same(texts: list[GeneratedText], truth: list[GeneratedText], tolerance: float = 1e-5) -> None:
    for text, true in zip(texts, truth, strict=True):
        assert (text.tokens, text.finish_reason, text.stop) == (true.tokens, true.finish_reason, true.stop)
        assert text.log_probabilities == pytest.approx(true.log_probabilities, abs=tolerance)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: lively(config) for name, config in (GPTS | TRANSFORMERS).items()}


@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("name", GPTS | TRANSFORMERS)
def test_the_loop_writes_the_texts_of_the_plain_path(models: dict[str, Any], name: str, way: str) -> None:
    adapter = adapter_of(models[name])
    for options in ({"max_new_tokens": 99}, {"max_new_tokens": 7, "stop": STOPS}):
        settings: Any = {"strategy": STRATEGIES[way], **options}
        assert_same(generate_ahead(adapter, PROMPTS, **settings), generate(adapter, PROMPTS, **settings))
    release_captured(models[name])


@pytest.mark.parametrize("name", GPTS | TRANSFORMERS)
def test_the_loop_writes_the_texts_of_the_plain_path_with_int8_weights(models: dict[str, Any], name: str) -> None:
    model = quantize_int8(models[name])
    assert not [reason for reason in capture_refusals(adapter_of(model)) if "GPU" not in reason]
    for options in ({"max_new_tokens": 99}, {"strategy": BeamSearch(3), "max_new_tokens": 7}):
        adapter: Any = adapter_of(model)
        assert_same(generate_ahead(adapter, PROMPTS, **options), generate(adapter, PROMPTS, **options), 2e-2)
    release_captured(model)


def test_a_text_of_one_token_and_one_that_fills_the_context_need_no_step(models: dict[str, Any]) -> None:
    full = [[3] * 23, [4]]
    for model, options in ((models["gpt-2"], {"max_new_tokens": 1}), (models["llama"], {"max_new_tokens": 5})):
        for strategy in (Greedy(), BeamSearch(2)):
            settings: Any = {"strategy": strategy, **options}
            assert_same(generate_ahead(model, full, **settings), generate(model, full, **settings))


def test_tokens_are_yielded_step_by_step_from_the_first_pass_on(models: dict[str, Any]) -> None:
    stream = tokens_ahead(models["gpt-2"], [[1, 2], [3, 4]], max_new_tokens=6)
    assert [(next(stream).prompt_index) for _ in range(4)] == [0, 1, 0, 1]


def test_streams_of_one_model_may_be_read_in_turns(models: dict[str, Any]) -> None:
    model = models["gpt-2"]
    truth = [[token.token for token in stream_tokens(model, prompt, max_new_tokens=9)] for prompt in ([[1]], [[2]])]
    first, second = (tokens_ahead(model, prompt, max_new_tokens=9) for prompt in ([[1]], [[2]]))
    found: list[list[int]] = [[], []]
    for a, b in zip(first, second, strict=True):
        found[0].append(a.token)
        found[1].append(b.token)
    assert found == truth


def kept(model: nn.Module) -> list[Any]:
    return list(captured_decoding._kept.get(model, {}).values())


def test_a_loop_is_kept_for_calls_of_similar_length_and_released() -> None:
    model = lively(GPTS["llama"])
    generate_ahead(model, [[1, 2, 3]], max_new_tokens=5)
    (loop,) = kept(model)
    assert_same(generate_ahead(model, [[9]], max_new_tokens=8), generate(model, [[9]], max_new_tokens=8))
    assert kept(model) == [loop]
    generate_ahead(model, [[1], [2]], max_new_tokens=5)
    generate_ahead(model, [[1]], max_new_tokens=5, temperature=0.5)
    assert len(kept(model)) == 2
    assert loop not in kept(model)
    release_captured(model)
    assert kept(model) == []


def test_seeds_share_a_loop_and_an_unfinished_stream_returns_it() -> None:
    model = lively(GPTS["gpt-2"])
    next(tokens_ahead(model, [[1]], max_new_tokens=5, temperature=0.5, seed=1))
    assert kept(model) == []  # no step was needed for the first token
    stream = tokens_ahead(model, [[1]], max_new_tokens=5, temperature=0.5, seed=1)
    next(stream), next(stream)
    stream.close()  # type: ignore[attr-defined]
    (loop,) = kept(model)
    for seed in (1, 2):
        settings: Any = {"max_new_tokens": 5, "temperature": 0.5, "seed": seed}
        assert_same(generate_ahead(model, [[1]], **settings), generate(model, [[1]], **settings))
    assert kept(model) == [loop]


def test_a_kept_loop_is_freed_with_its_model() -> None:
    model = lively(GPTS["gpt-2"])
    generate_ahead(model, [[1]], max_new_tokens=3)
    before = len(captured_decoding._kept)
    del model
    gc.collect()
    assert len(captured_decoding._kept) == before - 1


def replace_parameter(model: Any) -> None:
    model.blocks[0].attention.out.weight = nn.Parameter(torch.randn(24, 24))


def replace_setting(model: Any) -> None:
    model.blocks[1].attention.beta = 2.0


def replace_module(model: Any) -> None:
    model.blocks[0] = copy.deepcopy(model.blocks[1])


@pytest.mark.parametrize("change", [replace_parameter, replace_setting, replace_module])
def test_a_loop_made_for_other_parameters_or_settings_is_not_used(change: Callable[[Any], None]) -> None:
    model = lively(GPTS["gpt-2"])
    generate_ahead(model, [[1, 2]], max_new_tokens=9)
    (loop,) = kept(model)
    change(model)
    assert_same(generate_ahead(model, [[1, 2]], max_new_tokens=9), generate(model, [[1, 2]], max_new_tokens=9))
    assert loop not in kept(model)


@pytest.mark.parametrize("outputs", [1, 8, 17, 1001])
def test_a_number_of_outputs_that_is_not_aligned_changes_nothing(outputs: int) -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(outputs, 16), torch.randn(outputs)
    found = unaligned_linear(x, weight, bias)
    torch.testing.assert_close(found, functional.linear(x, weight, bias))
    assert found.stride(0) % ALIGNED == 0


@pytest.mark.parametrize("name", ["gpt-2", "t5"])
def test_weights_changed_in_place_are_seen_by_a_kept_loop(name: str) -> None:
    adapter = adapter_of(lively((GPTS | TRANSFORMERS)[name]))
    generate_ahead(adapter, PROMPTS, max_new_tokens=9)
    loops = kept(adapter.module)
    with torch.no_grad():
        for parameter in adapter.module.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    assert_same(generate_ahead(adapter, PROMPTS, max_new_tokens=9), generate(adapter, PROMPTS, max_new_tokens=9))
    assert kept(adapter.module) == loops


@pytest.mark.parametrize("strategy", [Greedy(), Sample(top_k=3), Sample(top_p=0.5), BeamSearch(2)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_or_infinity_at_a_later_step_raises_after_the_tokens_before_it(strategy: Strategy, bad: float) -> None:
    model = lively(GPTS["gpt-2"])
    with torch.no_grad():
        model.positions.weight[5] = bad
    found: list[GeneratedToken] = []
    stream = tokens_ahead(model, [[1, 2, 3]], strategy=strategy, max_new_tokens=9)
    with pytest.raises(RegardError, match="NaN or infinity"):
        found.extend(stream)
    assert len(found) == (0 if isinstance(strategy, BeamSearch) else 3)


def test_other_prompts_that_have_ended_do_not_matter_even_if_they_overflow() -> None:
    model = lively(GPTS["gpt-2"])
    texts = generate_ahead(model, [[1] * 22, [2]], max_new_tokens=99)
    assert_same(texts, generate(model, [[1] * 22, [2]], max_new_tokens=99))
    assert [text.finish_reason for text in texts] == ["context", "context"]


def test_a_loop_made_in_inference_mode_is_used_outside_of_it() -> None:
    model = lively(GPTS["gpt-2"])
    truth = generate(model, PROMPTS, max_new_tokens=9)
    with torch.inference_mode():
        assert_same(generate_ahead(model, PROMPTS, max_new_tokens=9), truth)
    loops = kept(model)
    assert_same(generate_ahead(model, PROMPTS, max_new_tokens=9), truth)
    assert kept(model) == loops


class Mine(StepwiseStrategy):
    name = "mine"

    def choose(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return logits.argmin(-1)


class Subclass(GPT):
    def hidden(self, *args: Any, **keywords: Any) -> Any:
        return super().hidden(*args, **keywords) * 2


def with_hook(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda *_: None)


def with_own_forward(model: Any) -> None:
    model.blocks[0].attention.forward = MethodType(lambda self, x, **_: x, model.blocks[0].attention)


def with_parametrization(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[0].attention.out)


def with_other_layer(model: Any) -> None:
    model.blocks[0].attention.out = nn.Linear(24, 24)


def with_kernel(model: Any) -> None:
    model.blocks[0].attention.kernel = "eager"


def with_term(model: Any) -> None:
    model.blocks[0].attention.scores = regard.alibi(heads=3)


def with_other_rotary(model: Any) -> None:
    model.blocks[1].attention.rotary = Rotary(base=500.0)


def with_other_activation(model: Any) -> None:
    model.blocks[0].feedforward.activation = torch.sin


def with_dtypes(model: Any) -> None:
    model.norm.double()


def with_hard_attention(model: Any) -> None:
    model.blocks[0].attention.beta = float("inf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_hook, "has a hook"),
        (with_own_forward, "its own forward"),
        (with_parametrization, "blocks.0.attention.out is a Parametrized"),
        (with_other_layer, "blocks.0.attention.out is a Linear"),
        (with_kernel, "names its kernel, 'eager'"),
        (with_term, "has a score term"),
        (with_other_rotary, "differ"),
        (with_dtypes, "parameters differ in dtype"),
        (with_other_activation, "blocks.0.feedforward has an activation that is not registered"),
        (with_hard_attention, "beta=inf"),
    ],
)
def test_what_the_step_does_not_know_is_refused(change: Callable[[Any], None], words: str) -> None:
    model = lively(GPTS["gpt-2"])
    before = capture_refusals(make_adapter(model), Greedy())
    change(model)
    assert not any(words in reason for reason in before)
    assert any(words in reason for reason in capture_refusals(make_adapter(model), Greedy()))


@pytest.mark.parametrize(
    ("config", "strategy", "words"),
    [
        (GPTConfig(**SMALL, mixer=SyntheticAttention()), Greedy(), "Synthesizer"),
        (GPTConfig(**SMALL, positions=Rotary(scaling=DynamicNTK(2.0, 16))), Greedy(), "DynamicNTK"),
        (GPTS["gpt-2"], Mine(), "it knows greedy decoding, sampling and beam search"),
    ],
)
def test_other_models_and_strategies_are_refused(config: GPTConfig, strategy: Strategy, words: str) -> None:
    assert any(words in reason for reason in capture_refusals(make_adapter(lively(config)), strategy))


@pytest.mark.parametrize("name", GPTS | TRANSFORMERS)
def test_a_copied_model_is_not_refused(models: dict[str, Any], name: str) -> None:
    adapter = adapter_of(copy.deepcopy(models[name]))
    assert all("GPU" in reason for reason in capture_refusals(adapter))


def test_subclasses_and_left_padded_sources_are_refused() -> None:
    reasons = capture_refusals(DecoderAdapter(Subclass(GPTS["gpt-2"])), Greedy())
    assert any("not Subclass" in reason for reason in reasons)
    adapter = EncoderDecoderAdapter(lively(TRANSFORMERS["2017"]), SOURCES, padding([4, 2, 5, 1], side="left", width=5))
    assert any("padded on the left" in reason for reason in capture_refusals(adapter, Greedy()))


def test_watching_recording_and_autocast_are_refused() -> None:
    model = lively(GPTS["gpt-2"])
    contexts: list[tuple[str, Any]] = [
        ("recorded", regard.watch(model)), ("recorded", regard.recording()),
        ("changed", regard.intervene(model)), ("autocast", torch.autocast("cpu", torch.bfloat16)),
    ]  # fmt: skip
    for words, context in contexts:
        with context as edit:
            if words == "changed":
                edit.ablate("blocks.0.attention", heads=[1])
                model(torch.tensor([[1]]))
            reasons = capture_refusals(make_adapter(model), Greedy())
        assert any(words in reason for reason in reasons), reasons
        assert not any(words in reason for reason in capture_refusals(make_adapter(model), Greedy()))


@pytest.mark.skipif(CUDA, reason="with a GPU the model could be moved there")
def test_on_a_cpu_capture_is_refused_by_name_and_left_out_by_default(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be captured: it needs a model on a GPU, not on cpu"):
        generate(models["gpt-2"], [[1]], capture=True)
    assert _prepare(models["gpt-2"], [[1]]).reader is not None


def test_few_tokens_are_not_worth_a_graph(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "capture_refusals", lambda *_: [])  # as if this were a GPU
    runs = [_prepare(models["gpt-2"], [[1]], max_new_tokens=new, capture=asked)
            for new, asked in ((15, None), (16, None), (2, True), (99, False))]  # fmt: skip
    assert [run.captured for run in runs] == [False, True, True, False]
    assert [run.reader is None for run in runs] == [False, True, True, False]


def test_capture_needs_a_cache_and_a_boolean(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use_cache=False keeps no cache"):
        generate(models["gpt-2"], [[1]], capture=True, use_cache=False)
    with pytest.raises(ConfigError, match="capture is None, True or False, not 'yes'"):
        generate(models["gpt-2"], [[1]], capture="yes")  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("name", GPTS | TRANSFORMERS)
def test_a_graph_writes_the_texts_of_the_plain_path(name: str, way: str) -> None:
    adapter = adapter_of(lively((GPTS | TRANSFORMERS)[name]).to("cuda"))
    if isinstance(adapter, EncoderDecoderAdapter):
        adapter.source = SOURCES.to("cuda")
    for options in ({"max_new_tokens": 99}, {"max_new_tokens": 7, "stop": STOPS}):
        settings: Any = {"strategy": STRATEGIES[way], **options}
        plain = generate(adapter, PROMPTS, capture=False, **settings)
        for _ in range(2):  # the second call replays a kept graph
            assert_same(generate(adapter, PROMPTS, capture=True, **settings), plain, 1e-4)


@pytest.mark.cuda
def test_a_graph_sees_weights_changed_in_place_and_not_replaced_ones() -> None:
    model = lively(GPTS["llama"]).to("cuda")
    generate(model, PROMPTS, max_new_tokens=9, capture=True)
    with torch.no_grad():
        model.blocks[0].feedforward.down.weight.mul_(-2)
    for _ in range(2):
        plain = generate(model, PROMPTS, max_new_tokens=9, capture=False)
        assert_same(generate(model, PROMPTS, max_new_tokens=9, capture=True), plain, 1e-4)
        model.blocks[0].attention.out.weight = nn.Parameter(torch.randn(24, 40, device="cuda"))


@pytest.mark.cuda
def test_in_half_precision_a_graph_is_as_exact_as_the_plain_path() -> None:
    exact = lively(GPTS["llama"], torch.bfloat16).double()
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    for text in generate(model, PROMPTS, max_new_tokens=15, temperature=1.0, capture=True):
        tokens = torch.tensor([text.prompt + text.tokens])
        where = torch.arange(len(text.prompt), tokens.shape[1])
        truth, plain = (
            net(tokens.to(next(net.parameters()).device))[0].double().log_softmax(-1).cpu()[where - 1, tokens[0, where]]
            for net in (exact, model)
        )
        error = (torch.tensor(text.log_probabilities, dtype=torch.float64) - truth).abs().max()
        assert error < 2 * (plain - truth).abs().max() + 0.05


def test_a_transformer_takes_the_option_too(models: dict[str, Any]) -> None:
    model: Transformer = models["2017"]
    texts = model.generate(SOURCES, start_token=1, max_new_tokens=4, capture=False)
    assert [text.tokens for text in texts] == [
        text.tokens for text in generate(EncoderDecoderAdapter(model, SOURCES), [[1]] * 4, max_new_tokens=4)
    ]


def test_hooks_of_all_modules_refuse_a_captured_step() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        reasons = capture_refusals(make_adapter(build_from_config(GPTS["gpt-2"])), Greedy())
    finally:
        handle.remove()
    assert any("hooks of all modules" in reason for reason in reasons)
