"""Error rates of speech recognition: edit distance, token error rate (word error rate), sequence accuracy."""

from collections.abc import Iterator, Sequence

from regard.data.digit_strings import DigitStrings


def token_error_rate(recognized: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """Return the token error rate, which is the word error rate (WER) if every token is a word.

    The rate is the edit distance between the recognised tokens and the labels of `sounds`, divided by the number of
    labels, over all sounds together.
    """
    pairs = list(_pairs(recognized, sounds))
    return sum(edit_distance(found, label) for found, label in pairs) / sum(len(label) for _, label in pairs)


def sequence_accuracy(recognized: Sequence[Sequence[int]], sounds: DigitStrings) -> float:
    """Return the fraction of sounds whose digits are all correct."""
    return sum(list(found) == label for found, label in _pairs(recognized, sounds)) / len(sounds)


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the edit distance: the fewest insertions, deletions and substitutions that turn `one` into `other`.

    Levenshtein 1966.

    >>> edit_distance([1, 2, 3], [1, 3, 4])
    2
    """
    row = list(range(len(other) + 1))
    for i, item in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (item != wanted))
    return row[-1]


def _pairs(recognized: Sequence[Sequence[int]], sounds: DigitStrings) -> Iterator[tuple[Sequence[int], list[int]]]:
    return zip(recognized, (label.tolist() for label in sounds.labels), strict=True)
