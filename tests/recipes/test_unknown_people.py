"""Strangers are made of known names, and are nobody of whom anything was read or asked."""

from regard.data.birthplaces_dataset import BirthplaceQuestion
from regard.recipes.unknown_people import make_unknown_questions

NAMES = ("Ada Lovelace", "Karl Marx", "Johann Sebastian Bach", "Plato", "Anna Maria van Schurman")


def asked(*names: str) -> list[BirthplaceQuestion]:
    return [BirthplaceQuestion(f"Where was {name} born?", "Bern") for name in names]


def test_a_stranger_has_the_first_names_of_one_and_the_last_name_of_another() -> None:
    found = make_unknown_questions(asked(*NAMES), [], 100, seed=3)
    first = ("Ada", "Karl", "Johann Sebastian", "Plato", "Anna Maria van")
    last = ("Lovelace", "Marx", "Bach", "Plato", "Schurman")
    longest = max(len(each.text) for each in asked(*NAMES))
    every = {each.text for one in first for other in last for each in asked(f"{one} {other}")}
    assert {*found} == {each for each in every if len(each) <= longest}


def test_nobody_who_was_heard_of_is_a_stranger() -> None:
    heard = [*NAMES, "In 1850 Karl Lovelace met somebody.", "Where was Ada Plato born?"]
    found = make_unknown_questions(asked(*NAMES), heard, 100, seed=3)
    people = [each.removeprefix("Where was ").removesuffix(" born?") for each in found]
    assert people
    assert not any(name in text for name in people for text in heard)
    assert {"Karl Plato", "Ada Marx"} <= {*people}


def test_strangers_are_those_of_the_seed_and_as_many_as_were_asked_for() -> None:
    some = asked(*(f"{one}a {other}o" for one, other in zip("BCDFGHJ", "KLMNPQR", strict=True)))
    found = make_unknown_questions(some, [], 13, seed=3)
    assert len(found) == len({*found}) == 13
    assert found == make_unknown_questions(some[::-1], [], 13, seed=3)
    assert found != make_unknown_questions(some, [], 13, seed=4)


def test_names_that_were_told_lend_their_parts_to_two_strangers_in_three() -> None:
    some = asked(*(f"{one}ada {other}olo" for one, other in zip("BCDFGHJ", "KLMNPQR", strict=True)))
    told = ["Where was Zed Zi born?"]
    found = make_unknown_questions(some, told, 15, seed=3, learned=told)
    assert len(found) == len({*found}) == 15
    assert sum("Zed" in each for each in found) == sum("Zi" in each for each in found) == 5
    assert told[0] not in found


def test_questions_of_another_form_lend_no_names() -> None:
    assert (
        make_unknown_questions(
            [BirthplaceQuestion("Who was Ada Lovelace?", "x"), BirthplaceQuestion("Where was born?", "x")],
            [],
            5,
            seed=0,
        )
        == []
    )
    assert make_unknown_questions([], [], 5, seed=0) == []
