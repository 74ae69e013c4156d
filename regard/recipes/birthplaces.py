"""Birthplace question answering: a GPT reads biographies by span infilling, then answers questions about other people.

Expected: built-in, correct answers to all 50 test questions (at least 98 %); no training question is about the same
person. Without pretraining (--variant no_pretraining) 2 % are correct. On the real set 90 % are correct, with rotary or
learned positions; 50 % with --variant finetune, and with --variant synthesizer at pretraining.steps=5000.
Time: built-in one minute of one core; the real set four to six minutes on one H200 shared with five other runs.
Memory: built-in under 1 GB; the real set 5.7 GiB of GPU memory.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.config import to_json
from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer, check_range
from regard.core.positions import Rotary
from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion, read_birthplaces
from regard.data.characters import CharacterTokenizer
from regard.data.span_corruption import MASK, PAD
from regard.data.splits import random_split
from regard.data.synthetic_biographies import biographies
from regard.models.gpt import GPT, GPTConfig, Learned, SyntheticAttention
from regard.models.model import Model
from regard.models.presets import build_from_config
from regard.recipes.calibration import NEVER, AnswerLikelihood, Confidence, calibrate
from regard.recipes.name_likelihood import name_log_likelihood
from regard.recipes.reading_comprehension import PassageCollection
from regard.recipes.recipe import Phase, RecipeResult, RunLocation, TrainingSetup
from regard.recipes.span_infilling import MAX_ANSWER, QuestionMix, SpanInfillingTask, generate_answers, grade_answers
from regard.recipes.unknown_people import make_unknown_questions
from regard.train.optimizers import AdamW, Muon
from regard.train.plan import TrainingPlan
from regard.train.schedule import Cosine, Linear

_CPU_PLAN = {"compile": False, "precision": "float32", "batch_size": 32, "evaluate_every": 400, "save_every": 400}
CPU_SETTINGS = {
    **{f"{name}.{key}": value for name in ("pretraining", "self_training") for key, value in _CPU_PLAN.items()},
    "pretraining.steps": 2400, "pretraining.schedule.warmup": 150, "self_training.steps": 400, "model.width": 128,
    "model.depth": 3, "model.heads": 4,
}  # fmt: skip
FROM_DATA = ("vocab",)
NEXT_COMMAND = 'regard ask --folder {folder} "Where was NAME born?"'


@dataclass(frozen=True, kw_only=True)
class BirthplaceSettings:
    """Settings of the birthplaces recipe.

    model                configuration of the GPT; the characters of texts and questions determine the vocabulary size
    pretraining          training plan of span infilling on the texts; None trains on the questions only
    self_training        training plan of self-training: the model answers the question about each person with the
                         person's text in its context, and is then trained on these answers without the text. None
                         leaves this phase out. Self-training needs reading_share above 0
    finetuning           training plan on the questions only; None leaves this phase out
    phrase_share         fraction of masked spans that are a whole capitalised phrase, in pretraining
    question_share       fraction of questions among the examples of pretraining
    self_training_share  fraction of questions among the examples of self-training
    reading_share        fraction of the examples of pretraining in which a question follows the text that contains its
                         answer (reading comprehension)
    counterfactuals      number of copies of each reading-comprehension question in which another name replaces the
                         correct answer in the text and becomes the answer. The model then has to read the answer from
                         the text
    crop_share           fraction of texts that are cropped in pretraining. Of a cropped text, the name at its start
                         and a piece around the masked span are kept
    position_offset      position of the first character of a text in the input; padding comes before it. With learned
                         positions, a model recognises a name only at positions where the name was in training; in
                         "Where was NAME born?" the name starts at position 10
    validation           number of training questions that are held out for validation and to calibrate the confidence.
                         As many questions about unknown people are added for the calibration
    precision            target fraction of correct answers among the answers that the model gives. The model gives no
                         answer if its confidence is below a threshold, which is chosen to reach this target
    people               number of people with a biography in the built-in set; training has questions about half of
                         them
    learned              questions that a finished model was taught by `regard ask --learn`; the model is not tested
                         on these questions
    """

    model: GPTConfig
    pretraining: TrainingPlan | None
    self_training: TrainingPlan | None = None
    finetuning: TrainingPlan | None
    phrase_share: float = 0.5
    question_share: float = 0.2
    self_training_share: float = 0.5
    reading_share: float = 0.0
    counterfactuals: int = 0
    crop_share: float = 0.0
    position_offset: int = 0
    validation: int = 200
    precision: float = 0.9
    people: int = 100
    learned: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("validation", self.validation, 1, "questions")
        check_integer("counterfactuals", self.counterfactuals, 0)
        if check_integer("position_offset", self.position_offset, 0, "positions") >= self.model.context // 2:
            raise ConfigError(
                f"position_offset={self.position_offset} leaves too little of model.context={self.model.context}"
            )
        for name in ("phrase_share", "crop_share", "precision"):
            check_range(name, getattr(self, name), 0, 1)
        for name in ("question_share", "self_training_share", "reading_share"):
            check_range(name, getattr(self, name), 0, 1, below=True)
        if self.pretraining is None and self.finetuning is None:
            raise ConfigError("with neither pretraining nor finetuning there is nothing to train")
        if self.question_share + self.reading_share >= 1:
            raise ConfigError(
                f"question_share={self.question_share} and reading_share={self.reading_share} leave no share for texts"
            )
        if self.self_training is not None and (self.pretraining is None or not self.reading_share):
            raise ConfigError("self_training needs reading comprehension: set pretraining, and reading_share above 0")


def built_in() -> BirthplaceSettings:
    """Return the settings for the built-in synthetic biographies."""
    model = GPTConfig(
        vocab=64, context=80, width=64, depth=2, heads=4, positions=Rotary(), dropout=0.0, attention_dropout=0.0
    )
    plan = TrainingPlan(
        steps=600, batch_size=64, optimizer=Muon(lr=0.02, weight_decay=0.01, adamw=AdamW(lr=3e-3, weight_decay=0.01)),
        schedule=Linear(warmup=50), evaluate_every=100, save_every=200,
    )  # fmt: skip
    return BirthplaceSettings(
        model=model, pretraining=plan, finetuning=None, phrase_share=1.0, question_share=0.1, validation=25
    )


def real() -> BirthplaceSettings:
    """Return the settings for a folder of real biographies and questions."""
    model = GPTConfig(
        vocab=256, context=192, width=256, depth=4, heads=8, positions=Rotary(), dropout=0.1,
        attention_dropout=0.1,
    )  # fmt: skip
    plan = TrainingPlan(
        steps=7000, batch_size=256,
        optimizer=Muon(lr=0.01, weight_decay=0.01, adamw=AdamW(lr=1.5e-3, weight_decay=0.1)),
        schedule=Cosine(warmup=500), precision="bfloat16", compile=True, evaluate_every=2000, save_every=2000,
    )  # fmt: skip
    self_training = replace(
        plan, steps=1500, optimizer=AdamW(lr=5e-4, weight_decay=0.1), schedule=Cosine(warmup=100), evaluate_every=500
    )  # fmt: skip
    return BirthplaceSettings(
        model=model, pretraining=plan, self_training=self_training, finetuning=None, question_share=0.1,
        reading_share=0.25, counterfactuals=20, crop_share=0.5, position_offset=len(QUESTION.partition("{")[0]),
    )  # fmt: skip


def finetune(settings: BirthplaceSettings) -> BirthplaceSettings:
    """Pretrain on the texts only, by span corruption; then finetune on the questions only.

    The variant keeps phrase_share, crop_share and position_offset; set them to 0 for plain span corruption of whole
    texts.
    """
    assert settings.pretraining is not None
    plan = replace(  # few steps at a low learning rate: finetuning soon forgets what was pretrained
        settings.pretraining, steps=80, optimizer=AdamW(lr=2e-4, weight_decay=0.01), schedule=Linear(warmup=14),
        evaluate_every=20,
    )  # fmt: skip
    return replace(settings, question_share=0.0, reading_share=0.0, self_training=None, finetuning=plan)


def synthesizer(settings: BirthplaceSettings) -> BirthplaceSettings:
    """Use the variant `finetune` with Synthesizer attention, whose weights do not compare queries with keys.

    Such a model is slower to learn names, so more masked spans are phrases and more texts are cropped.
    """
    model = replace(settings.model, positions=Learned(), mixer=SyntheticAttention())
    phrase_share, crop_share = (max(0.9, share) for share in (settings.phrase_share, settings.crop_share))
    return finetune(replace(settings, model=model, phrase_share=phrase_share, crop_share=crop_share))


def no_pretraining(settings: BirthplaceSettings) -> BirthplaceSettings:
    """Train on the questions only, without pretraining on the texts."""
    return replace(settings, reading_share=0.0, self_training=None, pretraining=None, finetuning=settings.pretraining)


VARIANTS = {"finetune": finetune, "synthesizer": synthesizer, "no_pretraining": no_pretraining}


@dataclass(frozen=True)
class BirthplaceSplits:
    """The data of the recipe: texts, and questions for training, validation and test.

    subjects  for each text, the name of the person that it is about
    """

    texts: tuple[str, ...]
    subjects: tuple[str, ...]
    train: tuple[BirthplaceQuestion, ...]
    validation: tuple[BirthplaceQuestion, ...]
    test: tuple[BirthplaceQuestion, ...]

    @property
    def by_name(self) -> dict[str, str]:
        """A dict from the name of each person to a text about the person: the last one if there are several."""
        return {name: text for name, text in zip(self.subjects, self.texts, strict=True) if name}

    @property
    def title_lengths(self) -> tuple[int, ...]:
        """For each text, the number of characters of the name at its beginning, with the separator after the name.

        The separator is a blank, or a full stop and a blank. A text that does not begin with the name has 0.
        """
        return tuple(
            len(name) + 1 + text.startswith(f"{name}. ") if name and text.startswith(name) else 0
            for name, text in zip(self.subjects, self.texts, strict=True)
        )

    @property
    def tokenizer(self) -> CharacterTokenizer:
        """A character tokenizer with all characters of the texts and questions."""
        questions = "".join(each.text + each.place for each in (*self.train, *self.validation, *self.test))
        return CharacterTokenizer(PAD + MASK + "".join(sorted({*"".join(self.texts), *questions})))


def load_data(folder: Path | None, settings: BirthplaceSettings) -> BirthplaceSplits:
    """Read biographies and questions from a folder, or generate synthetic ones if the folder is None."""
    if folder is None:
        made = biographies(
            settings.people, texts_per_person=10, places=30, one_sentence=True, seed=settings.seed
        )  # fmt: skip
        texts, subjects = made.texts, made.subjects
        train, test = (
            tuple(BirthplaceQuestion(text, answer) for text, answer in part)
            for part in (made.training, made.evaluation)
        )
    else:
        found = read_birthplaces(folder)
        texts, subjects, train, test = found.documents, found.subjects, found.train, found.dev
    everything = (*texts, *(f"{each.text} {each.place}" for each in (*train, *test)))
    marked = [text for text in everything if PAD in text or MASK in text]
    if marked:
        raise DataError(
            f"texts and questions may not contain {PAD!r} or {MASK!r}, the padding and mask characters, but one does: "
            f"{marked[0][:60]!r}"
        )
    if settings.validation >= len(train):
        raise ConfigError(f"validation={settings.validation} leaves none of the {len(train)} questions for training")
    learned, kept = (
        [train[number] for number in part.tolist()]
        for part in random_split(len(train), [settings.validation], settings.seed)
    )
    # two people with one name share a question: it is not trained on if it is also asked in validation or test
    asked_later = {each.text for each in (*kept, *test)}
    to_learn = tuple(each for each in learned if each.text not in asked_later)
    taught = set(settings.learned)
    validation, test = (tuple(each for each in part if each.text not in taught) for part in (kept, test))
    return BirthplaceSplits(texts, subjects, to_learn, validation, test)


def prepare(settings: BirthplaceSettings, location: RunLocation) -> TrainingSetup:
    """Build the untrained model, its tokenizer and the training phases."""
    splits = load_data(location.data, settings)
    tokenizer = splits.tokenizer
    config = replace(settings.model, vocab=tokenizer.vocab)
    model = build_from_config(config, seed=settings.seed)
    assert isinstance(model, GPT)

    _check_lengths(splits, config.context)
    passages = PassageCollection(splits.by_name, config.context, max(len(each.place) for each in splits.train))

    def task(plan: TrainingPlan, *mixes: QuestionMix) -> SpanInfillingTask:
        return make_infilling_task(settings, splits, tokenizer, plan.batch_size, *mixes)

    def self_training_task(plan: TrainingPlan) -> SpanInfillingTask:
        # computed by one process for all, since GPUs need not agree to the last bit
        own = location.group.run_on_main(lambda: passages.self_labelled_questions(model, tokenizer, splits.train))
        return task(plan, QuestionMix(settings.self_training_share, (*splits.train, *own)))

    phases = []
    questions = QuestionMix(settings.question_share, splits.train)
    if settings.pretraining is not None:
        mixes = [questions]
        if settings.reading_share:
            changed = passages.counterfactual_questions(splits.train, settings.counterfactuals, settings.seed)
            mixes.append(QuestionMix(settings.reading_share, [*_passage_questions(passages, splits), *changed]))
        phases.append(Phase("pretraining", task(settings.pretraining, *mixes), settings.pretraining))
    if settings.self_training is not None:
        plan = settings.self_training
        phases.append(Phase("self_training", task(plan, questions), plan, lambda: self_training_task(plan)))
    if settings.finetuning is not None:
        mix = QuestionMix(1.0, splits.train)
        phases.append(Phase("finetuning", task(settings.finetuning, mix), settings.finetuning))
    # questions of the validation and test sets and about unknown people, with the likelihoods of the names
    return TrainingSetup(model, tuple(phases), tokenizer, final_validations=7)


def make_infilling_task(
    settings: BirthplaceSettings,
    splits: BirthplaceSplits,
    tokenizer: CharacterTokenizer,
    batch: int,
    *mixes: QuestionMix,
) -> SpanInfillingTask:
    """Build the training task of span infilling on the texts, with questions mixed in.

    batch  number of examples in a batch
    mixes  sets of questions, each with its fraction of the training examples
    """
    return SpanInfillingTask(
        splits.texts, mixes, splits.validation, tokenizer, settings.model.context, batch, settings.phrase_share,
        settings.seed, crop_share=settings.crop_share, title_lengths=splits.title_lengths,
        position_offset=settings.position_offset,
    )  # fmt: skip


def _check_lengths(splits: BirthplaceSplits, context: int) -> None:
    """Check that every question with its answer fits into the context, else raise DataError."""
    for each in (*splits.train, *splits.validation, *splits.test):
        size = len(each.text) + len(each.place) + 3  # two masks and the end
        if size > context or len(each.place) > MAX_ANSWER:
            raise DataError(
                f"the question {each.text[:60]!r} and its answer take {size} characters, and the answer "
                f"{len(each.place)}; at most model.context={context} and {MAX_ANSWER} are allowed"
            )


def _passage_questions(passages: PassageCollection, splits: BirthplaceSplits) -> list[BirthplaceQuestion]:
    questions = passages.questions_with_passages(splits.train)
    if not questions:
        name = next(iter(splits.by_name), None)
        raise DataError(
            f"no question is about a person with a text: the first question is {splits.train[0].text!r}, and the first "
            f"text is about {name!r}; texts begin with a name and a full stop. Without such questions set "
            "reading_share=0 and self_training=none"
        )
    return questions


def run(settings: BirthplaceSettings, location: RunLocation) -> RecipeResult:
    """Train the model, calibrate its confidence and evaluate it."""
    setup = prepare(settings, location)
    model, tokenizer = setup.model, setup.tokenizer
    assert isinstance(model, GPT)
    assert isinstance(tokenizer, CharacterTokenizer)
    seconds = setup.train(location)
    splits = load_data(location.data, settings)
    if not unknown_questions(settings, splits):
        location.on_message(
            f"the questions do not have the form {QUESTION!r}, so no questions about unknown people can be made and "
            "the confidence cannot be calibrated: the model gives no answers"
        )
    metrics, confidence = evaluate_with_confidence(settings, model, tokenizer, splits)
    return RecipeResult({**metrics, "seconds": seconds}, model, tokenizer, {"confidence": to_json(confidence)})


def evaluate(
    settings: BirthplaceSettings, model: Model, tokenizer: CharacterTokenizer, location: RunLocation
) -> dict[str, float]:
    """Return metrics: exact-match accuracies, the fraction of answered questions, and the accuracy on these.

    A question is answered if the confidence of the model reaches the calibrated threshold.
    """
    assert isinstance(model, GPT)
    return evaluate_with_confidence(settings, model, tokenizer, load_data(location.data, settings))[0]


def evaluate_with_confidence(
    settings: BirthplaceSettings, model: GPT, tokenizer: CharacterTokenizer, splits: BirthplaceSplits
) -> tuple[dict[str, float], Confidence]:
    """Evaluate the model and calibrate its confidence. Returns the metrics and the calibrated confidence.

    The confidence is calibrated on the validation questions and on as many questions about unknown people, to which
    every answer is wrong. One metric is how often the model answers questions about other unknown people. If no
    questions about unknown people can be made, the threshold is so high that the model never answers.
    """
    likelihoods, correct = predict_answers(model, tokenizer, splits.validation)
    unknown = [BirthplaceQuestion(each, "") for each in unknown_questions(settings, splits)]
    fitted, others = (
        predict_answers(model, tokenizer, part)[0] for part in (unknown[: len(correct)], unknown[len(correct) :])
    )
    confidence = calibrate([*likelihoods, *fitted], [*correct, *[False] * len(fitted)], settings.precision)
    if not fitted:
        confidence = replace(confidence, threshold=NEVER, coverage=0.0)
    test_likelihoods, test_correct = predict_answers(model, tokenizer, splits.test)
    given = [hit for one, hit in zip(test_likelihoods, test_correct, strict=True) if confidence.accepts(one)]
    metrics = {
        "test accuracy": sum(test_correct) / len(test_correct),
        "validation accuracy": sum(correct) / len(correct),
        "answered": len(given) / len(test_correct),
    }
    if given:
        metrics["accuracy of answered"] = sum(given) / len(given)
    if others:
        metrics["unknown people answered"] = sum(map(confidence.accepts, others)) / len(others)
    return metrics, confidence


def unknown_questions(settings: BirthplaceSettings, splits: BirthplaceSplits) -> list[str]:
    """Return questions about made-up people, whose names occur in no text and no other question.

    The first questions, as many as there are validation questions, are for calibration. The others, at most as many as
    there are test questions, are for evaluation.
    """
    asked = (each.text for each in (*splits.train, *splits.validation, *splits.test))
    count = len(splits.validation) + len(splits.test)
    known = (*splits.texts, *asked, *settings.learned)
    return make_unknown_questions(splits.train, known, count, settings.seed, settings.learned)


def predict_answers(
    model: GPT, tokenizer: CharacterTokenizer, questions: Sequence[BirthplaceQuestion]
) -> tuple[list[AnswerLikelihood], list[bool]]:
    """Answer questions; return the log-probabilities for each question, and whether each answer is exactly right.

    The log-probabilities are those of the generated answer and of the name in the question.
    """
    answers, correct = grade_answers(model, tokenizer, questions)
    names = name_log_likelihood(model, tokenizer, [each.text for each in questions])
    return list(map(AnswerLikelihood, answers, names)), correct


@dataclass(frozen=True)
class AnsweredQuestion:
    """A test question, the model's answer, and the correct answer (`truth`).

    confidence  calibrated probability that the answer is correct
    given       whether the confidence reaches the threshold, so that `regard ask` gives the answer
    """

    question: str
    answer: str
    truth: str
    confidence: float
    correct: bool
    given: bool


@dataclass(frozen=True)
class ConstantBaseline:
    """The baseline that always gives the most frequent training answer, with its accuracy on all test questions."""

    place: str
    accuracy: float


def evaluate_with_answers(
    settings: BirthplaceSettings, model: Model, tokenizer: CharacterTokenizer, location: RunLocation, count: int
) -> tuple[dict[str, float], list[AnsweredQuestion], ConstantBaseline]:
    """Return the metrics, up to `count` answered test questions, and the constant baseline.

    If possible, half of these answers are right and half are wrong.
    """
    assert isinstance(model, GPT)
    splits = load_data(location.data, settings)
    metrics, confidence = evaluate_with_confidence(settings, model, tokenizer, splits)
    texts = [each.text for each in splits.test]
    generated = generate_answers(model, tokenizer, texts)
    answered = []
    for question, text, name in zip(splits.test, generated, name_log_likelihood(model, tokenizer, texts), strict=True):
        answer, likelihood = tokenizer.decode(text.body), AnswerLikelihood(text.log_probability, name)
        score, given = confidence.score(likelihood), confidence.accepts(likelihood)
        answered.append(AnsweredQuestion(question.text, answer, question.place, score, answer == question.place, given))
    errors, hits = ([each for each in answered if each.correct == correct] for correct in (False, True))
    wrong = errors[: max(count // 2, count - len(hits))]
    place = Counter(each.place for each in splits.train).most_common(1)[0][0]
    baseline = ConstantBaseline(place, sum(each.place == place for each in splits.test) / len(splits.test))
    return metrics, [*wrong, *hits[: count - len(wrong)]], baseline
