"""Byte pairs on a rhyme: counting neighbours, merging them, learning a vocabulary, cutting new words."""

from collections.abc import Iterable
from itertools import pairwise

from regard.work.exercises.checks import Case, by_answers, of_kind, one_after_the_other
from regard.work.exercises.exercise import Exercise, Exercises, PlantedMistake
from regard.work.exercises.solutions import byte_pairs as solutions

Words = dict[tuple[str, ...], int]
Pair = tuple[str, str]

RHYME = (
    "one for sorrow two for joy three for a girl four for a boy five for silver six for gold seven for a secret "
    "never to be told"
)

GIVEN = f"""\
from collections import Counter
from itertools import pairwise

rhyme = (
    "{RHYME[:107]}"
    "{RHYME[107:]}"
)
words = {{tuple(word): times for word, times in Counter(rhyme.split()).items()}}
"""

ABOUT = """\
Byte-pair encoding starts from single letters and merges the commonest pair of neighbours into a new symbol, again and
again. Common words end up as one token, rare ones as several, and nothing is ever unknown.

A text is given as its words and how often each occurs; a word is a tuple of symbols, at first its letters.
"""


def counted(text: str) -> Words:
    words: Words = {}
    for word in text.split():
        words[tuple(word)] = words.get(tuple(word), 0) + 1
    return words


BANANA = "banana banana bananas anna aaa aaaa cabana can nab"
TIES = "zab zab aby aby bzz bzz"


def _texts() -> list[Case]:
    half = {("an", "an", "a"): 3, ("an", "a"): 2, ("n", "an"): 1, ("a",): 7}
    return [(counted(RHYME),), (counted(BANANA),), (half,)]


def _merges() -> list[Case]:
    return [
        (tuple("banana"), ("a", "n")),
        (tuple("aaaaa"), ("a", "a")),
        (("a", "ab", "c", "a", "b"), ("a", "b")),
        (("b", "a", "b", "a"), ("b", "a")),
        (("n", "a", "s", "a", "n"), ("a", "n")),
        (("x",), ("x", "y")),
        (tuple("aaa"), ("a", "a")),
    ]


def _within_symbols() -> list[Case]:
    """Pairs that stand in the text of longer symbols, where there is nothing to merge."""
    return [(("ab", "c"), ("b", "c")), (("b", "cd"), ("b", "c")), (("ab", "cd", "b", "c"), ("b", "c"))]


def _lessons() -> list[Case]:
    return [(counted(RHYME), 7), (counted(BANANA), 5), (counted(TIES), 3), ({("a", "b"): 2}, 4)]


def _rare_pairs() -> list[Case]:
    """Texts in which pairs are left that occur once."""
    return [(counted("abcd ab"), 5), (counted("xyz"), 2)]


def _tokenised() -> list[Case]:
    banana: list[Pair] = [("a", "n"), ("an", "a"), ("b", "ana"), ("a", "a")]
    learned = solutions.learn_merges(counted(RHYME), 9)
    later: list[Pair] = [("b", "c"), ("a", "b"), ("ab", "c"), ("x", "y")]
    return [("bananana", banana), ("aaaaa", banana), ("forsake", learned), ("abcab", later), ("xyxy", later)]


def _pairs(
    words: Words, *, times: bool = True, ordered: bool = True, once: bool = False, apart: bool = True
) -> dict[Pair, int]:
    """Counts with one thing wrong."""
    counts: dict[Pair, int] = {}
    for symbols, often in words.items():
        pairs: Iterable[Pair] = list(pairwise(symbols))
        if once:
            pairs = set(pairs)
        if not apart:
            pairs = _without_overlap(pairs)
        for pair in pairs:
            key = pair if ordered else (min(pair), max(pair))
            counts[key] = counts.get(key, 0) + (often if times else 1)
    return counts


def _without_overlap(pairs: Iterable[Pair]) -> list[Pair]:
    kept: list[Pair] = []
    skip = False
    for pair in pairs:
        skip = not skip and bool(kept) and kept[-1] == pair and pair[0] == pair[1]
        if not skip:
            kept.append(pair)
    return kept


def _across(words: Words) -> dict[Pair, int]:
    """Counts that go on from the end of a word to the next."""
    return solutions.count_pairs({tuple(symbol for word in words for symbol in word * words[word]): 1})


def _overlapping(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """Each pair found is merged, though its first symbol was the last of the one before."""
    merged: list[str] = []
    for at, symbol in enumerate(symbols):
        if symbols[at : at + 2] == pair:
            merged.append("".join(pair))
        elif at == 0 or symbols[at - 1 : at + 1] != pair:
            merged.append(symbol)
    return tuple(merged)


def _from_the_right(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    merged: list[str] = []
    at = len(symbols)
    while at > 0:
        found = symbols[max(at - 2, 0) : at] == pair
        merged.insert(0, "".join(pair) if found else symbols[at - 1])
        at -= 1 + found
    return tuple(merged)


def _first_only(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    for at in range(len(symbols) - 1):
        if symbols[at : at + 2] == pair:
            return (*symbols[:at], "".join(pair), *symbols[at + 2 :])
    return symbols


def _either_way(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        found = symbols[at : at + 2] in (pair, pair[::-1])
        merged.append("".join(symbols[at : at + 2]) if found else symbols[at])
        at += 1 + found
    return tuple(merged)


def _in_the_text(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """The symbols written with spaces between them, and the pair replaced in that text."""
    return tuple(" ".join(symbols).replace(" ".join(pair), "".join(pair)).split(" "))


def _doubled(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """The merged symbol is written, and the second of the pair again after it."""
    merged: list[str] = []
    for at, symbol in enumerate(symbols):
        merged.append("".join(pair) if symbols[at : at + 2] == pair else symbol)
    return tuple(merged)


def _learned(words: Words, merges: int, *, last: bool = False, stale: bool = False, rarest: bool = False,
             times: bool = True, first: bool = False, least: int = 1) -> list[Pair]:  # fmt: skip
    """Merges learned with one thing wrong."""
    learned: list[Pair] = []
    counts = _pairs(words, times=times)
    while len(learned) < merges and counts:
        best = (min if rarest else max)(counts.values())
        if best < least:
            break
        equal = [pair for pair in counts if counts[pair] == best]
        pair = equal[0] if first else max(equal) if last else min(equal)
        learned.append(pair)
        if stale:
            del counts[pair]
            continue
        joined: Words = {}
        for symbols, often in words.items():
            left = solutions.merge(symbols, pair)
            joined[left] = joined.get(left, 0) + often
        words, counts = joined, _pairs(joined, times=times)
    return learned


def _longest(word: str, merges: list[Pair]) -> list[str]:
    """The longest known symbol each time, from the left."""
    known = {"".join(pair) for pair in merges}
    tokens: list[str] = []
    while word:
        size = next(size for size in range(len(word), 0, -1) if size == 1 or word[:size] in known)
        tokens.append(word[:size])
        word = word[size:]
    return tokens


def _reversed(word: str, merges: list[Pair]) -> list[str]:
    return solutions.tokenise(word, merges[::-1])


def _once_each(word: str, merges: list[Pair]) -> list[str]:
    symbols = tuple(word)
    for pair in merges:
        symbols = _first_only(symbols, pair)
    return list(symbols)


def _joined(word: str, merges: list[Pair]) -> list[str]:
    symbols = tuple(word)
    for pair in merges:
        symbols = _overlapping(symbols, pair)
    return list(symbols)


BYTE_PAIRS = Exercises(
    name="byte-pairs",
    title="Byte pairs",
    about=ABOUT,
    given=GIVEN,
    tasks=(
        Exercise(
            name="count",
            title="Counting pairs",
            prompt="""\
Write `count_pairs`: how often each pair of neighbours occurs in the text. A pair lies within one word, its order
counts, and a word that occurs five times counts five times.
""",
            starter='''\
def count_pairs(words: dict[tuple[str, ...], int]) -> dict[tuple[str, str], int]:
    """How often each pair of neighbours occurs; a word counts as often as it is in the text."""
    counts: dict[tuple[str, str], int] = {}
    # TODO: go through the pairs of neighbours of each word
    raise NotImplementedError
''',
            solution=solutions.count_pairs,
            check=by_answers(_texts),
            slips=(
                PlantedMistake(
                    "frequency of words forgotten",
                    "each word counts once, however often it occurs: add its number, not 1.",
                    lambda words: _pairs(words, times=False),
                ),
                PlantedMistake(
                    "a pair counted once a word",
                    "a pair that occurs twice in a word counts twice: 'an' in 'banana'.",
                    lambda words: _pairs(words, once=True),
                ),
                PlantedMistake(
                    "order of the pair lost",
                    "'ab' and 'ba' were counted as one pair; keep the order.",
                    lambda words: _pairs(words, ordered=False),
                ),
                PlantedMistake(
                    "pairs across words",
                    "the last letter of a word and the first of the next were counted as neighbours; words stand "
                    "alone.",
                    _across,
                ),
                PlantedMistake(
                    "overlapping pairs left out",
                    "'aaa' has two pairs of neighbours, though only one can be merged; count both.",
                    lambda words: _pairs(words, apart=False),
                ),
            ),
        ),
        Exercise(
            name="merge",
            title="Merging a pair",
            prompt="""\
Write `merge`: the symbols of a word with every such pair made one symbol, from left to right. A symbol that has been
merged is used up: `merge(("a", "a", "a"), ("a", "a"))` is `("aa", "a")`.
""",
            starter='''\
def merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The symbols with every such pair made one, from left to right, no symbol used twice."""
    merged: list[str] = []
    at = 0
    # TODO: go along; step over two symbols where the pair is found, else over one
    raise NotImplementedError
''',
            solution=solutions.merge,
            check=one_after_the_other(by_answers(_merges, _within_symbols), of_kind(tuple, _merges)),
            slips=(
                PlantedMistake(
                    "merges that overlap",
                    "a symbol was used twice: 'a a a' became 'aa aa'. After a merge go on behind both symbols.",
                    _overlapping,
                ),
                PlantedMistake(
                    "second symbol kept",
                    "the second symbol of the pair stands there again after the merged one; step over two.",
                    _doubled,
                ),
                PlantedMistake(
                    "only the first pair",
                    "only the first pair was merged; go on to the end of the word.",
                    _first_only,
                ),
                PlantedMistake(
                    "merges from the right",
                    "pairs were merged from right to left: 'a a a' became 'a aa' instead of 'aa a'.",
                    _from_the_right,
                ),
                PlantedMistake(
                    "either order merged",
                    "the pair was merged the other way round as well; 'b a' is not 'a b'.",
                    _either_way,
                ),
                PlantedMistake(
                    "parts of symbols merged",
                    "the pair was looked for in the text of the word: 'ab c' became 'abc' by the pair 'b c', though "
                    "no symbol is 'b' there. Compare whole symbols.",
                    _in_the_text,
                ),
            ),
        ),
        Exercise(
            name="learn",
            title="Learning merges",
            prompt="""\
Write `learn_merges`: count, merge the commonest pair in every word, and again, as often as asked or until no pair is
left. Of pairs that are equally common take the first in the alphabet, `min` of the pairs. Return the pairs in the order
in which they were merged.
""",
            starter='''\
def learn_merges(words: dict[tuple[str, ...], int], merges: int) -> list[tuple[str, str]]:
    """The pairs that were merged, in order: always the commonest, of equals the first in the alphabet."""
    learned: list[tuple[str, str]] = []
    # TODO: count_pairs, choose, merge in every word, count anew
    raise NotImplementedError
''',
            solution=solutions.learn_merges,
            check=by_answers(_lessons, _rare_pairs),
            slips=(
                PlantedMistake(
                    "pairs not counted anew",
                    "the pairs were counted once, at the start. After each merge there are new symbols: count again.",
                    lambda words, merges: _learned(words, merges, stale=True),
                ),
                PlantedMistake(
                    "ties to the last of the alphabet",
                    "of equally common pairs the last of the alphabet was taken; take the first.",
                    lambda words, merges: _learned(words, merges, last=True),
                ),
                PlantedMistake(
                    "ties to the first found",
                    "of equally common pairs the one that was met first was taken; take the first of the alphabet, so "
                    "that the order of words does not matter.",
                    lambda words, merges: _learned(words, merges, first=True),
                ),
                PlantedMistake(
                    "the rarest pair merged",
                    "the rarest pair was merged; take the commonest.",
                    lambda words, merges: _learned(words, merges, rarest=True),
                ),
                PlantedMistake(
                    "frequency of words forgotten",
                    "each word counted once, however often it occurs.",
                    lambda words, merges: _learned(words, merges, times=False),
                ),
                PlantedMistake(
                    "pairs that occur once left out",
                    "learning stopped where the commonest pair occurs once; go on as often as asked, or until no pair "
                    "is left.",
                    lambda words, merges: _learned(words, merges, least=2),
                ),
            ),
        ),
        Exercise(
            name="tokenise",
            title="Cutting new words",
            prompt="""\
Write `tokenise`: a new word is cut into letters, which are then merged in the order in which the merges were learned,
each merge through the whole word.
""",
            starter='''\
def tokenise(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The tokens of a word: its letters, merged in the order in which merges were learned."""
    symbols = tuple(word)
    # TODO: every merge in its turn
    raise NotImplementedError
''',
            solution=solutions.tokenise,
            check=by_answers(_tokenised),
            slips=(
                PlantedMistake(
                    "longest symbol first",
                    "the longest known symbol was taken each time. Byte pairs follow the order of learning, which can "
                    "cut otherwise.",
                    _longest,
                ),
                PlantedMistake(
                    "merges in the wrong order",
                    "the last merge was applied first; begin with the first that was learned.",
                    _reversed,
                ),
                PlantedMistake(
                    "each merge applied once",
                    "a merge stopped after its first pair; it goes through the whole word.",
                    _once_each,
                ),
                PlantedMistake(
                    "merges that overlap",
                    "a symbol was used twice by one merge; your `merge` steps over one symbol instead of two.",
                    _joined,
                ),
            ),
        ),
    ),
)
