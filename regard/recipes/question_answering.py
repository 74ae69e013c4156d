"""Question answering with abstention: the answer comes from the model if it is confident, else from a fact store."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError, ConfigError, RegardError
from regard.base.files import read_json
from regard.base.lock import lock_folder
from regard.base.validation import check_range
from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.data.characters import CharacterTokenizer
from regard.data.fact_store import FactStore, StoredFact, open_fact_store
from regard.data.span_corruption import MASK, PAD
from regard.models.gpt import GPT
from regard.recipes import birthplaces
from regard.recipes.calibration import AnswerLikelihood, Confidence
from regard.recipes.name_likelihood import extract_name, name_log_likelihood
from regard.recipes.recipe import (
    RESULT_FILE,
    RecipeResult,
    RunLocation,
    find_run,
    load_finished_run,
    read_metrics,
    save_result,
)
from regard.recipes.span_infilling import QuestionMix, generate_answers
from regard.train.checkpoint import convert_os_errors
from regard.train.loop import fit
from regard.train.optimizers import AdamW
from regard.train.plan import TrainingPlan
from regard.train.schedule import Linear

LEARNING_STEPS = 300  # training steps of `learn`
FACT_SHARE = 0.02  # share of the questions, and of the texts, for each fact to learn; at most half for all facts


@dataclass(frozen=True)
class Reply:
    """The reply to a question, with its source.

    answer      the answer; None if neither the model nor the fact store knows it
    source      where the answer is from: "model", "store" (the fact store), or "nobody" if there is no answer
    guess       the model's answer, regardless of its confidence; None if the model cannot read the question or
                generates no proper answer
    confidence  estimated probability that the guess is correct
    """

    answer: str | None
    source: str
    guess: str | None
    confidence: float


@dataclass(frozen=True)
class QuestionAnswerer:
    """Answers questions with the model of a finished `birthplaces` run and with a store of facts that users taught.

    The model can be trained further on these facts.

    folder      folder of the run
    confidence  calibrated confidence of the model, with the threshold for giving an answer
    store       the facts
    """

    folder: Path
    settings: birthplaces.BirthplaceSettings
    model: GPT
    tokenizer: CharacterTokenizer
    confidence: Confidence
    store: FactStore

    def reply(self, question: str) -> Reply:
        """Answer a question with the model if its confidence reaches the threshold, else from the fact store.

        The answer is None if neither the model nor the fact store has an answer.
        """
        guess, confidence = self.guess(question)
        if guess is not None and confidence >= self.confidence.threshold:
            return Reply(guess, "model", guess, confidence)
        stored = self.store.answer(question)
        return Reply(stored, "nobody" if stored is None else "store", guess, confidence)

    def guess(self, question: str) -> tuple[str | None, float]:
        """Return the model's most likely answer and its confidence, regardless of the threshold.

        The answer is None and the confidence 0 if the model cannot read the question, or if the generated answer is
        empty or has padding or mask characters.
        """
        asked = normalize_wording(question)
        if not extract_name(asked):  # the confidence is calibrated for one form of question only
            return None, 0.0
        try:
            (text,) = generate_answers(self.model, self.tokenizer, [asked])
        except RegardError:  # an unknown character, or a question that is too long
            return None, 0.0
        answer = self.tokenizer.decode(text.body)
        if not answer.strip() or PAD in answer or MASK in answer:  # the model generated no proper answer
            return None, 0.0
        (name,) = name_log_likelihood(self.model, self.tokenizer, [asked])
        return answer, self.confidence.score(AnswerLikelihood(text.log_probability, name))

    def learn(
        self, location: RunLocation, steps: int = LEARNING_STEPS, lr: float = 3e-4
    ) -> tuple[list[StoredFact], dict[str, float]]:
        """Train the model on the stored facts and save it; return the new facts it answers correctly, and the metrics.

        Texts and questions of earlier training are mixed in, so that the model does not forget them.
        """
        with ExitStack() as until_the_end:
            with convert_os_errors(self.folder):
                location.group.run_on_main(lambda: until_the_end.enter_context(lock_folder(self.folder)))
            return self._learn(location, steps, lr)

    def _learn(self, location: RunLocation, steps: int, lr: float) -> tuple[list[StoredFact], dict[str, float]]:
        stored = self.store.all()
        facts = [fact for fact in stored if self._is_learnable(fact)]
        for fact in stored:
            if fact not in facts:
                location.on_message(
                    f"stays in the store only, for its form, characters or length: {fact.question} {fact.answer}"
                )
        new = [fact for fact in facts if not fact.learned]
        if not new:
            raise ConfigError(f"{self.store.file} has no facts for {self.folder / 'model'} to learn")
        splits = birthplaces.load_data(location.data, self.settings)
        taught = [BirthplaceQuestion(normalize_wording(fact.question), fact.answer) for fact in facts]
        questions = [*splits.train, *taught * _repeats(len(taught), len(splits.train))]
        plan = TrainingPlan(
            steps=steps, batch_size=32, optimizer=AdamW(lr=lr, weight_decay=0.01),
            schedule=Linear(warmup=steps // 10), seed=self.settings.seed,
        )  # fmt: skip
        # also as texts, with the name at its position in a question: questions train the answer only, and a name
        # that is never trained on remains that of an unknown person
        texts = [f"{each.text} {each.place}"[self.settings.position_offset :] for each in taught]
        texts *= _repeats(len(texts), len(splits.texts))
        splits = replace(splits, texts=(*splits.texts, *texts), subjects=(*splits.subjects, *[""] * len(texts)))
        mix = QuestionMix(0.5, questions)
        task = replace(
            birthplaces.make_infilling_task(self.settings, splits, self.tokenizer, plan.batch_size, mix),
            validation=taught,
            seed=self.settings.seed + len(facts),
        )
        fit(
            self.model, task, plan, group=location.group, on_message=location.on_message,
            on_progress=lambda now: location.on_progress("learning", now),
        )  # fmt: skip
        learned = tuple(sorted({*self.settings.learned, *(each.text for each in taught)}))
        settings = replace(self.settings, learned=learned)
        metrics, confidence = self._evaluate(settings, location)
        outcome = RecipeResult(metrics, self.model, self.tokenizer, {"confidence": to_json(confidence)})
        if location.group.is_main:
            save_result("birthplaces", settings, outcome, self.folder)
        known = [replace(fact, learned=True) for fact in new if self.guess(fact.question)[0] == fact.answer]
        known_questions = {fact.question for fact in known}
        for fact in new:
            if fact.question not in known_questions:
                location.on_message(f"not learned yet, increase --steps: {fact.question} {fact.answer}")
        if location.group.is_main:
            self.store.mark_learned(known)
        return known, metrics

    def _evaluate(
        self, settings: birthplaces.BirthplaceSettings, location: RunLocation
    ) -> tuple[dict[str, float], Confidence]:
        """Evaluate the model and calibrate its confidence, on questions whose answers users did not teach it.

        If users taught every validation or every test question, return the saved metrics and the old confidence.
        """
        splits = birthplaces.load_data(location.data, settings)
        if splits.validation and splits.test:
            return birthplaces.evaluate_with_confidence(settings, self.model, self.tokenizer, splits)
        location.on_message("every validation or test question was taught: metrics and confidence are not updated")
        return read_metrics(self.folder), self.confidence

    def _is_learnable(self, fact: StoredFact) -> bool:
        """Return whether the model can read the question and its answer.

        The question must have the wording "Where was NAME born?", all characters must be in the vocabulary, and the
        question with its answer must fit into the context.
        """
        asked = normalize_wording(fact.question)
        text = asked + fact.answer
        spelled = not set(text) - set(self.tokenizer.alphabet)
        return bool(extract_name(asked)) and spelled and len(text) + 3 <= self.model.config.context


def _repeats(new: int, old: int) -> int:
    """Return how often to repeat each new example, so that new examples are a given fraction of all examples.

    This fraction is FACT_SHARE times the number of new examples, at most one half.

    new, old  numbers of new and of old examples
    """
    share = min(0.5, FACT_SHARE * new)
    return max(1, round(share / (1 - share) * old / new))


def normalize_wording(question: str) -> str:
    """Reword a question as in training: single blanks, a question mark, and the usual capitals."""
    asked = " ".join(question.split()).rstrip("?!. ") + "?"
    name = extract_name(asked)
    return QUESTION.format(name=name) if name else asked


def load_question_answerer(folder: Path, store: Path | None = None) -> QuestionAnswerer:
    """Load a finished run of the recipe `birthplaces` and its fact store.

    folder  folder of the run, or the name of a pretrained model
    store   SQLite file of the facts. None means `facts.sqlite` in the folder of the run, or in the current folder for
            a pretrained model
    """
    run = find_run(folder)
    default = Path("facts.sqlite") if run != folder else folder / "facts.sqlite"  # nothing is written into the package
    folder = run
    recipe, settings, model, tokenizer = load_finished_run(folder)
    if recipe.name != "birthplaces" or not isinstance(model, GPT) or not isinstance(tokenizer, CharacterTokenizer):
        raise ConfigError(f"{folder} has a run of {recipe.name!r}; questions are answered by a run of 'birthplaces'")
    about = read_json(folder / RESULT_FILE, CheckpointError, "confidence")["confidence"]
    confidence = from_json(f"{folder / RESULT_FILE}: confidence", Confidence, about)
    return QuestionAnswerer(folder, settings, model.eval(), tokenizer, confidence, open_fact_store(store or default))


def with_threshold(answerer: QuestionAnswerer, threshold: float) -> QuestionAnswerer:
    """Return a copy of the answerer that gives the model's answer if its confidence is at least `threshold`."""
    check_range("threshold", threshold, 0, 1)
    return replace(answerer, confidence=replace(answerer.confidence, threshold=threshold))
