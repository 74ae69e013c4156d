"""BLEU, how many word sequences a translation shares with a reference, and the words that it counts.

Papineni et al. 2002. Two figures go by that name. One is counted on tokens as they are, mostly those of the Moses
tools; the other on plain text, which `sacrebleu` cuts into words in its own way, so that nobody's tools matter.
"""

import html
import math
import re
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

from regard.base.errors import ConfigError, DataError

LONGEST = 4  # words in a row
ESCAPED = {
    "&": "&amp;", "|": "&#124;", "<": "&lt;", ">": "&gt;", "'": "&apos;", '"': "&quot;", "[": "&#91;", "]": "&#93;",
}  # fmt: skip
# quotation marks, apostrophes, dots and dashes of print, as keyboards have them
PRINTED = {
    '"': "\u201c\u201d\u201e\u00ab\u00bb",
    "'": "\u2018\u2019\u201a\u00b4`",
    "-": "\u2013\u2014",
    "...": "\u2026",
}
PLAIN = {ord(printed): typed for typed, several in PRINTED.items() for printed in several}
CLOSING = frozenset(".,;:!?)]}%") | {"..."}
OPENING = frozenset("([{")


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 of a whole text, from 0 to 100: the words are what blanks separate.

    The geometric mean of the shares of word sequences, one to four long, that the reference has too, each at most as
    often as there; less where all translations together are shorter than all references.
    """
    _check_pairs(translations, references)
    found, there = [0] * LONGEST, [0] * LONGEST
    words, wanted = 0, 0
    for translation, reference in zip(translations, references, strict=True):
        told, right = translation.split(), reference.split()
        words, wanted = words + len(told), wanted + len(right)
        for size in range(1, LONGEST + 1):
            mine = _sequences(told, size)
            found[size - 1] += (mine & _sequences(right, size)).total()
            there[size - 1] += mine.total()
    if not all(found):
        return 0.0
    mean = sum(math.log(right / all_of) for right, all_of in zip(found, there, strict=True)) / LONGEST
    return 100 * math.exp(mean + min(0.0, 1 - wanted / words))


def has_sacrebleu() -> bool:
    """Whether the package is installed."""
    return find_spec("sacrebleu") is not None


def sacrebleu(translations: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """The figure of the `sacrebleu` package for plain text, words cut its way (13a).

    lowercase  for translations without capital letters: those of the references are not held against them
    """
    _check_pairs(translations, references)
    if not has_sacrebleu():
        raise ConfigError("this figure is counted by the package sacrebleu, which is missing: pip install sacrebleu")
    counting = import_module("sacrebleu")
    return float(counting.corpus_bleu(list(translations), [list(references)], lowercase=lowercase).score)


def tokenised(text: str, language: str = "en") -> str:
    """Words and signs with blanks between them, some signs spelled out, by the rules of the Moses tools.

    English keeps `'s` together; other languages have apostrophes apart. Text that is cut already stays as it is.
    """
    text = re.sub(r"\s&apos;(?=\w)", "'", text)
    text = f" {html.unescape(text).translate(PLAIN)} "
    text = re.sub(r"(\.{2,})", r" \1 ", text)
    text = re.sub(r"([^\w\s.',\-]|_)", r" \1 ", text)
    text = re.sub(r"(?<!\d),|,(?!\d)", " , ", text)
    if language == "en":
        text = re.sub(r"(?<![^\W\d_])'|'(?![^\W\d_])", " ' ", text)
        text = re.sub(r"(?<=[^\W\d_])'(?=[^\W\d_])", " '", text)
    else:
        text = text.replace("'", " ' ")
    words = text.split()
    cut = [part for word, following in pairwise([*words, ""]) for part in _stopped(word, following)]
    return " ".join("".join(ESCAPED.get(sign, sign) for sign in word) for word in cut)


def detokenised(text: str) -> str:
    """Plain text again: signs stand where they do in print, to the word before, after or both."""
    whole, inside, glued = "", False, True
    for word in map(html.unescape, text.split()):
        joined = glued or word in CLOSING or bool(re.fullmatch(r"'[a-z]+", word, re.IGNORECASE))
        glued = word in OPENING
        if word == '"':
            joined, glued, inside = joined or inside, not inside, not inside
        elif word == "'":
            joined, glued = True, whole[-1:].isalpha() and whole[-1:] != "s"  # what's, but the ladies' hats
        whole += word if joined else f" {word}"
    return whole


def _sequences(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def _stopped(word: str, following: str) -> tuple[str, ...]:
    """A word and the full stop after it, unless that is a part of it or the sentence goes on."""
    stem = word[:-1]
    if not stem.strip(".") or not word.endswith(".") or following[:1].islower():
        return (word,)
    return (word,) if "." in stem and re.search(r"[^\W\d_]", stem) else (stem, ".")


def _check_pairs(translations: Sequence[str], references: Sequence[str]) -> None:
    if len(translations) != len(references):
        raise DataError(f"{len(translations)} translations have {len(references)} references; each needs one")
    if not translations:
        raise DataError("BLEU is a figure of a whole text, but there are no translations")
