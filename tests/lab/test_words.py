"""Numbers as sentences have them."""

import pytest

from regard.lab.words import listed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], ""),
        ([4], "4"),
        ([0.5, 2.0], "0.5 and 2"),
        ([1, 12, 4096], "1, 12 and 4,096"),
        ([262_144, 262_144, 262_144], "262,144"),
        ([7, 7, 9], "7, 7 and 9"),
    ],
)
def test_several_numbers_are_told_in_a_row_and_equal_ones_once(values: list[float], words: str) -> None:
    assert listed(values) == words
