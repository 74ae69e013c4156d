"""What does byte-pair encoding do to a text?

Claim: The encoded text has fewer tokens from a larger vocabulary. Each merge adds one token to the vocabulary and
    shortens the text by the number of pairs it merges; the first merges save most, and merging ends when no pair occurs
    twice. Encoding is lossless. Merges computed step by step equal those of the `tokenizers` library.
Measures: A nursery rhyme of 1755 as bytes, split into words. The most common pair of neighbours is merged again and
    again, by our own code and by the library. The number of tokens after each merge. This rhyme, another one and random
    texts, encoded and decoded.
Finding: {{ n.merges }} merges ({{ n["merges equal to the library"] }} equal those of the library) reduce {{ n.tokens[0]
    }} tokens to {{ n.tokens[-1] }} ({{ n.words }} words): the first merge saves {{ n["pairs merged"][0] }}, the last {{
    n["pairs merged"][-1] }}. {{ n["texts decoded without loss"] }} of {{ n.texts }} texts are decoded without loss, and
    {{ n["texts encoded like the library"] }} are encoded as by the library. A token has {{ n["bytes per
    token"]["training rhyme"]|fixed }} bytes on average in this text and {{ n["bytes per token"]["another rhyme"]|fixed
    }} in another.
Budget: 3 seconds
Source: 003, notebook 12.3
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from regard.base.errors import ConfigError
from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.drawing import Figure, make_figure, mark_level, plot_lines
from regard.lab.verdict import Decision, Numbers, decide

MATHS = (
    r"(a, b) = \mathrm{argmax}_{(x, y)} \sum_i [t_i = x, t_{i+1} = y], \quad a b \to c, \quad "
    r"N \to N - n_{ab}, \quad V \to V + 1"
)

JACK = """This is the house that Jack built.
This is the malt that lay in the house that Jack built.
This is the rat that ate the malt that lay in the house that Jack built.
This is the cat that killed the rat that ate the malt that lay in the house that Jack built.
This is the dog that worried the cat that killed the rat that ate the malt that lay in the house that Jack built."""
MARY = "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go."
WORD = r"[ \n]*[^ \n]+|[ \n]+"  # with the spaces before it

Word = list[int]
Pair = tuple[int, int]
Merge = Callable[[Word, Pair, int], Word]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the claim: the texts, and the number of byte-pair merges.

    text    the text that merges are learned from
    other   another text to encode
    merges  largest number of merges
    texts   number of random texts to encode
    """

    text: str = JACK
    other: str = MARY
    merges: int = 200
    texts: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("merges", self.merges, 1)
        check_integer("texts", self.texts, 1)
        if _most_common_pair(Counter(tuple(word) for word in _split_words(self.text)))[1] < 2:
            raise ConfigError(
                "text must have a pair of letters twice in its words, so that there is something to merge"
            )
        if not self.other:
            raise ConfigError("other must not be empty")


def merge_pair(word: Word, pair: Pair, token: int) -> Word:
    """Return the word with every occurrence of the pair replaced by the token, from left to right."""
    found: Word = []
    at = 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            found.append(token)
            at += 2
        else:
            found.append(word[at])
            at += 1
    return found


def run(setup: Setup, merge: Merge = merge_pair) -> Numbers:
    """Run this lab claim's experiment and return the measured numbers by name.

    merge  returns a word with a pair replaced by a token: merge(word, pair, token)
    """
    words = Counter(tuple(word) for word in _split_words(setup.text))
    table: dict[Pair, int] = {}
    lengths, saved = [_count_tokens(words)], []
    for _ in range(setup.merges):
        pair, count = _most_common_pair(words)
        if count < 2:
            break
        saved.append(count)
        table[pair] = 256 + len(table)
        words = _merge_all(words, pair, table[pair], merge)
        lengths.append(_count_tokens(words))
    library = _LibraryEncoder(setup.text, 256 + len(table))
    spelled = _token_bytes(table)
    texts = [setup.text, setup.other, *_random_texts(setup)]
    coded = [_encode(text, table, merge) for text in texts]
    return {
        "bytes": len(setup.text.encode()),
        "words": len(_split_words(setup.text)),
        "merges": len(table),
        "merges equal to the library": sum(
            (spelled[a], spelled[b]) == theirs for (a, b), theirs in zip(table, library.merges, strict=False)
        ),
        "merges of the library": len(library.merges),
        "texts encoded like the library": sum(
            mine == library.code(text) for mine, text in zip(coded, texts, strict=True)
        ),
        "texts decoded without loss": sum(
            b"".join(spelled[token] for token in tokens) == text.encode()
            for tokens, text in zip(coded, texts, strict=True)
        ),
        "texts": len(texts),
        "vocabulary": [256 + number for number in range(len(lengths))],
        "tokens": lengths,
        "pairs merged": saved,
        "bytes per token": {
            name: len(text.encode()) / len(tokens)
            for name, text, tokens in zip(("training rhyme", "another rhyme"), texts, coded, strict=False)
        },
        "longest tokens": [
            spelled[token].decode(errors="replace") for token in sorted(spelled, key=lambda t: -len(spelled[t]))[:5]
        ],
    }


def _split_words(text: str) -> list[bytes]:
    return re.findall(WORD.encode(), text.encode())


def _count_tokens(words: Counter[tuple[int, ...]]) -> int:
    return sum(len(word) * count for word, count in words.items())


def _most_common_pair(words: Counter[tuple[int, ...]]) -> tuple[Pair, int]:
    """Return the most common pair of adjacent tokens and its count.

    Of equally common pairs, the pair with the lowest token ids is returned. Without pairs the count is 0.
    """
    pairs: Counter[Pair] = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    return min(pairs.items(), key=lambda item: (-item[1], item[0]), default=((0, 0), 0))


def _merge_all(words: Counter[tuple[int, ...]], pair: Pair, token: int, merge: Merge) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for word, count in words.items():
        found[tuple(merge(list(word), pair, token))] += count
    return found


def _encode(text: str, table: dict[Pair, int], merge: Merge) -> Word:
    """Return the tokens of a text: its bytes after all merges, applied in the order in which they were learned."""
    found: Word = []
    for each in _split_words(text):
        word = list(each)
        for pair, token in table.items():
            word = merge(word, pair, token)
        found += word
    return found


def _token_bytes(table: dict[Pair, int]) -> dict[int, bytes]:
    """Return the bytes that each token represents, by token id."""
    found = {byte: bytes([byte]) for byte in range(256)}
    for (a, b), token in table.items():
        found[token] = found[a] + found[b]
    return found


class _LibraryEncoder:
    """Byte-pair encoding by the `tokenizers` library, for comparison.

    The library works on characters, so each UTF-8 byte is passed as the character with the same number (Latin-1).
    Its merges are then byte-pair merges like ours.
    """

    def __init__(self, text: str, vocab: int) -> None:
        import json

        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, min_frequency=2, initial_alphabet=list(map(chr, range(256))), show_progress=False
        )
        self.tokenizer.train_from_iterator([_to_characters(text)], trainer)
        found: Sequence[Sequence[str]] = json.loads(self.tokenizer.to_str())["model"]["merges"]
        self.merges = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in found]

    def code(self, text: str) -> Word:
        return list(self.tokenizer.encode(_to_characters(text)).ids)


def _to_characters(text: str) -> str:
    return text.encode().decode("latin-1")


def _random_texts(setup: Setup) -> list[str]:
    """Sample texts of 60 characters, alternately from Unicode below U+D800 and from the training text."""
    draws = make_generator(setup.seed)
    letters = sorted(set(setup.text))
    found = []
    for number in range(setup.texts):
        places = torch.randint(len(letters) if number % 2 else 0xD800, (60,), generator=draws).tolist()
        found.append("".join(letters[place] if number % 2 else chr(place) for place in places))
    return found


SMOKE = Setup(texts=20)


def verdict(numbers: Numbers) -> Decision:
    saved, rate, texts = numbers["pairs merged"], numbers["bytes per token"], numbers["texts"]
    same = numbers["merges"] == numbers["merges of the library"] == numbers["merges equal to the library"]
    same &= numbers["texts encoded like the library"] == numbers["texts decoded without loss"] == texts
    exact = [before - after for before, after in pairwise(numbers["tokens"])] == saved
    falling = saved == sorted(saved, reverse=True)
    return decide(
        same and exact and falling and rate["training rhyme"] > rate["another rhyme"] > 1,
        missing="no pair that was merged is in the other text" * (rate["another rhyme"] == 1 < rate["training rhyme"]),
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    plot_lines(left, numbers["vocabulary"], {"tokens": numbers["tokens"]}, markevery=10)
    mark_level(left, numbers["words"], "words")
    left.set(xlabel="vocabulary", ylabel="tokens of the text", title="More merges, fewer tokens", ylim=(0, None))
    plot_lines(right, range(1, len(numbers["pairs merged"]) + 1), {"pairs": numbers["pairs merged"]}, markevery=10)
    right.set(xlabel="merge", ylabel="pairs merged", title="The first merges save most")
    return figure
