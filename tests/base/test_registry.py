"""The registry: order, duplicates and suggestions for unknown names."""

import pytest

from regard.base.errors import UnknownNameError
from regard.base.registry import Registry


@pytest.fixture
def fruits() -> Registry[int]:
    registry: Registry[int] = Registry("fruit")
    for size, name in enumerate(("pear", "apple", "cherry"), 3):
        registry.add(name)(size)
    return registry


def test_entries_are_found_by_name(fruits):
    assert [fruits["pear"], fruits["apple"], fruits["cherry"]] == [3, 4, 5]


def test_names_are_in_the_order_of_registration(fruits):
    assert list(fruits) == ["pear", "apple", "cherry"]
    assert len(fruits) == 3
    assert "apple" in fruits
    assert "plum" not in fruits


def test_add_is_a_decorator():
    registry: Registry[object] = Registry("kernel")

    @registry.add("mine")
    def mine() -> int:
        return 7

    assert mine() == 7
    assert registry["mine"] is mine


def test_registering_a_name_twice_raises_an_error(fruits):
    with pytest.raises(ValueError, match="fruit 'apple' is registered twice"):
        fruits.add("apple")(9)
    assert fruits["apple"] == 4


def test_a_misspelled_name_gets_a_suggestion(fruits):
    with pytest.raises(UnknownNameError) as unknown:
        fruits["aple"]
    assert str(unknown.value) == "unknown fruit 'aple'; did you mean 'apple'?"


def test_an_unknown_name_gets_the_list(fruits):
    with pytest.raises(UnknownNameError) as unknown:
        fruits["xyzzy"]
    assert str(unknown.value) == "unknown fruit 'xyzzy' (there are: pear, apple, cherry)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("noisy", "unknown claim 'noisy'; did you mean 'noisy-3' or 'noisy-2' or 'noisy-1'?"),
        ("xyzzy", "unknown claim 'xyzzy' (there are 43, from 'blue-0' to 'noisy-3')"),
    ],
)
def test_of_many_names_only_similar_ones_are_listed(name, words):
    many: Registry[int] = Registry("claim")
    for number, each in enumerate([f"blue-{number}" for number in range(40)] + ["noisy-1", "noisy-2", "noisy-3"]):
        many.add(each)(number)
    with pytest.raises(UnknownNameError) as unknown:
        many[name]
    assert str(unknown.value) == words


def test_none_can_be_registered():
    registry: Registry[None] = Registry("thing")
    registry.add("nothing")(None)
    assert registry["nothing"] is None
    with pytest.raises(ValueError, match="twice"):
        registry.add("nothing")(None)
