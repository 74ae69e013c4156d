"""Exercises on byte-pair encoding: counting pairs, merging them, learning merges, tokenising new words."""

from collections import Counter

from regard.work.exercises.checks import Case, check_outputs, check_type, run_checks
from regard.work.exercises.exercise import Exercise, ExerciseSet, PlantedMistake
from regard.work.exercises.solutions import byte_pairs as solutions

Words = dict[tuple[str, ...], int]
Pair = tuple[str, str]

RHYME = (
    "one for sorrow two for joy three for a girl four for a boy five for silver six for gold seven for a secret "
    "never to be told"
)
BANANA = "banana banana bananas anna aaa aaaa cabana can nab"

SETUP_CODE = f"""\
from collections import Counter
from itertools import pairwise

rhyme = (
    "{RHYME[:107]}"
    "{RHYME[107:]}"
)
words = {{tuple(word): times for word, times in Counter(rhyme.split()).items()}}
"""

ABOUT = """\
Byte-pair encoding starts from single letters and merges the most frequent pair of neighbours into a new symbol, again
and again. Frequent words become one token, rare words several tokens, and no word is ever unknown.

A text is given as its words and how often each occurs. A word is a tuple of symbols, at first its letters.
"""


def count_words(text: str) -> Words:
    return {tuple(word): times for word, times in Counter(text.split()).items()}


def _count_cases() -> list[Case]:
    half_merged = {("an", "an", "a"): 3, ("an", "a"): 2, ("n", "an"): 1, ("a",): 7}
    return [(count_words(RHYME),), (count_words(BANANA),), (half_merged,)]


def _merge_cases() -> list[Case]:
    return [
        (tuple("banana"), ("a", "n")),
        (tuple("aaaaa"), ("a", "a")),
        (("a", "ab", "c", "a", "b"), ("a", "b")),
        (("b", "a", "b", "a"), ("b", "a")),
        (("n", "a", "s", "a", "n"), ("a", "n")),
        (("x",), ("x", "y")),
        (tuple("aaa"), ("a", "a")),
    ]


def _long_symbol_cases() -> list[Case]:
    """The pair occurs in the text of longer symbols only, where nothing may be merged."""
    return [(("ab", "c"), ("b", "c")), (("b", "cd"), ("b", "c")), (("ab", "cd", "b", "c"), ("b", "c"))]


def _learn_cases() -> list[Case]:
    ties = count_words("zab zab aby aby bzz bzz")
    return [(count_words(RHYME), 7), (count_words(BANANA), 5), (ties, 3), ({("a", "b"): 2}, 4)]


def _rare_pair_cases() -> list[Case]:
    """Texts in which only pairs that occur once are left."""
    return [(count_words("abcd ab"), 5), (count_words("xyz"), 2)]


def _tokenise_cases() -> list[Case]:
    banana: list[Pair] = [("a", "n"), ("an", "a"), ("b", "ana"), ("a", "a")]
    learned = solutions.learn_merges(count_words(RHYME), 9)
    later: list[Pair] = [("b", "c"), ("a", "b"), ("ab", "c"), ("x", "y")]
    return [("bananana", banana), ("aaaaa", banana), ("forsake", learned), ("abcab", later), ("xyxy", later)]


def tokenise_longest_first(word: str, merges: list[Pair]) -> list[str]:
    """Wrong: takes the longest known symbol each time, from the left."""
    known = {"".join(pair) for pair in merges}
    tokens: list[str] = []
    while word:
        size = next(size for size in range(len(word), 0, -1) if size == 1 or word[:size] in known)
        tokens.append(word[:size])
        word = word[size:]
    return tokens


OVERLAPPING = {"at += 2": "at += 1 if symbols[at + 1 : at + 3] == pair else 2"}
FIRST_ONLY = {"at += 2": "return (*merged, *symbols[at + 2 :])"}
CHOICE = "min(counts, key=lambda pair: (-counts[pair], pair))"

BYTE_PAIRS = ExerciseSet(
    name="byte-pairs",
    title="Byte pairs",
    about=ABOUT,
    setup_code=SETUP_CODE,
    exercises=(
        Exercise(
            name="count",
            title="Counting pairs",
            prompt="""\
Write `count_pairs`: how often each pair of neighbours occurs in the text. A pair lies within one word, its order
matters, and a word that occurs five times counts five times.
""",
            solution=solutions.count_pairs,
            check=check_outputs(_count_cases),
            mistakes=(
                PlantedMistake(
                    "word frequency ignored",
                    "each word counts once, however often it occurs. Add its frequency, not 1.",
                    {"+ times": "+ 1"},
                ),
                PlantedMistake(
                    "pair counted once per word",
                    "a pair that occurs twice in a word counts twice, for example 'an' in 'banana'.",
                    {"in pairwise(symbols)": "in set(pairwise(symbols))"},
                ),
                PlantedMistake(
                    "pairs across words",
                    "you counted the last letter of a word and the first letter of the next as neighbours. Count each "
                    "word on its own.",
                    {
                        "int] = {}\n    # TODO: go": "int] = {}\n"
                        "    words = {sum((word * times for word, times in words.items()), ()): 1}\n    # TODO: go"
                    },
                ),
            ),
        ),
        Exercise(
            name="merge",
            title="Merging a pair",
            prompt="""\
Write `merge`: the symbols of a word with every occurrence of the pair merged into one symbol, from left to right. A
merged symbol cannot be used again: `merge(("a", "a", "a"), ("a", "a"))` is `("aa", "a")`.
""",
            solution=solutions.merge,
            check=run_checks(check_outputs(_merge_cases, _long_symbol_cases), check_type(tuple, _merge_cases)),
            mistakes=(
                PlantedMistake(
                    "overlapping merges",
                    "you used a symbol twice: 'a a a' became 'aa aa'. After a merge, continue after both symbols.",
                    OVERLAPPING,
                ),
                PlantedMistake(
                    "second symbol kept",
                    "the second symbol of the pair appears again after the merged one; step over two symbols.",
                    {"at += 2": "at += 1"},
                ),
                PlantedMistake(
                    "only the first pair",
                    "you merged only the first pair; continue to the end of the word.",
                    FIRST_ONLY,
                ),
                PlantedMistake(
                    "parts of symbols merged",
                    "you searched for the pair in the text of the word: 'ab c' became 'abc' by the pair 'b c', but no "
                    "symbol is 'b' there. Compare whole symbols.",
                    {"tuple(merged)": 'tuple(" ".join(symbols).replace(" ".join(pair), "".join(pair)).split(" "))'},
                ),
            ),
        ),
        Exercise(
            name="learn",
            title="Learning merges",
            prompt="""\
Write `learn_merges`: count the pairs, merge the most frequent one in every word, and repeat `merges` times or until no
pair is left. If several pairs are equally frequent, take the alphabetically first, `min` of the pairs. Return the pairs
in the order in which they were merged.
""",
            solution=solutions.learn_merges,
            check=check_outputs(_learn_cases, _rare_pair_cases),
            mistakes=(
                PlantedMistake(
                    "pairs not counted again",
                    "you counted the pairs once, at the start. Each merge makes new symbols: count again.",
                    {
                        "for _ in range(merges):\n        counts = count_pairs(words)": "counts = count_pairs(words)\n"
                        "    for _ in range(merges):",
                        "learned.append(pair)": "learned.append(pair)\n        del counts[pair]",
                    },
                ),
                PlantedMistake(
                    "ties to the alphabetically last",
                    "of equally frequent pairs you took the alphabetically last; take the first.",
                    {CHOICE: "max(counts, key=lambda pair: (counts[pair], pair))"},
                ),
                PlantedMistake(
                    "ties to the first found",
                    "of equally frequent pairs you took the one that came first in the text. Take the alphabetically "
                    "first, so that the order of the words does not matter.",
                    {CHOICE: "max(counts, key=lambda pair: counts[pair])"},
                ),
                PlantedMistake(
                    "word frequency ignored",
                    "each word counts once, however often it occurs.",
                    {"+ times": "+ 1"},
                ),
                PlantedMistake(
                    "pairs that occur once left out",
                    "you stopped when the most frequent pair occurred once. Continue until `merges` pairs are merged "
                    "or no pair is left.",
                    {"if not counts:": "if not counts or max(counts.values()) < 2:"},
                ),
            ),
        ),
        Exercise(
            name="tokenise",
            title="Tokenising new words",
            prompt="""\
Write `tokenise`: split a new word into letters, then apply the merges in the order in which they were learned, each
merge to the whole word.
""",
            solution=solutions.tokenise,
            check=check_outputs(_tokenise_cases),
            mistakes=(
                PlantedMistake(
                    "longest symbol first",
                    "you took the longest known symbol each time. Byte-pair encoding follows the order of learning, "
                    "which can split a word differently.",
                    tokenise_longest_first,
                ),
                PlantedMistake(
                    "merges in the wrong order",
                    "you applied the last merge first; begin with the first merge that was learned.",
                    {"for pair in merges:": "for pair in merges[::-1]:"},
                ),
                PlantedMistake(
                    "each merge applied once",
                    "a merge stopped after its first pair; apply it to the whole word.",
                    FIRST_ONLY,
                ),
                PlantedMistake(
                    "overlapping merges",
                    "one merge used a symbol twice; your `merge` steps over one symbol instead of two.",
                    OVERLAPPING,
                ),
            ),
        ),
    ),
)
