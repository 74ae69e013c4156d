"""Numbers in words, English and German: the smallest translation that has to reorder.

German says the ones before the tens: "one hundred twenty three" is "ein hundert drei und zwanzig".
"""

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.data.sentence_pairs import SentencePairs
from regard.data.splits import split

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


def english(number: int, *, separated: bool = True) -> str:
    """`one hundred twenty three`; not separated, as it is spelled: `one hundred twenty-three`."""
    thousands, rest = divmod(_checked(number), 1000)
    words = [] if not thousands else [*_english_below(thousands, separated), "thousand"]
    return " ".join(words + _english_below(rest, separated) if rest or not thousands else words)


def german(number: int, *, separated: bool = True) -> str:
    """`ein hundert drei und zwanzig`; not separated, as it is spelled: `einhundertdreiundzwanzig`."""
    thousands, rest = divmod(_checked(number), 1000)
    words = [] if not thousands else [*_german_below(thousands, before=True), "tausend"]
    if rest or not thousands:
        words += _german_below(rest, before=False)
    return (" " if separated else "").join(words)


def number_pairs(first: int = 0, last: int = 9_999) -> SentencePairs:
    """English and German words of the numbers first .. last, both included."""
    if _checked(last) < _checked(first):
        raise ConfigError(f"numbers run from first={first} up to last={last}; last must not be smaller")
    numbers = range(first, last + 1)
    return SentencePairs(tuple(map(english, numbers)), tuple(map(german, numbers)))


def number_words(
    first: int = 0, last: int = 9_999, *, valid: int = 500, test: int = 500, seed: int = 0
) -> tuple[SentencePairs, SentencePairs, SentencePairs]:
    """Pairs to train on, to validate with and to test with; no number is in two of them."""
    pairs = number_pairs(first, last)
    train_set, valid_set, test_set = (pairs.chosen(part) for part in split(len(pairs), [valid, test], seed))
    return train_set, valid_set, test_set


def _checked(number: int) -> int:
    if check_integer("a number in words", number, 0) > LARGEST:
        raise ConfigError(f"numbers are said up to {LARGEST}, so {number} is too large")
    return number


def _english_below(number: int, separated: bool) -> list[str]:
    """The words of a number below a thousand."""
    hundreds, rest = divmod(number, 100)
    words = [ENGLISH[hundreds], "hundred"] if hundreds else []
    if rest < 20:
        return words + [ENGLISH[rest]] * (rest > 0 or not hundreds)
    tens = [ENGLISH_TENS[rest // 10 - 2], *[ENGLISH[rest % 10]] * (rest % 10 > 0)]
    return words + (tens if separated else ["-".join(tens)])


def _german_below(number: int, before: bool) -> list[str]:
    """The words of a number below a thousand. One is `eins` at the end and `ein` before anything."""
    hundreds, rest = divmod(number, 100)
    words = [_german_one(hundreds, before=True), "hundert"] if hundreds else []
    if rest < 20:
        return words + [_german_one(rest, before)] * (rest > 0 or not hundreds)
    ones = [_german_one(rest % 10, before=True), "und"] if rest % 10 else []
    return [*words, *ones, GERMAN_TENS[rest // 10 - 2]]


def _german_one(number: int, before: bool) -> str:
    return "ein" if number == 1 and before else GERMAN[number]
