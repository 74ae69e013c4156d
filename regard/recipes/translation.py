"""A sentence of one language in another: an encoder-decoder on byte pairs of both, and the search for its best answer.

Expected: built-in at least 99 % of numbers in words, never seen in training, to the letter; Multi30k English to German
41 BLEU on test2016 (lower-cased, tokenised, beam of 5) with 2.6 M parameters.
Time: built-in one minute of one core; Multi30k nine minutes on one H200 that five other runs share.
Memory: built-in 1 GB; Multi30k 26 GiB of the GPU's, most of which the allocator keeps since batches differ in
width.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_number as real_number
from regard.core.masks import padding
from regard.core.masks.algebra import Mask
from regard.data.byte_pairs import END as WORD_END, BytePairs
from regard.data.number_words import number_words
from regard.data.sampler import LengthBuckets, sampler_generator
from regard.data.sentence_pairs import SentencePairs, read_sentence_pairs
from regard.models.generation_types import GeneratedText
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.sampling import BeamSearch, Greedy, Strategy
from regard.models.transformer import Transformer, TransformerConfig
from regard.recipes.bleu import bleu, detokenised, has_sacrebleu, sacrebleu, tokenised
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, Start
from regard.train.averaging import LastKAverage
from regard.train.objectives import cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear
from regard.train.task import Loss

SPECIAL = PAD, START, END = "pad", "start", "end"
SPELLINGS = 16  # of a word, drawn once; in training each occurrence takes one of them
MULTIPLE = 8  # what widths of batches are filled up to: fewer shapes, and those that kernels like
ROOM = 20  # tokens that a translation may have beyond twice the width of its source
OTHERS = 5  # sentences that an error names beside the first
PENALTY = "length penalty"  # the figure that says which exponent was chosen


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    model        its vocabulary is that of the byte pairs
    pieces       byte pairs of both languages together, at most
    smoothing    how much of each target is given to all tokens alike
    consistency  how much it costs where two passes with other dropout disagree; 0 makes one pass
    unjoined     how often a pair is left unjoined in training, so that words are spelled in other ways too
    pool         batches that are sorted by length together, so that less of each is filled up; 1 leaves them as drawn
    beams        texts that the final search looks at side by side
    penalties    exponents of length to choose from: the one with the best BLEU on what is held out is used
    source       the language of the texts
    target       the language of the translations
    form         how files of real data are named between split and language; "lc" in it means lower case, "tok" tokens
    test         the split that is judged on, where the data are real
    """

    model: TransformerConfig
    plan: TrainingPlan
    pieces: int
    smoothing: float = 0.1
    consistency: float = 0.0
    unjoined: float = 0.0
    pool: int = 1
    beams: int = 5
    penalties: tuple[float, ...] = (1.0,)
    source: str = "en"
    target: str = "de"
    form: str = ""
    test: str = "test_2016_flickr"
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("pieces", self.pieces, 1, "tokens")
        check_integer("pool", self.pool, 1, "batches")
        check_integer("beams", self.beams, 1, "texts")
        check_integer("seed", self.seed, 0)
        for name in ("smoothing", "unjoined"):
            if not 0 <= real_number(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} is a share, from 0 to below 1, not {getattr(self, name)}")
        if real_number("consistency", self.consistency) < 0:
            raise ConfigError(f"consistency is 0 or above, such as 5, not {self.consistency}")
        if not self.penalties:
            raise ConfigError("penalties has no exponent to choose from; (1.0,) compares translations by their mean")
        if self.source == self.target:
            raise ConfigError(f"source and target are both {self.source!r}; a translation needs two languages")


def built_in() -> Settings:
    model = TransformerConfig(
        vocab=300, context=64, width=64, depth=2, heads=4, ff_width=128, order="pre", dropout=0.0
    )  # fmt: skip
    plan = TrainingPlan(
        steps=800, batch_size=128, optimizer=AdamW(lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01),
        schedule=Linear(warmup=100), averaging=LastKAverage(count=10, every=20), evaluate_every=200, save_every=200,
    )  # fmt: skip
    return Settings(model=model, plan=plan, pieces=300)


def real() -> Settings:
    """Transformer-Tiny, with what helps where there are few sentences: two views, many spellings, averages."""
    model = TransformerConfig(
        vocab=10_000, context=256, width=128, depth=4, heads=4, ff_width=256, dropout=0.1
    )  # fmt: skip
    plan = TrainingPlan(
        steps=7000, batch_size=256,
        optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)),
        schedule=Cosine(warmup=500, min_lr_ratio=0.05), precision="bfloat16",
        averaging=LastKAverage(count=10, every=120), compile=True, evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    return Settings(
        model=model, plan=plan, pieces=10_000, consistency=5.0, unjoined=0.05, pool=16, penalties=(0.6, 1.0, 1.4, 1.8),
        form="lc.norm.tok",
    )  # fmt: skip


@dataclass(frozen=True)
class Set:
    """Pairs to learn from, to choose by and to be judged by."""

    train: SentencePairs
    held: SentencePairs
    test: SentencePairs


def data(folder: Path | None, settings: Settings) -> Set:
    """The real pairs where there is a folder, else numbers in words."""
    names = settings.source, settings.target
    if folder is not None:
        splits = ("train", "val", settings.test)
        return Set(*(read_sentence_pairs(folder, split, *names, form=settings.form) for split in splits))
    if set(names) != {"en", "de"}:
        raise ConfigError(f"the built-in numbers are in words of 'en' and 'de', not of {names[0]!r} and {names[1]!r}")
    parts = number_words(seed=settings.seed)
    return Set(*parts if names == ("en", "de") else (SentencePairs(each.target, each.source) for each in parts))


def byte_pairs(train: SentencePairs, pieces: int) -> BytePairs:
    """The tokens of both languages: pieces of words, with a stand-in for characters that training never had."""
    return BytePairs.trained(train.source, train.target, vocab=pieces, special=SPECIAL, words=True, lenient=True)


class Batch(NamedTuple):
    """Sentences and their translations, filled up: what is read, what is written, and what comes next there.

    places  which of all that is written is no filling, and has something coming next
    """

    source: Int[Tensor, "b m"]
    source_padding: Mask
    given: Int[Tensor, "b n"]
    places: Int[Tensor, " t"]
    wanted: Int[Tensor, " t"]


@dataclass(frozen=True)
class TranslationTask:
    """Pairs of sentences, each word in one of its spellings; the score is BLEU without a search."""

    train: SentencePairs
    held: SentencePairs
    pairs: BytePairs
    context: int
    batch_size: int
    smoothing: float
    consistency: float
    unjoined: float
    pool: int
    seed: int

    def batch(self, step: int, part: int, of: int) -> Batch:
        records = self._order.part(part, of).at(step).tolist()
        # drawn for the whole batch at once, so that its shares make it up however many there are
        size = (self.batch_size, 2, self._longest)
        ways = (1, SPELLINGS + 1) if self.unjoined else (0, 1)
        draws = torch.randint(*ways, size, generator=sampler_generator(self.seed, step, "spelling"))
        mine = draws[part * len(records) : (part + 1) * len(records)].tolist()
        rows = [
            tuple(self._row(words[record], chosen) for words, chosen in zip(self._words, both, strict=True))
            for record, both in zip(records, mine, strict=True)
        ]
        pad, start, end = (self.pairs.token(name) for name in SPECIAL)
        times = 2 if self.consistency else 1  # two passes in one: what falls out differs from row to row
        given = filled([[start, *target] for _, target in rows], pad, self.context).repeat(times, 1)
        return Batch(
            filled([source for source, _ in rows], pad, self.context).repeat(times, 1),
            padding([len(source) for source, _ in rows] * times),
            given,
            (given.flatten() != pad).nonzero().squeeze(1),
            torch.tensor([token for _, target in rows for token in (*target, end)]).repeat(times),
        )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = model(batch.source, batch.given, source_padding=batch.source_padding, indices=batch.places).float()
        told = cross_entropy(logits, batch.wanted, smoothing=self.smoothing)
        if not self.consistency:
            return told
        apart = disagreement(*logits.chunk(2)).sum()
        assert isinstance(told.count, Tensor)
        return Loss((told.total + self.consistency * apart) / 2, told.count // 2)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Transformer)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            said = translated(model, self.pairs, self.held.source, Greedy())
        return {"BLEU": bleu(said, self.held.target), "exact": exact(said, self.held.target)}

    @cached_property
    def _order(self) -> LengthBuckets:
        source, target = (
            torch.tensor([sum(len(self._spelled[word][0]) for word in words) for words in side]) for side in self._words
        )
        lengths = target * self.context + source  # by the target, whose tokens cost more: each has its logits
        return LengthBuckets(len(self.train), self.batch_size, self.seed, lengths=lengths, pool=self.pool)

    @cached_property
    def _words(self) -> tuple[list[list[str]], ...]:
        """The words of each sentence, of both sides."""
        sides = tuple([text.split() for text in side] for side in (self.train.source, self.train.target))
        for side in sides:
            for number, words in enumerate(side):
                tokens = sum(len(self._spelled[word][0]) for word in words)
                if tokens >= self.context:  # one more begins or ends it
                    raise DataError(
                        f"sentence {number + 1} of the training set has {tokens} tokens, but the model reads "
                        f"{self.context} with one for the start; make model.context larger, or leave the pair out: "
                        f"{' '.join(words[:6])!r} ..."
                    )
        return sides

    @cached_property
    def _longest(self) -> int:
        """Words of a sentence, at most."""
        return max(len(words) for side in self._words for words in side)

    @cached_property
    def _spelled(self) -> dict[str, list[list[int]]]:
        """The usual spelling of each word, and then others."""
        words = dict.fromkeys(
            word for side in (self.train.source, self.train.target) for t in side for word in t.split()
        )
        usual = self.pairs.encode_many(list(words))
        spelled = {word: [tokens] for word, tokens in zip(words, usual, strict=True)}
        if self.unjoined:
            respell, draw = Respelling(self.pairs, self.unjoined), random.Random(self.seed).random
            for word, ways in spelled.items():
                ways += [respell(word, draw) for _ in range(SPELLINGS)]
        return spelled

    def _row(self, words: Sequence[str], ways: Sequence[int]) -> list[int]:
        row = [token for word, way in zip(words, ways, strict=False) for token in self._spelled[word][way]]
        if len(row) < self.context:
            return row
        return [token for word in words for token in self._spelled[word][0]]


class Respelling:
    """Words as tokens, with some pairs left unjoined by chance. Provilkov et al. 2019, arXiv:1910.13267.

    Before every join, each pair that could be joined is passed over with probability `unjoined`; the word is done when
    none is left.
    """

    def __init__(self, pairs: BytePairs, unjoined: float) -> None:
        self.unjoined = unjoined
        self._ranks = {pair: rank for rank, pair in enumerate(pairs.merges)}
        self._numbers = {piece: number for number, piece in enumerate(pairs.pieces, len(pairs.special))}

    def __call__(self, word: str, draw: Callable[[], float]) -> list[int]:
        """The tokens of a word whose characters are all known; `draw` gives numbers from 0 to below 1."""
        parts = [*word[:-1], word[-1] + WORD_END]
        while True:
            possible = [
                (self._ranks[pair], place)
                for place, pair in enumerate(pairwise(parts))
                if pair in self._ranks and draw() >= self.unjoined
            ]
            if not possible:
                return [self._numbers[part] for part in parts]
            _, place = min(possible)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]


def disagreement(one: Float[Tensor, "*n w"], other: Float[Tensor, "*n w"]) -> Float[Tensor, "*n"]:
    """How far two answers are apart: the mean of KL(p, q) and KL(q, p). Liang et al. 2021, arXiv:2106.14448."""
    one, other = one.log_softmax(-1), other.log_softmax(-1)
    return ((one.exp() - other.exp()) * (one - other)).sum(-1) / 2


def filled(rows: Sequence[Sequence[int]], fill: int, most: int) -> Int[Tensor, "b n"]:
    """Rows side by side, filled up at their ends to a common width: a multiple of eight, where that is not too much."""
    together = numpy.full((len(rows), _width(max(map(len, rows)), most)), fill)
    for filled_row, row in zip(together, rows, strict=True):
        filled_row[: len(row)] = row
    return torch.from_numpy(together)


def _width(length: int, most: int) -> int:
    return min(length + -length % MULTIPLE, max(length, most))


def answers(
    model: Transformer,
    pairs: BytePairs,
    sentences: Sequence[str],
    strategy: Strategy,
    at_once: int = 256,
    names: Sequence[str] | None = None,
) -> list[GeneratedText]:
    """What the model writes about each sentence. Those that are filled up to one width are read together.

    names  what errors call each sentence: by default its number, from 1 on
    """
    context = model.config.context
    read = pairs.encode_many(sentences)
    unfit = [number for number, tokens in enumerate(read) if not 0 < len(tokens) <= context]
    if unfit:
        called = [f"sentence {number + 1}" if names is None else names[number] for number in unfit]
        sentence, tokens = sentences[unfit[0]], read[unfit[0]]
        raise DataError(
            f"{called[0]}: {sentence[:40]!r} has {len(tokens)} tokens, but the model reads from 1 to {context}; "
            f"{'split it' if tokens else 'leave it out'}{_also(called[1:])}"
        )
    alike: dict[int, list[int]] = {}
    for number, tokens in enumerate(read):
        alike.setdefault(_width(len(tokens), context), []).append(number)
    found: dict[int, GeneratedText] = {}
    for width, all_of_it in alike.items():
        for first in range(0, len(all_of_it), at_once):
            chosen = all_of_it[first : first + at_once]
            # the most tokens are those of the width, so that no sentence's answer depends on the ones beside it
            texts = _answered(model, pairs, [read[number] for number in chosen], strategy, 2 * width + ROOM)
            found.update(zip(chosen, texts, strict=True))
    return [found[number] for number in range(len(read))]


def _also(called: Sequence[str]) -> str:
    """The others that an error is about, a few of them by name."""
    if not called:
        return ""
    more = f" and {len(called) - OTHERS} more" if len(called) > OTHERS else ""
    return f". The same holds for {', '.join(called[:OTHERS])}{more}"


def _answered(
    model: Transformer, pairs: BytePairs, rows: list[list[int]], strategy: Strategy, length: int
) -> list[GeneratedText]:
    device = next(model.parameters()).device
    source = filled(rows, pairs.token(PAD), model.config.context).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return model.generate(
        source,
        start_token=pairs.token(START),
        source_padding=padding(lengths),
        strategy=strategy,
        max_new_tokens=length,
        stop=[pairs.token(END)],
    )


def translated(model: Transformer, pairs: BytePairs, sentences: Sequence[str], strategy: Strategy) -> list[str]:
    """Sentences in the other language, in the form that the model was trained on."""
    return [pairs.decode(text.body) for text in answers(model, pairs, sentences, strategy)]


def exact(said: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of translations that are those wanted, to the letter."""
    return sum(one == " ".join(other.split()) for one, other in zip(said, wanted, strict=True)) / len(said)


def prepared(settings: Settings, text: str) -> str:
    """Plain text in the form that the model was trained on."""
    parts = settings.form.split(".")
    text = text.lower() if "lc" in parts else text
    return tokenised(text, settings.source) if "tok" in parts else text


def plain(settings: Settings, text: str) -> str:
    """A translation as people write."""
    return detokenised(text) if "tok" in settings.form.split(".") else text


def start(settings: Settings, place: RunLocation) -> Start:
    found = data(place.data, settings)
    pairs = byte_pairs(found.train, settings.pieces)
    config = replace(settings.model, vocab=pairs.vocab)
    model = build_from_config(config, seed=settings.seed)
    task = TranslationTask(
        found.train, found.held, pairs, config.context, settings.plan.batch_size, settings.smoothing,
        settings.consistency, settings.unjoined, settings.pool, settings.seed,
    )  # fmt: skip
    return Start(model, (Phase("training", task, settings.plan),), pairs)


def run(settings: Settings, place: RunLocation) -> RecipeResult:
    begun = start(settings, place)
    assert isinstance(begun.tokenizer, BytePairs)
    seconds = begun.trained(place)
    figures = judged(settings, begun.model, begun.tokenizer, place)
    return RecipeResult({**figures, "seconds": seconds}, begun.model, begun.tokenizer)


def judged(settings: Settings, model: Model, pairs: BytePairs, place: RunLocation) -> dict[str, float]:
    """BLEU and the share of exact translations of the test set; the search has a penalty chosen on held-out pairs."""
    assert isinstance(model, Transformer)
    found = data(place.data, settings)
    tried = {
        penalty: bleu(
            translated(model, pairs, found.held.source, BeamSearch(settings.beams, penalty)), found.held.target
        )
        for penalty in settings.penalties
    }
    penalty = max(tried, key=lambda each: tried[each])
    said = translated(model, pairs, found.test.source, BeamSearch(settings.beams, penalty))
    return {
        "test BLEU": bleu(said, found.test.target),
        "test exact": exact(said, found.test.target),
        "held-out BLEU": tried[penalty],
        PENALTY: penalty,
        **_counted_plainly(settings, said, place),
    }


def _counted_plainly(settings: Settings, said: Sequence[str], place: RunLocation) -> dict[str, float]:
    """The figure of sacrebleu against the references as they were before anybody cut them into tokens."""
    if place.data is None:
        return {}  # numbers in words are plain as they are
    if not has_sacrebleu():
        place.on_message("sacrebleu is not installed, so its figure is left out")
        return {}
    try:
        references = read_sentence_pairs(place.data, settings.test, settings.source, settings.target).target
    except DataError as error:
        place.on_message(f"the figure of sacrebleu is left out, which is counted on plain text: {error}")
        return {}
    lowercase = "lc" in settings.form.split(".")
    return {"test sacreBLEU": sacrebleu([plain(settings, each) for each in said], references, lowercase=lowercase)}
