"""Text generation: independent of batch, padding and KV cache, and equal to a plain loop."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError, DtypeError, RegardError, ShapeError
from regard.core.masks import causal, padding
from regard.core.positions import Rotary
from regard.integrations.torchvision import let_torchvision_load
from regard.models.beam_search import BeamSearch
from regard.models.generation import collect_tokens, generate, stream_tokens
from regard.models.generation_adapters import EncoderDecoderAdapter, GenerationAdapter
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, DotProductAttention, GPTConfig, Sinusoidal, SyntheticAttention
from regard.models.hypothesis import GeneratedToken
from regard.models.presets import build, build_from_config
from regard.models.sampling import Greedy, KthLargest, Sample, StepwiseStrategy, Strategy
from regard.models.saving import load
from regard.models.transformer import Transformer, TransformerConfig

SMALL: dict[str, Any] = dict(vocab=23, context=9, width=24, depth=2, heads=3, ff_width=40, tied=False)  # noqa: C408
CONFIGS = {
    "learned": GPTConfig(**SMALL),
    "rotary": GPTConfig(**SMALL, positions=Rotary()),
    "sinusoidal": GPTConfig(**SMALL, positions=Sinusoidal()),
    "grouped": GPTConfig(**SMALL, positions=Rotary(), mixer=DotProductAttention(kv_heads=1, qk_norm="rms")),
    "windowed": GPTConfig(**SMALL, window=3),
    "windowed-rotary": GPTConfig(**SMALL, positions=Rotary(), window=4),
    "synthesizer": GPTConfig(**SMALL, mixer=SyntheticAttention(context=8)),
    "mixture": GPTConfig(**SMALL, mixer=SyntheticAttention(parts=("dense", "random", "dot"))),
}
STRATEGIES = {
    "greedy": Greedy(),
    "sample": Sample(seed=3),
    "nucleus": Sample(temperature=1.3, top_k=11, top_p=0.9, seed=40),
    "kth": KthLargest(2),
    "beam": BeamSearch(3),
    "penalised": BeamSearch(4, 0.7),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2, 2]]
STOPS = [3, (1, 4), (20, 20)]


def lively(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are large enough for its logits to differ clearly."""
    model = build_from_config(config, seed=1, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, GPT]:
    return {name: lively(config) for name, config in CONFIGS.items()}


def reach(model: GPT) -> int:
    return model.config.max_length


def ends(stops: Sequence[int | tuple[int, ...]], new: list[int]) -> bool:
    return any(new[-len(stop) :] == list(stop) for stop in ((s,) if isinstance(s, int) else s for s in stops))


@torch.no_grad()
def by_hand(model: GPT, prompt: list[int], strategy: Strategy, number: int, length: int, stops: Any) -> list[int]:
    """The new tokens of one prompt alone, from whole passes: what generation must come to."""
    if isinstance(strategy, BeamSearch):
        return beam_by_hand(model, prompt, strategy, length, stops)
    assert isinstance(strategy, StepwiseStrategy)
    draws = np.random.default_rng((strategy.seed, number))
    new: list[int] = []
    while len(new) < length and len(prompt) + len(new) <= reach(model) and not ends(stops, new):
        logits = model(torch.tensor([prompt + new]))[:, -1]
        chance = torch.tensor([draws.random()], dtype=torch.float64)
        new.append(int(strategy.choose(logits, chance)))
    return new


def beam_by_hand(model: GPT, prompt: list[int], strategy: BeamSearch, length: int, stops: Any) -> list[int]:
    """All continuations are compared at every step, and the search ends when no running text is better."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []

    def over(new: list[int]) -> bool:
        return ends(stops, new) or len(new) == length or len(prompt) + len(new) > reach(model)

    def score(pair: tuple[float, list[int]]) -> float:
        return pair[0] / len(pair[1]) ** strategy.length_penalty

    while True:
        found = []
        rows = model(torch.tensor([prompt + new for _, new in live]))[:, -1].double().log_softmax(-1).tolist()
        for (total, new), scores in zip(live, rows, strict=True):
            found += [(total + each, [*new, token]) for token, each in enumerate(scores)]
        found = sorted(found, key=lambda pair: -pair[0])
        ended = [pair for pair in found[: strategy.num_beams] if over(pair[1])]
        done = sorted(done + ended, key=score, reverse=True)[: strategy.num_beams]
        live = [pair for pair in found if not over(pair[1])][: strategy.num_beams]
        if not live or (len(done) == strategy.num_beams and score(live[0]) <= score(done[-1])):
            return done[0][1]


@pytest.mark.parametrize(
    ("name", "way"),
    [*itertools.product(CONFIGS, ("greedy", "nucleus", "penalised")), *itertools.product(["learned"], STRATEGIES)],
)
def test_the_cache_changes_no_text(models: dict[str, GPT], name: str, way: str) -> None:
    model, strategy = models[name], STRATEGIES[way]
    truth = [by_hand(model, prompt, strategy, number, 6, STOPS) for number, prompt in enumerate(PROMPTS)]
    for cache in (True, False):
        texts = generate(model, PROMPTS, strategy=strategy, max_new_tokens=6, stop=STOPS, use_cache=cache)
        assert [list(text.tokens) for text in texts] == truth, cache
        assert [list(text.prompt) for text in texts] == PROMPTS


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_log_probabilities_are_those_of_one_pass_over_the_whole_text(models: dict[str, GPT], name: str) -> None:
    model = models[name]
    for way in ("nucleus", "beam"):
        for text in generate(model, PROMPTS, strategy=STRATEGIES[way], max_new_tokens=9):
            after = model(torch.tensor([[*text.prompt, *text.tokens[:-1]]]))
            rows = after[0].double().log_softmax(-1)[len(text.prompt) - 1 :]
            truth = rows.gather(1, torch.tensor(text.tokens)[:, None])[:, 0]
            assert text.log_probabilities == pytest.approx(truth.tolist(), abs=2e-5)
            assert text.log_probability == pytest.approx(float(truth.sum()), abs=1e-4)


def test_in_double_precision_the_numbers_agree_too() -> None:
    model = lively(CONFIGS["learned"], torch.float64)
    one = generate(model, PROMPTS, strategy=Sample(), max_new_tokens=11, use_cache=False)
    other = generate(model, PROMPTS, strategy=Sample(), max_new_tokens=11)
    for a, b in zip(one, other, strict=True):
        assert a.tokens == b.tokens
        assert a.log_probabilities == pytest.approx(b.log_probabilities, abs=1e-12)


def test_other_prompts_of_the_batch_change_nothing(models: dict[str, GPT]) -> None:
    model = models["learned"]
    beside = [[[7] * 9, [4], [9, 1]], [[2, 2], [4], [1] * 7, [5]]]
    texts = [generate(model, prompts, strategy=Sample(), max_new_tokens=9) for prompts in beside]
    assert texts[0][1].tokens == texts[1][1].tokens
    assert texts[0][1].tokens != generate(model, [[4]], strategy=Sample(), max_new_tokens=9)[0].tokens


def test_samples_of_different_seeds_and_prompts_are_independent() -> None:
    """Seeds 0 to 9 with eight equal prompts each: 80 texts of 40 draws from 10 tokens are all different."""
    model = Markov(torch.zeros(10, 10))
    texts = [generate(model, [[1]] * 8, temperature=1.0, seed=seed, max_new_tokens=40) for seed in range(10)]
    drawn = torch.tensor([text.tokens for batch in texts for text in batch])
    assert len({tuple(row) for row in drawn.tolist()}) == 80
    same = (drawn[:, None] == drawn).float().mean(-1)[~torch.eye(80, dtype=torch.bool)]
    assert same.mean() == pytest.approx(0.1, abs=0.01)
    assert same.max() < 0.5  # 40 draws of probability 0.1: 20 equal ones have a probability below 1e-9


def test_equal_prompts_have_different_samples_and_seeds_repeat(models: dict[str, GPT]) -> None:
    model = models["rotary"]
    texts = generate(model, [[4, 5]] * 5, strategy=Sample(temperature=2.0), max_new_tokens=8)
    assert len({text.tokens for text in texts}) == 5
    again = generate(model, [[4, 5]] * 5, strategy=Sample(temperature=2.0), max_new_tokens=8)
    assert [text.tokens for text in again] == [text.tokens for text in texts]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_beam_k_1_and_a_single_candidate_equal_greedy_decoding(models: dict[str, GPT], name: str) -> None:
    model = models[name]
    truth = generate(model, PROMPTS, max_new_tokens=11, stop=STOPS)
    for strategy in (BeamSearch(1), BeamSearch(1, 1.5), KthLargest(1), Sample(top_k=1, seed=9), Sample(top_p=1e-9)):
        texts = generate(model, PROMPTS, strategy=strategy, max_new_tokens=11, stop=STOPS)
        assert [(text.tokens, text.finish_reason, text.stop) for text in texts] == [
            (text.tokens, text.finish_reason, text.stop) for text in truth
        ]


class Markov(GenerationAdapter):
    """A decoder of one's own: the next token depends on the last one, or on the last two."""

    def __init__(self, table: Tensor, context: int = 100) -> None:
        super().__init__(nn.Module())
        self.table = self.module.table = nn.Parameter(table.double())
        self.module.config = SimpleNamespace(vocab=table.shape[-1], context=context)
        self.calls: list[tuple[int, int]] = []

    class Memory:
        """All tokens, one row for each text."""

        tokens: Tensor | None = None

        def reorder(self, rows: Tensor) -> None:
            if self.tokens is not None:
                self.tokens = self.tokens[rows]

    def start(self, capacity: int) -> "Markov.Memory":
        return Markov.Memory()

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        self.calls.append((tokens.shape[0], tokens.shape[1]))
        state.tokens = tokens if state.tokens is None else torch.cat([state.tokens, tokens], 1)
        return self.full_pass(state.tokens, torch.arange(len(tokens)))

    def full_pass(self, tokens: Tensor, rows: Tensor) -> Tensor:
        if self.table.ndim == 2:
            return self.table[tokens[:, -1]]
        before = tokens[:, -2] if tokens.shape[1] > 1 else torch.zeros_like(tokens[:, -1])
        return self.table[before, tokens[:, -1]]


def every_text(model: Markov, prompt: list[int], length: int, stop: int) -> dict[tuple[int, ...], float]:
    """All texts there can be, with their log-probabilities."""
    found: dict[tuple[int, ...], float] = {}

    def go(new: tuple[int, ...], total: float) -> None:
        if len(new) == length or (new and new[-1] == stop):
            found[new] = total
            return
        scores = model.full_pass(torch.tensor([[*prompt, *new]]), torch.arange(1))[0].log_softmax(-1).tolist()
        for token, score in enumerate(scores):
            go((*new, token), total + score)

    go((), 0.0)
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_texts(seed: int, penalty: float) -> None:
    table = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(seed)) * 1.5
    model = Markov(table)
    prompts = [[1], [2, 3, 0], [3, 3]]
    texts = generate(model, prompts, strategy=BeamSearch(4**4, penalty), max_new_tokens=4, stop=[2])
    for prompt, text in zip(prompts, texts, strict=True):
        every = every_text(model, prompt, 4, 2)
        best = max(every, key=lambda new: every[new] / len(new) ** penalty)
        assert sum(math.exp(total) for total in every.values()) == pytest.approx(1.0)
        assert text.tokens == best
        assert text.log_probability == pytest.approx(every[best], abs=1e-12)


@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_texts_of_a_gpt() -> None:
    model = lively(GPTConfig(vocab=5, context=9, width=12, depth=1, heads=3, dropout=0.0))
    for prompt in ([1], [3, 0, 4]):
        texts = torch.tensor([[*prompt, *new] for new in itertools.product(range(5), repeat=4)])
        rows = model(texts[:, :-1]).double().log_softmax(-1)[:, len(prompt) - 1 :]
        totals = rows.gather(2, texts[:, len(prompt) :, None])[..., 0].sum(1)
        best = texts[totals.argmax()].tolist()[len(prompt) :]
        assert list(generate(model, [prompt], strategy=BeamSearch(5**4), max_new_tokens=4)[0].tokens) == best


def test_beam_search_finds_what_greedy_decoding_misses() -> None:
    # from 0, token 1 is likelier than 2, but leads nowhere good
    shares = torch.tensor([[0.0, 0.6, 0.4, 0.0], [0.25] * 4, [0.0, 0.0, 0.0, 1.0], [0.25] * 4])
    model = Markov(shares.log())
    assert generate(model, [[0]], max_new_tokens=2)[0].tokens == (1, 0)
    text = generate(model, [[0]], strategy=BeamSearch(2), max_new_tokens=2)[0]
    assert text.tokens == (2, 3)
    assert text.log_probability == pytest.approx(math.log(0.4))


def test_a_finished_hypothesis_frees_its_place_in_the_beam() -> None:
    # 3 is the stop: it is second best at once, and a beam of two still continues two texts
    shares = torch.tensor([[0.2, 0.5, 0.0, 0.3], [0.5, 0.0, 0.4, 0.1], [0.0, 0.0, 1.0, 0.0], [0.25] * 4])
    model = Markov(shares.log())
    text = generate(model, [[0]], num_beams=2, max_new_tokens=3, stop=[3])[0]
    assert model.calls == [(1, 1), (2, 1), (2, 1)]
    assert (text.tokens, text.finish_reason, text.stop, text.body) == ((3,), "stop", (3,), ())
    # a mean over tokens prefers a long text that begins well: 0.5 * 0.4 * 1 over three against 0.3 over one
    longer = generate(Markov(shares.log()), [[0]], num_beams=2, length_penalty=1.0, max_new_tokens=3, stop=[3])[0]
    assert longer.tokens == (1, 2, 2)
    assert longer.finish_reason == "length"


def test_early_stopping_decides_when_the_search_ends() -> None:
    # the stop 3 is the most likely token after 0 and after 1; later texts through 2 have the best mean
    shares = torch.tensor([[0.05, 0.3, 0.15, 0.5], [0.3, 0.1, 0.1, 0.5], [0.0, 0.0, 0.95, 0.05], [0.25] * 4])
    passes = {}
    for early in (True, False, "never"):
        model = Markov(shares.log())
        text = generate(
            model, [[0]], num_beams=2, length_penalty=1.0, early_stopping=early, max_new_tokens=30, stop=[3]
        )
        passes[early] = len(model.calls), text[0].tokens
    assert passes[True] == (2, (3,))
    assert passes[True][0] <= passes[False][0] <= passes["never"][0]
    assert passes["never"] == (30, (2,) * 30)


def test_ties_in_beam_search_go_to_lower_tokens() -> None:
    model = Markov(torch.zeros(5, 5))
    assert generate(model, [[2]], strategy=BeamSearch(3), max_new_tokens=4)[0].tokens == (0, 0, 0, 0)
    assert generate(model, [[2]], max_new_tokens=3)[0].tokens == (0, 0, 0)
    assert generate(model, [[2]], strategy=KthLargest(4), max_new_tokens=3)[0].tokens == (3, 3, 3)


def test_beam_search_drops_impossible_tokens() -> None:
    table = torch.full((4, 4), -math.inf)
    table[:, 1] = 0.0
    model = Markov(table)
    text = generate(model, [[0]], strategy=BeamSearch(3), max_new_tokens=3)[0]
    assert (text.tokens, text.log_probability) == ((1, 1, 1), 0.0)
    assert model.calls == [(1, 1)] * 3, "one text, since there is no other"


def test_texts_of_many_seeds_are_as_frequent_as_their_probabilities() -> None:
    shares = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])
    texts = generate(Markov(shares.log()), [[0]] * 6000, strategy=Sample(seed=11), max_new_tokens=2)
    counts = torch.zeros(3, 3)
    for text in texts:
        counts[text.tokens] += 1
    expected = 6000 * shares[0][:, None] * shares
    # eight degrees of freedom: less than one run in a thousand exceeds 26.1
    assert float(((counts - expected) ** 2 / expected).sum()) < 26.1
    assert texts[0].log_probabilities[0] == pytest.approx(math.log(shares[0, texts[0].tokens[0]]), abs=1e-6)


def counting(following: int, vocab: int = 10) -> Markov:
    """After each token comes the next number."""
    table = torch.full((vocab, vocab), -5.0)
    for token in range(vocab):
        table[token, (token + following) % vocab] = 5.0
    return Markov(table)


def test_a_stop_token_ends_a_text_and_is_part_of_it() -> None:
    (text,) = generate(counting(1), [[2]], stop=[6])
    assert (text.tokens, text.finish_reason, text.stop, text.body) == ((3, 4, 5, 6), "stop", (6,), (3, 4, 5))
    assert len(text.log_probabilities) == 4


def test_a_stop_sequence_must_match_as_a_whole() -> None:
    (text,) = generate(counting(1), [[2]], stop=[(5, 5), (4, 5), (9,)])
    assert (text.tokens, text.stop, text.body) == ((3, 4, 5), (4, 5), (3,))
    (text,) = generate(counting(1), [[2]], stop=[5, [3, 4, 5], torch.tensor([4, 5])])
    assert (text.tokens, text.stop) == ((3, 4, 5), (3, 4, 5)), "the longest one is told"


def test_tokens_of_the_prompt_do_not_count_for_a_stop() -> None:
    (text,) = generate(counting(1), [[1, 2]], stop=[2, (2, 3)], max_new_tokens=4)
    assert (text.tokens, text.finish_reason) == ((3, 4, 5, 6), "length")


def test_finish_reasons_stop_before_length_before_context() -> None:
    assert generate(counting(1), [[2]], stop=[4], max_new_tokens=2)[0].finish_reason == "stop"
    assert generate(Markov(torch.zeros(3, 3), context=4), [[1, 1]], max_new_tokens=3)[0].finish_reason == "length"
    assert generate(Markov(torch.zeros(3, 3), context=4), [[1, 1]], max_new_tokens=4)[0].finish_reason == "context"


@pytest.mark.parametrize("cache", [True, False])
def test_a_text_ends_with_the_token_that_could_not_be_read(models: dict[str, GPT], cache: bool) -> None:
    prompts = [[1] * 9, [2] * 8, [3] * 2]
    texts = generate(models["learned"], prompts, max_new_tokens=1000, use_cache=cache)
    assert [text.finish_reason for text in texts] == ["context"] * 3
    assert [len(text.prompt) + len(text.tokens) for text in texts] == [10] * 3


def test_the_synthesizer_preset_generates_up_to_the_end_of_its_table() -> None:
    model = build("birthplace-synthesizer", depth=1).eval()
    texts = generate(model, [[65] * 127, [66] * 120], max_new_tokens=100)
    assert [len(text.tokens) for text in texts] == [1, 8]
    assert [text.finish_reason for text in texts] == ["context", "context"]
    assert list(texts[1].tokens) == by_hand(model, [66] * 120, Greedy(), 1, 100, ())


def test_prompts_may_be_lists_of_tensors_or_one_tensor(models: dict[str, GPT]) -> None:
    model = models["rotary"]
    truth = [text.tokens for text in generate(model, PROMPTS, max_new_tokens=5)]
    assert generate(model, torch.tensor(PROMPTS[2:3]), max_new_tokens=5)[0].tokens == truth[2]
    assert [t.tokens for t in generate(model, [torch.tensor(p) for p in PROMPTS], max_new_tokens=5)] == truth
    assert generate(model, ((4,),), max_new_tokens=5)[0].tokens == truth[1]


@pytest.mark.parametrize("way", STRATEGIES)
def test_a_stream_gives_the_tokens_of_the_texts(models: dict[str, GPT], way: str) -> None:
    settings: Any = {"strategy": STRATEGIES[way], "max_new_tokens": 10, "stop": STOPS}
    tokens = list(stream_tokens(models["learned"], PROMPTS, **settings))
    texts = generate(models["learned"], PROMPTS, **settings)
    for number, text in enumerate(texts):
        mine = [token for token in tokens if token.prompt_index == number]
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [text.finish_reason]
        assert collect_tokens(PROMPTS[number], mine, STOPS) == text


def test_a_stream_gives_each_token_after_its_pass() -> None:
    model = counting(1)
    tokens = stream_tokens(model, [[2], [3, 4]], max_new_tokens=2)
    assert model.calls == []
    assert next(tokens)[:2] == (0, 3)
    assert model.calls == [(2, 1)]
    # the second prompt has been read by now, and both go on
    assert [token[:2] for token in tokens] == [(0, 4), (1, 5), (1, 6)]
    assert model.calls == [(2, 1), (2, 1), (1, 1)]


def test_prompts_are_read_in_as_few_passes_as_possible() -> None:
    model = counting(1)
    generate(model, [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3]], max_new_tokens=2)
    # the short text ends after two tokens; what is left of the long prompt is then read at once
    assert model.calls == [(2, 3), (2, 1), (1, 3), (1, 1)]


def test_with_a_cache_each_token_is_read_once(models: dict[str, GPT]) -> None:
    read = []
    model = models["learned"]
    hook = model.tokens.register_forward_pre_hook(lambda module, inputs: read.append(tuple(inputs[0].shape)))
    try:
        generate(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=4)
        assert read == [(2, 3), (2, 1), (2, 1), (2, 1)]
        read.clear()
        generate(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=4, use_cache=False)
        assert read == [(2, 3), (2, 4), (2, 5), (2, 6)]
    finally:
        hook.remove()


def test_an_unfinished_stream_makes_no_text() -> None:
    with pytest.raises(ConfigError, match="the stream of this text has not ended"):
        collect_tokens([1], [GeneratedToken(0, 3, -0.5, None)])
    with pytest.raises(ConfigError, match="has not ended"):
        collect_tokens([1], [])
    assert collect_tokens([1], [GeneratedToken(0, 3, -0.5, "length")]) == GeneratedText((1,), (3,), (-0.5,), "length")


def test_the_mode_of_the_model_and_gradients_are_left_as_they_were() -> None:
    model = build_from_config(GPTConfig(**SMALL, dropout=0.5), seed=1)
    model.train()
    model.blocks[0].eval()  # type: ignore[index]
    before = [part.training for part in model.modules()]
    tokens = stream_tokens(model, [[1, 2]], max_new_tokens=6)  # type: ignore[arg-type]
    first = next(tokens)
    assert torch.is_grad_enabled()
    assert [part.training for part in model.modules()] == before
    trained = [first.token, *(token.token for token in tokens)]
    assert [part.training for part in model.modules()] == before
    assert trained == list(generate(model.eval(), [[1, 2]], max_new_tokens=6)[0].tokens)  # type: ignore[arg-type]


def test_half_precision_and_autocast_generate() -> None:
    model = lively(CONFIGS["learned"], torch.bfloat16)
    truth = [by_hand(model, [4, 5], Greedy(), 0, 6, ())]
    assert [list(text.tokens) for text in generate(model, [[4, 5]], max_new_tokens=6)] == truth
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(lively(CONFIGS["rotary"]), [[4, 5], [1]], max_new_tokens=6)[1].tokens) == 6


@pytest.mark.cuda
@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("name", ["learned", "windowed-rotary", "mixture"])
def test_a_gpu_generates_the_same(name: str, way: str) -> None:
    model = lively(CONFIGS[name], torch.float64)
    settings: Any = {"strategy": STRATEGIES[way], "max_new_tokens": 6, "stop": STOPS}
    truth = [text.tokens for text in generate(model, PROMPTS, **settings)]
    model.to("cuda")
    assert [text.tokens for text in generate(model, PROMPTS, **settings)] == truth


TRANSLATOR = TransformerConfig(vocab=19, context=13, width=16, depth=2, heads=2, ff_width=24)
SOURCES = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 3, 0, 0, 0, 0], [2, 4, 6, 8, 10, 12]])


@pytest.mark.parametrize("strategy", [Greedy(), Sample(seed=2), BeamSearch(3, 0.6)])
@torch.no_grad()
def test_an_encoder_decoder_generates_the_same_in_a_batch_and_alone(strategy: Strategy) -> None:
    model = lively(TRANSLATOR)
    prompts = [[1], [1, 7, 7], [1, 2]]
    real = padding([4, 2, 6])
    for cache in (True, False):
        texts = generate(
            EncoderDecoderAdapter(model, SOURCES, real),
            prompts,
            strategy=strategy,
            max_new_tokens=9,
            stop=[2, 3],
            use_cache=cache,
        )
        for number, length in enumerate((4, 2, 6)):
            source, prompt = SOURCES[number : number + 1, :length], prompts[number]
            if strategy == Greedy():
                new: list[int] = []
                while len(new) < 9 and not (new and new[-1] in (2, 3)):
                    new.append(int(model(source, torch.tensor([prompt + new]))[0, -1].argmax()))
                assert list(texts[number].tokens) == new
            if not isinstance(strategy, Sample) or number == 0:  # the random numbers depend on the number in the batch
                alone = generate(
                    EncoderDecoderAdapter(model, source),
                    [prompt],
                    strategy=strategy,
                    max_new_tokens=9,
                    stop=[2, 3],
                    use_cache=False,
                )
                assert alone[0].tokens == texts[number].tokens


def test_an_encoder_decoder_ends_at_its_context() -> None:
    (text,) = generate(EncoderDecoderAdapter(lively(TRANSLATOR), SOURCES[:1]), [[1, 1]], max_new_tokens=99)
    assert (len(text.tokens), text.finish_reason) == (12, "context")


@pytest.mark.parametrize(
    ("tokens", "options", "kind", "words"),
    [
        ([[1], []], {}, ShapeError, r"tokens\[1\] is empty; a prompt needs at least one token"),
        ([], {}, ConfigError, r"tokens takes prompts, a list of lists of token ids or a tensor \(b n\), not \[\]"),
        ([1, 2], {}, ConfigError, r"tokens\[0\] takes a list of token ids such as \[3, 1, 4\], not 1"),
        ("text", {}, ConfigError, "tokens takes prompts, .* not 'text'"),
        (["text"], {}, ConfigError, r"tokens\[0\] takes a list of token ids .* not 'text'"),
        ([[1], [2, 23]], {}, ShapeError, r"tokens\[1\] has token 23, but the vocabulary has tokens 0 to 22"),
        ([[-1]], {}, ConfigError, r"a token of tokens\[0\] is -1, but must be at least 0"),
        ([[1.5]], {}, ConfigError, r"a token of tokens\[0\] takes a whole number, not 1\.5"),
        ([[1], [1] * 10], {}, ShapeError, r"tokens\[1\] has 10 tokens, but the model can read 9; .*: prompt\[-9:\]"),
        (torch.zeros(2, 3), {}, DtypeError, "tokens must be a tensor of whole numbers"),
        (torch.tensor([1, 2]), {}, ShapeError, r"tokens is \(2,\), but is read as \(b n\)"),
        (torch.tensor([[1, 99]]), {}, ShapeError, "tokens holds 99, but the vocabulary has"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0, but must be at least 1"),
        ([[1]], {"strategy": "gredy"}, ConfigError, "strategy is 'greedy', 'sample', 'beam' or a value such as"),
        ([[1]], {"strategy": KthLargest(24)}, ConfigError, "k is 24, but the vocabulary has only 23 tokens"),
        ([[1]], {"top_k": 24}, ConfigError, "top_k is 24, but the vocabulary has only 23 tokens"),
        (
            [[1]],
            {"num_beams": 2, "temperature": 0.5},
            ConfigError,
            "temperature=0.5 is for strategy='sample', but num_",
        ),
        ([[1]], {"stop": 5}, ConfigError, "stop takes a list of token ids and of sequences"),
        ([[1]], {"stop": [()]}, ConfigError, "stop has an empty sequence"),
        ([[1]], {"stop": ["."]}, ConfigError, r"stop takes a list of token ids .* not '\.'"),
        ([[1]], {"stop": [23]}, ShapeError, "stop has token 23, but the vocabulary has"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    models: dict[str, GPT], tokens: Any, options: Any, kind: type[Exception], words: str
) -> None:
    for call in (generate, stream_tokens, GPT.generate):
        with pytest.raises(kind, match=words):
            call(models["learned"], tokens, **options)


def test_only_models_that_predict_the_next_token_generate() -> None:
    with pytest.raises(ConfigError, match=r"text is generated by a GPT, .* not by a Linear"):
        generate(nn.Linear(2, 2), [[1]])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not by 'gpt2'"):
        generate("gpt2", [[1]])  # type: ignore[arg-type]


@torch.no_grad()
def test_the_method_takes_the_keywords_of_the_function(models: dict[str, GPT]) -> None:
    model = models["learned"]
    for options, strategy in (
        ({}, Greedy()),
        ({"temperature": 1.3, "top_k": 11, "top_p": 0.9, "seed": 40}, STRATEGIES["nucleus"]),
        ({"num_beams": 4, "length_penalty": 0.7}, STRATEGIES["penalised"]),
        ({"strategy": "sample", "seed": 3}, STRATEGIES["sample"]),
    ):
        texts = model.generate(PROMPTS, max_new_tokens=6, stop=STOPS, **options)  # type: ignore[arg-type]
        assert texts == generate(model, PROMPTS, max_new_tokens=6, stop=STOPS, strategy=strategy)
    translator = lively(TRANSLATOR)
    real = padding([4, 2, 6])
    adapter = EncoderDecoderAdapter(translator, SOURCES, real)
    texts = translator.generate(SOURCES, start_token=1, source_padding=real, num_beams=2, max_new_tokens=5, stop=[2])
    assert texts == generate(adapter, [[1]] * 3, strategy=BeamSearch(2), max_new_tokens=5, stop=[2])


def test_an_encoder_decoder_needs_a_source() -> None:
    model = build_from_config(TRANSLATOR)
    assert isinstance(model, Transformer)
    with pytest.raises(ConfigError, match=r"a Transformer needs a source; call model\.generate\(source, start_token="):
        generate(model, [[1]])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="there are 2 prompts, but 3 sources; give one prompt for each"):
        generate(EncoderDecoderAdapter(model, SOURCES), [[1], [1]])
    with pytest.raises(
        ShapeError, match=r"source is \(2,\), but is read as \(b n\); for one text write source\[None\]"
    ):
        EncoderDecoderAdapter(model, torch.tensor([5, 6]))
    with pytest.raises(ShapeError, match="source holds 19, but the vocabulary has tokens 0 to 18"):
        EncoderDecoderAdapter(model, torch.tensor([[5, 19]]))
    with pytest.raises(ConfigError, match=r"source_padding takes padding\(lengths\), not"):
        EncoderDecoderAdapter(model, SOURCES, causal())


@pytest.mark.parametrize("strategy", [Greedy(), Sample(), BeamSearch(2)])
def test_logits_of_nan_or_infinity_are_refused(strategy: Strategy) -> None:
    for bad, token in ((math.nan, 1), (math.inf, 1), (math.nan, 1000), (math.inf, 0), (-math.inf, slice(None))):
        table = torch.zeros(1009, 1009)
        table[0, token] = bad
        with pytest.raises(RegardError, match="the model's logits contain NaN or infinity"):
            generate(Markov(table), [[0]], strategy=strategy)


@torch.no_grad()
def test_beam_search_over_a_large_vocabulary_matches_a_plain_loop() -> None:
    model = lively(GPTConfig(vocab=2003, context=9, width=12, depth=1, heads=3, tied=True))
    model.tokens.weight[1000:2000] = model.tokens.weight[:1000]  # twins, so that texts tie
    for prompt in ([1], [1999, 3]):
        (text,) = generate(model, [prompt], strategy=BeamSearch(5), max_new_tokens=4)
        assert list(text.tokens) == beam_by_hand(model, prompt, BeamSearch(5), 4, ())
        assert all(token < 1000 or token >= 2000 for token in text.tokens)


@pytest.mark.parametrize("seed", range(200))
def test_beam_search_gives_the_texts_and_scores_of_hugging_face(seed: int, tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformers", reason="the texts are compared with those of transformers")
    let_torchvision_load()
    choose = random.Random(seed)
    vocab, stop = choose.choice([23, 31, 47]), choose.choice([[3], [3, 7]])
    config = theirs.GPT2Config(
        vocab_size=vocab, n_positions=29, n_embd=20, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=stop
    )
    torch.manual_seed(seed)
    model = theirs.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, GPT)
    settings: Any = {
        "num_beams": choose.choice([1, 2, 3, 5]),
        "length_penalty": choose.choice([0.0, 1.0, 0.6, 2.0, -0.5]),
        "early_stopping": choose.choice([False, True, "never"]),
        "max_new_tokens": choose.choice([5, 9, 17]),
    }
    if settings["num_beams"] == 1:
        del settings["length_penalty"], settings["early_stopping"]
    prompts = torch.randint(8, vocab, (3, choose.choice([1, 4, 7])))
    whole = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=2,
        return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip
    texts = ours.generate(prompts, stop=stop, **settings)
    for row, text in enumerate(texts):
        new = whole.sequences[row, prompts.shape[1] :].tolist()
        assert list(text.tokens) == new[: len(text.tokens)]
        assert set(new[len(text.tokens) :]) <= {2}
        if settings["num_beams"] > 1:
            score = text.log_probability / len(text.tokens) ** settings["length_penalty"]
            assert score == pytest.approx(whole.sequences_scores[row].item(), rel=1e-4)
