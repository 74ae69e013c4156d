"""The translation recipe: batches, losses and beam search, and a small run from end to end."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from regard.base.config import override
from regard.base.errors import ConfigError, DataError
from regard.core.masks.forms.padding import PaddingMask
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.number_words import english, german
from regard.data.sentence_pairs import SentencePairs
from regard.models.beam_search import BeamSearch
from regard.models.presets import build_from_config
from regard.models.sampling import Greedy
from regard.models.transformer import Transformer, TransformerConfig
from regard.recipes import translation
from regard.recipes.bleu import bleu
from regard.recipes.recipe import RunLocation, get_recipe, load_finished_run
from regard.recipes.translation import (
    LENGTH_PENALTY,
    BPEDropout,
    TranslationBatch,
    TranslationSettings,
    TranslationTask,
    built_in,
    exact_match,
    generate_translations,
    load_data,
    pad_rows,
    postprocess,
    preprocess,
    real,
    run,
    symmetric_kl,
    train_tokenizer,
    translate,
)
from regard.train.averaging import LastKAverage
from regard.train.loop import Progress
from regard.train.objectives import IGNORED

CONTEXT = 25
SIZES = {"train": range(100, 161), "val": range(201, 208), "test": range(301, 306)}


def numbers(some: range) -> SentencePairs:
    return SentencePairs(tuple(map(english, some)), tuple(map(german, some)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as Multi30k has them: tokens in lower case, and the test set in plain text too."""
    path = tmp_path_factory.mktemp("pairs")
    for split, some in SIZES.items():
        pairs = numbers(some)
        for language, side in (("en", pairs.source), ("de", pairs.target)):
            (path / f"{split}.lc.tok.{language}").write_text("".join(f"{each} .\n" for each in side))
            if split == "test":
                (path / f"{split}.{language}").write_text("".join(f"{each.capitalize()}.\n" for each in side))
    return path


@pytest.fixture(scope="module")
def pairs() -> BytePairTokenizer:
    return train_tokenizer(numbers(SIZES["train"]), 90)


def small(**changes: Any) -> TranslationSettings:
    model = TransformerConfig(vocab=90, context=CONTEXT, width=12, depth=1, heads=3, ff_width=20, dropout=0.1)
    plan = replace(
        built_in().plan, steps=6, batch_size=6, evaluate_every=3, save_every=2, averaging=LastKAverage(count=2, every=2)
    )
    settings = TranslationSettings(
        model=model,
        plan=plan,
        bpe_vocab=90,
        r_drop=2.0,
        bpe_dropout=0.2,
        num_beams=2,
        preprocessing="lc.tok",
        test_split="test",
    )
    return override(settings, changes)


def task_of(pairs: BytePairTokenizer, **changes: Any) -> TranslationTask:
    given = {"r_drop": 0.0, "bpe_dropout": 0.0, "model.context": CONTEXT, "plan.batch_size": 6, "seed": 5} | changes
    return TranslationTask(numbers(SIZES["train"]), numbers(SIZES["val"]), pairs, small(**given))


def model_of(pairs: BytePairTokenizer, seed: int = 3, dropout: float = 0.0, context: int = CONTEXT) -> Transformer:
    """A model that says something else about each source."""
    config = TransformerConfig(
        vocab=pairs.vocab, context=context, width=12, depth=1, heads=3, ff_width=20, dropout=dropout
    )  # fmt: skip
    model = build_from_config(config, seed=seed)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


def real_targets(batch: TranslationBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and targets of a batch without those that fill it up."""
    kept = batch.targets != IGNORED
    return batch.positions[kept], batch.targets[kept]


def rows(batch: TranslationBatch) -> list[tuple[list[int], list[int], list[int]]]:
    """Each row without what was filled in."""
    assert isinstance(batch.source_padding, PaddingMask)
    following = torch.full_like(batch.inputs, IGNORED)
    positions, targets = real_targets(batch)
    following.view(-1)[positions] = targets
    found = []
    for source, length, given, wanted in zip(
        batch.source.tolist(), batch.source_padding.data.tolist(), batch.inputs.tolist(), following.tolist(),
        strict=True,
    ):  # fmt: skip
        real_ones = [token for token in wanted if token != IGNORED]
        found.append((source[:length], given[: len(real_ones)], real_ones))
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, not 1"),
        ({"bpe_dropout": -0.1}, "bpe_dropout must be at least 0 and below 1, not -0.1"),
        ({"r_drop": -1.0}, "r_drop must be at least 0, not -1"),
        ({"bucket_batches": 0}, "bucket_batches is 0, but must be at least 1"),
        ({"num_beams": 0}, "num_beams is 0, but must be at least 1"),
        ({"bpe_vocab": 0}, "bpe_vocab is 0, but must be at least 1"),
        ({"length_penalties": ()}, "length_penalties is empty"),
        ({"target": "en"}, "source and target are both 'en'"),
        ({"bpe_vocap": 3}, "did you mean 'bpe_vocab'"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**changes)


def test_the_real_settings_follow_the_published_protocol() -> None:
    settings = real()
    assert (settings.bpe_vocab, settings.num_beams, settings.preprocessing, settings.test_split) == (
        10_000, 5, "lc.norm.tok", "test_2016_flickr",
    )  # fmt: skip
    assert isinstance(settings.plan.averaging, LastKAverage)
    assert settings.plan.averaging.count == 10
    model = build_from_config(settings.model, device="meta")
    assert 2.5e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert settings.model.vocab == settings.bpe_vocab


def test_the_recipe_has_its_expected_results() -> None:
    found = get_recipe("translation")
    assert "99 %" in found.expected
    assert "BLEU on test2016" in found.expected
    assert found.settings(real=True) == real()
    assert found.settings(real=False) == built_in()


def test_the_built_in_numbers_can_be_translated_in_both_directions() -> None:
    there, back = load_data(None, built_in()), load_data(None, replace(built_in(), source="de", target="en"))
    assert (len(there.train), len(there.validation), len(there.test)) == (9000, 500, 500)
    assert there.test.source == back.test.target
    assert there.test.target == back.test.source
    assert not {*there.train.source} & {*there.validation.source, *there.test.source}
    with pytest.raises(ConfigError, match="in words of 'en' and 'de', not of 'en' and 'fr'"):
        load_data(None, replace(built_in(), target="fr"))


def test_real_pairs_are_read_from_their_splits(folder: Path) -> None:
    found = load_data(folder, small())
    assert (len(found.train), len(found.validation), len(found.test)) == (61, 7, 5)
    assert found.test.source[0] == "three hundred one ."
    with pytest.raises(DataError, match=r"has neither test_2017\.lc\.tok\.en nor"):
        load_data(folder, small(test_split="test_2017"))


def test_a_batch_has_decoder_inputs_and_next_token_targets(pairs: BytePairTokenizer) -> None:
    task = task_of(pairs)
    batch = task.batch(4, 0, 1)
    wanted = dict(zip(task.train.source, task.train.target, strict=True))
    start, end = pairs.token("start"), pairs.token("end")
    assert len(rows(batch)) == 6
    for source, given, following in rows(batch):
        assert pairs.token("pad") not in source
        assert given == [start, *following[:-1]]
        assert following[-1] == end
        assert pairs.decode(following) == wanted[pairs.decode(source)]
    assert batch.source.shape[1] % 8 == batch.inputs.shape[1] % 8 == 0
    positions, targets = real_targets(batch)
    assert (batch.inputs.flatten() != pairs.token("pad")).nonzero()[:, 0].equal(positions)
    assert len(targets) == sum(len(following) for _, _, following in rows(batch))
    assert len(batch.targets) % 6 == 0
    assert len(batch.targets) - len(targets) < 6


def test_bucketing_reduces_padding_and_keeps_the_records(pairs: BytePairTokenizer) -> None:
    drawn, alike = task_of(pairs), task_of(pairs, bucket_batches=5)
    steps = range(61)  # six passes: 61 records, 6 in a batch
    assert sum(alike.batch(step, 0, 1).inputs.numel() for step in steps) < 0.9 * sum(
        drawn.batch(step, 0, 1).inputs.numel() for step in steps
    )
    for first in range(0, 60, 5):  # what five steps see is what they would have seen
        mine, others = (
            sorted(row for step in range(first, first + 5) for row in rows(task.batch(step, 0, 1)))
            for task in (alike, drawn)
        )
        assert mine == others


@pytest.mark.parametrize("r_drop", [0.0, 2.0])
@pytest.mark.parametrize("bpe_dropout", [0.0, 0.3])
@pytest.mark.parametrize("of", [2, 3])
def test_the_shards_of_a_batch_concatenate_to_the_batch(
    pairs: BytePairTokenizer, r_drop: float, bpe_dropout: float, of: int
) -> None:
    task = task_of(pairs, r_drop=r_drop, bpe_dropout=bpe_dropout)
    whole, shares = rows(task.batch(7, 0, 1)), [rows(task.batch(7, part, of)) for part in range(of)]
    if r_drop:
        assert whole[:6] == whole[6:]
        assert all(share[: 6 // of] == share[6 // of :] for share in shares)
        whole, shares = whole[:6], [share[: 6 // of] for share in shares]
    assert [row for share in shares for row in share] == whole
    assert rows(task_of(pairs, r_drop=r_drop, bpe_dropout=bpe_dropout).batch(7, 0, 1))[:6] == whole


def test_every_epoch_has_every_pair(pairs: BytePairTokenizer) -> None:
    task = task_of(pairs)
    seen = {pairs.decode(source) for step in range(11) for source, _, _ in rows(task.batch(step, 0, 1))}
    assert seen == set(task.train.source)


def test_bpe_dropout_of_0_gives_the_usual_tokens(pairs: BytePairTokenizer) -> None:
    respell = BPEDropout(pairs, 0.0)
    words = {word for text in (*map(english, range(999)), *map(german, range(999))) for word in text.split()}
    known = [word for word in sorted(words) if set(word) <= set("".join(pairs.symbols))]
    assert len(known) > 30
    assert [respell(word, lambda: 0.0) for word in known] == [pairs.encode(word) for word in known]


def test_bpe_dropout_splits_a_word_in_other_tokens_of_the_same_text(pairs: BytePairTokenizer) -> None:
    def draws(values: list[float]) -> Callable[[], float]:
        endless: Iterator[float] = iter(values * 99)
        return lambda: next(endless)

    respell = BPEDropout(pairs, 0.3)
    assert len(respell("hundred", lambda: 0.29)) == 7  # every pair passed over
    some = respell("hundred", draws([0.1, 0.9, 0.9]))
    assert 1 < len(some) < 7
    assert pairs.decode(some) == "hundred"


def test_bpe_dropout_changes_from_step_to_step(pairs: BytePairTokenizer) -> None:
    task, usual = task_of(pairs, bpe_dropout=0.05), task_of(pairs)
    changed = 0
    for step in range(5):
        for mine, plain_row in zip(rows(task.batch(step, 0, 1)), rows(usual.batch(step, 0, 1)), strict=True):
            assert pairs.decode(mine[0]) == pairs.decode(plain_row[0])
            assert pairs.decode(mine[2]) == pairs.decode(plain_row[2])
            changed += mine[0] != plain_row[0]
    assert 5 < changed < 25
    first, later = (rows(task.batch(step, 0, 1)) for step in (0, 61))  # 61 batches are six passes
    assert first != later


def test_a_sentence_that_bpe_dropout_makes_too_long_is_tokenised_as_usual(pairs: BytePairTokenizer) -> None:
    tokens = max(len(pairs.encode(text)) for side in (english, german) for text in map(side, SIZES["train"]))
    tight, wide = task_of(pairs, bpe_dropout=0.9, **{"model.context": tokens + 1}), task_of(pairs, bpe_dropout=0.9)
    assert max(wide.batch(0, 0, 1).inputs.shape) > tokens + 1
    assert max(tight.batch(0, 0, 1).inputs.shape) <= tokens + 1


def test_a_training_sentence_longer_than_the_context_is_refused(pairs: BytePairTokenizer) -> None:
    with pytest.raises(DataError, match=r"sentence \d+ of the training set has \d+ tokens, but model.context is 4"):
        task_of(pairs, **{"model.context": 4}).batch(0, 0, 1)


def test_rows_are_padded_to_a_multiple_of_eight_within_the_context() -> None:
    assert pad_rows([[1, 2, 3], [4]], 0, 40).tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]
    assert pad_rows([[1] * 9], 0, 40).shape == (1, 16)
    assert pad_rows([[1] * 9, [2]], 0, 11).shape == (2, 11)


def test_the_loss_is_smoothed_cross_entropy_of_real_targets(pairs: BytePairTokenizer) -> None:
    task, model = task_of(pairs, label_smoothing=0.2), model_of(pairs)
    batch = task.batch(0, 0, 1)
    loss = task.loss(model, batch)
    total = torch.zeros(())
    for source, given, wanted in rows(batch):  # one at a time, with nothing filled in
        logits = model(torch.tensor([source]), torch.tensor([given]))[0]
        total += functional.cross_entropy(logits, torch.tensor(wanted), label_smoothing=0.2, reduction="sum")
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert loss.count == sum(len(wanted) for _, _, wanted in rows(batch))


def test_r_drop_of_two_equal_passes_is_the_loss_of_one(pairs: BytePairTokenizer) -> None:
    model = model_of(pairs)
    one, two = task_of(pairs), task_of(pairs, r_drop=5.0)
    single, double = one.loss(model, one.batch(0, 0, 1)), two.loss(model, two.batch(0, 0, 1))
    assert double.total.item() == pytest.approx(single.total.item(), rel=1e-5)
    assert double.count == single.count


def test_r_drop_adds_the_divergence_of_two_passes(pairs: BytePairTokenizer) -> None:
    task, model = task_of(pairs, r_drop=5.0, label_smoothing=0.0), model_of(pairs, dropout=0.2).train()
    batch = task.batch(0, 0, 1)
    torch.manual_seed(11)
    loss = task.loss(model, batch)
    torch.manual_seed(11)
    logits = model(batch.source, batch.inputs, source_padding=batch.source_padding)
    assert (batch.targets == IGNORED).any(), "the loss must leave out what fills a batch up"
    positions, targets = real_targets(batch)
    one, other = logits.flatten(0, 1)[positions].log_softmax(-1).chunk(2)
    wanted = targets[: len(one)]
    surprise = sum(functional.nll_loss(each, wanted, reduction="sum") for each in (one, other))
    apart = sum(functional.kl_div(p, q, log_target=True, reduction="sum") for p, q in ((one, other), (other, one)))
    assert apart > 1
    assert loss.total.item() == pytest.approx((surprise / 2 + 5.0 / 4 * apart).item(), rel=1e-5)


def test_symmetric_kl_is_the_mean_of_both_divergences() -> None:
    one, other = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    p, q = one.softmax(-1), other.softmax(-1)
    truth = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)) / 2
    assert torch.allclose(symmetric_kl(one, other), truth, atol=1e-12)


def test_the_losses_of_the_shards_sum_to_that_of_the_batch(pairs: BytePairTokenizer) -> None:
    task, model = task_of(pairs, r_drop=2.0, bpe_dropout=0.2), model_of(pairs)
    whole, shares = (
        task.loss(model, task.batch(1, 0, 1)),
        [task.loss(model, task.batch(1, part, 3)) for part in range(3)],
    )
    assert sum(share.total.item() for share in shares) == pytest.approx(whole.total.item(), rel=1e-5)
    assert sum(int(share.count) for share in shares) == whole.count


@pytest.mark.parametrize("strategy", [Greedy(), BeamSearch(2, 0.7)], ids=["greedy", "beam"])
def test_a_translation_does_not_depend_on_its_batch(pairs: BytePairTokenizer, strategy: Any) -> None:
    model = model_of(pairs, context=60)  # beyond what is written about any of these
    sentences = [english(101), f"{english(143)} {english(129)} {english(155)}", english(110)]
    assert len({-(-len(pairs.encode(each)) // 8) for each in sentences}) > 1
    together = generate_translations(model, pairs, sentences, strategy)
    split = generate_translations(model, pairs, sentences, strategy, batch_size=2)
    alone = [text for each in sentences for text in generate_translations(model, pairs, [each], strategy)]
    assert [each.tokens for each in together] == [each.tokens for each in split] == [each.tokens for each in alone]
    assert len({each.tokens for each in together}) > 1
    assert len({len(each.tokens) for each in together}) > 1
    assert translate(model, pairs, sentences, strategy) == [pairs.decode(each.body) for each in together]


def test_a_sentence_that_does_not_fit_is_refused(pairs: BytePairTokenizer) -> None:
    with pytest.raises(DataError, match=r"'one one one.*' has 60 tokens, but the model reads from 1 to 25"):
        generate_translations(model_of(pairs), pairs, ["one", "one " * 60], Greedy())
    with pytest.raises(DataError, match="'' has 0 tokens"):
        generate_translations(model_of(pairs), pairs, [""], Greedy())


def test_evaluation_is_greedy_and_in_full_precision(pairs: BytePairTokenizer) -> None:
    task, model = task_of(pairs), model_of(pairs)
    said = translate(model, pairs, task.validation.source, Greedy())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        metrics = task.evaluate(model)
    assert metrics == {"BLEU": bleu(said, task.validation.target), "exact": 0.0}


def test_the_share_of_exact_translations() -> None:
    assert exact_match(["ein hund", "eine katze", "x"], ["ein  hund ", "ein katze", "x"]) == pytest.approx(2 / 3)


def test_text_is_preprocessed_by_the_settings() -> None:
    settings = small(preprocessing="lc.norm.tok")
    assert preprocess(settings, "A man's hat.") == "a man &apos;s hat ."
    assert postprocess(settings, "der hut ist rot .") == "der hut ist rot."
    assert (
        preprocess(small(preprocessing=""), "A man's hat.")
        == postprocess(small(preprocessing=""), "A man's hat.")
        == "A man's hat."
    )
    assert preprocess(small(preprocessing="lc"), "A hat.") == "a hat."


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    where = tmp_path_factory.mktemp("run")
    return where, get_recipe("translation").run(
        small(length_penalties=(0.0, 2.0)), RunLocation(data=folder, folder=where)
    )


def test_a_saved_run_gives_the_same_metrics(folder: Path, ran: tuple[Path, Any]) -> None:
    where, outcome = ran
    found, settings, model, pairs = load_finished_run(where)
    assert settings == small(length_penalties=(0.0, 2.0))
    assert pairs == outcome.tokenizer
    metrics = found.module.evaluate(settings, model, pairs, RunLocation(data=folder))
    assert {**metrics, "seconds": outcome.metrics["seconds"]} == outcome.metrics
    assert {"test BLEU", "test exact", "validation BLEU", LENGTH_PENALTY} <= set(metrics)


def test_the_length_penalty_is_chosen_on_validation_pairs(
    folder: Path, pairs: BytePairTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []

    def searched(model: Transformer, pairs: BytePairTokenizer, sentences: Any, strategy: Any) -> list[str]:
        """Right about a share of the sentences that says which penalty it was."""
        asked.append((len(sentences), strategy.length_penalty))
        right = {0.0: 2, 2.0: 5, 1.0: 3}[strategy.length_penalty]
        truth = dict(zip(both.source, both.target, strict=True))
        return [truth[each] if number < right else "x" for number, each in enumerate(sentences)]

    settings = small(length_penalties=(0.0, 2.0, 1.0))
    found = load_data(folder, settings)
    both = SentencePairs((*found.validation.source, *found.test.source), (*found.validation.target, *found.test.target))
    monkeypatch.setattr(translation, "translate", searched)
    metrics = translation.evaluate(settings, model_of(pairs), pairs, RunLocation(data=folder))
    assert asked == [(7, 0.0), (7, 2.0), (7, 1.0), (5, 2.0)]
    assert (metrics[LENGTH_PENALTY], metrics["test BLEU"], metrics["test exact"]) == (2.0, pytest.approx(100), 1.0)
    assert 0 < metrics["validation BLEU"] < 100


def test_an_interrupted_run_resumes_to_the_same_result(folder: Path, ran: tuple[Path, Any], tmp_path: Path) -> None:
    def stop(phase: str, progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    settings = small(length_penalties=(0.0, 2.0))
    with pytest.raises(KeyboardInterrupt):
        run(settings, RunLocation(data=folder, folder=tmp_path, on_progress=stop))
    outcome = run(settings, RunLocation(data=folder, folder=tmp_path, resume=True))
    straight = ran[1]
    assert {**outcome.metrics, "seconds": 0} == {**straight.metrics, "seconds": 0}
    for one, other in zip(outcome.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_sacrebleu_is_left_out_without_plain_text_and_required_for_training(
    folder: Path, ran: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings, model, pairs = load_finished_run(ran[0])
    messages: list[str] = []
    monkeypatch.setattr(translation, "translate", lambda m, p, sentences, s: ["drei hundert eins ."] * len(sentences))
    for file in folder.glob("*.lc.tok.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    metrics = translation.evaluate(settings, model, pairs, RunLocation(data=tmp_path, on_message=messages.append))
    assert "sacreBLEU is left out because there is no plain text" in messages[0]
    assert "has neither test.en nor" in messages[0]
    assert "test sacreBLEU" not in metrics
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match=r"pip install 'regard\[translate\]'"):
        run(settings, RunLocation(data=folder))


def test_sacrebleu_compares_plain_text_without_case(
    folder: Path, ran: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings, model, pairs = load_finished_run(ran[0])
    monkeypatch.setattr(translation, "translate", lambda m, p, sentences, s: ["drei hundert eins ."] * len(sentences))
    calls: list[Any] = []
    monkeypatch.setattr(translation, "plain_text_bleu", lambda *given, **more: calls.append((given, more)) or 12.5)
    metrics = translation.evaluate(settings, model, pairs, RunLocation(data=folder))
    assert metrics["test sacreBLEU"] == 12.5
    (((translations, references), more),) = calls
    assert (translations[0], references[0], more) == ("drei hundert eins.", "Drei hundert eins.", {"lowercase": True})


def test_the_built_in_run_translates_numbers_that_are_not_in_training() -> None:
    outcome = get_recipe("translation").run(built_in(), RunLocation())
    assert outcome.metrics["test exact"] >= 0.99
    assert outcome.metrics["test BLEU"] >= 99
