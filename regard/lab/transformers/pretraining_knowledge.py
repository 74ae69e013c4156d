"""What does a model know about people it was not asked about in training?

Claim: Only what it has read. A model trained on questions about some people only answers questions about others no
    better than always naming the most common place. After reading the biographies of all people it answers most
    questions about people who were in no training question. About people in no text it still knows nothing. It is the
    content that helps, not the amount: the same number of texts about other people does not.
Measures: Generated biographies and questions (`regard.data.synthetic_biographies`). One small character-level GPT fills
    gaps in the texts and answers questions about one half of the people; another sees the questions only; a third reads
    as many texts, but about other people. Exact answers about the other half, about people in no text, and with the
    most common place, over seeds.
Finding: Questions about people who were in no training question are answered correctly in {{ accuracy["read"] }} by a
    model that has read the biographies of all people and in {{ accuracy["not read"] }} by one that has read none ({{
    n.repeats }} seeds); training questions in {{ n["accuracy in training"]["read"]|percent }} and {{ n["accuracy in
    training"]["not read"]|percent }}. A model that has read as many biographies of other people answers {{
    accuracy["read about others"] }} correctly. Always the most common place is correct in {{ accuracy["most common
    place"] }}. About people in no text the first model is correct in {{ accuracy["in no text"] }}.
Budget: 60 seconds
Source: 001 2, 001 3a
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.base.seeds import make_generator
from regard.base.validation import check_integer, check_number
from regard.core.positions import Rotary
from regard.data.span_corruption import (
    IGNORED,
    PHRASE,
    MaskedText,
    collate,
    collect_alphabet,
    corrupt_spans,
    encode_question,
)
from regard.data.synthetic_biographies import Biographies, BiographyQuestion, biographies
from regard.lab.drawing import Figure, make_figure, plot_shares
from regard.lab.fitting import fit
from regard.lab.seeds_interval import RepeatedSetup, estimates, mean_and_interval
from regard.lab.settings import setting_error
from regard.lab.verdict import Decision, Numbers, decide
from regard.models.gpt import GPT, GPTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = (
    r"\mathrm{prefix} \cdot M \cdot \mathrm{suffix} \cdot M \cdot \mathrm{content}, \quad "
    r"\mathrm{question} \cdot M M \cdot \mathrm{answer}"
)


READERS = ("read", "not read", "read about others", "in no text", "most common place")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small GPT and its training.

    width      width of the model
    depth      number of blocks
    heads      number of heads
    batch      number of texts and questions per training step
    steps      number of training steps
    rate       learning rate
    questions  fraction of questions in a batch; the rest are texts with a masked span
    phrases    fraction of masked spans that are whole capitalised phrases, such as names; the others are random spans
    salient    whether these phrases are places only; otherwise also names of people
    """

    width: int = 64
    depth: int = 1
    heads: int = 4
    batch: int = 24
    steps: int = 350
    rate: float = 0.01
    questions: float = 0.1
    phrases: float = 1.0
    salient: bool = True

    def __post_init__(self) -> None:
        check_integer("batch", self.batch, 1)
        check_integer("steps", self.steps, 1)
        if not 0.0 < check_number("questions", self.questions, "a share of what is read") < 1.0:
            raise setting_error(self, "questions must be between 0 and 1", "questions")


@dataclass(frozen=True, kw_only=True)
class Setup(RepeatedSetup):
    """Settings of the claim: invented people, texts about them, and the training of a GPT on these texts.

    people            number of people about whom there are texts
    unknown_people    number of people who are in no text
    places            number of places of birth
    texts_per_person  number of texts about each person
    training          settings of the model and its training
    """

    people: int = 40
    unknown_people: int = 40
    places: int = 30
    texts_per_person: int = 10
    training: Training = Training()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("unknown_people", self.unknown_people, 1)


SMOKE = Setup(people=8, unknown_people=12, places=12, training=Training(width=48, batch=12, steps=80))


def sample_world(setup: Any, seed: int, **settings: Any) -> Biographies:
    """Generate invented people, texts about them and questions, with `biographies`.

    setup     has the fields people, unknown_people, places and texts_per_person
    settings  further arguments of `biographies`
    """
    return biographies(
        setup.people,
        unknown_people=setup.unknown_people,
        places=setup.places,
        texts_per_person=setup.texts_per_person,
        one_sentence=True,
        seed=seed,
        **settings,
    )


def run(setup: Setup, gpt: Callable[[GPTConfig], Any] = GPT) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    gpt  builds the model: gpt(config)
    """
    right: dict[str, list[float]] = {name: [] for name in READERS}
    trained_on: dict[str, list[float]] = {"read": [], "not read": []}
    only_in_texts: list[float] = []
    for seed in setup.seeds:
        world = sample_world(setup, seed)
        reader, other, elsewhere = (
            Reader.trained(world, setup.training, seed, gpt, texts=texts)
            for texts in (world.texts, (), sample_world(setup, seed + 500).texts)
        )
        right["read"].append(reader.right(world.evaluation))
        # for a model that has read nothing, everyone outside the training questions is unknown
        right["not read"].append(other.right(_other_people(world)))
        right["read about others"].append(elsewhere.right(_other_people(world)))
        right["in no text"].append(reader.right(world.unknown_people))
        right["most common place"].append(_most_common_accuracy(world))
        trained_on["read"].append(reader.right(world.training))
        trained_on["not read"].append(other.right(world.training))
        only_in_texts.append(_share_only_in_texts(world))
    return {
        "people": setup.people,
        "repeats": setup.repeats,
        **mean_and_interval("accuracy", right),
        **mean_and_interval("accuracy in training", trained_on),
        "facts in texts alone": fmean(only_in_texts),
    }


@dataclass(frozen=True)
class Reader:
    """A trained character-level model that answers questions.

    letters  the characters that are the model's tokens
    length   context length in characters
    """

    model: Any
    letters: str
    length: int

    @classmethod
    def trained(
        cls,
        world: Biographies,
        training: Training,
        seed: int,
        gpt: Callable[[GPTConfig], Any] = GPT,
        *,
        texts: Sequence[str] | None = None,
    ) -> "Reader":
        """Train a new model on questions and on texts with masked spans, and return it as a `Reader`.

        world     has the training questions and the default texts
        training  settings of the model and its training
        gpt       builds the model: gpt(config)
        texts     texts to train on; None for those of `world`, () for questions alone
        """
        read = world.texts if texts is None else texts
        questions = [*world.training, *world.evaluation, *world.unknown_people]
        everything = [*world.texts, *read, *(question.text + question.answer for question in questions)]
        letters, length = collect_alphabet(everything), max(map(len, everything)) + 3  # two masks and the end token
        sizes = {"width": training.width, "depth": training.depth, "heads": training.heads, "positions": Rotary()}
        form = {"activation": "relu", "dropout": 0.0, "attention_dropout": 0.0}
        model, draws = gpt(GPTConfig(vocab=len(letters), context=length, **sizes, **form)), make_generator(seed)  # type: ignore[arg-type]  # the config checks
        # a larger init than for large models, since there are few training steps
        table = {"tokens.weight": normal(0.3), "*norm.weight": constant(1.0), "*.bias": constant(0.0)}
        init_parameters(model, {**table, "*.weight": fan_in()}, seed)
        reader = cls(model, letters, length)

        phrase = re.compile("|".join(world.places)) if training.salient else PHRASE

        def below(count: int) -> int:
            return int(torch.randint(count, (), generator=draws))

        def drawn() -> MaskedText:
            if not read or float(torch.rand((), generator=draws)) < training.questions:
                question, answer = world.training[below(len(world.training))]
                return encode_question(question, answer, length)
            text = read[below(len(read))]
            return corrupt_spans(text, length, draws, phrases=training.phrases, phrase=phrase, whole_text=False)

        def loss() -> Tensor:
            tokens, targets = collate([drawn() for _ in range(training.batch)], letters)
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        # questions alone are memorised in a fraction of the steps
        fit(model.parameters(), loss, steps=training.steps if read else training.steps // 2 + 1, rate=training.rate)
        return reader

    @torch.no_grad()
    def right(self, questions: Sequence[BiographyQuestion]) -> float:
        """Return the fraction of questions that greedy decoding would answer exactly.

        One forward pass is enough: an answer is exact if every correct character is the most likely one.
        """
        tokens, targets = collate([encode_question(*question, self.length) for question in questions], self.letters)
        predicted = self.model(tokens).argmax(-1)
        return float(((predicted == targets) | (targets == IGNORED)).all(1).double().mean())


def _most_common_accuracy(world: Biographies) -> float:
    """Return the accuracy, on all questions outside training, of always giving the most common training answer."""
    guess, _ = Counter(question.answer for question in world.training).most_common(1)[0]
    return fmean(question.answer == guess for question in _other_people(world))


def _other_people(world: Biographies) -> list[BiographyQuestion]:
    return [*world.evaluation, *world.unknown_people]


def _share_only_in_texts(world: Biographies) -> float:
    """Return the fraction of the tested people whose place of birth the model can learn from the texts alone.

    For these people, a text has both name and place, and no training question has the name.
    """
    people = [person for person in world.people if person.question in world.evaluation]
    return fmean(
        any(person.name in text and person.place in text for text in world.texts)
        and not any(person.name in question.text for question in world.training)
        for person in people
    )


def verdict(numbers: Numbers) -> Decision:
    accuracy, by_heart = estimates(numbers, "accuracy"), estimates(numbers, "accuracy in training")
    known = [accuracy["read"] - 0.5, accuracy["read"] - accuracy["not read"] - 0.2]
    known += [accuracy["read"] - accuracy[other] - 0.2 for other in ("in no text", "read about others")]
    guessed = [accuracy["most common place"] + 0.2 - accuracy[other] for other in ("not read", "read about others")]
    margins = [*known, *guessed, *(share - 0.8 for share in by_heart.values())]
    return decide(numbers["facts in texts alone"] == 1.0, margins, accuracy=accuracy)


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure(width=6.0)
    bars = {name.replace(" ", "\n", 1): value for name, value in numbers["accuracy"].items()}
    plot_shares(axes, bars, list(numbers["interval of accuracy"].values()))
    axes.set(xlabel="what the model has read", ylabel="accuracy", title="Knowledge from reading")
    return figure
