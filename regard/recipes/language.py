"""GPT and BERT, each from scratch on a text: what comes next, and what the text asks by itself.

Expected: built-in GPT 1.32 nats per character on the test part (1.91 bits), against 1.85 by trigrams and 3.25 by
    single characters. Built-in BERT (--form bert) on the test part, each with the interval of its sample: whether a
    sentence follows 66 % (4 either way; chance 50 %), whether two stand in their order 62 % (5; chance 50 %), the other
    half 31 % of the time out of eight (7; chance 12.5 %), hidden words 14 % (2; the commonest 3 %). Seed 0. On
    tinyshakespeare GPT 1.53 nats per character (trigrams 2.11), and BERT 66 % (3), 77 % (3), 59 % (4) and 31 % (2;
    the commonest 6 %).
Time: built-in 130 seconds of one core for GPT and 120 for BERT; tinyshakespeare two minutes for GPT and six for BERT,
    on one H200 that five other runs share.
Memory: built-in 0.7 GB; tinyshakespeare 2.7 GiB of the GPU's for GPT and 3.4 GiB for BERT.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_number as real_number
from regard.core.positions import Rotary
from regard.data.byte_pairs import BytePairs
from regard.data.characters import Characters
from regard.data.plain_text import read_text
from regard.data.python_text import python_text
from regard.data.sampler import sampler_generator
from regard.models.bert import BERT, BERTConfig
from regard.models.gpt import GPTConfig
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.nn.init import constant, fan_in, init_parameters, normal
from regard.recipes.bert_objectives import SPECIAL, Book, SentenceTask, answered
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, Start
from regard.train.averaging import ExponentialAverage
from regard.train.objectives import cross_entropy
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear
from regard.train.task import Loss, Task

LEARNERS = ("gpt", "bert")
COUNTED = {"single characters": 1, "trigrams": 3}  # what GPT is compared with


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How GPT learns to go on.

    pieces  how many tokens of byte pairs there are at most; None makes each character a token
    """

    model: GPTConfig
    plan: TrainingPlan
    pieces: int | None = None

    def __post_init__(self) -> None:
        if self.pieces is not None:
            check_integer("gpt.pieces", self.pieces, 256, "tokens, and each byte is one")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How BERT learns to answer.

    pieces  how many tokens of byte pairs there are at most
    hidden  the share of words that are hidden
    asked   the most sentences that each question is asked about to see how good the model is
    """

    model: BERTConfig
    plan: TrainingPlan
    pieces: int = 1024
    hidden: float = 0.15
    asked: int = 500

    def __post_init__(self) -> None:
        check_integer("bert.pieces", self.pieces, 256 + len(SPECIAL), "tokens, and each byte and each question is one")
        check_integer("bert.asked", self.asked, 1, "sentences")
        if not 0 < real_number("bert.hidden", self.hidden) <= 1:
            raise ConfigError(f"bert.hidden is a share of words, above 0 and up to 1, not {self.hidden}")
        if self.model.head != "pretraining" or self.model.segments < 2:
            raise ConfigError(
                "bert.model answers questions about words and pairs: it has head='pretraining' and segments=2, not "
                f"head={self.model.head!r} and segments={self.model.segments}"
            )
        if self.model.context < 16:
            raise ConfigError(f"bert.model.context={self.model.context} has no room for two sentences; give 16 or more")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    learner  "gpt" or "bert": which of the two is trained
    held     the share of the text before its end that the model is chosen by; as much again, at its end, judges it
    """

    learner: str = "gpt"
    gpt: Writing
    bert: Reading
    held: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learner not in LEARNERS:
            raise ConfigError(f"learner is one of {', '.join(LEARNERS)}, not {self.learner!r}")
        if not 0 < real_number("held", self.held) <= 0.25:
            raise ConfigError(f"held is a share of the text, above 0 and up to 0.25, not {self.held}")

    @property
    def model(self) -> GPTConfig | BERTConfig:
        return self.gpt.model if self.learner == "gpt" else self.bert.model

    @property
    def plan(self) -> TrainingPlan:
        return self.gpt.plan if self.learner == "gpt" else self.bert.plan


def built_in() -> Settings:
    gpt = Writing(
        model=GPTConfig(
            vocab=512, context=128, width=128, depth=4, heads=4, positions=Rotary(), dropout=0.0, attention_dropout=0.0
        ),
        plan=TrainingPlan(
            steps=500, batch_size=16, schedule=Cosine(warmup=50, min_lr_ratio=0.05), evaluate_every=100, save_every=100,
            optimizer=Muon(lr=0.02, weight_decay=0.1, adamw=AdamW(lr=3e-3, weight_decay=0.1)),
        ),
        pieces=512,
    )  # fmt: skip
    bert = Reading(
        model=BERTConfig(
            vocab=1024, context=56, width=64, depth=2, heads=4, eps=1e-5, dropout=0.0, attention_dropout=0.0
        ),
        plan=TrainingPlan(
            steps=1500, batch_size=16, schedule=Linear(warmup=50), evaluate_every=300, save_every=300,
            optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=3e-3, weight_decay=0.01)),
        ),
    )  # fmt: skip
    return Settings(gpt=gpt, bert=bert, held=0.1)


def real() -> Settings:
    gpt = Writing(
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
    bert = Reading(
        model=BERTConfig(vocab=4096, context=128, width=256, depth=4, heads=4, eps=1e-5),
        plan=TrainingPlan(
            steps=6000, batch_size=64, schedule=Linear(warmup=200),
            optimizer=Muon(lr=0.01, weight_decay=0.05, adamw=AdamW(lr=2e-3, weight_decay=0.01)),
            averaging=ExponentialAverage(decay=0.998), precision="bfloat16", compile=True, evaluate_every=500,
            save_every=1000, load_best_at_end=True,
        ),
        pieces=4096,
        asked=1000,
    )  # fmt: skip
    return Settings(gpt=gpt, bert=bert)


def gpt(settings: Settings) -> Settings:
    """GPT, which tells each token from those before it."""
    return replace(settings, learner="gpt")


def bert(settings: Settings) -> Settings:
    """BERT, which answers four questions that the text asks by itself."""
    return replace(settings, learner="bert")


FORMS = {"gpt": gpt, "bert": bert}


@dataclass(frozen=True)
class Parts:
    """A text in three: to learn from, to choose by and to be judged by, in the order in which they stand."""

    train: str
    held: str
    test: str

    @staticmethod
    def of(text: str, share: float) -> "Parts":
        size = int(len(text) * share)
        if not size:
            raise DataError(f"held={share} of a text of {len(text)} characters is nothing; read a longer one")
        return Parts(text[: -2 * size], text[-2 * size : -size], text[-size:])


def parts(path: Path | None, share: float) -> Parts:
    """The text of a path, or that of Python's help, each of whose paragraphs is read once: it often repeats itself."""
    if path is not None:
        return Parts.of(read_text(path), share)
    return Parts.of("\n\n".join(dict.fromkeys(python_text().split("\n\n"))), share)


def tokenizer_of(settings: Settings, found: Parts) -> Characters | BytePairs:
    """Byte pairs of the text that is learned from; or all its characters, which the rest can be spelled by."""
    if settings.learner == "bert":
        return BytePairs.trained(found.train, vocab=settings.bert.pieces, special=SPECIAL)
    if settings.gpt.pieces is None:
        return Characters.of(found.train, found.held, found.test)
    return BytePairs.trained(found.train, vocab=settings.gpt.pieces)


@dataclass(frozen=True)
class NextToken:
    """Windows of a text, each token told from those before it.

    tokens  of the text that is learned from
    held    of the text that tells how good the model is
    length  of that in characters
    """

    tokens: Int[Tensor, "n"]
    held: Int[Tensor, "m"]
    length: int
    context: int
    batch_size: int
    seed: int

    def batch(self, step: int, part: int, of: int) -> tuple[Tensor, Tensor]:
        windows = self.tokens.unfold(0, self.context + 1, 1)
        draws = sampler_generator(self.seed, step, "windows")
        # drawn for the whole batch at once, so that its shares make it up however many there are
        starts = torch.randint(len(windows), (self.batch_size,), generator=draws)
        mine = windows[starts.tensor_split(of)[part]]
        return mine[:, :-1], mine[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, targets = batch
        return cross_entropy(model(tokens).float(), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        nats = cost(model, self.held, self.context) / self.length
        return {"score": -nats, "nats per character": nats, "bits per character": nats / math.log(2)}


@torch.no_grad()
def cost(model: nn.Module, tokens: Int[Tensor, "n"], context: int, at_once: int = 64) -> float:
    """Minus the log-likelihood of a text in nats, its first token given: in windows side by side, each token once."""
    device = next(model.parameters()).device
    end = (len(tokens) - 1) // context * context  # of the last window that is full
    windows = (
        (tokens[:end].view(-1, context), tokens[1 : end + 1].view(-1, context)),
        (tokens[end:-1][None], tokens[end + 1 :][None]),
    )
    total = 0.0
    for inputs, targets in windows:
        for some, wanted in zip(inputs.split(at_once), targets.split(at_once), strict=True):
            if some.numel():
                total += cross_entropy(model(some.to(device)).float(), wanted.to(device)).total.item()
    return total


@dataclass(frozen=True)
class Grams:
    """A model that counts: a character by the ones just before it, the less they were seen the more by fewer of them.

    Witten and Bell 1991. What a context was never followed by gets as much as it had different followers.
    """

    order: int
    counts: Counter[str] = field(repr=False)
    totals: Counter[str] = field(repr=False)
    kinds: Counter[str] = field(repr=False)
    alphabet: int

    @staticmethod
    def of(text: str, order: int, alphabet: int) -> "Grams":
        """order  characters that are looked at, the one to tell among them; alphabet: how many there are"""
        counts = Counter(text[end - size : end] for size in range(1, order + 1) for end in range(size, len(text) + 1))
        totals: Counter[str] = Counter()
        for gram, count in counts.items():
            totals[gram[:-1]] += count
        return Grams(order, counts, totals, Counter(gram[:-1] for gram in counts), alphabet)

    def likelihood(self, gram: str) -> float:
        """Of the last character after the others."""
        if not gram:
            return 1 / self.alphabet
        before, shorter = gram[:-1], self.likelihood(gram[1:])
        if before not in self.totals:
            return shorter
        return (self.counts[gram] + self.kinds[before] * shorter) / (self.totals[before] + self.kinds[before])

    def cost(self, text: str) -> float:
        """Minus the log-likelihood of a text in nats per character, its first given."""
        ends = range(2, len(text) + 1)
        return -math.fsum(math.log(self.likelihood(text[max(0, end - self.order) : end])) for end in ends) / len(ends)


def start(settings: Settings, place: RunLocation) -> Start:
    found = parts(place.data, settings.held)
    tokenizer = tokenizer_of(settings, found)
    model = begun(replace(settings.model, vocab=tokenizer.vocab), settings.seed)
    task = task_of(settings, found, tokenizer)
    return Start(model, (Phase(settings.learner, task, settings.plan),), tokenizer)


def run(settings: Settings, place: RunLocation) -> RecipeResult:
    first = start(settings, place)
    assert first.tokenizer is not None
    seconds = first.trained(place)
    figures = judged(settings, first.model, first.tokenizer, place)
    return RecipeResult({**figures, "seconds": seconds}, first.model, first.tokenizer)


def begun(config: GPTConfig | BERTConfig, seed: int) -> Model:
    """A model that has read nothing."""
    model = build_from_config(config, seed=seed)
    if isinstance(model, BERT):
        # begun as its large sisters are, words and the two sentences would differ too little for so short a run
        table = {"positions.weight": normal(0.02), "*norm.weight": constant(1.0), "*norm.bias": constant(0.0)}
        init_parameters(model, {**table, "*.bias": constant(0.0), "*.weight": fan_in()}, seed)
    return model


def task_of(settings: Settings, found: Parts, tokenizer: Characters | BytePairs) -> Task:
    """What is learned from the first part of a text, and seen to be learned on the second."""
    plan, context = settings.plan, settings.model.context
    if settings.learner == "gpt":
        train, held = (torch.tensor(tokenizer.encode(text)) for text in (found.train, found.held))
        if len(train) <= context:
            raise DataError(f"a context of {context} tokens is longer than the text, which has {len(train)}")
        length = _told(found.held, held, tokenizer)
        return NextToken(train, held, length, context, plan.batch_size, settings.seed)
    assert isinstance(tokenizer, BytePairs)
    book, other = (Book.of(text, tokenizer, context) for text in (found.train, found.held))
    return SentenceTask(book, other, plan.batch_size, settings.bert.hidden, settings.bert.asked, settings.seed)


def judged(settings: Settings, model: Model, tokenizer: Characters | BytePairs, place: RunLocation) -> dict[str, float]:
    """GPT's loss for each character, beside that of models that count; BERT's answers, beside those of chance."""
    found = parts(place.data, settings.held)
    asked = {"test": found.test, "held-out": found.held}
    figures: dict[str, float] = {}
    if settings.learner == "bert":
        assert isinstance(tokenizer, BytePairs)
        for name, text in asked.items():
            book = Book.of(text, tokenizer, settings.model.context)
            told = answered(model, book, settings.bert.hidden, settings.bert.asked, settings.seed)
            figures |= {f"{name} {question}": each.right for question, each in told.items()}
            figures |= {f"{name} {question} by chance": each.chance for question, each in told.items()}
            figures |= {f"{name} {question} interval": each.interval for question, each in told.items()}
        return figures
    alphabet = len({*found.train, *found.held, *found.test})
    counted = {words: Grams.of(found.train, order, alphabet) for words, order in COUNTED.items()}
    for name, text in asked.items():
        tokens = torch.tensor(tokenizer.encode(text))
        nats = cost(model, tokens, settings.model.context) / _told(text, tokens, tokenizer)
        figures |= {f"{name} nats per character": nats, f"{name} bits per character": nats / math.log(2)}
        figures |= {f"{name} nats by {words}": grams.cost(text) for words, grams in counted.items()}
    return figures


def _told(text: str, tokens: Int[Tensor, "n"], tokenizer: Characters | BytePairs) -> int:
    """How many characters are told when the first token is given."""
    return len(text) - len(tokenizer.decode(tokens[:1].tolist()))
