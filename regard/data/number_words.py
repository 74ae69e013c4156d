"""The built-in translation data set: numbers in English and German words.

German puts the ones before the tens: "one hundred twenty three" is "ein hundert drei und zwanzig".
"""

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.data.sentence_pairs import SentencePairs
from regard.data.splits import random_split

LARGEST = 999_999
ENGLISH = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
ENGLISH_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
GERMAN = (
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    *("dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
GERMAN_TENS = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")


def english(number: int) -> str:
    """Return a number in English words, such as `one hundred twenty three`."""
    thousands, rest = divmod(_check_number(number), 1000)
    words = [] if not thousands else [*_english_below_1000(thousands), "thousand"]
    return " ".join(words + _english_below_1000(rest) if rest or not thousands else words)


def german(number: int) -> str:
    """Return a number in German words, such as `ein hundert drei und zwanzig`."""
    thousands, rest = divmod(_check_number(number), 1000)
    words = [] if not thousands else [*_german_below_1000(thousands, before=True), "tausend"]
    if rest or not thousands:
        words += _german_below_1000(rest, before=False)
    return " ".join(words)


def number_pairs(first: int = 0, last: int = 9_999) -> SentencePairs:
    """Return the numbers from first to last (inclusive) in English and German words.

    >>> number_pairs(21, 21).target
    ('ein und zwanzig',)
    """
    if _check_number(last) < _check_number(first):
        raise ConfigError(f"first={first} must not be larger than last={last}")
    numbers = range(first, last + 1)
    return SentencePairs(tuple(map(english, numbers)), tuple(map(german, numbers)))


def number_words(
    first: int = 0, last: int = 9_999, *, valid: int = 500, test: int = 500, seed: int = 0
) -> tuple[SentencePairs, SentencePairs, SentencePairs]:
    """Return random disjoint splits of `number_pairs`: train, validation and test.

    first  smallest number
    last   largest number (inclusive)
    valid  number of validation pairs
    test   number of test pairs

    >>> [len(part.source) for part in number_words(0, 999, valid=50, test=50)]
    [900, 50, 50]
    """
    pairs = number_pairs(first, last)
    train_set, valid_set, test_set = (pairs.select(part) for part in random_split(len(pairs), [valid, test], seed))
    return train_set, valid_set, test_set


def _check_number(number: int) -> int:
    if check_integer("a number in words", number, 0) > LARGEST:
        raise ConfigError(f"numbers in words are supported up to {LARGEST}, not {number}")
    return number


def _english_below_1000(number: int) -> list[str]:
    """Return the English words of a number below a thousand."""
    hundreds, rest = divmod(number, 100)
    words = [ENGLISH[hundreds], "hundred"] if hundreds else []
    if rest < 20:
        return words + [ENGLISH[rest]] * (rest > 0 or not hundreds)
    tens = [ENGLISH_TENS[rest // 10 - 2], *[ENGLISH[rest % 10]] * (rest % 10 > 0)]
    return words + tens


def _german_below_1000(number: int, before: bool) -> list[str]:
    """Return the German words of a number below a thousand.

    before  True if other words, such as `tausend`, follow. Then a final digit 1 is `ein`, otherwise `eins`
    """
    hundreds, rest = divmod(number, 100)
    words = [_german_digit(hundreds, before=True), "hundert"] if hundreds else []
    if rest < 20:
        return words + [_german_digit(rest, before)] * (rest > 0 or not hundreds)
    ones = [_german_digit(rest % 10, before=True), "und"] if rest % 10 else []
    return [*words, *ones, GERMAN_TENS[rest // 10 - 2]]


def _german_digit(number: int, before: bool) -> str:
    return "ein" if number == 1 and before else GERMAN[number]
