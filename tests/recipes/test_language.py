"""The recipe of texts: what GPT is told by windows, what BERT is asked about sentences, and whole runs of both."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.base.config import override
from regard.base.errors import ConfigError, DataError
from regard.core.positions import Rotary
from regard.data.byte_pairs import BytePairs
from regard.data.python_text import python_text
from regard.data.sampler import sampler_generator
from regard.models.bert import BERTConfig, BERTOutput
from regard.models.generation import generate
from regard.models.gpt import GPT, GPTConfig
from regard.models.presets import build_from_config
from regard.recipes import language
from regard.recipes.bert_objectives import (
    CHOICES,
    QUESTIONS,
    SHARPNESS,
    SPECIAL,
    TURNS,
    Book,
    Example,
    Examples,
    SentenceTask,
    answered,
    fitting,
    halves,
    hidden,
    inverted_order,
    next_sentence,
    passages,
    said as asked_of,
    together,
    words,
)
from regard.recipes.language import Grams, NextToken, Parts, Reading, Settings, Writing, cost, parts
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.train.objectives import IGNORED
from regard.train.plan import TrainingPlan

GPT_TINY = GPTConfig(vocab=7, context=15, width=12, depth=1, heads=3, positions=Rotary())
BERT_TINY = BERTConfig(vocab=7, context=31, width=12, depth=1, heads=3)
PLAN = TrainingPlan(steps=6, batch_size=4, evaluate_every=3, save_every=2)


def settings(learner: str = "gpt", **changes: Any) -> Settings:
    tiny = Settings(
        learner=learner,
        gpt=Writing(model=GPT_TINY, plan=PLAN),
        bert=Reading(model=BERT_TINY, plan=PLAN, pieces=300, asked=9),
        held=0.2,
    )
    return override(tiny, changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "some.txt"
    file.write_text(python_text()[39_000:56_000], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def book() -> Book:
    told = parts(None, 0.1).held
    return Book.of(told, BytePairs.trained(told, vocab=320, special=SPECIAL), 31)


def test_a_text_is_cut_into_three_parts_in_its_order() -> None:
    told = "".join(chr(97 + number % 26) for number in range(103))
    found = Parts.of(told, 0.1)
    assert found.train + found.held + found.test == told
    assert (len(found.train), len(found.held), len(found.test)) == (83, 10, 10)


def test_a_text_too_short_to_be_cut_is_told() -> None:
    with pytest.raises(DataError, match=r"held=0.05 of a text of 9 characters is nothing; read a longer one"):
        Parts.of("too short", 0.05)


def test_the_built_in_text_says_nothing_twice_that_is_held_out() -> None:
    found = parts(None, 0.1)
    pieces = (found.train + found.held + found.test).split("\n\n")
    assert len(pieces) == len(set(pieces)) > 2000
    unseen = found.held + found.test
    windows = [unseen[start : start + 60] for start in range(0, len(unseen) - 60, 200)]
    assert sum(window in found.train for window in windows) < 0.01 * len(windows)


def test_a_window_and_what_follows_each_of_its_tokens_stand_in_the_text() -> None:
    tokens = torch.arange(5, 58)
    task = NextToken(tokens, tokens, 53, 15, 6, seed=3)
    inputs, targets = task.batch(11, 0, 1)
    assert inputs.shape == targets.shape == (6, 15)
    assert torch.equal(targets, inputs + 1)  # the text counts
    starts = torch.cat([task.batch(step, 0, 1)[0][:, 0] for step in range(200)])
    assert sorted(starts.unique().tolist()) == list(range(5, 58 - 15))  # from the first to the last that has a next


def test_shares_of_windows_make_up_the_batch() -> None:
    tokens = torch.arange(53)
    task = NextToken(tokens, tokens, 53, 15, 6, seed=3)
    whole, thirds = task.batch(7, 0, 1), [task.batch(7, part, 3) for part in range(3)]
    for one, several in zip(whole, zip(*thirds, strict=True), strict=True):
        assert torch.equal(one, torch.cat(several))
    assert not torch.equal(whole[0], task.batch(8, 0, 1)[0])


@pytest.mark.parametrize("length", [2, 14, 15, 16, 17, 46, 47])
def test_a_text_costs_what_its_tokens_cost_one_after_the_other(length: int) -> None:
    model = build_from_config(GPT_TINY, seed=1).eval()
    tokens = torch.randint(7, (length,), generator=sampler_generator(0, 0))
    one_by_one = 0.0
    for place in range(1, length):
        window = tokens[(place - 1) // 15 * 15 : place]
        one_by_one -= model(window[None])[0, -1].log_softmax(-1)[tokens[place]].item()
    assert cost(model, tokens, 15, at_once=2) == pytest.approx(one_by_one, rel=1e-5)


def test_counted_likelihoods_sum_to_one_after_any_context() -> None:
    grams = Grams.of("abracadabra, abracadabra", 3, alphabet=8)
    for before in ("", "a", "br", "bz", "zz", "z"):
        assert math.fsum(grams.likelihood(before + each) for each in "abrcd, z") == pytest.approx(1)


def test_counted_likelihoods_are_those_of_witten_and_bell() -> None:
    grams = Grams.of("aab", 2, alphabet=4)
    alone = (2 + 2 / 4) / (3 + 2)  # seen twice of three times, and two kinds were seen
    assert grams.likelihood("a") == pytest.approx(alone)
    assert grams.likelihood("aa") == pytest.approx((1 + 2 * alone) / (2 + 2))
    assert grams.likelihood("ba") == pytest.approx(alone)  # nothing was seen after b
    assert grams.cost("aab") == pytest.approx(
        -(math.log(grams.likelihood("aa")) + math.log(grams.likelihood("ab"))) / 2
    )


def test_more_context_tells_more_and_what_was_read_is_told_best() -> None:
    found = parts(None, 0.1)
    counted = [Grams.of(found.train[:20_000], order, 103) for order in (1, 2, 3)]
    one, two, three = (grams.cost(found.held[:900]) for grams in counted)
    assert one > two + 0.3 > three + 0.4
    assert counted[2].cost(found.train[:900]) < three - 0.2


def test_passages_have_their_sentences_in_order_and_short_ones_go_with_the_next() -> None:
    told = "A HEADING\n\nANN:\nYes. This is one whole sentence\nover lines. A second one; with a part. And so on.\n\n"
    assert passages(told + "Another one stands here, without an end\n   \n") == [
        ["ANN: Yes. This is one whole sentence over lines.", "A second one; with a part. And so on."],
        ["Another one stands here, without an end"],
    ]


def test_passages_lose_no_word_but_those_of_headings() -> None:
    told = python_text()[:50_000]
    kept = [" ".join(sentences) for sentences in passages(told)]
    everything = [" ".join(each.split()) for each in told.split("\n\n")]
    assert kept == [each for each in everything if len(each.split()) >= 6]


def test_pairs_do_not_go_from_one_passage_to_the_next() -> None:
    three = "{0} one has words enough here. {0} two has words enough here. {0} three has words enough here."
    told = "\n\n".join(three.format(word) for word in ("ONE", "TWO", "SIX", "TEN"))
    book = Book.of(told, BytePairs.trained(told, vocab=300, special=SPECIAL), 31)
    assert len(book.sentences) == 12
    assert book.pairs == (0, 1, 3, 4, 6, 7, 9, 10)


def test_a_text_with_too_few_pairs_is_told() -> None:
    pieces = BytePairs.trained("a b", vocab=256 + len(SPECIAL), special=SPECIAL)
    with pytest.raises(DataError, match=r"need 8 sentences that others follow .* has 1 in 1; read a longer one"):
        Book.of("There is but one sentence in here. And there is another one here.", pieces, 31)
    with pytest.raises(DataError, match=r"in 2 passages, .* has 8 in 1; read a longer one, whose passages stand apart"):
        Book.of("Here is a sentence like all others. " * 9, pieces, 31)


def said(book: Book, example: Example) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What is asked, and of which two; everything around them is checked."""
    tokens, between = example.tokens.tolist(), book.marks["between"]
    middle = tokens.index(between)
    assert tokens[-1] == between
    assert len(tokens) <= book.context
    assert example.segments.tolist() == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1)
    return SPECIAL[tokens[0]], tuple(tokens[1:middle]), tuple(tokens[middle + 1 : -1])


def ends(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return bool(part) and whole[-len(part) :] == part


def starts(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return bool(part) and whole[: len(part)] == part


def draws(number: int) -> torch.Generator:
    return sampler_generator(0, number, "test")


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_example_is_a_function_of_its_place_and_its_draws(book: Book, question: str) -> None:
    ask = QUESTIONS[question]
    once, again = (ask(book, 5, draws(3)) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))
        assert SPECIAL[one.tokens[0]] == question


def test_words_are_hidden_in_two_sentences_that_follow_each_other(book: Book) -> None:
    for number, place in enumerate(book.pairs):
        (example,) = words(book, number, draws(number))
        _, first, second = said(book, example)
        assert ends(book.sentences[place], first)
        assert starts(book.sentences[place + 1], second)
        assert example.pair == IGNORED


def apart(book: Book, record: tuple[Example, ...], question: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First and second parts of a choice, each read alone."""
    read = [each.tokens.tolist() for each in record]
    assert len(read) == 2 * CHOICES == 16
    for each, tokens in zip(record, read, strict=True):
        assert (SPECIAL[tokens[0]], tokens[-1]) == (question, book.marks["between"])
        assert len(tokens) <= book.context
        assert not each.segments.any()
        assert each.pair == IGNORED
    bare = [tuple(each[1:-1]) for each in read]
    return list(zip(bare[:CHOICES], bare[CHOICES:], strict=True))


def test_a_sentence_is_put_before_the_next_one_and_before_one_from_another_passage(book: Book) -> None:
    wide = replace(book, context=999)
    chained = set(book.pairs)
    found: Counter[int] = Counter()
    for number, place in enumerate(book.pairs):
        true, false = next_sentence(wide, number, draws(number))
        assert (true.pair, false.pair) == (0, 1)
        assert said(wide, true) == ("next", book.sentences[place], book.sentences[place + 1])
        _, first, other = said(wide, false)
        assert first == book.sentences[place]
        there = book.sentences.index(other)
        assert there - 1 in chained  # as the true one, it follows another
        low, high = sorted((place, there))
        assert not chained.issuperset(range(low, high))  # passages end between the two
        found[there] += 1
    assert len(found) > 0.5 * len(book.pairs)


def test_elsewhere_is_any_other_passage_as_likely(book: Book) -> None:
    few = replace(book, pairs=(2, 3, 5, 6, 7, 11))
    for number, others in enumerate([(5, 6, 7, 11), (5, 6, 7, 11), *[(2, 3, 11)] * 3, (2, 3, 5, 6, 7)]):
        told = Counter(few.elsewhere(number, draws(each)) for each in range(600))
        assert set(told) == set(others)
        assert all(abs(count - 600 / len(others)) < 60 for count in told.values())


def test_sentences_stand_in_their_order_and_inverted(book: Book) -> None:
    for number, place in enumerate(book.pairs):
        earlier, later = book.sentences[place], book.sentences[place + 1]
        for example, one, other in zip(
            inverted_order(book, number, draws(number)), (earlier, later), (later, earlier), strict=True
        ):
            question, first, second = said(book, example)
            assert question == "order"
            assert example.pair == int(one is later)
            assert ends(one, first)
            assert starts(other, second)


def test_halves_in_their_order_make_up_sentences_from_all_over_the_text(book: Book) -> None:
    wide = replace(book, context=999)
    found = set()
    for number, place in enumerate(book.pairs):
        pairs = apart(wide, halves(wide, number, draws(number)), "halves")
        places = [book.sentences.index(first + second) for first, second in pairs]
        assert book.sentences[places[0]] == book.sentences[place]
        assert len(set(places)) >= CHOICES - 1  # a text may say a sentence twice
        found.update(places)
        for first, second in pairs:
            size = len(first + second)
            assert size // 4 < len(first) <= size - size // 4
            assert second
    assert len(found) > 0.9 * len(book.pairs)


def test_parts_that_do_not_fit_are_cut_where_they_are_furthest_apart(book: Book) -> None:
    long = replace(book, sentences=(tuple(range(50, 150)), *book.sentences[1:]), pairs=tuple(range(9)))
    first, second = apart(long, halves(long, 0, draws(0)), "halves")[0]
    assert first == tuple(range(first[0], first[0] + 29))
    assert second == tuple(range(first[-1] + 1, first[-1] + 30))


def test_others_are_any_but_the_one_as_likely(book: Book) -> None:
    few = replace(book, pairs=tuple(range(3, 22, 2)))
    told = Counter(each for number in range(1000) for each in few.others(4, draws(number))[1:])
    assert set(told) == {3, 5, 7, 9, 13, 15, 17, 19, 21}
    assert abs(min(told.values()) - 778) < 60 > abs(max(told.values()) - 778)


def test_long_sentences_are_cut_where_they_are_furthest_apart(book: Book) -> None:
    long = replace(book, sentences=(tuple(range(50, 90)), tuple(range(100, 140)), (30, 31, 32)), pairs=(0, 1))
    assert said(long, *words(long, 0, draws(0))) == ("words", tuple(range(76, 90)), tuple(range(100, 114)))
    assert said(long, *words(long, 1, draws(0))) == ("words", tuple(range(115, 140)), (30, 31, 32))
    short = replace(book, sentences=((30, 31, 32), tuple(range(100, 140))), pairs=(0,))
    assert said(short, *words(short, 0, draws(0))) == ("words", (30, 31, 32), tuple(range(100, 125)))


def test_of_hidden_words_eight_of_ten_are_masked_one_is_another_and_one_stays(book: Book) -> None:
    fates: Counter[str] = Counter()
    shown = 0
    for number in range(600):
        (example,) = words(book, number % len(book.pairs), draws(number))
        asked = hidden(example, 0.15, book, draws(number + 1000))
        telling = asked.words != IGNORED
        assert torch.equal(asked.tokens[~telling], example.tokens[~telling])
        assert torch.equal(asked.words[telling], example.tokens[telling])
        assert int(example.tokens[telling].min()) >= len(SPECIAL)
        for before, after in zip(example.tokens[telling].tolist(), asked.tokens[telling].tolist(), strict=True):
            fates["masked" if after == book.marks["mask"] else "kept" if after == before else "other"] += 1
            assert after == book.marks["mask"] or after >= len(SPECIAL)
        shown += int((example.tokens >= len(SPECIAL)).sum())
    count = fates.total()
    assert count / shown == pytest.approx(0.15, abs=0.015)
    assert fates["masked"] / count == pytest.approx(0.8, abs=0.03)
    assert fates["other"] / count == pytest.approx(0.1, abs=0.02)
    assert fates["kept"] / count == pytest.approx(0.1, abs=0.02)


def test_one_word_is_hidden_where_chance_would_hide_none(book: Book) -> None:
    places = set()
    for number in range(60):
        told = hidden(*words(book, 5, draws(0)), 1e-9, book, draws(number)).words
        assert int((told != IGNORED).sum()) == 1
        places.add(int((told != IGNORED).nonzero()))
    assert len(places) > 15


SIZES = {"words": 1, "next": 2, "order": 2, "halves": 16}  # examples of a record


def sentence_task(book: Book, batch: int = 20) -> SentenceTask:
    return SentenceTask(book, book, batch, 0.15, 9, seed=4)


def make_up(several: list[Examples], whole: Examples) -> None:
    """That shares, one after the other, are the whole; the choices of a share are numbered in it."""
    for name in ("tokens", "segments", "lengths", "words", "pair"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(each, name) for each in several])), name
    before = [sum(len(each.tokens) for each in several[:number]) for number in range(len(several))]
    assert torch.equal(whole.choices, torch.cat([each.choices + b for each, b in zip(several, before, strict=True)]))


def test_shares_of_sentences_make_up_the_batch_and_questions_are_asked_in_turn(book: Book) -> None:
    task = sentence_task(book)
    whole = task.batch(3, 0, 1)
    make_up([task.batch(3, part, 4) for part in range(4)], whole)
    turns = [TURNS[number % len(TURNS)] for number in range(60, 80)]
    assert set(turns) == set(QUESTIONS)
    rows = [question for question in turns for _ in range(SIZES[question])]
    assert [SPECIAL[token] for token in whole.tokens[:, 0].tolist()] == rows
    chosen = [SPECIAL[token] for token in whole.tokens[whole.choices.flatten(), 0].tolist()]
    assert chosen == ["halves"] * 16 * turns.count("halves")
    assert not torch.equal(whole.tokens[0], task.batch(8, 0, 1).tokens[0])


def test_losses_of_shares_add_up_to_the_loss_of_the_batch(book: Book) -> None:
    task = sentence_task(book)
    model = build_from_config(replace(BERT_TINY, vocab=book.pieces.vocab), seed=2).eval()
    whole = task.loss(model, task.batch(3, 0, 1))
    shares = [task.loss(model, task.batch(3, part, 5)) for part in range(5)]
    assert whole.count == sum(share.count for share in shares) == len(task.batch(3, 0, 1).tokens)
    assert whole.total.item() == pytest.approx(sum(share.total.item() for share in shares), rel=1e-5)


def test_a_batch_costs_the_means_over_hidden_words_its_pairs_and_its_choices(book: Book) -> None:
    task = sentence_task(book)
    model = build_from_config(replace(BERT_TINY, vocab=book.pieces.vocab), seed=2).eval()
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
            fits = torch.stack([SHARPNESS * vectors[group[place]] @ vectors[other] for other in group[8:]])
            total -= fits.log_softmax(0)[place].item()
    assert task.loss(model, batch).total.item() == pytest.approx(total, rel=1e-4)


def test_a_batch_without_choices_is_no_trouble(book: Book) -> None:
    task = sentence_task(book, batch=2)
    model = build_from_config(replace(BERT_TINY, vocab=book.pieces.vocab), seed=2).eval()
    batch = task.batch(0, 0, 1)
    assert fitting(asked_of(model, batch), batch).shape == (0, 8, 8)
    assert task.loss(model, batch).total.isfinite()


class Knowing(nn.Module):
    """Knows the book by heart, or answers always the same."""

    def __init__(self, book: Book, *, right: bool) -> None:
        super().__init__()
        self.book, self.right = book, right
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, *, segments: Tensor, padding: Any) -> BERTOutput:
        pairs, pooled = torch.zeros(len(tokens), 2), torch.zeros(len(tokens), len(self.book.sentences))
        for row, record in enumerate(tokens):
            read = record[record != self.book.marks["pad"]]
            if not segments[row].any():
                part = tuple(read[1:-1].tolist())
                for place, each in enumerate(self.book.sentences):
                    pooled[row, place] = float(not self.right or starts(each, part) or ends(each, part))
                continue
            _, first, second = said(self.book, Example(read, segments[row, : len(read)], read))
            both = zip(self.book.sentences, self.book.sentences[1:], strict=False)
            true = any(ends(one, first) and starts(other, second) for one, other in both)
            pairs[row, int(not true) if self.right else 0] = 1.0
        logits = torch.zeros(*tokens.shape, self.book.pieces.vocab)
        return BERTOutput(logits, pairs, logits, pooled)


def test_answers_are_judged_beside_what_one_answer_for_all_would_get(book: Book) -> None:
    wide = replace(book, context=999, pairs=book.pairs[:20:2])
    found = answered(Knowing(wide, right=True), wide, 0.15, 60, seed=0, at_once=7)
    assert found["next"] == found["order"] == (1, 1 / 2, 0)
    assert found["halves"] == (1, 1 / 8, 0)
    constant = answered(Knowing(wide, right=False), wide, 0.15, 60, seed=0, at_once=7)
    assert constant["next"] == constant["order"] == (1 / 2, 1 / 2, 0)
    assert constant["halves"] == (1 / 8, 1 / 8, 0)
    assert found["words"].right == 0
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


def test_the_interval_is_that_of_a_share_among_records_drawn_anew(book: Book) -> None:
    assert len(book.pairs) > 150
    some = answered(Guessing(0.7), book, 0.15, 150, seed=0, at_once=8)["next"]
    by_chance = 1.96 * math.sqrt(0.7 * 0.3 / 300)  # each pair is asked both ways, here one as good as two
    assert some.interval == pytest.approx(by_chance, rel=0.25)
    assert abs(some.right - 0.7) < 1.5 * some.interval
    few = answered(Guessing(0.7), book, 0.15, 37, seed=0, at_once=8)["next"]
    assert few.interval == pytest.approx(2 * by_chance, rel=0.35)


def test_a_short_text_is_asked_about_once(book: Book) -> None:
    few = replace(book, pairs=book.pairs[:13])
    once, again = (answered(Guessing(0.7), few, 0.15, asked, seed=0) for asked in (13, 900))
    assert once == again


def test_examples_are_filled_up_to_the_context(book: Book) -> None:
    some = [words(book, 3, draws(0)), halves(book, 4, draws(1)), words(book, 5, draws(2))]
    batch = together(some, book)
    assert batch.tokens.shape == (18, 31)
    assert batch.choices.tolist() == [list(range(1, 17))]
    for row, each in enumerate(each for record in some for each in record):
        length = int(batch.lengths[row])
        assert torch.equal(batch.tokens[row, :length], each.tokens)
        assert (batch.tokens[row, length:] == book.marks["pad"]).all()
        assert (batch.words[row, length:] == IGNORED).all()


FAULTS = [
    ({"learner": "rnn"}, r"learner is one of gpt, bert, not 'rnn'"),
    ({"held": 0.3}, r"held is a share of the text, above 0 and up to 0.25, not 0.3"),
    ({"gpt.pieces": 255}, r"gpt.pieces is 255, but must be at least 256"),
    ({"bert.pieces": 262}, r"bert.pieces is 262, but must be at least 263"),
    ({"bert.hidden": 0.0}, r"bert.hidden is a share of words, above 0 and up to 1, not 0.0"),
    ({"bert.asked": 0}, r"bert.asked is 0, but must be at least 1"),
    ({"bert.model.head": "masked"}, r"has head='pretraining' and segments=2, not head='masked' and segments=2"),
    ({"bert.model.segments": 1}, r"not head='pretraining' and segments=1"),
    ({"bert.model.context": 15}, r"bert.model.context=15 has no room for two sentences; give 16 or more"),
]


@pytest.mark.parametrize(
    ("changes", "words"), FAULTS, ids=lambda each: next(iter(each), "") if isinstance(each, dict) else ""
)
def test_faults_in_settings_are_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**changes)


def test_a_context_longer_than_the_text_is_told(text: Path) -> None:
    with pytest.raises(DataError, match=r"a context of 99999 tokens is longer than the text, which has 10200"):
        language.run(settings(**{"gpt.model.context": 99_999}), RunLocation(data=text))


@pytest.mark.parametrize("form", [language.built_in, language.real])
def test_the_settings_of_a_learner_are_those_it_is_trained_by(form: Any) -> None:
    made_so = form()
    assert (made_so.model, made_so.plan) == (made_so.gpt.model, made_so.gpt.plan)
    other = override(made_so, {"learner": "bert"})
    assert (other.model, other.plan) == (made_so.bert.model, made_so.bert.plan)


def test_a_form_is_the_recipe_of_one_learner() -> None:
    found = get_recipe("language")
    assert {name: found.settings(real=real, form=name).learner for name in found.forms for real in (True, False)} == {
        "gpt": "gpt",
        "bert": "bert",
    }


class KilledError(Exception):
    """What ends a run here."""


@pytest.mark.parametrize(
    ("learner", "changes"), [("gpt", {}), ("gpt", {"gpt.pieces": 270}), ("bert", {})], ids=["gpt", "pieces", "bert"]
)
def test_a_run_leaves_a_model_that_can_be_judged_again_and_goes_on_exactly_when_it_was_killed(
    learner: str, changes: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    chosen = settings(learner, **changes)
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
    figures = {name: value for name, value in whole.figures.items() if name != "seconds"}
    assert again.module.judged(kept, model, tokenizer, RunLocation(data=text)) == pytest.approx(figures, rel=1e-6)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["recipe"] == "language"
    if isinstance(model, GPT):
        (written,) = generate(model, [tokenizer.encode("the ")], max_new_tokens=5)
        assert len(tokenizer.decode(written.body)) >= 5


def test_untrained_models_tell_nothing(text: Path) -> None:
    """What figures say of a model that has learned nothing: all tokens are as likely, and pairs are guessed."""
    found = language.run(settings(**{"gpt.plan.steps": 1, "gpt.plan.optimizer.lr": 1e-9}), RunLocation(data=text))
    alphabet = len(set(text.read_text(encoding="utf-8")))
    assert found.figures["test nats per character"] == pytest.approx(math.log(alphabet), abs=0.05)
    assert found.figures["test bits per character"] == pytest.approx(math.log2(alphabet), abs=0.07)
    assert found.figures["test nats by trigrams"] < found.figures["test nats by single characters"] < math.log(alphabet)


@pytest.mark.slow
def test_the_built_in_gpt_tells_characters_far_better_than_trigrams() -> None:
    figures = language.run(language.built_in(), RunLocation()).figures
    for part in ("test", "held-out"):
        assert figures[f"{part} nats per character"] < figures[f"{part} nats by trigrams"] - 0.45
        assert figures[f"{part} nats by trigrams"] < figures[f"{part} nats by single characters"] - 1
    assert figures["test nats per character"] < 1.38


@pytest.mark.slow
def test_the_built_in_bert_answers_every_question_better_than_chance() -> None:
    """By more than the interval of the sample, about all text that it has not read."""
    figures = language.run(get_recipe("language").settings(real=False, form="bert"), RunLocation()).figures
    parts_unread = ("test", "held-out")
    for part in parts_unread:
        assert figures[f"{part} next by chance"] == figures[f"{part} order by chance"] == 1 / 2
        assert figures[f"{part} halves by chance"] == 1 / 8
    for question, least in {"words": 0.11, "next": 0.58, "order": 0.55, "halves": 0.22}.items():
        right, chance, interval = (
            [figures[f"{part} {question}{what}"] for part in parts_unread] for what in ("", " by chance", " interval")
        )
        assert sum(right) / 2 - math.hypot(*interval) / 2 > sum(chance) / 2, question
        assert sum(right) / 2 > least, question
