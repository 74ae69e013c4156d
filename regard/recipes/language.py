"""Language models trained from scratch on a text: GPT by next-token prediction, or BERT by self-supervised objectives.

Expected: built-in GPT 1.32 nats per character on the test part (1.91 bits), against 1.85 by trigrams and 3.25 by
    single characters. Built-in BERT (--variant bert) on the test part, each with its 95 % interval: next sentence
    66 % (± 4; chance 50 %), sentence order 62 % (± 5; chance 50 %), matching halves 31 % (± 7; chance 12.5 %), masked
    words 14 % (± 2; the most frequent word 3 %). Seed 0. On tinyshakespeare GPT 1.53 nats per character (trigrams
    2.11), and BERT 66 % (± 3), 77 % (± 3), 59 % (± 4) and 31 % (± 2; the most frequent word 6 %).
Time: built-in 130 seconds of one core for GPT and 120 for BERT; tinyshakespeare two minutes for GPT and six for BERT,
    on one H200 shared with five other runs.
Memory: built-in 0.7 GB; tinyshakespeare 2.7 GiB of GPU memory for GPT and 3.4 GiB for BERT.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_range
from regard.core.positions import Rotary
from regard.data.byte_pairs import BytePairTokenizer
from regard.data.characters import CharacterTokenizer
from regard.data.plain_text import read_text
from regard.data.python_text import python_text
from regard.data.repeated_text import ALPHABET, LENGTH, repeated_permutations, repeated_text
from regard.data.sampler import sampler_generator
from regard.models.bert import BERT, BERTConfig
from regard.models.gpt import GPT, GPTConfig, Learned
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.recipes.bert_objectives import SPECIAL, BERTPretrainingTask, SentenceCorpus, evaluate_objectives
from regard.recipes.recipe import Phase, RecipeTokenizer, RunLocation, Splits, TrainingSetup, name_setting
from regard.see.heads import build_head_table
from regard.see.watch import watch
from regard.train.averaging import ExponentialAverage
from regard.train.linear_cross_entropy import linear_cross_entropy
from regard.train.objectives import cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear
from regard.train.task import Loss, Task

_CPU_PLAN = {"compile": False, "precision": "float32", "batch_size": 16, "evaluate_every": 500, "save_every": 500}
CPU_SETTINGS = {
    **{f"{name}.plan.{setting}": value for name in ("gpt", "bert") for setting, value in _CPU_PLAN.items()},
    "gpt.plan.steps": 2000, "gpt.model.context": 128, "gpt.model.width": 128, "gpt.model.depth": 4,
    "gpt.model.heads": 4, "bert.plan.steps": 3000, "bert.model.context": 64, "bert.model.width": 128,
    "bert.model.depth": 2, "bert.bpe_vocab": 2048,
}  # fmt: skip
FROM_DATA = ("vocab",)
NEXT_COMMAND = {"gpt": 'regard generate {folder} "TEXT"', "bert": 'regard look {folder}/model "TEXT"'}
ARCHITECTURES = ("gpt", "bert")
LARGE_VOCAB = 4096  # tokens, from which GPT is trained without holding all logits
TEXTS = ("python", "repeated")  # built in
NGRAM_BASELINES = {"single characters": 1, "trigrams": 3}  # orders of the n-gram models that GPT is compared with


@dataclass(frozen=True, kw_only=True)
class GPTSettings:
    """Settings of GPT in the language recipe.

    bpe_vocab  maximum number of byte-pair tokens; None makes each character a token
    """

    model: GPTConfig
    plan: TrainingPlan
    bpe_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.bpe_vocab is not None:
            check_integer("gpt.bpe_vocab", self.bpe_vocab, 256, "tokens, of which each byte is one")


@dataclass(frozen=True, kw_only=True)
class BERTSettings:
    """Settings of BERT in the language recipe.

    bpe_vocab       maximum number of byte-pair tokens
    mask_share      fraction of words that are masked
    eval_sentences  maximum number of sentences for each objective in evaluation
    """

    model: BERTConfig
    plan: TrainingPlan
    bpe_vocab: int = 1024
    mask_share: float = 0.15
    eval_sentences: int = 500

    def __post_init__(self) -> None:
        check_integer(
            "bert.bpe_vocab", self.bpe_vocab, 256 + len(SPECIAL), "tokens, with those of bytes and objectives"
        )
        check_integer("bert.eval_sentences", self.eval_sentences, 1, "sentences")
        check_range("bert.mask_share", self.mask_share, 0, 1, above=True)
        if self.model.head != "pretraining" or self.model.segments < 2:
            raise ConfigError(
                "bert.model predicts words and pairs, so it needs head='pretraining' and segments=2, not "
                f"head={self.model.head!r} and segments={self.model.segments}"
            )
        if self.model.context < 16:
            raise ConfigError(
                f"bert.model.context={self.model.context} is too small for two sentences; use at least 16"
            )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of the language recipe.

    architecture  "gpt" or "bert": which of the two is trained
    text          built-in text: "python" is the text of Python's help, "repeated" is random strings written
                  twice
    validation    fraction of the text for validation; the same fraction, at the end of the text, is for test
    """

    architecture: str = "gpt"
    gpt: GPTSettings
    bert: BERTSettings
    text: str = "python"
    validation: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture is one of {', '.join(ARCHITECTURES)}, not {self.architecture!r}")
        if self.text not in TEXTS:
            raise ConfigError(f"text is one of {', '.join(TEXTS)}, not {self.text!r}")
        check_range("validation", self.validation, 0, 0.25, above=True)

    @property
    def chosen(self) -> GPTSettings | BERTSettings:
        """The settings of the architecture to train: the field `gpt` or the field `bert`."""
        return self.gpt if self.architecture == "gpt" else self.bert


def built_in() -> LanguageSettings:
    """Return the settings for the built-in text of Python's help."""
    gpt = GPTSettings(
        model=GPTConfig(
            vocab=512, context=128, width=128, depth=4, heads=4, positions=Rotary(), dropout=0.0, attention_dropout=0.0
        ),
        plan=TrainingPlan(
            steps=500, batch_size=16, schedule=Cosine(warmup=50, min_lr_ratio=0.05), evaluate_every=100, save_every=100,
            optimizer=Muon(lr=0.02, weight_decay=0.1, adamw=AdamW(lr=3e-3, weight_decay=0.1)),
        ),
        bpe_vocab=512,
    )  # fmt: skip
    bert = BERTSettings(
        model=BERTConfig(
            vocab=1024, context=56, width=64, depth=2, heads=4, eps=1e-5, dropout=0.0, attention_dropout=0.0
        ),
        plan=TrainingPlan(
            steps=1500, batch_size=16, schedule=Linear(warmup=50), evaluate_every=300, save_every=300,
            optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=3e-3, weight_decay=0.01)),
        ),
    )  # fmt: skip
    return LanguageSettings(gpt=gpt, bert=bert, validation=0.1)


def real() -> LanguageSettings:
    """Return the settings for a text file such as tinyshakespeare."""
    gpt = GPTSettings(
        model=GPTConfig(
            vocab=65, context=256, width=384, depth=6, heads=6, positions=Rotary(), bias=False, dropout=0.25,
            attention_dropout=0.25,
        ),
        plan=TrainingPlan(
            steps=4000, batch_size=64, optimizer=AdamW(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
            schedule=Cosine(warmup=100, min_lr_ratio=0.05), averaging=ExponentialAverage(decay=0.998),
            precision="bfloat16", compile=True, evaluate_every=200, save_every=1000, load_best_at_end=True,
        ),
    )  # fmt: skip
    bert = BERTSettings(
        model=BERTConfig(vocab=4096, context=128, width=256, depth=4, heads=4, eps=1e-5),
        plan=TrainingPlan(
            steps=6000, batch_size=64, schedule=Linear(warmup=200),
            optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=2e-3, weight_decay=0.01)),
            averaging=ExponentialAverage(decay=0.998), precision="bfloat16", compile=True, evaluate_every=500,
            save_every=1000, load_best_at_end=True,
        ),
        bpe_vocab=4096,
        eval_sentences=1000,
    )  # fmt: skip
    return LanguageSettings(gpt=gpt, bert=bert)


def gpt(settings: LanguageSettings) -> LanguageSettings:
    """Select GPT, which predicts each token from the ones before it."""
    return replace(settings, architecture="gpt")


def bert(settings: LanguageSettings) -> LanguageSettings:
    """Select BERT, trained on masked words, next sentence, sentence order and matching halves."""
    return replace(settings, architecture="bert")


def induction(settings: LanguageSettings) -> LanguageSettings:
    """Select a GPT of two attention-only layers, trained on random strings written twice, so that an induction head
    forms.
    """
    model = GPTConfig(
        vocab=len(ALPHABET), context=2 * LENGTH[1], width=64, depth=2, heads=4, ff_width=0, positions=Learned(),
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=2000, batch_size=32, schedule=Cosine(warmup=100, min_lr_ratio=0.05), evaluate_every=500, save_every=500,
        optimizer=Muon(lr=0.02, weight_decay=0.1, adamw=AdamW(lr=3e-3, weight_decay=0.1)),
    )  # fmt: skip
    return replace(settings, architecture="gpt", gpt=GPTSettings(model=model, plan=plan), text="repeated")


VARIANTS = {"gpt": gpt, "bert": bert, "induction": induction}


def load_data(path: Path | None, settings: LanguageSettings) -> Splits[str]:
    """Read a text, or make the built-in text if `path` is None, and split it for training, validation and test.

    The built-in text is Python's help without repeated paragraphs, or random strings written twice.
    """
    if path is not None:
        return split_text(read_text(path), settings.validation)
    if settings.text == "repeated":
        return split_text(repeated_text(), settings.validation)
    return split_text("\n\n".join(dict.fromkeys(python_text().split("\n\n"))), settings.validation)


def split_text(text: str, share: float) -> Splits[str]:
    """Split a text into train, validation and test, in this order.

    share  fraction of the text for validation, and the same fraction for test
    """
    size = int(len(text) * share)
    if not size:
        raise DataError(f"validation={share} of a text of {len(text)} characters is empty; use a longer text")
    return Splits(text[: -2 * size], text[-2 * size : -size], text[-size:])


def train_tokenizer(settings: LanguageSettings, splits: Splits[str]) -> RecipeTokenizer:
    """Train a byte pair encoding (BPE) on the training text, or make a character tokenizer.

    GPT uses the character tokenizer if `bpe_vocab` is None. This tokenizer has all characters of the three splits.
    """
    if settings.architecture == "gpt" and settings.gpt.bpe_vocab is None:
        return CharacterTokenizer.from_texts(splits.train, splits.validation, splits.test)
    special = SPECIAL if settings.architecture == "bert" else ()
    assert settings.chosen.bpe_vocab is not None
    with name_setting(f"{settings.architecture}.bpe_vocab"):
        return BytePairTokenizer.train(splits.train, vocab=settings.chosen.bpe_vocab, special=special)


@dataclass(frozen=True)
class NextTokenTask:
    """Training task: next-token prediction on random windows of a text.

    tokens      tokens of the training text
    validation  tokens of the validation text
    characters  number of characters in the validation text, except those of the first token, which is not predicted
    context     number of tokens in a window
    fused       compute the loss without storing the logits of all tokens, which need much memory if the vocabulary
                is large
    """

    tokens: Int[Tensor, "n"]
    validation: Int[Tensor, "m"]
    characters: int
    context: int
    batch_size: int
    seed: int
    fused: bool = False

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and next-token targets of one micro-batch of a training step, each of shape (b, n).

        part  index of the micro-batch, from 0
        of    number of micro-batches of the step
        """
        windows = self.tokens.unfold(0, self.context + 1, 1)
        draws = sampler_generator(self.seed, step, "windows")
        # drawn for the whole batch, so that the examples do not depend on the number of processes
        starts = torch.randint(len(windows), (self.batch_size,), generator=draws)
        mine = windows[starts.tensor_split(of)[part]]
        return mine[:, :-1], mine[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the cross-entropy of the next token."""
        tokens, targets = batch
        if self.fused:
            return Loss(model(tokens, head=partial(linear_cross_entropy, targets=targets)), targets.numel())
        return cross_entropy(model(tokens).float(), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the cross-entropy per character of the validation text, in nats and in bits.

        The metric "score", which selects the best weights, is minus the nats per character.
        """
        nats = negative_log_likelihood(model, self.validation, self.context) / self.characters
        return {"score": -nats, "nats per character": nats, "bits per character": nats / math.log(2)}


@torch.no_grad()
def negative_log_likelihood(model: nn.Module, tokens: Int[Tensor, "n"], context: int, batch_size: int = 64) -> float:
    """Return the negative log-likelihood in nats, summed over all tokens but the first.

    The tokens are split into windows of `context` tokens that do not overlap. Each window is predicted without the
    tokens of earlier windows.
    """
    device = next(model.parameters()).device
    end = (len(tokens) - 1) // context * context  # end of the last full window
    windows = (
        (tokens[:end].view(-1, context), tokens[1 : end + 1].view(-1, context)),
        (tokens[end:-1][None], tokens[end + 1 :][None]),
    )
    total = 0.0
    for inputs, targets in windows:
        for some, wanted in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            if some.numel():
                total += cross_entropy(model(some.to(device)).float(), wanted.to(device)).total.item()
    return total


class NGramModel:
    """A character n-gram model with Witten-Bell smoothing (Witten and Bell 1991), trained on a text.

    The context of a character is the order - 1 characters before it. The probability of a character after a context is
    interpolated with its probability after the context without its first character. The interpolation weight depends on
    how many different characters followed the context in the text.

    order     maximum number of characters of an n-gram
    alphabet  number of different characters
    """

    def __init__(self, text: str, order: int, alphabet: int) -> None:
        ends = {size: range(size, len(text) + 1) for size in range(1, order + 1)}
        self.order, self.alphabet = order, alphabet
        self.counts = Counter(text[end - size : end] for size in ends for end in ends[size])
        self.kinds = Counter(gram[:-1] for gram in self.counts)
        self.totals: Counter[str] = Counter()
        for gram, count in self.counts.items():
            self.totals[gram[:-1]] += count

    def likelihood(self, gram: str) -> float:
        """Return the probability of the last character of `gram` given the characters before it."""
        if not gram:
            return 1 / self.alphabet
        before, shorter = gram[:-1], self.likelihood(gram[1:])
        if before not in self.totals:
            return shorter
        return (self.counts[gram] + self.kinds[before] * shorter) / (self.totals[before] + self.kinds[before])

    def cross_entropy(self, text: str) -> float:
        """Return the cross-entropy of a text in nats per character; the first character is not predicted."""
        ends = range(2, len(text) + 1)
        return -math.fsum(math.log(self.likelihood(text[max(0, end - self.order) : end])) for end in ends) / len(ends)


def prepare(settings: LanguageSettings, location: RunLocation) -> TrainingSetup:
    """Train the tokenizer, and build the untrained model and its training task."""
    splits = load_data(location.data, settings)
    tokenizer = train_tokenizer(settings, splits)
    model = build_model(replace(settings.chosen.model, vocab=tokenizer.vocab), settings.seed)
    task = make_task(settings, splits, tokenizer)
    return TrainingSetup(model, (Phase(settings.architecture, task, settings.chosen.plan),), tokenizer)


def build_model(config: GPTConfig | BERTConfig, seed: int) -> Model:
    """Build an untrained GPT or BERT. The initial weights of BERT are larger than usual, which suits short training."""
    model = build_from_config(config, seed=seed)
    if isinstance(model, BERT):
        # the usual initialisation of BERT is too small for such a short run
        table = {"positions.weight": normal(0.02), "*norm.weight": constant(1.0), "*norm.bias": constant(0.0)}
        init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def make_task(settings: LanguageSettings, splits: Splits[str], tokenizer: RecipeTokenizer) -> Task:
    """Return the training task: next-token prediction for GPT, the four pretraining objectives for BERT."""
    plan, context = settings.chosen.plan, settings.chosen.model.context
    if settings.architecture == "gpt":
        train, validation = (torch.tensor(tokenizer.encode(text)) for text in (splits.train, splits.validation))
        if len(train) <= context:
            raise DataError(f"the context of {context} tokens is longer than the training text, which has {len(train)}")
        characters = _predicted_characters(splits.validation, validation, tokenizer)
        fused = tokenizer.vocab >= LARGE_VOCAB
        return NextTokenTask(train, validation, characters, context, plan.batch_size, settings.seed, fused)
    assert isinstance(tokenizer, BytePairTokenizer)
    train_set, validation_set = (
        SentenceCorpus.from_text(text, tokenizer, context) for text in (splits.train, splits.validation)
    )
    shares = settings.bert.mask_share, settings.bert.eval_sentences
    return BERTPretrainingTask(train_set, validation_set, plan.batch_size, *shares, settings.seed)


def evaluate(
    settings: LanguageSettings, model: Model, tokenizer: RecipeTokenizer, location: RunLocation
) -> dict[str, float]:
    """Return the metrics of the trained model on the test and validation text.

    For GPT the metrics are the cross-entropy of the model and of n-gram models. For BERT they are the accuracy of the
    model on each objective, with its confidence interval, and the accuracy by chance.
    """
    splits = load_data(location.data, settings)
    texts = {"test": splits.test, "validation": splits.validation}
    metrics = dict[str, float]()
    if settings.architecture == "bert":
        assert isinstance(tokenizer, BytePairTokenizer)
        shares = settings.bert.mask_share, settings.bert.eval_sentences
        for name, text in texts.items():
            corpus = SentenceCorpus.from_text(text, tokenizer, settings.bert.model.context)
            scores = evaluate_objectives(model, corpus, *shares, settings.seed)
            for field, words in (("accuracy", ""), ("chance", " by chance"), ("interval", " interval")):
                metrics |= {f"{name} {objective}{words}": getattr(each, field) for objective, each in scores.items()}
        return metrics
    alphabet = len({*splits.train, *splits.validation, *splits.test})
    baselines = {words: NGramModel(splits.train, order, alphabet) for words, order in NGRAM_BASELINES.items()}
    for name, text in texts.items():
        nats = nats_per_character(model, tokenizer, text)
        metrics |= {f"{name} nats per character": nats, f"{name} bits per character": nats / math.log(2)}
        metrics |= {f"{name} nats by {words}": model_of.cross_entropy(text) for words, model_of in baselines.items()}
    if location.data is None and settings.text == "repeated":
        metrics |= evaluate_induction(model)
    return metrics


@torch.no_grad()
def evaluate_induction(model: Model, count: int = 64, length: int = 40, seed: int = 1) -> dict[str, float]:
    """Return the largest induction score of any head, and the fraction of tokens that the model copies correctly.

    Both are measured on `count` new sequences: `length` random tokens, then the same tokens again. The induction score
    is the mean attention weight of a repeated token on the token after its previous occurrence.
    """
    assert isinstance(model, GPT)
    length = min(length, model.config.max_length // 2)
    tokens = repeated_permutations(count, length, vocab=model.config.vocab, seed=seed)
    tokens = tokens.to(next(model.parameters()).device)
    with watch(model) as seen:
        predicted = model(tokens).argmax(-1)
    scores = [head.induction for head in build_head_table(seen, tokens) if head.induction is not None]
    copied = predicted[:, length:-1] == tokens[:, length + 1 :]
    return {"induction score": max(scores), "copied": float(copied.double().mean())}


def nats_per_character(model: Model, tokenizer: RecipeTokenizer, text: str) -> float:
    """Return the cross-entropy of GPT on a text, in nats per character.

    The negative log-likelihood of all tokens but the first is divided by the number of characters of these tokens. The
    first token is left out, because no token before it predicts it.
    """
    assert isinstance(model, GPT)
    tokens = torch.tensor(tokenizer.encode(text))
    total = negative_log_likelihood(model, tokens, model.config.context)
    return total / _predicted_characters(text, tokens, tokenizer)


def _predicted_characters(text: str, tokens: Int[Tensor, "n"], tokenizer: RecipeTokenizer) -> int:
    """Return the number of characters of a text, except the characters of the first token, which is not predicted."""
    return len(text) - len(tokenizer.decode(tokens[:1].tolist()))
