"""What does a model know of people whom nobody asked it about in training?

Claim: What it has read, and nothing else. Trained on questions about some people alone, it answers no better about
    others than one who always names the commonest place; having read the biographies of all, it answers most questions
    about people it was never asked about. Of people in no text it knows nothing still.
Measures: Generated biographies and questions (`regard.data.synthetic_biographies`). One small character-level GPT fills
    gaps in the texts and answers questions about one half of the people; another sees the questions alone. Exact
    answers about the other half, about people in no text, and the commonest place, over seeds.
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
from regard.data.span_corruption import IGNORED, PHRASE, MaskedText, alphabet, batch, corrupt_spans, encode_question
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
    """The model, and how it is trained.

    questions  the share of questions among what it reads; the rest are texts with gaps
    phrases    the share of gaps that are whole capitalised phrases
    salient    whether these are places alone, and no names
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
            raise ConfigError(f"questions is a share of what is read, between 0 and 1, not {self.questions}")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How many people and places there are, the training, and how often to repeat it."""

    people: int = 40
    strangers: int = 40
    places: int = 30
    tellings: int = 10
    training: Training = Training()
    repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 2, "seeds, and an interval needs two")
        check_integer("strangers", self.strangers, 1)


SMOKE = Setup(
    people=8,
    strangers=12,
    places=12,
    training=Training(width=48, batch=12, steps=80),
    repeats=4,
)


def run(setup: Setup, gpt: Callable[[GPTConfig], Any] = GPT) -> Numbers:
    """gpt  makes the model: gpt(config)"""
    right: dict[str, list[float]] = {name: [] for name in ("read", "not read", "strangers", "commonest")}
    trained_on: dict[str, list[float]] = {"read": [], "not read": []}
    only_in_texts: list[float] = []
    for number in range(setup.repeats):
        seed = 1000 * setup.seed + number
        world = biographies(
            setup.people,
            strangers=setup.strangers,
            places=setup.places,
            tellings=setup.tellings,
            brief=True,
            seed=seed,
        )
        reader = Reader.trained(world, setup.training, seed, gpt)
        other = Reader.trained(world, setup.training, seed, gpt, reading=False)
        right["read"].append(reader.right(world.evaluation))
        # to one who has read nothing, all that were not asked about in training are strangers
        right["not read"].append(other.right(_others(world)))
        right["strangers"].append(reader.right(world.strangers))
        right["commonest"].append(_commonest(world))
        trained_on["read"].append(reader.right(world.training))
        trained_on["not read"].append(other.right(world.training))
        only_in_texts.append(_only_in_texts(world))
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
    """A model that answers questions, and the characters and length that it knows."""

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
        """A model taught the questions of training; `reading` mixes them with the texts."""
        questions = [*world.training, *world.evaluation, *world.strangers]
        everything = [*world.texts, *(question.text + question.answer for question in questions)]
        letters, length = alphabet(everything), max(map(len, everything)) + 3  # two masks and the end
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
        # wider than for large models: so few steps would not make characters differ
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
            tokens, targets = batch([drawn() for _ in range(training.batch)], letters)
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        # questions alone are known by heart in a fraction of the steps
        fit(
            model.parameters(),
            loss,
            steps=training.steps if reading else training.steps // 2 + 1,
            rate=training.rate,
        )
        return reader

    @torch.no_grad()
    def right(self, questions: Sequence[BiographyQuestion]) -> float:
        """The share of questions that are answered exactly, to the end.

        Greedy text is right if every character of it is the likeliest after the right ones before: one pass tells.
        """
        tokens, targets = batch([encode_question(*question, self.length) for question in questions], self.letters)
        told = self.model(tokens).argmax(-1)
        return float(((told == targets) | (targets == IGNORED)).all(1).double().mean())


def _commonest(world: Biographies) -> float:
    """How many questions the commonest answer of training gets right."""
    guess, _ = Counter(question.answer for question in world.training).most_common(1)[0]
    return fmean(question.answer == guess for question in _others(world))


def _others(world: Biographies) -> list[BiographyQuestion]:
    return [*world.evaluation, *world.strangers]


def _only_in_texts(world: Biographies) -> float:
    """The share of people asked about at last whose place stands with their name in texts, and in no other question."""
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
    told = {name: share.share() for name, share in right.items()}
    return decide(
        numbers["facts in texts alone"] == 1.0,
        f"Questions about people never asked about in training are answered right for {told['read']} after reading and "
        f"{told['not read']} without ({numbers['repeats']} seeds), though those of training are for "
        f"{by_heart['read'].mean:.0%} and {by_heart['not read'].mean:.0%}; the commonest place is right for "
        f"{told['commonest']}. About strangers the reader is right for {told['strangers']}.",
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
    axes.set(xlabel="biographies of those asked about", ylabel="right answers", title="Knowing by reading")
    return figure
