"""Generated biographies: who is in them, who is asked about, and that nothing leaks from one part to another."""

import re
from collections import Counter
from typing import Any

import pytest

from regard.base.errors import ConfigError
from regard.data.synthetic_biographies import (
    BIRTHS,
    ENDINGS,
    MAX_PEOPLE,
    PLACES,
    Biographies,
    biographies,
    surname_ending,
)

SMALL = biographies(31, unknown_people=7, places=11, texts_per_person=3, seed=5)


def test_the_same_seed_gives_the_same_people_and_another_seed_others() -> None:
    assert biographies(31, unknown_people=7, places=11, texts_per_person=3, seed=5) == SMALL
    assert not set(biographies(31, seed=6).texts) & set(SMALL.texts)


def test_no_name_and_no_surname_repeats() -> None:
    names = [person.name for person in biographies(900, unknown_people=100, texts_per_person=1).people]
    assert len(set(names)) == len({name.split()[1] for name in names}) == 1000


def test_every_person_has_the_requested_number_of_different_texts() -> None:
    for person in SMALL.people[:31]:
        about = [text for text in SMALL.texts if person.name in text]
        assert len(set(about)) == 3
        assert all(person.place in text and person.home in text and person.craft in text for text in about)
    assert len(SMALL.texts) == 3 * 31


def test_one_sentence_biographies_have_the_place_of_birth_only() -> None:
    world = biographies(31, places=11, texts_per_person=len(BIRTHS), one_sentence=True, seed=5)
    for person in world.people:
        about = [text for text in world.texts if person.name in text]
        assert sorted(about) == sorted(birth.format(name=person.name, place=person.place) for birth in BIRTHS)


def test_half_of_the_people_are_asked_in_training_and_the_others_in_evaluation_alone() -> None:
    training, evaluation = ({text for text, _ in each} for each in (SMALL.training, SMALL.evaluation))
    assert (len(training), len(evaluation)) == (15, 16)
    assert not training & evaluation
    asked = training | evaluation
    assert asked == {f"Where was {person.name} born?" for person in SMALL.people[:31]}


def test_answers_are_the_places_of_birth() -> None:
    places = {person.name: person.place for person in SMALL.people}
    for question in SMALL.training + SMALL.evaluation + SMALL.unknown_people:
        found = re.fullmatch(r"Where was (.+) born\?", question.text)
        assert found is not None
        assert places[found[1]] == question.answer


def test_unknown_people_are_in_no_text_and_no_other_question() -> None:
    assert len(SMALL.unknown_people) == 7
    elsewhere = " ".join([*SMALL.texts, *(question.text for question in SMALL.training + SMALL.evaluation)])
    for person in SMALL.people[31:]:
        assert person.name not in elsewhere
        assert person.name.split()[1] not in elsewhere


def test_the_order_of_texts_is_independent_of_the_order_of_questions() -> None:
    names = [person.name for person in SMALL.people[:31]]
    order = [next(at for at, name in enumerate(names) if name in text) for text in SMALL.texts]
    assert order != sorted(order)
    assert any(at >= 15 for at in order[:20])


def test_the_commonest_place_is_several_times_likelier_than_the_rarest_and_far_from_certain() -> None:
    world = biographies(3000, texts_per_person=1, seed=1)
    counts = Counter(person.place for person in world.people)
    shares = [counts[place] / 3000 for place in world.places]
    assert len(shares) == 60
    assert 0.04 < shares[0] < 0.07
    assert 4 < sum(shares[:5]) / sum(shares[-5:]) < 9


def test_surnames_are_informative_with_their_share() -> None:
    def share(world: Biographies) -> float:
        fits = [person.name.endswith(surname_ending(person.place, world.places)) for person in world.people]
        return sum(fits) / len(fits)

    chance = 1 / len(ENDINGS)
    assert share(biographies(2000, texts_per_person=1)) == pytest.approx(chance, abs=0.03)
    assert share(biographies(2000, texts_per_person=1, informative_surnames=0.7)) == pytest.approx(
        0.7 + 0.3 * chance, abs=0.03
    )
    assert share(biographies(2000, texts_per_person=1, informative_surnames=1.0)) == 1.0


def test_nobody_lives_on_where_they_were_born() -> None:
    assert all(person.home != person.place for person in biographies(200, places=2).people)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"people": 1}, "people is 1, but must be at least 2"),
        (
            {"people": MAX_PEOPLE, "unknown_people": 1},
            f"there are {MAX_PEOPLE} surnames, but people={MAX_PEOPLE} and unknown_people=1",
        ),
        ({"places": 1}, "places is 1, but must be at least 2"),
        ({"places": 999}, f"there are {len(PLACES)} places, but places=999 were asked for"),
        ({"texts_per_person": 11}, "a birth is worded in 10 ways at most, but texts_per_person=11"),
        (
            {"texts_per_person": 0},
            "texts_per_person is 0, but must be at least 1: it counts biographies of each person",
        ),
        ({"informative_surnames": 1.5}, "informative_surnames must be at least 0 and at most 1, not 1.5"),
        ({"unknown_people": -1}, "unknown_people is -1, but must be at least 0"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        biographies(**settings)
