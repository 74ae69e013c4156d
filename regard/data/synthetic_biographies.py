"""Short biographies of people who never lived, and questions about where they were born.

Every biography stands in the text to read, but only half of the people are asked about in training. What a model says
of the others it can know from reading alone. Strangers stand in no text at all: of them nothing can be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer, check_number

GIVEN = ("Ada", "Bruno", "Cleo", "Dora", "Edgar", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Nils", "Vera")
TOWNS = ("Ald", "Bren", "Cor", "Dun", "Elm", "Far", "Gol", "Hav", "Ing", "Kel", "Lor", "Mar", "Nor", "Ost", "Rav")
PLACES = tuple(map("".join, product(TOWNS, ("burg", "ford", "stad", "ton", "wick"))))
SYLLABLES = tuple(map("".join, product("bdfghjklmnprstvz", "aeiou")))
ENDINGS = ("sen", "ski", "man", "ley", "dez", "vic")
CRAFTS = ("baker", "doctor", "farmer", "joiner", "lawyer", "mason", "painter", "sailor", "singer", "teacher", "weaver")
MOST = len(SYLLABLES) ** 2  # surnames there are with one ending, so that it never runs out of them

# a birth in several words, and the life after it; no other capitals beside names, so that these are found by them
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
    """Somebody, and all that there is to know of them."""

    name: str
    place: str  # of birth
    craft: str
    home: str  # another place than that of birth
    year: int  # of the life there

    @property
    def question(self) -> "BiographyQuestion":
        return BiographyQuestion(QUESTION.format(name=self.name), self.place)


class BiographyQuestion(NamedTuple):
    """What is asked, and the answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Biographies:
    """Texts to read, and questions about the people in them.

    texts       the biographies of all people that are known, in an order that says nothing
    subjects    whose biography each text is
    training    questions about one half of these people
    evaluation  questions about the other half, who are asked about nowhere else
    strangers   questions about people in no text
    places      where one can be born, the commonest first
    """

    texts: tuple[str, ...]
    subjects: tuple[str, ...]
    training: tuple[BiographyQuestion, ...]
    evaluation: tuple[BiographyQuestion, ...]
    strangers: tuple[BiographyQuestion, ...]
    people: tuple[Person, ...]  # those with a text: first those asked in training, then the others; then strangers
    places: tuple[str, ...]


def biographies(
    people: int = 400,
    *,
    tellings: int = 6,
    strangers: int = 0,
    places: int = 60,
    telling: float = 0.0,
    brief: bool = False,
    seed: int = 0,
) -> Biographies:
    """People drawn by the seed. No two have one surname, and the commonest place is several times likelier than most.

    people     how many have a biography
    tellings   biographies of each, in different words. Facts that are told in one way alone are learned by heart, and
               are hardly found again by a question (Allen-Zhu and Li 2023, arXiv:2309.14316)
    strangers  how many more are asked about, and have none
    telling    the share of people whose surname ends as is the custom where they were born; for the others the ending
               says nothing
    brief      one sentence a person, which tells the place of birth alone
    """
    check_integer("people", people, 2, "those asked about in training and the others")
    check_integer("tellings", tellings, 1, "biographies of each person")
    check_integer("strangers", strangers, 0)
    check_integer("places", places, 2, "places to be born in")
    if people + strangers > MOST:
        raise ConfigError(f"there are {MOST} surnames, but people={people} and strangers={strangers} need one each")
    if tellings > len(BIRTHS):
        raise ConfigError(f"a birth can be told in {len(BIRTHS)} ways, but tellings={tellings}")
    if places > len(PLACES):
        raise ConfigError(f"there are {len(PLACES)} places, but places={places} were asked for")
    if not 0.0 <= check_number("telling", telling, "a share of people") <= 1.0:
        raise ConfigError(f"telling is a share of people, from 0 to 1, not {telling}")
    draws = _Draws(seed)
    towns = tuple(PLACES[number] for number in draws.order(len(PLACES))[:places])
    stems = draws.order(MOST)[: people + strangers]
    everyone = tuple(_person(stem, towns, telling, draws) for stem in stems)
    known = everyone[:people]
    texts = [(text, person.name) for person in known for text in _texts(person, tellings, brief, draws)]
    questions = [person.question for person in everyone]
    order = draws.order(len(texts))
    return Biographies(
        texts=tuple(texts[number][0] for number in order),
        subjects=tuple(texts[number][1] for number in order),
        training=tuple(questions[: people // 2]),
        evaluation=tuple(questions[people // 2 : people]),
        strangers=tuple(questions[people:]),
        people=everyone,
        places=towns,
    )


def most_frequent_place(place: str, places: Sequence[str]) -> str:
    """The ending that surnames have by custom in a place."""
    return ENDINGS[places.index(place) % len(ENDINGS)]


class _Draws:
    """Choices, one after the other, from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = make_generator(seed)

    def below(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator))

    def order(self, count: int) -> list[int]:
        found: list[int] = torch.randperm(count, generator=self.generator).tolist()
        return found

    def happens(self, share: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < share

    def weighted(self, count: int) -> int:
        """One of a row that grows rarer: the first is about 1 + count / 10 times as likely as the last."""
        shares = 1 / (1 + torch.arange(count) / 10)
        return int(torch.multinomial(shares, 1, generator=self.generator))


def _person(stem: int, places: Sequence[str], telling: float, draws: _Draws) -> Person:
    place = places[draws.weighted(len(places))]
    first, second = divmod(stem, len(SYLLABLES))
    by_custom = draws.happens(telling)
    ending = most_frequent_place(place, places) if by_custom else ENDINGS[draws.below(len(ENDINGS))]
    surname = (SYLLABLES[first] + SYLLABLES[second] + ending).capitalize()
    others = [other for other in places if other != place]
    return Person(
        name=f"{GIVEN[draws.below(len(GIVEN))]} {surname}",
        place=place,
        craft=CRAFTS[draws.below(len(CRAFTS))],
        home=others[draws.below(len(others))],
        year=1800 + draws.below(200),
    )


def _texts(person: Person, count: int, brief: bool, draws: _Draws) -> list[str]:
    texts = []
    for number in draws.order(len(BIRTHS))[:count]:
        sentences = [BIRTHS[number]] if brief else [BIRTHS[number], LIVES[draws.below(len(LIVES))]]
        texts.append(" ".join(sentences).format(**vars(person)))
    return texts
