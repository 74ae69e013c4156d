"""Where was somebody born? A decoder reads biographies with gaps in them, and answers questions about other people.

Expected: not yet measured; the aim is, built-in, 90 % of questions about people never asked in training, and under 10 %
    without pretraining; on the real set 85 % with rotary positions.
Time: not yet measured; the aim is, built-in, five minutes on two cores, and fifteen on one GPU for the real set.
Memory: not yet measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.config import to_json
from regard.base.errors import ConfigError
from regard.base.numbers import real as real_number, whole
from regard.data.biographies import biographies
from regard.data.birthplaces import Question, read_birthplaces
from regard.data.characters import Characters
from regard.data.corruption import MASK, PAD
from regard.data.splits import split
from regard.models.gpt import GPT, GPTConfig
from regard.models.model import Model
from regard.models.presets import made
from regard.recipes.confidence import Confidence, calibrated
from regard.recipes.gaps import GapTask, verdicts
from regard.recipes.recipe import Outcome, Place
from regard.train.loop import fit
from regard.train.optimiser import AdamW
from regard.train.plan import Plan
from regard.train.schedule import Cosine, Linear


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    model        its vocabulary is that of the texts
    pretraining  reading texts with gaps; None goes straight to the questions
    tuning       learning the questions alone; None leaves it at pretraining
    phrases      how often a gap is a whole capitalised phrase, in pretraining
    questions    the share of questions among what is read in pretraining
    held         questions of the training set that are kept back, to see how good and how sure the model is
    precision    the share of right answers among those that are given: less sure ones are not
    people       with a biography in the built-in set; half of them are asked about in training
    """

    model: GPTConfig
    pretraining: Plan | None
    tuning: Plan | None
    phrases: float = 0.5
    questions: float = 0.2
    held: int = 200
    precision: float = 0.9
    people: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        whole("held", self.held, 1, "questions")
        for name in ("phrases", "questions"):
            if not 0 <= real_number(name, getattr(self, name)) < 1 + (name == "phrases"):
                raise ConfigError(f"{name} is a share, from 0 to 1, not {getattr(self, name)}")
        if self.pretraining is None and self.tuning is None:
            raise ConfigError("with neither pretraining nor tuning there is nothing to train")


def built_in() -> Settings:
    model = GPTConfig(
        vocab=64, context=96, width=128, depth=3, heads=4, positions="rotary", dropout=0.0, attention_dropout=0.0
    )
    plan = Plan(
        steps=1500, batch=64, optimiser=AdamW(rate=3e-3, decay=0.01), schedule=Linear(warmup=50), evaluate_every=250,
        save_every=250,
    )  # fmt: skip
    return Settings(model=model, pretraining=plan, tuning=None, phrases=1.0, questions=0.1, held=20)


def real() -> Settings:
    model = GPTConfig(
        vocab=256, context=128, width=256, depth=4, heads=8, positions="rotary", tied=False, dropout=0.1,
        attention_dropout=0.1,
    )  # fmt: skip
    plan = Plan(
        steps=20_000, batch=256, optimiser=AdamW(rate=1.5e-3, decay=0.1), schedule=Cosine(warmup=500),
        precision="bfloat16", compile=True, evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    return Settings(model=model, pretraining=plan, tuning=None)


@dataclass(frozen=True)
class Set:
    """Texts to read, questions to learn, to choose by and to be judged by."""

    texts: tuple[str, ...]
    train: tuple[Question, ...]
    held: tuple[Question, ...]
    test: tuple[Question, ...]

    @property
    def letters(self) -> Characters:
        questions = "".join(each.text + each.place for each in (*self.train, *self.held, *self.test))
        return Characters(PAD + MASK + "".join(sorted({*"".join(self.texts), *questions})))


def data(folder: Path | None, settings: Settings) -> Set:
    """The real set where there is a folder, else generated lives."""
    held, seed = settings.held, settings.seed
    if folder is None:
        made_up = biographies(settings.people, tellings=10, places=30, brief=True, seed=seed)
        texts, asked = made_up.texts, made_up.training
        train = tuple(Question(text, answer) for text, answer in asked)
        test = tuple(Question(text, answer) for text, answer in made_up.evaluation)
    else:
        found = read_birthplaces(folder)
        texts, train, test = found.documents, found.train, found.dev
    if held >= len(train):
        raise ConfigError(f"held={held} leaves none of the {len(train)} questions to learn from")
    learned, kept = split(len(train), [held], seed)
    return Set(texts, _taken(train, learned.tolist()), _taken(train, kept.tolist()), test)


def _taken(questions: Sequence[Question], numbers: Sequence[int]) -> tuple[Question, ...]:
    return tuple(questions[number] for number in numbers)


def run(settings: Settings, place: Place) -> Outcome:
    found = data(place.data, settings)
    letters = found.letters
    config = replace(settings.model, vocab=letters.vocab)
    model = made(config, seed=settings.seed)
    assert isinstance(model, GPT)
    seconds = 0.0
    phases = (("pretraining", settings.pretraining, settings.questions), ("tuning", settings.tuning, 1.0))
    for phase, plan, share in phases:
        if plan is None:
            continue
        task = GapTask(
            found.texts, found.train, found.held, letters, config.context, plan.batch, share, settings.phrases,
            settings.seed,
        )  # fmt: skip
        seconds += fit(model, task, plan, **place.under(phase)).seconds
    figures, confidence = judged_with_confidence(settings, model, letters, found)
    return Outcome({**figures, "seconds": seconds}, model, letters, {"confidence": to_json(confidence)})


def judged(settings: Settings, model: Model, letters: Characters, place: Place) -> dict[str, float]:
    """The share of questions answered to the letter, and what is left where the model may abstain."""
    assert isinstance(model, GPT)
    return judged_with_confidence(settings, model, letters, data(place.data, settings))[0]


def judged_with_confidence(
    settings: Settings, model: GPT, letters: Characters, found: Set
) -> tuple[dict[str, float], Confidence]:
    """Figures, and the confidence that was fitted to the questions kept back."""
    sure, right = verdicts(model, letters, found.held)
    confidence = calibrated(sure, right, settings.precision)
    test_sure, test_right = verdicts(model, letters, found.test)
    given = [hit for one, hit in zip(test_sure, test_right, strict=True) if confidence.given(one)]
    figures = {
        "test accuracy": sum(test_right) / len(test_right),
        "held-out accuracy": sum(right) / len(right),
        "answered": len(given) / len(test_right),
        "right of answered": sum(given) / max(1, len(given)),
    }
    return figures, confidence
