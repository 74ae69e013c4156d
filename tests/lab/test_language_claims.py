"""The claims about text, its tokens and what models make of it: what they find, and that a fault turns them over."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.lab.transformers import bert_tasks, byte_pairs
from regard.models.beam_search import BeamSearch
from regard.models.bert import BERT, BERTConfig
from regard.models.generation import generate
from regard.models.generation_types import GeneratedText
from regard.models.gpt import GPT, GPTConfig
from regard.models.sampling import Greedy, Sample
from regard.nn.attention import Attention
from tests.lab.quick import Fault, claim, outcome


def overlapping(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Byte-pair merging that replaces the first token of a pair and keeps the second."""
    marks = [tuple(word[at : at + 2]) == pair for at in range(len(word))]
    return [token if mark else letter for letter, mark in zip(word, marks, strict=True)]


def beams_of_one(model: Any, prompts: Any, *, strategy: Any, **rest: Any) -> list[GeneratedText]:
    """A beam search that keeps one beam."""
    return generate(model, prompts, strategy=Greedy() if isinstance(strategy, BeamSearch) else strategy, **rest)


def one_too_many(model: Any, prompts: Any, *, strategy: Any, **rest: Any) -> list[GeneratedText]:
    """Top-k sampling with k + 1 tokens."""
    if isinstance(strategy, Sample) and strategy.top_k is not None:
        strategy = replace(strategy, top_k=strategy.top_k + 1)
    return generate(model, prompts, strategy=strategy, **rest)


def too_cold(model: Any, prompts: Any, *, strategy: Any, **rest: Any) -> list[GeneratedText]:
    """Sampling at the temperature 0.5 instead of 1."""
    if isinstance(strategy, Sample):
        strategy = replace(strategy, temperature=0.5)
    return generate(model, prompts, strategy=strategy, **rest)


def always_sure(*given: Any, **rest: Any) -> list[GeneratedText]:
    """Log-probabilities of 0 for every generated token."""
    texts = generate(*given, **rest)
    return [replace(text, log_probabilities=(0.0,) * len(text.tokens)) for text in texts]


def short_sighted(config: GPTConfig) -> GPT:
    """A model with a window of three tokens, which does not see the name when it answers."""
    return GPT(replace(config, window=3))


class Through(Attention):
    """Attention that returns the values unchanged: no token sees another."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return v


def blind(config: BERTConfig) -> BERT:
    made = BERT(config)
    for block in made.blocks:
        block.attention = Through(config.width, config.heads)
    return made


FAULTS: list[Fault] = [
    ("byte-pairs", {"merge": overlapping}),
    ("decoding", {"writer": beams_of_one}),
    ("decoding", {"writer": one_too_many}),
    ("decoding", {"writer": too_cold}),
    ("bert-tasks", {"bert": blind}),
    ("pretraining-knowledge", {"gpt": short_sighted}),
    ("made-up-answers", {"writer": always_sure}),
    ("made-up-answers", {"gpt": short_sighted}),
]


def test_pairs_are_merged_from_the_left_without_overlap() -> None:
    assert byte_pairs.merge_pair([7, 7, 7, 5, 7, 7], (7, 7), 300) == [300, 7, 5, 300]


def test_the_first_merge_of_the_rhyme_is_its_most_common_pair() -> None:
    numbers = outcome("byte-pairs").numbers
    text = byte_pairs.JACK
    most = max(text.count(text[at : at + 2]) for at in range(len(text) - 1))
    assert numbers["pairs merged"][0] == most == 30
    assert (numbers["tokens"][0], numbers["tokens"][-1]) == (370, 88)
    assert numbers["tokens"][0] - sum(numbers["pairs merged"]) == numbers["tokens"][-1]


def test_one_merge_leaves_340_tokens() -> None:
    came = claim("byte-pairs").run(claim("byte-pairs").setup({"merges": 1}))
    assert came.numbers["tokens"] == [370, 340]


def test_all_probabilities_sum_to_1_and_the_widest_beam_finds_the_most_likely_text() -> None:
    numbers = outcome("decoding").numbers
    assert numbers["texts"] == 5**4
    assert numbers["probability of all texts"] == pytest.approx(1.0)
    assert numbers["share found by beams"][-1] == 1.0
    assert numbers["log-probability by beams"][-1] == pytest.approx(
        numbers["log-probability of the most likely text"], abs=1e-5
    )
    assert numbers["tokens kept"]["top-k"] == 3


def test_the_k_th_token_is_greedy_for_k_equal_to_one() -> None:
    numbers = outcome("decoding").numbers
    assert numbers["log-probability by rank"][0] == numbers["log-probability by greedy"]


def test_true_and_false_pairs_differ_as_their_task_says() -> None:
    setup = bert_tasks.SMOKE
    for task in bert_tasks.TASKS:
        made = bert_tasks.examples(setup, task, 200, make_generator(1))
        asked = made.words if task == bert_tasks.WORDS else made.pair
        assert (asked != bert_tasks.IGNORED).any()
        assert made.tokens.shape == (200, 9)
        assert (made.tokens[:, 0] == bert_tasks.TASKS.index(task)).all()
    order = bert_tasks.examples(setup, "sentence order", 200, make_generator(1))
    pronouns = bert_tasks.SPECIAL + setup.kinds * setup.nouns
    assert torch.equal((order.tokens[:, 1] >= pronouns).long(), order.pair)


def test_only_masked_words_have_targets() -> None:
    made = bert_tasks.examples(bert_tasks.SMOKE, bert_tasks.WORDS, 200, make_generator(1))
    assert torch.equal(made.tokens == bert_tasks.MASK, made.words != bert_tasks.IGNORED)


def test_facts_about_tested_people_are_only_in_texts() -> None:
    assert outcome("pretraining-knowledge").numbers["facts in texts alone"] == 1.0


def test_the_first_answers_about_both_kinds_of_people_are_kept() -> None:
    examples = outcome("made-up-answers").numbers["examples"]
    assert [each["person"] for each in examples] == ["known"] * 4 + ["unknown"] * 4
    for each in examples:
        assert each["question"].startswith("Where was ")
        assert each["correct"] == (each["answer"] == each["truth"])
        assert 0.0 < each["confidence"] <= 1.0
    assert len({each["question"] for each in examples}) == len(examples)


def test_accuracy_of_all_answers_is_the_end_of_the_curve() -> None:
    numbers = outcome("made-up-answers").numbers
    assert numbers["coverages"][-1] == 1.0
    assert 0.0 < numbers["accuracy by coverage"][-1] < 1.0
    assert all(math.isfinite(value) for name, value in numbers.items() if name.startswith("interval"))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("byte-pairs", {"merges": 0}, "merges is 0, but must be at least 1"),
        ("decoding", {"length": 1}, "length is 1, but must be at least 2"),
        ("decoding", {"letters": 30, "length": 6}, "30 letters make 729,000,000 texts of length 6, too many"),
        ("decoding", {"sharpness": 0.0}, "sharpness must be above 0: sharpness=0.0"),
        ("bert-tasks", {"kinds": 1}, "kinds is 1, but must be at least 2"),
        ("bert-tasks", {"repeats": 1}, "repeats is 1, but must be at least 2"),
        ("pretraining-knowledge", {"repeats": 1}, "repeats is 1, but must be at least 2"),
        ("pretraining-knowledge", {"training.questions": 1.0}, "questions must be between 0 and 1: questions=1.0"),
        ("made-up-answers", {"unknown_people": 1}, "unknown_people is 1, but must be at least 2"),
    ],
)
def test_invalid_settings_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        claim(name).setup(settings)
