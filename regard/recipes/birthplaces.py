"""Where was somebody born? A decoder reads biographies with gaps in them, and answers questions about other people.

Expected: built-in all of 50 questions about people never asked in training (98 % and more), and 2 % without pretraining
(--form unread); of the real set 90 %, with rotary or learned positions, 50 % by --form course and by --form
synthesizer with pretraining.steps=5000.
Time: built-in one minute of one core; the real set four to six minutes on one H200 that five other runs share.
Memory: built-in under 1 GB; the real set 5.7 GiB of the GPU's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.config import to_json
from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_number as real_number
from regard.core.positions import Rotary
from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion, read_birthplaces
from regard.data.characters import Characters
from regard.data.span_corruption import MASK, PAD
from regard.data.splits import split
from regard.data.synthetic_biographies import biographies
from regard.models.gpt import GPT, GPTConfig, Learned, SyntheticAttention
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.recipes.calibration import NEVER, Confidence, Prediction, calibrated
from regard.recipes.name_likelihood import familiarity
from regard.recipes.reading_comprehension import Library
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, Start
from regard.recipes.span_infilling import LONGEST, Asked, GapTask, verdicts
from regard.recipes.unknown_people import strangers
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides how the run goes.

    model        its vocabulary is that of the texts
    pretraining  reading texts with gaps; None goes straight to the questions
    asking       then the model asks itself about everybody, with the text before it, and learns its answers without the
                 text; None leaves that out. It takes some `reading`
    tuning       learning the questions alone; None leaves it at pretraining
    phrases      how often a gap is a whole capitalised phrase, in pretraining
    questions    the share of questions among what is read in pretraining
    own          the share of questions, its own and those of the training set, among what is read in asking
    reading      the share of questions with their text before them, in pretraining
    retellings   of each such text, with another place in it: what it says has to be read, since it cannot be known
    pieces       how often only the name and a piece around the gap are left of a text, in pretraining
    offset       the place at which texts begin. A question says the name after ten characters, and a model with a table
                 of places knows a name only where it has read it
    held         questions of the training set that are kept back, to see how good and how sure the model is; as many
                 about strangers are asked beside them
    precision    the share of right answers among those that are given: less sure ones are not
    people       with a biography in the built-in set; half of them are asked about in training
    told         questions whose answers a finished model was told and has learned: it is not judged by them
    """

    model: GPTConfig
    pretraining: TrainingPlan | None
    asking: TrainingPlan | None = None
    tuning: TrainingPlan | None
    phrases: float = 0.5
    questions: float = 0.2
    own: float = 0.5
    reading: float = 0.0
    retellings: int = 0
    pieces: float = 0.0
    offset: int = 0
    held: int = 200
    precision: float = 0.9
    people: int = 100
    told: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("held", self.held, 1, "questions")
        check_integer("retellings", self.retellings, 0)
        if check_integer("offset", self.offset, 0, "places") >= self.model.context // 2:
            raise ConfigError(f"offset={self.offset} leaves little of model.context={self.model.context} to texts")
        for name in ("phrases", "questions", "own", "reading", "pieces"):
            if not 0 <= real_number(name, getattr(self, name)) < 1 + (name in ("phrases", "pieces")):
                raise ConfigError(f"{name} is a share, from 0 to 1, not {getattr(self, name)}")
        if self.pretraining is None and self.tuning is None:
            raise ConfigError("with neither pretraining nor tuning there is nothing to train")
        if self.questions + self.reading >= 1:
            raise ConfigError(f"questions={self.questions} and reading={self.reading} leave no share to the texts")
        if self.asking is not None and (self.pretraining is None or not self.reading):
            raise ConfigError("to ask itself a model must have learned to read: set pretraining, and reading above 0")


def built_in() -> Settings:
    model = GPTConfig(
        vocab=64, context=80, width=64, depth=2, heads=4, positions=Rotary(), dropout=0.0, attention_dropout=0.0
    )
    plan = TrainingPlan(
        steps=600, batch_size=64, optimizer=Muon(lr=0.02, weight_decay=0.01, adamw=AdamW(lr=3e-3, weight_decay=0.01)),
        schedule=Linear(warmup=50), evaluate_every=100, save_every=200,
    )  # fmt: skip
    return Settings(model=model, pretraining=plan, tuning=None, phrases=1.0, questions=0.1, held=25)


def real() -> Settings:
    model = GPTConfig(
        vocab=256, context=192, width=256, depth=4, heads=8, positions=Rotary(), dropout=0.1,
        attention_dropout=0.1,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=7000, batch_size=256,
        optimizer=Muon(lr=0.01, weight_decay=0.01, adamw=AdamW(lr=1.5e-3, weight_decay=0.1)),
        schedule=Cosine(warmup=500), precision="bfloat16", compile=True, evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    asking = replace(
        plan, steps=1500, optimizer=AdamW(lr=5e-4, weight_decay=0.1), schedule=Cosine(warmup=100), evaluate_every=500
    )  # fmt: skip
    return Settings(
        model=model, pretraining=plan, asking=asking, tuning=None, questions=0.1, reading=0.25, retellings=20,
        pieces=0.5, offset=len(QUESTION.partition("{")[0]),
    )  # fmt: skip


def course(settings: Settings) -> Settings:
    """Pretraining on the texts alone, by span corruption; then the questions alone.

    Spans, pieces and where texts begin are those of the settings; phrases=0, pieces=0 and offset=0 make them plain.
    """
    assert settings.pretraining is not None
    return replace(settings, questions=0.0, reading=0.0, asking=None, tuning=_tuning(settings.pretraining))


def synthesizer(settings: Settings) -> Settings:
    """As in course, with weights that each token proposes instead of comparing itself with others.

    Such a model is slower to learn names, so more of the gaps are phrases, and more of the texts name and piece alone.
    """
    model = replace(settings.model, positions=Learned(), mixer=SyntheticAttention())
    phrases, pieces = (max(0.9, share) for share in (settings.phrases, settings.pieces))
    return course(replace(settings, model=model, phrases=phrases, pieces=pieces))


def unread(settings: Settings) -> Settings:
    """Without pretraining: the questions alone."""
    assert settings.pretraining is not None
    return replace(settings, reading=0.0, asking=None, pretraining=None, tuning=settings.pretraining)


def _tuning(plan: TrainingPlan) -> TrainingPlan:
    """Short, and gentle: what was read is soon forgotten."""
    optimizer = AdamW(lr=2e-4, weight_decay=0.01)
    return replace(plan, steps=80, optimizer=optimizer, schedule=Linear(warmup=14), evaluate_every=20)


FORMS = {"course": course, "synthesizer": synthesizer, "unread": unread}


@dataclass(frozen=True)
class Set:
    """Texts to read and whom they are about, questions to learn, to choose by and to be judged by."""

    texts: tuple[str, ...]
    subjects: tuple[str, ...]
    train: tuple[BirthplaceQuestion, ...]
    held: tuple[BirthplaceQuestion, ...]
    test: tuple[BirthplaceQuestion, ...]

    @property
    def by_name(self) -> dict[str, str]:
        """One text of everybody who has one."""
        return {name: text for name, text in zip(self.subjects, self.texts, strict=True) if name}

    @property
    def titles(self) -> tuple[int, ...]:
        """How many characters of each text say whom it is about."""
        return tuple(
            len(name) + 1 + text.startswith(f"{name}. ") if name and text.startswith(name) else 0
            for name, text in zip(self.subjects, self.texts, strict=True)
        )

    @property
    def letters(self) -> Characters:
        questions = "".join(each.text + each.place for each in (*self.train, *self.held, *self.test))
        return Characters(PAD + MASK + "".join(sorted({*"".join(self.texts), *questions})))


def data(folder: Path | None, settings: Settings) -> Set:
    """The real set where there is a folder, else generated lives."""
    held, seed = settings.held, settings.seed
    if folder is None:
        made_up = biographies(settings.people, tellings=10, places=30, brief=True, seed=seed)
        texts, subjects, asked = made_up.texts, made_up.subjects, made_up.training
        train = tuple(BirthplaceQuestion(text, answer) for text, answer in asked)
        test = tuple(BirthplaceQuestion(text, answer) for text, answer in made_up.evaluation)
    else:
        found = read_birthplaces(folder)
        texts, subjects, train, test = found.documents, found.subjects, found.train, found.dev
    said = (*texts, *(f"{each.text} {each.place}" for each in (*train, *test)))
    marked = [text for text in said if PAD in text or MASK in text]
    if marked:
        raise DataError(
            f"texts and questions may not hold {PAD!r} or {MASK!r}, which mark gaps, but one does: {marked[0][:60]!r}"
        )
    if held >= len(train):
        raise ConfigError(f"held={held} leaves none of the {len(train)} questions to learn from")
    learned, kept = split(len(train), [held], seed)
    held_out = _taken(train, kept.tolist())
    asked_later = {each.text for each in (*held_out, *test)}
    # two people of one name make one question: it is not learned where it is asked later
    to_learn = tuple(each for each in _taken(train, learned.tolist()) if each.text not in asked_later)
    told = set(settings.told)
    judges = (tuple(each for each in part if each.text not in told) for part in (held_out, test))
    return Set(texts, subjects, to_learn, *judges)


def _taken(questions: Sequence[BirthplaceQuestion], numbers: Sequence[int]) -> tuple[BirthplaceQuestion, ...]:
    return tuple(questions[number] for number in numbers)


def start(settings: Settings, place: RunLocation) -> Start:
    found = data(place.data, settings)
    letters = found.letters
    config = replace(settings.model, vocab=letters.vocab)
    model = build_from_config(config, seed=settings.seed)
    assert isinstance(model, GPT)

    _check_room(found, config.context)
    library = Library(found.by_name, config.context, max(len(each.place) for each in found.train))

    def task(plan: TrainingPlan, *mixed: Asked) -> GapTask:
        return gap_task(settings, found, letters, plan.batch_size, *mixed)

    def itself(plan: TrainingPlan) -> GapTask:
        # read by one process for all, since GPUs need not agree to the last bit
        own = place.group.run_on_main(lambda: library.own_questions(model, letters, found.train))
        return task(plan, Asked(settings.own, (*found.train, *own)))

    phases = []
    asked = Asked(settings.questions, found.train)
    if settings.pretraining is not None:
        mixed = [asked]
        if settings.reading:
            retold = library.retold(found.train, settings.retellings, settings.seed)
            mixed.append(Asked(settings.reading, [*_opened(library, found), *retold]))
        phases.append(Phase("pretraining", task(settings.pretraining, *mixed), settings.pretraining))
    if settings.asking is not None:
        asking = settings.asking
        phases.append(Phase("asking", task(asking, asked), asking, lambda: itself(asking)))
    if settings.tuning is not None:
        phases.append(Phase("tuning", task(settings.tuning, Asked(1.0, found.train)), settings.tuning))
    return Start(model, tuple(phases), letters)


def gap_task(settings: Settings, found: Set, letters: Characters, batch: int, *mixed: Asked) -> GapTask:
    """Reading the texts, with questions mixed in."""
    return GapTask(
        found.texts, mixed, found.held, letters, settings.model.context, batch, settings.phrases, settings.seed,
        pieces=settings.pieces, titles=found.titles, offset=settings.offset,
    )  # fmt: skip


def _check_room(found: Set, context: int) -> None:
    """Raise where a question with its answer does not fit: it would be cut, and learned wrongly."""
    for each in (*found.train, *found.held, *found.test):
        size = len(each.text) + len(each.place) + 3  # two masks and the end
        if size > context or len(each.place) > LONGEST:
            raise DataError(
                f"the question {each.text[:60]!r} and its answer take {size} characters, and the answer "
                f"{len(each.place)}; model.context={context} and {LONGEST} are the most"
            )


def _opened(library: Library, found: Set) -> list[BirthplaceQuestion]:
    questions = library.opened(found.train)
    if not questions:
        name = next(iter(found.by_name), None)
        raise DataError(
            f"no question asks about somebody with a text: {found.train[0].text!r}, say, and the first text is about "
            f"{name!r}; texts begin with a name and a full stop. Without such questions set reading=0 and asking=none"
        )
    return questions


def run(settings: Settings, place: RunLocation) -> RecipeResult:
    begun = start(settings, place)
    model, letters = begun.model, begun.tokenizer
    assert isinstance(model, GPT)
    assert isinstance(letters, Characters)
    seconds = begun.trained(place)
    found = data(place.data, settings)
    if not unheard_of(settings, found):
        place.on_message(
            f"no stranger's name can be joined of two questions {QUESTION!r}: nothing shows how sure the model is of "
            "strangers, so it answers nobody"
        )
    figures, confidence = judged_with_confidence(settings, model, letters, found)
    return RecipeResult({**figures, "seconds": seconds}, model, letters, {"confidence": to_json(confidence)})


def judged(settings: Settings, model: Model, letters: Characters, place: RunLocation) -> dict[str, float]:
    """The share of questions answered to the letter, and what is left where the model may abstain."""
    assert isinstance(model, GPT)
    return judged_with_confidence(settings, model, letters, data(place.data, settings))[0]


def judged_with_confidence(
    settings: Settings, model: GPT, letters: Characters, found: Set
) -> tuple[dict[str, float], Confidence]:
    """Figures, and the confidence that was fitted to the questions kept back and to as many about strangers.

    Whatever is said of a stranger is wrong. Other strangers show how many would be answered all the same. Where the
    questions' names make no stranger, nothing shows how sure the model is of one, and it answers nobody.
    """
    said, right = heard(model, letters, found.held)
    asked = [BirthplaceQuestion(each, "") for each in unheard_of(settings, found)]
    made_up, others = (heard(model, letters, some)[0] for some in (asked[: len(right)], asked[len(right) :]))
    confidence = calibrated([*said, *made_up], [*right, *[False] * len(made_up)], settings.precision)
    if not made_up:
        confidence = replace(confidence, threshold=NEVER, coverage=0.0)
    test_said, test_right = heard(model, letters, found.test)
    given = [hit for one, hit in zip(test_said, test_right, strict=True) if confidence.given(one)]
    figures = {
        "test accuracy": sum(test_right) / len(test_right),
        "held-out accuracy": sum(right) / len(right),
        "answered": len(given) / len(test_right),
    }
    if given:
        figures["right of answered"] = sum(given) / len(given)
    if others:
        figures["strangers answered"] = sum(map(confidence.given, others)) / len(others)
    return figures, confidence


def unheard_of(settings: Settings, found: Set) -> list[str]:
    """Questions about strangers: as many as were kept back, to fit confidence by, and then others to judge it by."""
    asked = (each.text for each in (*found.train, *found.held, *found.test))
    count = len(found.held) + len(found.test)
    return strangers(found.train, (*found.texts, *asked, *settings.told), count, settings.seed, settings.told)


def heard(
    model: GPT, letters: Characters, questions: Sequence[BirthplaceQuestion]
) -> tuple[list[Prediction], list[bool]]:
    """How likely each answer and the name asked about are, and whether the answer is right to the letter."""
    likely, right = verdicts(model, letters, questions)
    return list(map(Prediction, likely, familiarity(model, letters, [each.text for each in questions]))), right
