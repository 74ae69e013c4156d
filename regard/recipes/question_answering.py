"""Questions to a model that knows when it does not know: then a store of facts is asked, and whoever is there."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.config import from_json, to_json
from regard.base.errors import ConfigError, RegardError
from regard.base.lock import lock_folder
from regard.data.birthplaces_dataset import QUESTION, BirthplaceQuestion
from regard.data.characters import Characters
from regard.data.fact_store import FactStore, StoredFact, open_fact_store
from regard.data.span_corruption import MASK, PAD
from regard.models.gpt import GPT
from regard.recipes import birthplaces
from regard.recipes.calibration import Confidence, Prediction
from regard.recipes.name_likelihood import familiarity, name_in
from regard.recipes.recipe import RESULT, RecipeResult, RunLocation, load_finished_run, save_result
from regard.recipes.run_folder import read_json_fields
from regard.recipes.span_infilling import Asked, answers
from regard.train.checkpoint import convert_os_errors
from regard.train.loop import fit
from regard.train.optimizers import AdamW
from regard.train.plan import TrainingPlan
from regard.train.schedule import Linear

STEPS = 300  # of training, where the model learns what it was told
SHARE = 0.02  # of the questions, and of the texts, that is one fact to be learned; all have half of them at most


@dataclass(frozen=True)
class Reply:
    """What came of a question.

    answer      None where neither the model nor the store knows
    source      "model", "store" or "nobody"
    guess       what the model would have said; None where it cannot read the question, or is asked in other words
    confidence  the share of such guesses that are right
    """

    answer: str | None
    source: str
    guess: str | None
    confidence: float


@dataclass(frozen=True)
class QuestionAnswerer:
    """A finished run of the recipe `birthplaces`, and a store of facts beside it."""

    folder: Path
    settings: birthplaces.Settings
    model: GPT
    letters: Characters
    confidence: Confidence
    store: FactStore

    def reply(self, question: str) -> Reply:
        """The model's answer where it is sure enough, else the store's, else none."""
        guess, sure = self.guess(question)
        if guess is not None and sure >= self.confidence.threshold:
            return Reply(guess, "model", guess, sure)
        told = self.store.answer(question)
        return Reply(told, "nobody" if told is None else "store", guess, sure)

    def guess(self, question: str) -> tuple[str | None, float]:
        """The model's likeliest answer and how sure it is, whatever the threshold."""
        asked = as_learned(question)
        if not name_in(asked):  # of questions in other words nothing is known
            return None, 0.0
        try:
            (text,) = answers(self.model, self.letters, [asked])
        except RegardError:  # a character it never saw, or more of them than fit
            return None, 0.0
        told = self.letters.decode(text.body)
        if not told.strip() or PAD in told or MASK in told:  # the model has lost its way
            return None, 0.0
        (name,) = familiarity(self.model, self.letters, [asked])
        return told, self.confidence.of(Prediction(text.log_probability, name))

    def learn(
        self, place: RunLocation, steps: int = STEPS, rate: float = 3e-4
    ) -> tuple[list[StoredFact], dict[str, float]]:
        """Train on with all facts that were told, and leave the model in the folder; what it knows now, and figures.

        Texts and old questions are read along, so that what is new does not drive out what was known.
        """
        with ExitStack() as until_the_end:
            with convert_os_errors(self.folder):
                place.group.run_on_main(lambda: until_the_end.enter_context(lock_folder(self.folder)))
            return self._learned(place, steps, rate)

    def _learned(self, place: RunLocation, steps: int, rate: float) -> tuple[list[StoredFact], dict[str, float]]:
        kept = self.store.all()
        told = [fact for fact in kept if self._readable(fact)]
        for fact in kept:
            if not self._readable(fact):
                place.on_message(
                    f"stays in the store alone, for its form, letters or length: {fact.question} {fact.answer}"
                )
        new = [fact for fact in told if not fact.learned]
        if not new:
            raise ConfigError(f"{self.store.file} holds nothing that {self.folder / 'model'} has not learned and could")
        found = birthplaces.data(place.data, self.settings)
        asked_for = [BirthplaceQuestion(as_learned(fact.question), fact.answer) for fact in told]
        asked = [*found.train, *asked_for * _times(len(asked_for), len(found.train))]
        plan = TrainingPlan(
            steps=steps, batch_size=32, optimizer=AdamW(lr=rate, weight_decay=0.01),
            schedule=Linear(warmup=steps // 10), seed=self.settings.seed,
        )  # fmt: skip
        # as texts too, with the name where a question has it: of a question only the answer is learned, and a name that
        # was never read stays that of a stranger
        texts = [f"{each.text} {each.place}"[self.settings.offset :] for each in asked_for]
        texts *= _times(len(texts), len(found.texts))
        found = replace(found, texts=(*found.texts, *texts), subjects=(*found.subjects, *[""] * len(texts)))
        reading = birthplaces.gap_task(self.settings, found, self.letters, plan.batch_size, Asked(0.5, asked))
        task = replace(reading, held=asked_for, seed=self.settings.seed + len(told))
        fit(
            self.model, task, plan, group=place.group, on_message=place.on_message,
            on_progress=lambda now: place.on_progress("learning", now),
        )  # fmt: skip
        settings = replace(self.settings, told=tuple(sorted({*self.settings.told, *(each.text for each in asked_for)})))
        figures, confidence = self._judged(settings, place)
        outcome = RecipeResult(figures, self.model, self.letters, {"confidence": to_json(confidence)})
        if place.group.is_main:
            save_result("birthplaces", settings, outcome, self.folder)
        known = [replace(fact, learned=True) for fact in new if self.guess(fact.question)[0] == fact.answer]
        answers_now = {fact.question for fact in known}
        for fact in new:
            if fact.question not in answers_now:
                place.on_message(f"not learned yet, give it more --steps: {fact.question} {fact.answer}")
        if place.group.is_main:
            self.store.mark_learned(known)
        return known, figures

    def _judged(self, settings: birthplaces.Settings, place: RunLocation) -> tuple[dict[str, float], Confidence]:
        """By questions that were not told; what was known before stays where none of these is left."""
        found = birthplaces.data(place.data, settings)
        if found.held and found.test:
            return birthplaces.judged_with_confidence(settings, self.model, self.letters, found)
        place.on_message("every question to judge by was told: figures and confidence are those from before")
        return read_json_fields(self.folder / RESULT, "figures")["figures"], self.confidence

    def _readable(self, fact: StoredFact) -> bool:
        asked = as_learned(fact.question)
        text = asked + fact.answer
        spelled = not set(text) - set(self.letters.alphabet)
        return bool(name_in(asked)) and spelled and len(text) + 3 <= self.model.config.context


def _times(new: int, old: int) -> int:
    """How often each of what is new comes beside what is old, so that it has its share of both together."""
    share = min(0.5, SHARE * new)
    return max(1, round(share / (1 - share) * old / new))


def as_learned(question: str) -> str:
    """A question as the model has seen questions: one blank between words, a mark at the end, and their capitals."""
    asked = " ".join(question.split()).rstrip("?!. ") + "?"
    name = name_in(asked)
    return QUESTION.format(name=name) if name else asked


def load_question_answerer(folder: Path, store: Path | None = None) -> QuestionAnswerer:
    """Whom to ask: the finished run in a folder, and the store in `facts.sqlite` there unless another is named."""
    recipe, settings, model, letters = load_finished_run(folder)
    if recipe.name != "birthplaces" or not isinstance(model, GPT) or not isinstance(letters, Characters):
        raise ConfigError(f"{folder} holds a run of {recipe.name!r}; questions are answered by one of 'birthplaces'")
    about = read_json_fields(folder / RESULT, "confidence")["confidence"]
    if "ceiling" not in about:  # it was fitted in another form
        raise ConfigError(f"{folder} was trained when confidence was another; train it anew: regard train birthplaces")
    confidence = from_json(f"{folder / RESULT}: confidence", Confidence, about)
    return QuestionAnswerer(
        folder, settings, model.eval(), letters, confidence, open_fact_store(store or folder / "facts.sqlite")
    )


def stricter(asking: QuestionAnswerer, threshold: float) -> QuestionAnswerer:
    """The same, with another confidence from which on the model's answer is given."""
    if not 0 <= threshold <= 1:
        raise ConfigError(f"a threshold is a confidence, from 0 to 1, not {threshold}")
    return replace(asking, confidence=replace(asking.confidence, threshold=threshold))
