"""Checks of the exercises on byte-pair encoding: counting pairs, merging, learning merges, tokenising new words."""

from collections import Counter

import numpy as np

from regard.work.exercises.checks import Case, FunctionCheck
from regard.work.exercises.exercise import load_set
from regard.work.exercises.solutions.byte_pairs import learn_merges

Words = dict[tuple[str, ...], int]
Pair = tuple[str, str]
RHYME = (
    "one for sorrow two for joy three for a girl four for a boy five for silver six for gold seven for a secret "
    "never to be told"
)
BANANA = "banana banana bananas anna aaa aaaa cabana can nab"


def count_words(text: str) -> Words:
    """Count the words of a text; return the counts by word, where a word is a tuple of letters."""
    return {tuple(word): times for word, times in Counter(text.split()).items()}


def _draw_text(generator: np.random.Generator) -> str:
    """Sample a text of words with four different letters, so that pairs are frequent and often equally frequent."""
    words = ("".join(generator.choice(list("abnz"), size=generator.integers(2, 7))) for _ in range(12))
    return " ".join(words)


def _count_cases(generator: np.random.Generator) -> list[Case]:
    half_merged = {("an", "an", "a"): 3, ("an", "a"): 2, ("n", "an"): 1, ("a",): 7}
    texts = (RHYME, BANANA, _draw_text(generator))
    return [*((count_words(text),) for text in texts), (half_merged,)]


def _merge_cases(generator: np.random.Generator) -> list[Case]:
    return [
        (tuple("banana"), ("a", "n")),
        (tuple("aaaaa"), ("a", "a")),
        (("a", "ab", "c", "a", "b"), ("a", "b")),
        (("b", "a", "b", "a"), ("b", "a")),
        (("n", "a", "s", "a", "n"), ("a", "n")),
        (("x",), ("x", "y")),
        (tuple("aaa"), ("a", "a")),
        (tuple(generator.choice(list("ab"), size=11).tolist()), ("a", "b")),
    ]


def _long_symbol_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases of merging a pair whose letters occur only inside longer symbols, which must not be merged.

    A case is the symbols of a word and the pair. In the last case the pair itself occurs too.
    """
    return [(("ab", "c"), ("b", "c")), (("b", "cd"), ("b", "c")), (("ab", "cd", "b", "c"), ("b", "c"))]


def _learn_cases(generator: np.random.Generator) -> list[Case]:
    texts = ((RHYME, 7), (BANANA, 5), ("zab zab aby aby bzz bzz", 3), (_draw_text(generator), 4))
    return [*((count_words(text), merges) for text, merges in texts), ({("a", "b"): 2}, 4)]


def _rare_pair_cases(generator: np.random.Generator) -> list[Case]:
    """Return test cases in which merging reaches a point where every pair occurs only once."""
    return [(count_words("abcd ab"), 5), (count_words("xyz"), 2)]


def _tokenise_cases(generator: np.random.Generator) -> list[Case]:
    banana: list[Pair] = [("a", "n"), ("an", "a"), ("b", "ana"), ("a", "a")]
    learned, drawn = (learn_merges(count_words(text), 9) for text in (RHYME, _draw_text(generator)))
    later: list[Pair] = [("b", "c"), ("a", "b"), ("ab", "c"), ("x", "y")]
    word = "".join(generator.choice(list("abnz"), size=9))
    return [
        ("bananana", banana),
        ("aaaaa", banana),
        ("forsake", learned),
        ("abcab", later),
        ("xyxy", later),
        (word, drawn),
    ]


BYTE_PAIRS = load_set(
    "byte-pairs",
    {
        "count": FunctionCheck((_count_cases,)),
        "merge": FunctionCheck((_merge_cases, _long_symbol_cases), kind=tuple),
        "learn": FunctionCheck((_learn_cases, _rare_pair_cases)),
        "tokenise": FunctionCheck((_tokenise_cases,)),
    },
)
