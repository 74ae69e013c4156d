"""Numbers in words, checked by examples and by reading them back."""

import pytest

from regard.base.errors import ConfigError
from regard.data.number_words import english, german, number_pairs, number_words

SAID = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    12: ("twelve", "zwölf"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty one", "ein und zwanzig"),
    30: ("thirty", "dreißig"),
    77: ("seventy seven", "sieben und siebzig"),
    100: ("one hundred", "ein hundert"),
    101: ("one hundred one", "ein hundert eins"),
    111: ("one hundred eleven", "ein hundert elf"),
    123: ("one hundred twenty three", "ein hundert drei und zwanzig"),
    200: ("two hundred", "zwei hundert"),
    1000: ("one thousand", "ein tausend"),
    1001: ("one thousand one", "ein tausend eins"),
    21_000: ("twenty one thousand", "ein und zwanzig tausend"),
    101_000: ("one hundred one thousand", "ein hundert ein tausend"),
    999_999: (
        "nine hundred ninety nine thousand nine hundred ninety nine",
        "neun hundert neun und neunzig tausend neun hundert neun und neunzig",
    ),
}
ONES = ["null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
STEMS = ["zwan", "drei", "vier", "fünf", "sech", "sieb", "acht", "neun"]
TEENS = {f"{stem}zehn": value for value, stem in enumerate(STEMS[1:], 13)}
TENS = {stem: 10 * value for value, stem in enumerate(STEMS, 2)}


@pytest.mark.parametrize("number", SAID)
def test_numbers_in_words(number: int) -> None:
    assert (english(number), german(number)) == SAID[number]


def heard(words: list[str]) -> int:
    """German words read back by other rules than those that wrote them."""
    if "tausend" in words:
        place = words.index("tausend")
        return 1000 * heard(words[:place]) + (heard(words[place + 1 :]) if words[place + 1 :] else 0)
    if "hundert" in words:
        place = words.index("hundert")
        return 100 * heard(words[:place]) + (heard(words[place + 1 :]) if words[place + 1 :] else 0)
    if "und" in words:
        one, _, ten = words
        return heard([one]) + heard([ten])
    (word,) = words
    if word == "eins":
        return 1
    if word in ONES:
        return ONES.index(word)
    return TEENS[word] if word in TEENS else TENS[word.removesuffix("zig").removesuffix("ßig")]


def test_german_words_can_be_parsed() -> None:
    for number in [*range(2000), *range(2003, 999_999, 7919)]:
        assert heard(german(number).split()) == number


def test_different_numbers_have_different_words() -> None:
    assert len({english(number) for number in range(3_000)}) == 3_000
    assert len({german(number) for number in range(3_000)}) == 3_000


def test_the_splits_share_no_number() -> None:
    parts = number_words(5, 1_004, valid=70, test=30, seed=3)
    assert [len(part) for part in parts] == [900, 70, 30]
    everything = [pair for part in parts for pair in zip(part.source, part.target, strict=True)]
    pairs = number_pairs(5, 1_004)
    assert sorted(everything) == sorted(zip(pairs.source, pairs.target, strict=True))
    assert number_words(5, 1_004, valid=70, test=30, seed=3) == parts
    assert number_words(5, 1_004, valid=70, test=30, seed=4) != parts


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"numbers in words are supported up to 999999, not 1000000"):
        german(1_000_000)
    with pytest.raises(ConfigError, match=r"a number in words is -1, but must be at least 0"):
        english(-1)
    with pytest.raises(ConfigError, match=r"first=9 must not be larger than last=7"):
        number_pairs(9, 7)
