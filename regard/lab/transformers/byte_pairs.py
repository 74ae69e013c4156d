"""What do byte pairs make of a text?

Claim: Ever fewer tokens of an ever larger vocabulary. Each merge adds one token and shortens the text by as many as
    there were pairs to merge, the first ones most; it ends when no pair stands there twice. No text loses anything.
    Merges counted by hand are those of the `tokenizers` library, token for token.
Measures: A nursery rhyme of 1755 as bytes, cut into words; the commonest pair of neighbours merged again and again, by
    hand and by the library; tokens after each merge; this rhyme, another one and random texts coded and decoded.
Budget: 3 seconds
Source: 003, notebook 12.3
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from regard.base.seeds import make_generator
from regard.base.validation import check_integer
from regard.lab.claim import Numbers, Verdict, decide
from regard.lab.drawing import Figure, make_figure, plot_lines

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
WORD = r"[ \n]*[^ \n]+|[ \n]+"  # with the blanks before it

Word = list[int]
Pair = tuple[int, int]
Merge = Callable[[Word, Pair, int], Word]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The text to learn from, another one, how often to merge at most, and random texts to code."""

    text: str = JACK
    other: str = MARY
    merges: int = 200
    texts: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("merges", self.merges, 1)
        check_integer("texts", self.texts, 1)


SMOKE = Setup(texts=20)


def merged(word: Word, pair: Pair, token: int) -> Word:
    """The word with every occurrence of the pair replaced, from the left, so that none overlap."""
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


def run(setup: Setup, merge: Merge = merged) -> Numbers:
    """merge  replaces a pair in a word by a token"""
    words = Counter(tuple(word) for word in _words(setup.text))
    table: dict[Pair, int] = {}
    lengths, saved = [_length(words)], []
    for _ in range(setup.merges):
        pair, count = _commonest(words)
        if count < 2:
            break
        saved.append(count)
        table[pair] = 256 + len(table)
        words = _merged(words, pair, table[pair], merge)
        lengths.append(_length(words))
    library = _Library(setup.text, 256 + len(table))
    spelled = _spelled(table)
    texts = [setup.text, setup.other, *_random_texts(setup)]
    coded = [_coded(text, table, merge) for text in texts]
    return {
        "bytes": len(setup.text.encode()),
        "words": len(_words(setup.text)),
        "merges": len(table),
        "merges as the library": sum(
            (spelled[a], spelled[b]) == theirs for (a, b), theirs in zip(table, library.merges, strict=False)
        ),
        "merges of the library": len(library.merges),
        "texts coded as by the library": sum(
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
        "bytes a token": {
            name: len(text.encode()) / len(tokens)
            for name, text, tokens in zip(("learned from", "another rhyme"), texts, coded, strict=False)
        },
        "longest tokens": [
            spelled[token].decode(errors="replace") for token in sorted(spelled, key=lambda t: -len(spelled[t]))[:5]
        ],
    }


def _words(text: str) -> list[bytes]:
    return re.findall(WORD.encode(), text.encode())


def _length(words: Counter[tuple[int, ...]]) -> int:
    return sum(len(word) * count for word, count in words.items())


def _commonest(words: Counter[tuple[int, ...]]) -> tuple[Pair, int]:
    """The commonest pair of neighbours and how often it is there; of equally common ones that of the lowest tokens."""
    pairs: Counter[Pair] = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    return min(pairs.items(), key=lambda item: (-item[1], item[0]), default=((0, 0), 0))


def _merged(words: Counter[tuple[int, ...]], pair: Pair, token: int, merge: Merge) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for word, count in words.items():
        found[tuple(merge(list(word), pair, token))] += count
    return found


def _coded(text: str, table: dict[Pair, int], merge: Merge) -> Word:
    """The tokens of a text: merges in the order in which they were learned."""
    found: Word = []
    for each in _words(text):
        word = list(each)
        for pair, token in table.items():
            word = merge(word, pair, token)
        found += word
    return found


def _spelled(table: dict[Pair, int]) -> dict[int, bytes]:
    """The bytes of every token."""
    found = {byte: bytes([byte]) for byte in range(256)}
    for (a, b), token in table.items():
        found[token] = found[a] + found[b]
    return found


class _Library:
    """Byte pairs of the `tokenizers` library, which is handed each byte as one of the first 256 characters."""

    def __init__(self, text: str, vocab: int) -> None:
        import json

        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, min_frequency=2, initial_alphabet=list(map(chr, range(256))), show_progress=False
        )
        self.tokenizer.train_from_iterator([_as_characters(text)], trainer)
        found: Sequence[Sequence[str]] = json.loads(self.tokenizer.to_str())["model"]["merges"]
        self.merges = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in found]

    def code(self, text: str) -> Word:
        return list(self.tokenizer.encode(_as_characters(text)).ids)


def _as_characters(text: str) -> str:
    return text.encode().decode("latin-1")


def _random_texts(setup: Setup) -> list[str]:
    """Letters of the text in any order, and characters from everywhere, most of which it never saw."""
    draws = make_generator(setup.seed)
    letters = sorted(set(setup.text))
    found = []
    for number in range(setup.texts):
        places = torch.randint(len(letters) if number % 2 else 0xD800, (60,), generator=draws).tolist()
        found.append("".join(letters[place] if number % 2 else chr(place) for place in places))
    return found


def verdict(numbers: Numbers) -> Verdict:
    tokens, saved, merges = numbers["tokens"], numbers["pairs merged"], numbers["merges"]
    same = merges == numbers["merges of the library"] == numbers["merges as the library"]
    coded, kept, texts = (
        numbers[f"texts{which}"] for which in (" coded as by the library", " decoded without loss", "")
    )
    exact = [before - after for before, after in pairwise(tokens)] == saved
    falling = saved == sorted(saved, reverse=True)
    rate = numbers["bytes a token"]
    return decide(
        same and coded == kept == texts and exact and falling and rate["learned from"] > rate["another rhyme"] > 1,
        f"{merges} merges, of which the library makes {numbers['merges as the library']} too, take {tokens[0]} tokens "
        f"to {tokens[-1]} ({numbers['words']} words): {saved[0]} fewer with the first and {saved[-1]} with the last. "
        f"{kept} of {texts} texts come back without loss, and {coded} are coded as by the library. A token has "
        f"{rate['learned from']:.2f} bytes of this rhyme and {rate['another rhyme']:.2f} of another.",
    )


def draw(numbers: Numbers) -> Figure:
    figure, (left, right) = make_figure(2)
    plot_lines(left, numbers["vocabulary"], {"tokens": numbers["tokens"]}, markevery=10)
    left.axhline(numbers["words"], color="grey", linestyle="--", label="words")
    left.legend(frameon=False)
    left.set(
        xlabel="vocabulary", ylabel="tokens of the text", title="A larger vocabulary, fewer tokens", ylim=(0, None)
    )
    plot_lines(right, range(1, len(numbers["pairs merged"]) + 1), {"pairs": numbers["pairs merged"]}, markevery=10)
    right.set(xlabel="merge", ylabel="pairs merged", title="The first merges save most")
    return figure
