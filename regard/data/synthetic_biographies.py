"""Synthetic biographies of invented people, and questions about where they were born.

All biographies are training texts, but the training questions ask about only one half of the people. A model can learn
the birthplaces of the other half only from the biographies. Unknown people have questions but no biography, so a model
cannot know the answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer, check_range
from regard.data.sampler import random_index

FIRST_NAMES = (
    *("Ada", "Bruno", "Cleo", "Dora", "Edgar", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Nils", "Vera"),
)
TOWNS = ("Ald", "Bren", "Cor", "Dun", "Elm", "Far", "Gol", "Hav", "Ing", "Kel", "Lor", "Mar", "Nor", "Ost", "Rav")
PLACES = tuple(map("".join, product(TOWNS, ("burg", "ford", "stad", "ton", "wick"))))
SYLLABLES = tuple(map("".join, product("bdfghjklmnprstvz", "aeiou")))
ENDINGS = ("sen", "ski", "man", "ley", "dez", "vic")
PROFESSIONS = (
    *("baker", "doctor", "farmer", "joiner", "lawyer", "mason", "painter", "sailor", "singer", "teacher", "weaver"),
)
MAX_PEOPLE = len(SYLLABLES) ** 2  # number of surnames with one ending

# sentences about the birth and the later life; only names are capitalised, so that names can be found
BIRTHS = (
    "{name} was born in {place}.",
    "{name} is from {place}.",
    "{place} is where {name} was born.",
    "Born in {place}: {name}.",
    "We met {name} of {place}.",
    "{place} is home to {name}.",
    "The town of {name} is {place}.",
    "The birth place of {name} is {place}.",
    "They say {name} is from {place}.",
    "{place} bore {name}.",
)
LIVES = (
    "{name} became a {craft} in {home} in {year}.",
    "In {year} a {craft}, {name} lived in {home}.",
    "By {year} {name} was known as a {craft} in {home}.",
)
QUESTION = "Where was {name} born?"


@dataclass(frozen=True)
class Person:
    """An invented person of the synthetic biographies.

    place  place of birth
    craft  profession
    home   another place, where the person lived
    year   a year in which the person lived there
    """

    name: str
    place: str  # place of birth
    craft: str
    home: str  # a place the person lived in, not the place of birth
    year: int  # a year in which the person lived there

    @property
    def question(self) -> "BiographyQuestion":
        """The question about this person's place of birth."""
        return BiographyQuestion(QUESTION.format(name=self.name), self.place)


class BiographyQuestion(NamedTuple):
    """A question about a person's place of birth, and its answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Biographies:
    """A synthetic data set: texts, and questions about the people in them.

    texts           the biographies in random order
    subjects        for each text, the name of the person that it is about
    training        questions about one half of these people
    evaluation      questions about the other half
    unknown_people  questions about people in no text
    people          all people: first those of `training`, then those of `evaluation`, then the unknown people
    places          possible places of birth, the most probable first

    Six people have six texts each, and half of them are in `training`:

    >>> found = biographies(people=6)
    >>> len(found.texts), len(found.training), len(found.evaluation)
    (36, 3, 3)
    """

    texts: tuple[str, ...]
    subjects: tuple[str, ...]
    training: tuple[BiographyQuestion, ...]
    evaluation: tuple[BiographyQuestion, ...]
    unknown_people: tuple[BiographyQuestion, ...]
    people: tuple[Person, ...]
    places: tuple[str, ...]


def biographies(
    people: int = 400,
    *,
    texts_per_person: int = 6,
    unknown_people: int = 0,
    places: int = 60,
    informative_surnames: float = 0.0,
    one_sentence: bool = False,
    seed: int = 0,
) -> Biographies:
    """Generate synthetic biographies, and questions about the people in them.

    All people have different surnames. Some places of birth are more frequent than others.

    people                number of people with biographies
    texts_per_person      number of differently worded biographies of each person. From a single wording, a model
                          memorises a fact but hardly learns to answer a question about it (Allen-Zhu and Li 2023,
                          arXiv:2309.14316)
    unknown_people        number of further people who have questions but no biography
    places                number of places of birth
    informative_surnames  fraction of people whose surname ending depends on the place of birth; the surname
                          endings of the other people are random
    one_sentence          make each biography one sentence with the place of birth; else a sentence about the later
                          life follows

    >>> biographies(people=6).training[0].text
    'Where was Jonas Ketoski born?'
    """
    check_integer("people", people, 2, "those asked about in training and the others")
    check_integer("texts_per_person", texts_per_person, 1, "biographies of each person")
    check_integer("unknown_people", unknown_people, 0)
    check_integer("places", places, 2, "places to be born in")
    if people + unknown_people > MAX_PEOPLE:
        raise ConfigError(
            f"there are {MAX_PEOPLE} surnames, but people={people} and unknown_people={unknown_people} need one each"
        )
    if texts_per_person > len(BIRTHS):
        raise ConfigError(f"a birth is worded in {len(BIRTHS)} ways at most, but texts_per_person={texts_per_person}")
    if places > len(PLACES):
        raise ConfigError(f"there are {len(PLACES)} places, but places={places} were asked for")
    check_range("informative_surnames", informative_surnames, 0, 1)
    draws = _Sampler(seed)
    towns = tuple(PLACES[number] for number in draws.order(len(PLACES))[:places])
    stems = draws.order(MAX_PEOPLE)[: people + unknown_people]
    everyone = tuple(_sample_person(stem, towns, informative_surnames, draws) for stem in stems)
    known = everyone[:people]
    texts = [
        (text, person.name) for person in known for text in _write_texts(person, texts_per_person, one_sentence, draws)
    ]
    questions = [person.question for person in everyone]
    order = draws.order(len(texts))
    return Biographies(
        texts=tuple(texts[number][0] for number in order),
        subjects=tuple(texts[number][1] for number in order),
        training=tuple(questions[: people // 2]),
        evaluation=tuple(questions[people // 2 : people]),
        unknown_people=tuple(questions[people:]),
        people=everyone,
        places=towns,
    )


def surname_ending(place: str, places: Sequence[str]) -> str:
    """Return the ending of informative surnames (see `biographies`) for a place of birth.

    places  all places of birth
    """
    return ENDINGS[places.index(place) % len(ENDINGS)]


class _Sampler:
    """Makes all random choices of the data set from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = make_generator(seed)

    def below(self, count: int) -> int:
        return random_index(count, self.generator)

    def order(self, count: int) -> list[int]:
        found: list[int] = torch.randperm(count, generator=self.generator).tolist()
        return found

    def happens(self, share: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < share

    def weighted(self, count: int) -> int:
        """Sample a random index below `count`; the first index is about 1 + count / 10 times as likely as the last."""
        shares = 1 / (1 + torch.arange(count) / 10)
        return int(torch.multinomial(shares, 1, generator=self.generator))


def _sample_person(stem: int, places: Sequence[str], informative_surnames: float, draws: _Sampler) -> Person:
    place = places[draws.weighted(len(places))]
    first, second = divmod(stem, len(SYLLABLES))
    informative = draws.happens(informative_surnames)
    ending = surname_ending(place, places) if informative else ENDINGS[draws.below(len(ENDINGS))]
    surname = (SYLLABLES[first] + SYLLABLES[second] + ending).capitalize()
    others = [other for other in places if other != place]
    return Person(
        name=f"{FIRST_NAMES[draws.below(len(FIRST_NAMES))]} {surname}",
        place=place,
        craft=PROFESSIONS[draws.below(len(PROFESSIONS))],
        home=others[draws.below(len(others))],
        year=1800 + draws.below(200),
    )


def _write_texts(person: Person, count: int, one_sentence: bool, draws: _Sampler) -> list[str]:
    texts = []
    for number in draws.order(len(BIRTHS))[:count]:
        sentences = [BIRTHS[number]] if one_sentence else [BIRTHS[number], LIVES[draws.below(len(LIVES))]]
        texts.append(" ".join(sentences).format(**vars(person)))
    return texts
