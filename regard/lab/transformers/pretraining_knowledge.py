"""What does a model know about people it was not asked about in training?

Claim: Only what it has read. A model trained on questions about some people only answers questions about others no
    better than always naming the most common place. After reading the biographies of all people it answers most
    questions about people who were in no training question. About people in no text it still knows nothing.
Measures: Generated biographies and questions (`regard.data.synthetic_biographies`). One small character-level GPT fills
    gaps in the texts and answers questions about one half of the people; another sees the questions only. Exact answers
    about the other half, about people in no text, and with the most common place, over seeds.
Budget: 60 seconds
Source: 001 3a
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

from regard.base.errors import ConfigError
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
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_shares
from regard.lab.fitting import fit
from regard.lab.seeds_interval import estimates, interval_half_width
from regard.models.gpt import GPT, GPTConfig
from regard.nn.init import constant, fan_in, init_parameters, normal

MATHS = (
    r"\mathrm{prefix} \cdot M \cdot \mathrm{suffix} \cdot M \cdot \mathrm{content}, \quad "
    r"\mathrm{question} \cdot M M \cdot \mathrm{answer}"
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model and its training.

    questions  the share of questions in a batch; the rest are texts with gaps
    phrases    the share of gaps that are whole capitalised phrases
    salient    whether these are places only, and not names
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
            raise ConfigError(f"questions must be between 0 and 1: questions={self.questions}")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Numbers of people and places, the training, and the number of seeds."""

    people: int = 40
    strangers: int = 40
    places: int = 30
    tellings: int = 10
    training: Training = Training()
    repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds; an interval needs two")
        check_integer("strangers", self.strangers, 1)


SMOKE = Setup(
    people=8,
    strangers=12,
    places=12,
    training=Training(width=48, batch=12, steps=80),
    repeats=4,
)


def run(setup: Setup, gpt: Callable[[GPTConfig], Any] = GPT) -> Numbers:
    """gpt  builds the model: gpt(config)"""
    right: dict[str, list[float]] = {name: [] for name in ("read", "not read", "strangers", "commonest")}
    trained_on: dict[str, list[float]] = {"read": [], "not read": []}
    only_in_texts: list[float] = []
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        world = biographies(
            setup.people,
            unknown_people=setup.strangers,
            places=setup.places,
            texts_per_person=setup.tellings,
            one_sentence=True,
            seed=seed,
        )
        reader = Reader.trained(world, setup.training, seed, gpt)
        other = Reader.trained(world, setup.training, seed, gpt, reading=False)
        right["read"].append(reader.right(world.evaluation))
        # for a model that has read nothing, everyone outside the training questions is unknown
        right["not read"].append(other.right(_other_people(world)))
        right["strangers"].append(reader.right(world.unknown_people))
        right["commonest"].append(_most_common_accuracy(world))
        trained_on["read"].append(reader.right(world.training))
        trained_on["not read"].append(other.right(world.training))
        only_in_texts.append(_share_only_in_texts(world))
    return {
        "people": setup.people,
        "repeats": setup.repeats,
        "right": {name: fmean(shares) for name, shares in right.items()},
        "interval": {name: interval_half_width(shares) for name, shares in right.items()},
        "right in training": {name: fmean(shares) for name, shares in trained_on.items()},
        "interval in training": {name: interval_half_width(shares) for name, shares in trained_on.items()},
        "facts in texts alone": fmean(only_in_texts),
    }


@dataclass(frozen=True)
class Reader:
    """A model that answers questions, with its characters and its context length."""

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
        reading: bool = True,
    ) -> "Reader":
        """Train a model on the questions; `reading` mixes them with the texts."""
        questions = [*world.training, *world.evaluation, *world.unknown_people]
        everything = [*world.texts, *(question.text + question.answer for question in questions)]
        letters, length = collect_alphabet(everything), max(map(len, everything)) + 3  # two masks and the end token
        config = GPTConfig(
            vocab=len(letters),
            context=length,
            width=training.width,
            depth=training.depth,
            heads=training.heads,
            positions=Rotary(),
            activation="relu",
            dropout=0.0,
            attention_dropout=0.0,
        )
        model, draws = gpt(config), make_generator(seed)
        # a larger init than for large models, since there are few training steps
        table = {"tokens.weight": normal(0.3), "*norm.weight": constant(1.0), "*.bias": constant(0.0)}
        init_parameters(model, {**table, "*.weight": fan_in()}, seed)
        reader = cls(model, letters, length)

        phrase = re.compile("|".join(world.places)) if training.salient else PHRASE

        def below(count: int) -> int:
            return int(torch.randint(count, (), generator=draws))

        def drawn() -> MaskedText:
            if not reading or float(torch.rand((), generator=draws)) < training.questions:
                question, answer = world.training[below(len(world.training))]
                return encode_question(question, answer, length)
            text = world.texts[below(len(world.texts))]
            return corrupt_spans(text, length, draws, phrases=training.phrases, phrase=phrase, whole_text=False)

        def loss() -> Tensor:
            tokens, targets = collate([drawn() for _ in range(training.batch)], letters)
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        # questions alone are memorised in a fraction of the steps
        fit(
            model.parameters(),
            loss,
            steps=training.steps if reading else training.steps // 2 + 1,
            rate=training.rate,
        )
        return reader

    @torch.no_grad()
    def right(self, questions: Sequence[BiographyQuestion]) -> float:
        """Return the share of questions that are answered exactly.

        Greedy decoding is exact if every correct character is the most likely one: one pass is enough.
        """
        tokens, targets = collate([encode_question(*question, self.length) for question in questions], self.letters)
        predicted = self.model(tokens).argmax(-1)
        return float(((predicted == targets) | (targets == IGNORED)).all(1).double().mean())


def _most_common_accuracy(world: Biographies) -> float:
    """Return the accuracy of the most common answer of training."""
    guess, _ = Counter(question.answer for question in world.training).most_common(1)[0]
    return fmean(question.answer == guess for question in _other_people(world))


def _other_people(world: Biographies) -> list[BiographyQuestion]:
    return [*world.evaluation, *world.unknown_people]


def _share_only_in_texts(world: Biographies) -> float:
    """Return the share of tested people whose place is in the texts with their name, and in no other question."""
    people = [person for person in world.people if person.question in world.evaluation]
    return fmean(
        any(person.name in text and person.place in text for text in world.texts)
        and not any(person.name in question.text for question in world.training)
        for person in people
    )


def verdict(numbers: Numbers) -> Verdict:
    right = estimates(numbers["right"], numbers["interval"])
    by_heart = estimates(numbers["right in training"], numbers["interval in training"])
    known = [right["read"] - 0.5, right["read"] - right["not read"] - 0.2]
    guessed = right["commonest"] + 0.2 - right["not read"]
    unknown = right["read"] - right["strangers"] - 0.2
    percents = {name: share.percent() for name, share in right.items()}
    return decide(
        numbers["facts in texts alone"] == 1.0,
        f"Questions about people who were not in the training questions are answered correctly in {percents['read']} "
        f"after reading and {percents['not read']} without ({numbers['repeats']} seeds); training questions in "
        f"{by_heart['read'].mean:.0%} and {by_heart['not read'].mean:.0%}. The most common place is correct in "
        f"{percents['commonest']}. About people in no text the reader is correct in {percents['strangers']}.",
        [*known, guessed, unknown, *(share - 0.8 for share in by_heart.values())],
    )


def draw(numbers: Numbers) -> Figure:
    figure, (axes,) = make_figure()
    names = {"read": "read", "not read": "not read", "strangers": "read,\nstrangers", "commonest": "commonest\nplace"}
    plot_shares(
        axes,
        {shown: numbers["right"][name] for name, shown in names.items()},
        [numbers["interval"][name] for name in names],
    )
    axes.set(xlabel="biographies of the tested people", ylabel="accuracy", title="Knowledge from reading")
    return figure
