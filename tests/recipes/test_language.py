"""The language recipe: next-token windows of GPT, objectives of BERT, and whole runs of both."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.base.config import override
from regard.base.errors import ConfigError, DataError
from regard.core.positions import Rotary
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.python_text import python_text
from regard.data.repeated_text import repeated_text
from regard.data.sampler import sampler_generator
from regard.models.bert import BERTConfig, BERTOutput
from regard.models.generation import generate
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build_from_config
from regard.recipes import language
from regard.recipes.bert_objectives import (
    CHOICES,
    OBJECTIVE_CYCLE,
    OBJECTIVES,
    SIMILARITY_SCALE,
    SPECIAL,
    BERTPretrainingTask,
    PretrainingBatch,
    PretrainingExample,
    SentenceCorpus,
    collate,
    evaluate_objectives,
    half_similarity,
    mask_words,
    masked_words,
    matching_halves,
    next_sentence,
    run_bert as asked_of,
    sentence_order,
    split_passages,
)
from regard.recipes.language import (
    BERTSettings,
    GPTSettings,
    LanguageSettings,
    NextTokenTask,
    NGramModel,
    evaluate_induction,
    load_data,
    negative_log_likelihood,
    split_text,
)
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.train.objectives import IGNORED
from regard.train.plan import TrainingPlan

GPT_TINY = GPTConfig(vocab=7, context=15, width=12, depth=1, heads=3, positions=Rotary())
BERT_TINY = BERTConfig(vocab=7, context=31, width=12, depth=1, heads=3)
PLAN = TrainingPlan(steps=6, batch_size=4, evaluate_every=3, save_every=2)


def settings(architecture: str = "gpt", **changes: Any) -> LanguageSettings:
    tiny = LanguageSettings(
        architecture=architecture,
        gpt=GPTSettings(model=GPT_TINY, plan=PLAN),
        bert=BERTSettings(model=BERT_TINY, plan=PLAN, bpe_vocab=300, eval_sentences=9),
        validation=0.2,
    )
    return override(tiny, changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "some.txt"
    file.write_text(python_text()[39_000:56_000], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def corpus() -> SentenceCorpus:
    told = load_data(None, settings(validation=0.1)).validation
    return SentenceCorpus.from_text(told, BytePairTokenizer.train(told, vocab=320, special=SPECIAL), 31)


def test_a_text_is_cut_into_three_parts_in_its_order() -> None:
    told = "".join(chr(97 + number % 26) for number in range(103))
    found = split_text(told, 0.1)
    assert found.train + found.validation + found.test == told
    assert (len(found.train), len(found.validation), len(found.test)) == (83, 10, 10)


def test_a_text_too_short_to_split_is_refused() -> None:
    with pytest.raises(DataError, match=r"validation=0.05 of a text of 9 characters is empty; use a longer text"):
        split_text("too short", 0.05)


def test_the_built_in_text_has_no_repeated_paragraphs() -> None:
    found = load_data(None, settings(validation=0.1))
    pieces = (found.train + found.validation + found.test).split("\n\n")
    assert len(pieces) == len(set(pieces)) > 2000
    unseen = found.validation + found.test
    windows = [unseen[start : start + 60] for start in range(0, len(unseen) - 60, 200)]
    assert sum(window in found.train for window in windows) < 0.01 * len(windows)


def test_a_window_and_what_follows_each_of_its_tokens_stand_in_the_text() -> None:
    tokens = torch.arange(5, 58)
    task = NextTokenTask(tokens, tokens, 53, 15, 6, seed=3)
    inputs, targets = task.batch(11, 0, 1)
    assert inputs.shape == targets.shape == (6, 15)
    assert torch.equal(targets, inputs + 1)  # the text counts
    starts = torch.cat([task.batch(step, 0, 1)[0][:, 0] for step in range(200)])
    assert sorted(starts.unique().tolist()) == list(range(5, 58 - 15))  # from the first to the last that has a next


def test_the_shards_of_a_batch_of_windows_concatenate_to_the_batch() -> None:
    tokens = torch.arange(53)
    task = NextTokenTask(tokens, tokens, 53, 15, 6, seed=3)
    whole, thirds = task.batch(7, 0, 1), [task.batch(7, part, 3) for part in range(3)]
    for one, several in zip(whole, zip(*thirds, strict=True), strict=True):
        assert torch.equal(one, torch.cat(several))
    assert not torch.equal(whole[0], task.batch(8, 0, 1)[0])


def test_the_fused_loss_of_a_large_vocabulary_is_that_of_the_logits() -> None:
    model, tokens = build_from_config(GPT_TINY, seed=1).eval(), torch.arange(53) % 7
    plain = NextTokenTask(tokens, tokens, 53, 15, 6, seed=3)
    found, truth = (task.loss(model, task.batch(2, 0, 1)) for task in (replace(plain, fused=True), plain))
    assert int(found.count) == int(truth.count) == 90
    torch.testing.assert_close(found.total, truth.total)


@pytest.mark.parametrize("length", [2, 14, 15, 16, 17, 46, 47])
def test_a_text_costs_what_its_tokens_cost_one_after_the_other(length: int) -> None:
    model = build_from_config(GPT_TINY, seed=1).eval()
    tokens = torch.randint(7, (length,), generator=sampler_generator(0, 0))
    one_by_one = 0.0
    for place in range(1, length):
        window = tokens[(place - 1) // 15 * 15 : place]
        one_by_one -= model(window[None])[0, -1].log_softmax(-1)[tokens[place]].item()
    assert negative_log_likelihood(model, tokens, 15, batch_size=2) == pytest.approx(one_by_one, rel=1e-5)


def test_counted_likelihoods_sum_to_one_after_any_context() -> None:
    grams = NGramModel("abracadabra, abracadabra", 3, alphabet=8)
    for before in ("", "a", "br", "bz", "zz", "z"):
        assert math.fsum(grams.likelihood(before + each) for each in "abrcd, z") == pytest.approx(1)


def test_counted_likelihoods_are_those_of_witten_and_bell() -> None:
    grams = NGramModel("aab", 2, alphabet=4)
    alone = (2 + 2 / 4) / (3 + 2)  # seen twice of three times, and two kinds were seen
    assert grams.likelihood("a") == pytest.approx(alone)
    assert grams.likelihood("aa") == pytest.approx((1 + 2 * alone) / (2 + 2))
    assert grams.likelihood("ba") == pytest.approx(alone)  # nothing was seen after b
    assert grams.cross_entropy("aab") == pytest.approx(
        -(math.log(grams.likelihood("aa")) + math.log(grams.likelihood("ab"))) / 2
    )


def test_longer_n_grams_predict_better_and_training_text_best() -> None:
    found = load_data(None, settings(validation=0.1))
    counted = [NGramModel(found.train[:20_000], order, 103) for order in (1, 2, 3)]
    one, two, three = (grams.cross_entropy(found.validation[:900]) for grams in counted)
    assert one > two + 0.3 > three + 0.4
    assert counted[2].cross_entropy(found.train[:900]) < three - 0.2


def test_passages_have_their_sentences_in_order_and_short_ones_go_with_the_next() -> None:
    told = "A HEADING\n\nANN:\nYes. This is one whole sentence\nover lines. A second one; with a part. And so on.\n\n"
    assert split_passages(told + "Another one stands here, without an end\n   \n") == [
        ["ANN: Yes. This is one whole sentence over lines.", "A second one; with a part. And so on."],
        ["Another one stands here, without an end"],
    ]


def test_passages_lose_no_word_but_those_of_headings() -> None:
    told = python_text()[:50_000]
    kept = [" ".join(sentences) for sentences in split_passages(told)]
    everything = [" ".join(each.split()) for each in told.split("\n\n")]
    assert kept == [each for each in everything if len(each.split()) >= 6]


def test_pairs_do_not_go_from_one_passage_to_the_next() -> None:
    three = "{0} one has words enough here. {0} two has words enough here. {0} three has words enough here."
    told = "\n\n".join(three.format(word) for word in ("ONE", "TWO", "SIX", "TEN"))
    corpus = SentenceCorpus.from_text(told, BytePairTokenizer.train(told, vocab=300, special=SPECIAL), 31)
    assert len(corpus.sentences) == 12
    assert corpus.pairs == (0, 1, 3, 4, 6, 7, 9, 10)


def test_a_text_with_too_few_pairs_is_refused() -> None:
    pieces = BytePairTokenizer.train("a b", vocab=256 + len(SPECIAL), special=SPECIAL)
    with pytest.raises(DataError, match=r"need 8 pairs of consecutive sentences .* has 1 in 1; use a longer text"):
        SentenceCorpus.from_text("There is but one sentence in here. And there is another one here.", pieces, 31)
    with pytest.raises(DataError, match=r"in 2 passages, .* has 8 in 1; use a longer text, with empty lines"):
        SentenceCorpus.from_text("Here is a sentence like all others. " * 9, pieces, 31)


def said(corpus: SentenceCorpus, example: PretrainingExample) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What is asked, and of which two; everything around them is checked."""
    tokens, between = example.tokens.tolist(), corpus.special_ids["between"]
    middle = tokens.index(between)
    assert tokens[-1] == between
    assert len(tokens) <= corpus.context
    assert example.segments.tolist() == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1)
    return SPECIAL[tokens[0]], tuple(tokens[1:middle]), tuple(tokens[middle + 1 : -1])


def ends(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return bool(part) and whole[-len(part) :] == part


def starts(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return bool(part) and whole[: len(part)] == part


def draws(number: int) -> torch.Generator:
    return sampler_generator(0, number, "test")


@pytest.mark.parametrize("question", OBJECTIVES)
def test_an_example_is_a_function_of_its_number_and_its_generator(corpus: SentenceCorpus, question: str) -> None:
    ask = OBJECTIVES[question]
    once, again = (ask(corpus, 5, draws(3)) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))
        assert SPECIAL[one.tokens[0]] == question


def test_masked_words_are_in_two_consecutive_sentences(corpus: SentenceCorpus) -> None:
    for number, place in enumerate(corpus.pairs):
        (example,) = masked_words(corpus, number, draws(number))
        _, first, second = said(corpus, example)
        assert ends(corpus.sentences[place], first)
        assert starts(corpus.sentences[place + 1], second)
        assert example.pair == IGNORED


def apart(
    corpus: SentenceCorpus, record: tuple[PretrainingExample, ...], question: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First and second parts of a choice, each read alone."""
    read = [each.tokens.tolist() for each in record]
    assert len(read) == 2 * CHOICES == 16
    for each, tokens in zip(record, read, strict=True):
        assert (SPECIAL[tokens[0]], tokens[-1]) == (question, corpus.special_ids["between"])
        assert len(tokens) <= corpus.context
        assert not each.segments.any()
        assert each.pair == IGNORED
    bare = [tuple(each[1:-1]) for each in read]
    return list(zip(bare[:CHOICES], bare[CHOICES:], strict=True))


def test_next_sentence_pairs_a_sentence_with_the_next_and_with_one_of_another_passage(corpus: SentenceCorpus) -> None:
    wide = replace(corpus, context=999)
    chained = set(corpus.pairs)
    found: Counter[int] = Counter()
    for number, place in enumerate(corpus.pairs):
        true, false = next_sentence(wide, number, draws(number))
        assert (true.pair, false.pair) == (0, 1)
        assert said(wide, true) == ("next", corpus.sentences[place], corpus.sentences[place + 1])
        _, first, other = said(wide, false)
        assert first == corpus.sentences[place]
        there = corpus.sentences.index(other)
        assert there - 1 in chained  # as the true one, it follows another
        low, high = sorted((place, there))
        assert not chained.issuperset(range(low, high))  # passages end between the two
        found[there] += 1
    assert len(found) > 0.5 * len(corpus.pairs)


def test_a_sentence_elsewhere_is_uniform_over_other_passages(corpus: SentenceCorpus) -> None:
    few = replace(corpus, pairs=(2, 3, 5, 6, 7, 11))
    for number, others in enumerate([(5, 6, 7, 11), (5, 6, 7, 11), *[(2, 3, 11)] * 3, (2, 3, 5, 6, 7)]):
        counts = Counter(few.sample_other_passage(number, draws(each)) for each in range(600))
        assert set(counts) == set(others)
        assert all(abs(count - 600 / len(others)) < 60 for count in counts.values())


def test_sentence_order_has_both_orders(corpus: SentenceCorpus) -> None:
    for number, place in enumerate(corpus.pairs):
        earlier, later = corpus.sentences[place], corpus.sentences[place + 1]
        for example, one, other in zip(
            sentence_order(corpus, number, draws(number)), (earlier, later), (later, earlier), strict=True
        ):
            question, first, second = said(corpus, example)
            assert question == "order"
            assert example.pair == int(one is later)
            assert ends(one, first)
            assert starts(other, second)


def test_matching_halves_concatenate_to_sentences_of_the_text(corpus: SentenceCorpus) -> None:
    wide = replace(corpus, context=999)
    found = set()
    for number, place in enumerate(corpus.pairs):
        pairs = apart(wide, matching_halves(wide, number, draws(number)), "halves")
        places = [corpus.sentences.index(first + second) for first, second in pairs]
        assert corpus.sentences[places[0]] == corpus.sentences[place]
        assert len(set(places)) >= CHOICES - 1  # a text may say a sentence twice
        found.update(places)
        for first, second in pairs:
            size = len(first + second)
            assert size // 4 < len(first) <= size - size // 4
            assert second
    assert len(found) > 0.9 * len(corpus.pairs)


def test_long_halves_are_truncated_at_their_outer_end(corpus: SentenceCorpus) -> None:
    long = replace(corpus, sentences=(tuple(range(50, 150)), *corpus.sentences[1:]), pairs=tuple(range(9)))
    first, second = apart(long, matching_halves(long, 0, draws(0)), "halves")[0]
    assert first == tuple(range(first[0], first[0] + 29))
    assert second == tuple(range(first[-1] + 1, first[-1] + 30))


def test_other_sentences_are_uniform(corpus: SentenceCorpus) -> None:
    few = replace(corpus, pairs=tuple(range(3, 22, 2)))
    counts = Counter(each for number in range(1000) for each in few.sample_choices(4, draws(number))[1:])
    assert set(counts) == {3, 5, 7, 9, 13, 15, 17, 19, 21}
    assert abs(min(counts.values()) - 778) < 60 > abs(max(counts.values()) - 778)


def test_long_sentences_are_truncated_at_their_outer_end(corpus: SentenceCorpus) -> None:
    long = replace(corpus, sentences=(tuple(range(50, 90)), tuple(range(100, 140)), (30, 31, 32)), pairs=(0, 1))
    assert said(long, *masked_words(long, 0, draws(0))) == ("words", tuple(range(76, 90)), tuple(range(100, 114)))
    assert said(long, *masked_words(long, 1, draws(0))) == ("words", tuple(range(115, 140)), (30, 31, 32))
    short = replace(corpus, sentences=((30, 31, 32), tuple(range(100, 140))), pairs=(0,))
    assert said(short, *masked_words(short, 0, draws(0))) == ("words", (30, 31, 32), tuple(range(100, 125)))


def test_chosen_words_are_masked_replaced_or_kept_in_ratio_8_1_1(corpus: SentenceCorpus) -> None:
    fates: Counter[str] = Counter()
    shown = 0
    for number in range(600):
        (example,) = masked_words(corpus, number % len(corpus.pairs), draws(number))
        asked = mask_words(example, 0.15, corpus, draws(number + 1000))
        telling = asked.words != IGNORED
        assert torch.equal(asked.tokens[~telling], example.tokens[~telling])
        assert torch.equal(asked.words[telling], example.tokens[telling])
        assert int(example.tokens[telling].min()) >= len(SPECIAL)
        for before, after in zip(example.tokens[telling].tolist(), asked.tokens[telling].tolist(), strict=True):
            fates["masked" if after == corpus.special_ids["mask"] else "kept" if after == before else "other"] += 1
            assert after == corpus.special_ids["mask"] or after >= len(SPECIAL)
        shown += int((example.tokens >= len(SPECIAL)).sum())
    count = fates.total()
    assert count / shown == pytest.approx(0.15, abs=0.015)
    assert fates["masked"] / count == pytest.approx(0.8, abs=0.03)
    assert fates["other"] / count == pytest.approx(0.1, abs=0.02)
    assert fates["kept"] / count == pytest.approx(0.1, abs=0.02)


def test_at_least_one_word_is_masked(corpus: SentenceCorpus) -> None:
    places = set()
    for number in range(60):
        told = mask_words(*masked_words(corpus, 5, draws(0)), 1e-9, corpus, draws(number)).words
        assert int((told != IGNORED).sum()) == 1
        places.add(int((told != IGNORED).nonzero()))
    assert len(places) > 15


SIZES = {"words": 1, "next": 2, "order": 2, "halves": 16}  # examples of a record


def sentence_task(corpus: SentenceCorpus, batch: int = 20) -> BERTPretrainingTask:
    return BERTPretrainingTask(corpus, corpus, batch, 0.15, 9, seed=4)


def make_up(several: list[PretrainingBatch], whole: PretrainingBatch) -> None:
    """That shares, one after the other, are the whole; the choices of a share are numbered in it."""
    for name in ("tokens", "segments", "lengths", "words", "pair"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(each, name) for each in several])), name
    before = [sum(len(each.tokens) for each in several[:number]) for number in range(len(several))]
    assert torch.equal(whole.choices, torch.cat([each.choices + b for each, b in zip(several, before, strict=True)]))


def test_the_shards_of_a_batch_of_sentences_concatenate_and_objectives_take_turns(corpus: SentenceCorpus) -> None:
    task = sentence_task(corpus)
    whole = task.batch(3, 0, 1)
    make_up([task.batch(3, part, 4) for part in range(4)], whole)
    turns = [OBJECTIVE_CYCLE[number % len(OBJECTIVE_CYCLE)] for number in range(60, 80)]
    assert set(turns) == set(OBJECTIVES)
    rows = [question for question in turns for _ in range(SIZES[question])]
    assert [SPECIAL[token] for token in whole.tokens[:, 0].tolist()] == rows
    chosen = [SPECIAL[token] for token in whole.tokens[whole.choices.flatten(), 0].tolist()]
    assert chosen == ["halves"] * 16 * turns.count("halves")
    assert not torch.equal(whole.tokens[0], task.batch(8, 0, 1).tokens[0])


def test_the_losses_of_the_shards_sum_to_that_of_the_batch(corpus: SentenceCorpus) -> None:
    task = sentence_task(corpus)
    model = build_from_config(replace(BERT_TINY, vocab=corpus.tokenizer.vocab), seed=2).eval()
    whole = task.loss(model, task.batch(3, 0, 1))
    shares = [task.loss(model, task.batch(3, part, 5)) for part in range(5)]
    assert whole.count == sum(share.count for share in shares) == len(task.batch(3, 0, 1).tokens)
    assert whole.total.item() == pytest.approx(sum(share.total.item() for share in shares), rel=1e-5)


def test_the_loss_is_the_mean_of_masked_words_plus_pairs_and_halves(corpus: SentenceCorpus) -> None:
    task = sentence_task(corpus)
    model = build_from_config(replace(BERT_TINY, vocab=corpus.tokenizer.vocab), seed=2).eval()
    batch = task.batch(3, 0, 1)
    total, vectors = 0.0, []
    for tokens, segments, length, told, pair in zip(*batch[:-1], strict=True):
        out = model(tokens[None, :length], segments=segments[None, :length])  # what was filled in is not seen
        said_words = out.logits[0].log_softmax(-1)
        costs = [-said_words[place, token].item() for place, token in enumerate(told) if token != IGNORED]
        total += sum(costs) / len(costs)
        if pair != IGNORED:
            total -= out.pair_logits[0].log_softmax(-1)[pair].item()
        vectors.append(out.pooled[0] / out.pooled[0].norm())
    for group in batch.choices.tolist():
        for place in range(8):
            fits = torch.stack([SIMILARITY_SCALE * vectors[group[place]] @ vectors[other] for other in group[8:]])
            total -= fits.log_softmax(0)[place].item()
    assert task.loss(model, batch).total.item() == pytest.approx(total, rel=1e-4)


def test_a_batch_without_halves_has_a_loss(corpus: SentenceCorpus) -> None:
    task = sentence_task(corpus, batch=2)
    model = build_from_config(replace(BERT_TINY, vocab=corpus.tokenizer.vocab), seed=2).eval()
    batch = task.batch(0, 0, 1)
    assert half_similarity(asked_of(model, batch), batch).shape == (0, 8, 8)
    assert task.loss(model, batch).total.isfinite()


class Knowing(nn.Module):
    """Knows the corpus by heart, or answers always the same."""

    def __init__(self, corpus: SentenceCorpus, *, right: bool) -> None:
        super().__init__()
        self.corpus, self.right = corpus, right
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, *, segments: Tensor, padding: Any) -> BERTOutput:
        pairs, pooled = torch.zeros(len(tokens), 2), torch.zeros(len(tokens), len(self.corpus.sentences))
        for row, record in enumerate(tokens):
            read = record[record != self.corpus.special_ids["pad"]]
            if not segments[row].any():
                part = tuple(read[1:-1].tolist())
                for place, each in enumerate(self.corpus.sentences):
                    pooled[row, place] = float(not self.right or starts(each, part) or ends(each, part))
                continue
            _, first, second = said(self.corpus, PretrainingExample(read, segments[row, : len(read)], read))
            both = zip(self.corpus.sentences, self.corpus.sentences[1:], strict=False)
            true = any(ends(one, first) and starts(other, second) for one, other in both)
            pairs[row, int(not true) if self.right else 0] = 1.0
        logits = torch.zeros(*tokens.shape, self.corpus.tokenizer.vocab)
        return BERTOutput(logits, pairs, logits, pooled)


def test_accuracy_is_reported_beside_that_of_a_constant_answer(corpus: SentenceCorpus) -> None:
    wide = replace(corpus, context=999, pairs=corpus.pairs[:20:2])
    found = evaluate_objectives(Knowing(wide, right=True), wide, 0.15, 60, seed=0, batch_size=7)
    assert found["next"] == found["order"] == (1, 1 / 2, 0)
    assert found["halves"] == (1, 1 / 8, 0)
    constant = evaluate_objectives(Knowing(wide, right=False), wide, 0.15, 60, seed=0, batch_size=7)
    assert constant["next"] == constant["order"] == (1 / 2, 1 / 2, 0)
    assert constant["halves"] == (1 / 8, 1 / 8, 0)
    assert found["words"].accuracy == 0
    assert 0 < found["words"].chance < 0.3


class Guessing(nn.Module):
    """Says of a pair what was drawn for its first sentence alone."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, *, segments: Tensor, padding: Any) -> BERTOutput:
        logits, pairs = torch.zeros(*tokens.shape, 320), torch.zeros(len(tokens), 2)
        for row in range(len(tokens)):
            right = torch.rand((), generator=draws(int(tokens[row].sum()))) < self.share
            pairs[row, row % 2 if right else 1 - row % 2] = 1.0  # true and false pairs take turns
        return BERTOutput(logits, pairs, logits, torch.ones(len(tokens), 3))


def test_the_interval_is_that_of_a_binomial_share(corpus: SentenceCorpus) -> None:
    assert len(corpus.pairs) > 150
    some = evaluate_objectives(Guessing(0.7), corpus, 0.15, 150, seed=0, batch_size=8)["next"]
    by_chance = 1.96 * math.sqrt(0.7 * 0.3 / 300)  # each pair is asked both ways, here one as good as two
    assert some.interval == pytest.approx(by_chance, rel=0.25)
    assert abs(some.accuracy - 0.7) < 1.5 * some.interval
    few = evaluate_objectives(Guessing(0.7), corpus, 0.15, 37, seed=0, batch_size=8)["next"]
    assert few.interval == pytest.approx(2 * by_chance, rel=0.35)


def test_a_short_text_is_evaluated_once(corpus: SentenceCorpus) -> None:
    few = replace(corpus, pairs=corpus.pairs[:13])
    once, again = (evaluate_objectives(Guessing(0.7), few, 0.15, asked, seed=0) for asked in (13, 900))
    assert once == again


def test_examples_are_padded_to_the_context(corpus: SentenceCorpus) -> None:
    some = [masked_words(corpus, 3, draws(0)), matching_halves(corpus, 4, draws(1)), masked_words(corpus, 5, draws(2))]
    batch = collate(some, corpus)
    assert batch.tokens.shape == (18, 31)
    assert batch.choices.tolist() == [list(range(1, 17))]
    for row, each in enumerate(each for record in some for each in record):
        length = int(batch.lengths[row])
        assert torch.equal(batch.tokens[row, :length], each.tokens)
        assert (batch.tokens[row, length:] == corpus.special_ids["pad"]).all()
        assert (batch.words[row, length:] == IGNORED).all()


FAULTS = [
    ({"architecture": "rnn"}, r"architecture is one of gpt, bert, not 'rnn'"),
    ({"validation": 0.3}, r"validation must be above 0 and at most 0.25, not 0.3"),
    ({"gpt.bpe_vocab": 255}, r"gpt.bpe_vocab is 255, but must be at least 256"),
    ({"bert.bpe_vocab": 262}, r"bert.bpe_vocab is 262, but must be at least 263"),
    ({"bert.mask_share": 0.0}, r"bert.mask_share must be above 0 and at most 1, not 0"),
    ({"bert.eval_sentences": 0}, r"bert.eval_sentences is 0, but must be at least 1"),
    ({"bert.model.head": "masked"}, r"needs head='pretraining' and segments=2, not head='masked' and segments=2"),
    ({"bert.model.segments": 1}, r"not head='pretraining' and segments=1"),
    ({"bert.model.context": 15}, r"bert.model.context=15 is too small for two sentences; use at least 16"),
]


@pytest.mark.parametrize(
    ("changes", "words"), FAULTS, ids=lambda each: next(iter(each), "") if isinstance(each, dict) else ""
)
def test_invalid_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**changes)


def test_a_context_longer_than_the_text_is_refused(text: Path) -> None:
    with pytest.raises(
        DataError, match=r"the context of 99999 tokens is longer than the training text, which has 10200"
    ):
        get_recipe("language").run(settings(**{"gpt.model.context": 99_999}), RunLocation(data=text))


@pytest.mark.parametrize("form", [language.built_in, language.real])
def test_the_settings_are_those_of_the_chosen_architecture(form: Any) -> None:
    made_so = form()
    assert made_so.chosen == made_so.gpt
    other = override(made_so, {"architecture": "bert"})
    assert other.chosen == made_so.bert


def test_each_variant_chooses_an_architecture() -> None:
    found = get_recipe("language")
    assert {
        name: found.settings(real=real, variant=name).architecture for name in found.variants for real in (True, False)
    } == {
        "gpt": "gpt",
        "bert": "bert",
        "cpu": "gpt",
        "induction": "gpt",
    }


class KilledError(Exception):
    """What ends a run here."""


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("gpt", {}), ("gpt", {"gpt.bpe_vocab": 270}), ("bert", {})],
    ids=["gpt", "bpe", "bert"],
)
def test_a_killed_run_resumes_to_the_same_parameters_and_metrics(
    architecture: str, changes: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    chosen = settings(architecture, **changes)
    found = get_recipe("language")
    whole = found.run(chosen, RunLocation(data=text, folder=tmp_path / "whole"))

    def kill(phase: str, progress: Any) -> None:
        if progress.step == 4:
            raise KilledError

    place = RunLocation(data=text, folder=tmp_path / "killed")
    with pytest.raises(KilledError):
        found.run(chosen, replace(place, on_progress=kill))
    resumed = found.run(chosen, replace(place, resume=True))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again, kept, model, tokenizer = load_finished_run(tmp_path / "whole")
    assert kept == chosen
    metrics = {name: value for name, value in whole.metrics.items() if name != "seconds"}
    assert again.module.evaluate(kept, model, tokenizer, RunLocation(data=text)) == pytest.approx(metrics, rel=1e-6)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["recipe"] == "language"
    if isinstance(model, GPT):
        (written,) = generate(model, [tokenizer.encode("the ")], max_new_tokens=5)
        assert len(tokenizer.decode(written.body)) >= 5


def test_an_untrained_model_has_the_entropy_of_the_alphabet(text: Path) -> None:
    untrained = settings(**{"gpt.plan.steps": 1, "gpt.plan.optimizer.lr": 1e-9})
    found = get_recipe("language").run(untrained, RunLocation(data=text))
    alphabet = len(set(text.read_text(encoding="utf-8")))
    assert found.metrics["test nats per character"] == pytest.approx(math.log(alphabet), abs=0.05)
    assert found.metrics["test bits per character"] == pytest.approx(math.log2(alphabet), abs=0.07)
    assert found.metrics["test nats by trigrams"] < found.metrics["test nats by single characters"] < math.log(alphabet)


def test_the_built_in_gpt_is_far_better_than_trigrams() -> None:
    metrics = get_recipe("language").run(language.built_in(), RunLocation()).metrics
    for part in ("test", "validation"):
        assert metrics[f"{part} nats per character"] < metrics[f"{part} nats by trigrams"] - 0.45
        assert metrics[f"{part} nats by trigrams"] < metrics[f"{part} nats by single characters"] - 1
    assert metrics["test nats per character"] < 1.38


def test_the_built_in_bert_is_better_than_chance_on_every_objective() -> None:
    recipe = get_recipe("language")
    metrics = recipe.run(recipe.settings(real=False, variant="bert"), RunLocation()).metrics
    parts_unread = ("test", "validation")
    for part in parts_unread:
        assert metrics[f"{part} next by chance"] == metrics[f"{part} order by chance"] == 1 / 2
        assert metrics[f"{part} halves by chance"] == 1 / 8
    for question, least in {"words": 0.11, "next": 0.58, "order": 0.55, "halves": 0.22}.items():
        right, chance, interval = (
            [metrics[f"{part} {question}{what}"] for part in parts_unread] for what in ("", " by chance", " interval")
        )
        assert sum(right) / 2 - math.hypot(*interval) / 2 > sum(chance) / 2, question
        assert sum(right) / 2 > least, question


def test_the_induction_variant_trains_on_repeated_text(tmp_path: Path) -> None:
    recipe = get_recipe("language")
    short = {"gpt.plan.steps": 3, "gpt.plan.batch_size": 2, "gpt.plan.evaluate_every": 3, "validation": 0.01}
    small = override(recipe.settings(real=False, variant="induction"), short)
    assert load_data(None, small).test == repeated_text()[-10_000:]
    outcome = recipe.run(small, RunLocation(folder=tmp_path / "run"))
    assert {"induction score", "copied", "test nats by trigrams"} <= set(outcome.metrics)
    assert outcome.metrics["induction score"] < 0.2, "untrained heads attend evenly"
    text = tmp_path / "text.txt"
    text.write_text("abcdefg" * 500)
    real = override(recipe.settings(real=True, variant="induction"), short)
    assert "induction score" not in recipe.run(real, RunLocation(data=text)).metrics
    with pytest.raises(ConfigError, match="text is one of python, repeated, not 'novel'"):
        replace(small, text="novel")


def test_the_induction_score_is_that_of_the_best_head_on_new_sequences() -> None:
    found = evaluate_induction(regard.load("induction-gpt"), count=5, length=17, seed=8)
    assert found["induction score"] > 0.9
    assert found["copied"] == 1
