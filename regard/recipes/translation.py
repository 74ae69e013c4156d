"""Translation: an encoder-decoder Transformer on byte pairs of both languages, decoded by beam search.

Expected: built-in at least 99 % exact matches on numbers in words that are not in training; Multi30k English to German
41 BLEU on test2016 (lower-cased, tokenised, beam of 5) with 2.6 M parameters.
Time: built-in one minute of one core; Multi30k nine minutes on one H200 shared with five other runs.
Memory: built-in 1 GB; Multi30k 26 GiB of GPU memory, most of which the allocator keeps because batches differ in
width.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_range
from regard.core.masks import padding
from regard.core.masks.algebra import Mask
from regard.data.byte_pairs import WORD_END, BytePairTokenizer
from regard.data.number_words import number_words
from regard.data.sampler import LengthBuckets, sampler_generator
from regard.data.sentence_pairs import SentencePairs, read_sentence_pairs
from regard.models.beam_search import BeamSearch
from regard.models.generation_types import GeneratedText
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.models.sampling import Greedy, Strategy
from regard.models.transformer import Transformer, TransformerConfig
from regard.recipes.bleu import bleu, check_sacrebleu, plain_text_bleu
from regard.recipes.moses_tokenizer import moses_detokenize, moses_tokenize
from regard.recipes.ragged_rows import Integers, RaggedRows
from regard.recipes.recipe import (
    Phase,
    RecipeResult,
    RunLocation,
    Splits,
    TrainingSetup,
    name_setting,
    train_and_evaluate,
)
from regard.train.averaging import LastKAverage
from regard.train.objectives import IGNORED, cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear
from regard.train.task import Loss

CPU_SETTINGS = {
    "plan.compile": False, "plan.precision": "float32", "plan.batch_size": 64, "plan.steps": 3000,
    "plan.schedule.warmup": 200, "plan.evaluate_every": 1000, "plan.save_every": 500, "r_drop": 0.0, "bpe_vocab": 4000,
    "model.depth": 2,
}  # fmt: skip
FROM_DATA = ("vocab",)
NEXT_COMMAND = 'regard translate {folder} "TEXT"'
SPECIAL = PAD, START, END = "pad", "start", "end"
SPELLINGS = 16  # tokenisations of a word by BPE dropout, sampled once; training picks one for each occurrence
PAD_MULTIPLE = 8  # batches are padded to a multiple of this: fewer shapes, and shapes that kernels are fast for
EXTRA_TOKENS = 20  # tokens that a translation may have beyond twice the width of its source
MAX_OTHERS = 200  # characters for the further sentences that an error names
LENGTH_PENALTY = "length penalty"  # the metric with the exponent that was chosen


@dataclass(frozen=True, kw_only=True)
class TranslationSettings:
    """Settings of the translation recipe.

    model             configuration of the Transformer; the tokenizer determines the vocabulary size
    bpe_vocab         maximum number of byte-pair tokens of both languages together
    label_smoothing   fraction of each target that is spread over all tokens
    r_drop            weight of the KL divergence between two forward passes with different dropout (R-Drop); with 0
                      there is one forward pass
    bpe_dropout       probability of skipping a merge in training, so that words are split in several ways
    bucket_batches    number of batches that are sorted by length together, to reduce padding; 1 does not sort
    num_beams         number of beams of the beam search in the final evaluation
    length_penalties  exponents to try in the final evaluation: the score of a hypothesis in beam search is its
                      log-probability / length ** exponent. The exponent with the best validation BLEU is used
    source            language of the sentences to translate
    target            language of the translations
    preprocessing     part of the names of real files between split and language, such as "lc.norm.tok" in
                      train.lc.norm.tok.en; "lc" means lower case and "tok" Moses tokens
    test_split        name of the test split of real data
    """

    model: TransformerConfig
    plan: TrainingPlan
    bpe_vocab: int
    label_smoothing: float = 0.1
    r_drop: float = 0.0
    bpe_dropout: float = 0.0
    bucket_batches: int = 1
    num_beams: int = 5
    length_penalties: tuple[float, ...] = (1.0,)
    source: str = "en"
    target: str = "de"
    preprocessing: str = ""
    test_split: str = "test_2016_flickr"
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("bpe_vocab", self.bpe_vocab, 1, "tokens")
        check_integer("bucket_batches", self.bucket_batches, 1, "batches")
        check_integer("num_beams", self.num_beams, 1, "beams")
        check_integer("seed", self.seed, 0)
        for name in ("label_smoothing", "bpe_dropout"):
            check_range(name, getattr(self, name), 0, 1, below=True)
        check_range("r_drop", self.r_drop, 0)
        if not self.length_penalties:
            raise ConfigError("length_penalties is empty; (1.0,) ranks translations by their mean log-probability")
        if self.source == self.target:
            raise ConfigError(f"source and target are both {self.source!r}; a translation needs two languages")


def built_in() -> TranslationSettings:
    """Return the settings for the built-in data, numbers in English and German words."""
    model = TransformerConfig(
        vocab=300, context=64, width=64, depth=2, heads=4, ff_width=128, order="pre", dropout=0.0
    )  # fmt: skip
    plan = TrainingPlan(
        steps=800, batch_size=128, optimizer=AdamW(lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01),
        schedule=Linear(warmup=100), averaging=LastKAverage(count=10, every=20), evaluate_every=200, save_every=200,
    )  # fmt: skip
    return TranslationSettings(model=model, plan=plan, bpe_vocab=300)


def real() -> TranslationSettings:
    """Return the settings of Transformer-Tiny on Multi30k.

    There are few sentences, so the training is regularised: R-Drop, BPE dropout and checkpoint averaging.
    """
    model = TransformerConfig(
        vocab=10_000, context=256, width=128, depth=4, heads=4, ff_width=256, dropout=0.1
    )  # fmt: skip
    plan = TrainingPlan(
        steps=7000, batch_size=256,
        optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)),
        schedule=Cosine(warmup=500, min_lr_ratio=0.05), precision="bfloat16",
        averaging=LastKAverage(count=10, every=120), compile=True, evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    return TranslationSettings(
        model=model, plan=plan, bpe_vocab=10_000, r_drop=5.0, bpe_dropout=0.05, bucket_batches=16,
        length_penalties=(0.6, 1.0, 1.4, 1.8), preprocessing="lc.norm.tok",
    )  # fmt: skip


def load_data(folder: Path | None, settings: TranslationSettings) -> Splits[SentencePairs]:
    """Read sentence pairs from a folder, or generate numbers in words if the folder is None."""
    names = settings.source, settings.target
    if folder is not None:
        splits = ("train", "val", settings.test_split)
        read = partial(read_sentence_pairs, folder, preprocessing=settings.preprocessing)
        return Splits(*(read(split, *names) for split in splits))
    if set(names) != {"en", "de"}:
        raise ConfigError(f"the built-in numbers are in words of 'en' and 'de', not of {names[0]!r} and {names[1]!r}")
    parts = number_words(seed=settings.seed)
    swapped = (SentencePairs(each.target, each.source) for each in parts)
    return Splits(*(parts if names == ("en", "de") else swapped))


def train_tokenizer(train: SentencePairs, bpe_vocab: int) -> BytePairTokenizer:
    """Train a byte pair encoding on both languages, in which unknown characters become the replacement character."""
    with name_setting("bpe_vocab"):
        return BytePairTokenizer.train(
            train.source, train.target, vocab=bpe_vocab, special=SPECIAL, words=True, replace_unknown=True
        )


class TranslationBatch(NamedTuple):
    """A padded batch of sentence pairs.

    With R-Drop, each pair is in the batch twice.

    source          token ids of the source sentences
    source_padding  mask that hides the padding of the source
    inputs          decoder inputs: the start token, then the target sentence
    positions       indices of the tokens that are not padding, in the flattened `inputs`. Index 0 is appended until the
                    length is a multiple of the number of sentences, so that few different shapes occur
    targets         the next token at each of these positions; IGNORED at appended indices
    """

    source: Int[Tensor, "b m"]
    source_padding: Mask
    inputs: Int[Tensor, "b n"]
    positions: Int[Tensor, " t"]
    targets: Int[Tensor, " t"]


@dataclass(frozen=True)
class TranslationTask:
    """Training task: predict the next target token. Validation measures BLEU with greedy decoding."""

    train: SentencePairs
    validation: SentencePairs
    tokenizer: BytePairTokenizer
    settings: TranslationSettings

    @property
    def context(self) -> int:
        """The maximum number of tokens of a sentence."""
        return self.settings.model.context

    def batch(self, step: int, part: int, of: int) -> TranslationBatch:
        """Return micro-batch `part`, counted from 0, of a training step that is split into `of` micro-batches."""
        records = self._order.at(step, part, of).numpy()
        # drawn for the whole batch, so that the examples do not depend on the number of processes
        size = (self.settings.plan.batch_size, 2, self._longest)
        choices = (1, SPELLINGS + 1) if self.settings.bpe_dropout else (0, 1)
        draws = torch.randint(*choices, size, generator=sampler_generator(self.settings.seed, step, "spelling"))
        mine = draws[part * len(records) : (part + 1) * len(records)].numpy()
        source, target = (self._spell(side.select(records), mine[:, number]) for number, side in enumerate(self._words))
        pad, start, end = (self.tokenizer.token(name) for name in SPECIAL)
        times = 2 if self.settings.r_drop else 1  # two passes in one batch: dropout differs from row to row
        width = _padded_width(int(target.lengths.max()) + 1, self.context)
        inputs = target.pad(width, pad, first=1)
        inputs[:, 0] = start
        following = target.pad(width, pad)
        numpy.put_along_axis(following, target.lengths[:, None], end, axis=1)
        positions, targets = _pad_positions(following, target.lengths + 1)
        passes = [positions + number * inputs.size for number in range(times)]
        padded = source.pad(_padded_width(int(source.lengths.max()), self.context), pad)
        return TranslationBatch(
            torch.from_numpy(padded).repeat(times, 1),
            padding(torch.from_numpy(source.lengths).repeat(times)),
            torch.from_numpy(inputs).repeat(times, 1),
            torch.from_numpy(numpy.concatenate(passes)),
            torch.from_numpy(targets).repeat(times),
        )

    def loss(self, model: nn.Module, batch: TranslationBatch) -> Loss:
        """Return the cross-entropy of the next target token.

        With R-Drop, the loss is the mean cross-entropy of two forward passes, plus the weighted KL divergence between
        them.
        """
        logits = model(batch.source, batch.inputs, source_padding=batch.source_padding, indices=batch.positions).float()
        found = cross_entropy(logits, batch.targets, smoothing=self.settings.label_smoothing)
        if not self.settings.r_drop:
            return found
        filled = batch.targets.chunk(2)[0] == IGNORED
        divergence = symmetric_kl(*logits.chunk(2)).masked_fill(filled, 0).sum()
        assert isinstance(found.count, Tensor)
        return Loss((found.total + self.settings.r_drop * divergence) / 2, found.count // 2)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return BLEU and the fraction of exact matches on the validation pairs, with greedy decoding."""
        assert isinstance(model, Transformer)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            found = translate(model, self.tokenizer, self.validation.source, Greedy())
        return {"BLEU": bleu(found, self.validation.target), "exact": exact_match(found, self.validation.target)}

    @cached_property
    def _order(self) -> LengthBuckets:
        source, target = (torch.from_numpy(each) for each in self._lengths)
        # sort by the target first: its tokens cost more, since each has logits
        lengths = target * self.context + source
        pool, plan = self.settings.bucket_batches, self.settings.plan
        return LengthBuckets(len(self.train), plan.batch_size, self.settings.seed, lengths=lengths, pool=pool)

    @cached_property
    def _words(self) -> tuple[RaggedRows, ...]:
        """For the sources, then for the targets: the words of each training sentence, as indices in `_tokens_of`."""
        numbers = {word: number for number, word in enumerate(self._tokens_of)}
        return tuple(
            RaggedRows.from_lists([numbers[word] for word in text.split()] for text in side)
            for side in (self.train.source, self.train.target)
        )

    @cached_property
    def _lengths(self) -> tuple[Integers, ...]:
        """For the sources, then for the targets: the number of tokens of each training sentence, without BPE dropout.

        Raise DataError if a sentence does not fit into the context.
        """
        usual = numpy.array([len(spellings[0]) for spellings in self._tokens_of.values()])
        found = []
        for words, texts in zip(self._words, (self.train.source, self.train.target), strict=True):
            ends = numpy.concatenate([[0], numpy.cumsum(usual[words.values])])
            lengths = ends[words.starts + words.lengths] - ends[words.starts]
            for number in numpy.flatnonzero(lengths >= self.context)[:1]:  # one more token begins or ends it
                raise DataError(
                    f"sentence {number + 1} of the training set has {lengths[number]} tokens, but model.context is "
                    f"{self.context}, start token included; increase model.context, or leave the pair out: "
                    f"{' '.join(texts[number].split()[:6])!r} ..."
                )
            found.append(lengths)
        return tuple(found)

    @cached_property
    def _longest(self) -> int:
        """The number of words in the longest sentence."""
        return max(int(side.lengths.max()) for side in self._words)

    @cached_property
    def _tokens_of(self) -> dict[str, list[list[int]]]:
        """A dict from each word to its tokenisations: first the one without BPE dropout, then random ones with it."""
        words = dict.fromkeys(
            word for side in (self.train.source, self.train.target) for text in side for word in text.split()
        )
        usual = self.tokenizer.encode_batch(list(words))
        spelled = {word: [tokens] for word, tokens in zip(words, usual, strict=True)}
        if self.settings.bpe_dropout:
            dropout, draw = (
                BPEDropout(self.tokenizer, self.settings.bpe_dropout),
                random.Random(self.settings.seed).random,
            )
            for word, spellings in spelled.items():
                spellings += [dropout(word, draw) for _ in range(SPELLINGS)]
        return spelled

    @cached_property
    def _spellings(self) -> RaggedRows:
        """All tokenisations of all words, as rows of token ids. Every word has the same number of tokenisations."""
        return RaggedRows.from_lists(tokens for spellings in self._tokens_of.values() for tokens in spellings)

    def _spell(self, words: RaggedRows, choices: Integers) -> RaggedRows:
        """Return the token ids of sentences, tokenised as chosen at random by BPE dropout.

        A sentence that would not fit into the context is tokenised without BPE dropout.

        words    words of each sentence, as indices in `_tokens_of`
        choices  for each sentence and word, which of the tokenisations of the word to use
        """
        column = numpy.arange(len(words.values)) - numpy.repeat(words.starts, words.lengths)
        row = numpy.repeat(numpy.arange(len(words.lengths)), words.lengths)
        several = SPELLINGS + 1 if self.settings.bpe_dropout else 1
        chosen = words.values * several + choices[row, column]
        spelled = self._spellings.select(chosen).join(words.lengths)
        long = spelled.lengths >= self.context
        if not long.any():
            return spelled
        usual = numpy.where(long[row], words.values * several, chosen)
        return self._spellings.select(usual).join(words.lengths)


def _pad_positions(following: Integers, lengths: Integers) -> tuple[Integers, Integers]:
    """Return the indices of the tokens that are not padding in a flattened batch, and these tokens.

    Both results are padded to a multiple of the number of sentences: indices with 0, tokens with IGNORED.

    following  padded token ids, of shape (b, n)
    lengths    number of tokens in each row that are not padding
    """
    inside = numpy.arange(following.shape[1]) < lengths[:, None]
    positions, targets = numpy.flatnonzero(inside), following[inside]
    missing = -len(positions) % len(following)
    return numpy.pad(positions, (0, missing)), numpy.pad(targets, (0, missing), constant_values=IGNORED)


class BPEDropout:
    """BPE dropout: tokenise a word with some merges skipped at random. Provilkov et al. 2019, arXiv:1910.13267.

    Before every merge, each pair of tokens that could be merged is skipped with probability `dropout`. The word is done
    when no pair is left.
    """

    def __init__(self, tokenizer: BytePairTokenizer, dropout: float) -> None:
        self.dropout = dropout
        self._ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges)}
        self._ids = {piece: number for number, piece in enumerate(tokenizer.pieces, len(tokenizer.special))}

    def __call__(self, word: str, draw: Callable[[], float]) -> list[int]:
        """Return the tokens of a word, whose characters must be known; `draw` returns random numbers from 0 to 1."""
        parts = [*word[:-1], word[-1] + WORD_END]
        while True:
            possible = [
                (self._ranks[pair], index)
                for index, pair in enumerate(pairwise(parts))
                if pair in self._ranks and draw() >= self.dropout
            ]
            if not possible:
                return [self._ids[part] for part in parts]
            _, index = min(possible)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]


def symmetric_kl(one: Float[Tensor, "*n w"], other: Float[Tensor, "*n w"]) -> Float[Tensor, "*n"]:
    """Return the symmetric KL divergence of two sets of logits, the mean of KL(p, q) and KL(q, p), as in R-Drop.

    Liang et al. 2021, arXiv:2106.14448.
    """
    one, other = one.log_softmax(-1), other.log_softmax(-1)
    return ((one.exp() - other.exp()) * (one - other)).sum(-1) / 2


def pad_rows(rows: Sequence[Sequence[int]], fill: int, most: int) -> Int[Tensor, "b n"]:
    """Pad sequences of token ids on the right to a common width, and return them as a tensor of shape (b, n).

    The width is the length of the longest sequence, rounded up to a multiple of 8.

    fill  token used for padding
    most  the width is not rounded up beyond this limit; a longer sequence is not cut
    """
    padded = numpy.full((len(rows), _padded_width(max(map(len, rows)), most)), fill)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return torch.from_numpy(padded)


def _padded_width(length: int, most: int) -> int:
    return min(length + -length % PAD_MULTIPLE, max(length, most))


def generate_translations(
    model: Transformer,
    tokenizer: BytePairTokenizer,
    sentences: Sequence[str],
    strategy: Strategy,
    batch_size: int = 256,
    names: Sequence[str] | None = None,
) -> list[GeneratedText]:
    """Translate sentences and return the generated texts. Sentences of the same padded width form a batch.

    strategy  decoding strategy, such as greedy decoding or beam search
    names     name of each sentence in error messages; by default the number of the sentence, counted from 1
    """
    context = model.config.context
    encoded = tokenizer.encode_batch(sentences)
    unfit = [number for number, tokens in enumerate(encoded) if not 0 < len(tokens) <= context]
    if unfit:
        called, first = [f"sentence {number + 1}" if names is None else names[number] for number in unfit], unfit[0]
        others = f"; the same holds for {', '.join(called[1:])}"[:MAX_OTHERS] if called[1:] else ""
        raise DataError(
            f"{called[0]}: {sentences[first][:40]!r} has {len(encoded[first])} tokens, but the model reads from 1 to "
            f"{context}; split long sentences and leave empty ones out{others}"
        )
    by_width: dict[int, list[int]] = {}
    for number, tokens in enumerate(encoded):
        by_width.setdefault(_padded_width(len(tokens), context), []).append(number)
    found: dict[int, GeneratedText] = {}
    for width, numbers in by_width.items():
        for first in range(0, len(numbers), batch_size):
            chosen = numbers[first : first + batch_size]
            # the maximum length depends on the width only, so that no translation depends on its batch
            rows = [encoded[number] for number in chosen]
            texts = _generate_batch(model, tokenizer, rows, strategy, 2 * width + EXTRA_TOKENS)
            found.update(zip(chosen, texts, strict=True))
    return [found[number] for number in range(len(encoded))]


def _generate_batch(
    model: Transformer, tokenizer: BytePairTokenizer, rows: list[list[int]], strategy: Strategy, length: int
) -> list[GeneratedText]:
    device = next(model.parameters()).device
    source = pad_rows(rows, tokenizer.token(PAD), model.config.context).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return model.generate(
        source,
        start_token=tokenizer.token(START),
        source_padding=padding(lengths),
        strategy=strategy,
        max_new_tokens=length,
        stop=[tokenizer.token(END)],
    )


def translate(
    model: Transformer, tokenizer: BytePairTokenizer, sentences: Sequence[str], strategy: Strategy
) -> list[str]:
    """Translate sentences that are preprocessed as in training. The translations are in the same form."""
    return [tokenizer.decode(text.body) for text in generate_translations(model, tokenizer, sentences, strategy)]


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the fraction of translations that equal the reference, up to white space."""
    pairs = zip(translations, references, strict=True)
    return sum(one == " ".join(other.split()) for one, other in pairs) / len(translations)


def preprocess(settings: TranslationSettings, text: str) -> str:
    """Convert plain text to the form the model was trained on: lower case and Moses tokens if the settings say so."""
    parts = settings.preprocessing.split(".")
    text = text.lower() if "lc" in parts else text
    return moses_tokenize(text, settings.source) if "tok" in parts else text


def postprocess(settings: TranslationSettings, text: str) -> str:
    """Convert a translation to plain text: Moses tokens are joined if the model was trained on Moses tokens."""
    return moses_detokenize(text) if "tok" in settings.preprocessing.split(".") else text


def prepare(settings: TranslationSettings, location: RunLocation) -> TrainingSetup:
    """Train the tokenizer, and build the untrained model and its training task."""
    splits = load_data(location.data, settings)
    tokenizer = train_tokenizer(splits.train, settings.bpe_vocab)
    task = TranslationTask(splits.train, splits.validation, tokenizer, settings)
    model = build_from_config(replace(settings.model, vocab=tokenizer.vocab), seed=settings.seed)
    searches = (len(settings.length_penalties) + 1) * settings.num_beams  # a validation decodes greedily
    return TrainingSetup(model, (Phase("training", task, settings.plan),), tokenizer, final_validations=searches)


def run(settings: TranslationSettings, location: RunLocation) -> RecipeResult:
    """Train and evaluate the model. Raise at once if sacrebleu is not installed."""
    check_sacrebleu()  # raise before training rather than at the first evaluation
    return train_and_evaluate(prepare, evaluate, settings, location)


def evaluate(
    settings: TranslationSettings, model: Model, tokenizer: BytePairTokenizer, location: RunLocation
) -> dict[str, float]:
    """Return BLEU and the fraction of exact matches on the test set, by beam search.

    The length penalty with the best BLEU on the validation set is used.
    """
    assert isinstance(model, Transformer)
    splits = load_data(location.data, settings)

    def search(pairs: SentencePairs, penalty: float) -> list[str]:
        return translate(model, tokenizer, pairs.source, BeamSearch(settings.num_beams, penalty))

    scores = {
        penalty: bleu(search(splits.validation, penalty), splits.validation.target)
        for penalty in settings.length_penalties
    }
    penalty = max(scores, key=lambda each: scores[each])
    found = search(splits.test, penalty)
    return {
        "test BLEU": bleu(found, splits.test.target),
        "test exact": exact_match(found, splits.test.target),
        "validation BLEU": scores[penalty],
        LENGTH_PENALTY: penalty,
        **_plain_text_bleu(settings, found, location),
    }


def _plain_text_bleu(
    settings: TranslationSettings, translations: Sequence[str], location: RunLocation
) -> dict[str, float]:
    """Return the metric "test sacreBLEU": BLEU of the detokenised translations against plain-text references.

    The dict is empty if the data folder has no plain text, and for built-in data.
    """
    if location.data is None:
        return {}  # numbers in words are plain text already
    try:
        references = read_sentence_pairs(location.data, settings.test_split, settings.source, settings.target).target
    except DataError as error:
        location.on_message(f"sacreBLEU is left out because there is no plain text: {error}")
        return {}
    lowercase = "lc" in settings.preprocessing.split(".")
    plain = [postprocess(settings, each) for each in translations]
    return {"test sacreBLEU": plain_text_bleu(plain, references, lowercase=lowercase)}
