"""Tokenisation of text in the style of the Moses tools, and detokenisation."""

import html
import re
from itertools import pairwise

ESCAPES = {
    "&": "&amp;", "|": "&#124;", "<": "&lt;", ">": "&gt;", "'": "&apos;", '"': "&quot;", "[": "&#91;", "]": "&#93;",
}  # fmt: skip
# typographic quotation marks, apostrophes, dashes and dots, by the character on a keyboard
TYPOGRAPHIC = {
    '"': "\u201c\u201d\u201e\u00ab\u00bb",
    "'": "\u2018\u2019\u201a\u00b4`",
    "-": "\u2013\u2014",
    "...": "\u2026",
}
TYPED = {ord(printed): typed for typed, several in TYPOGRAPHIC.items() for printed in several}
CLOSING = frozenset(".,;:!?)]}%") | {"..."}
OPENING = frozenset("([{")


def moses_tokenize(text: str, language: str = "en") -> str:
    """Tokenise text like the Moses tokenizer: words and punctuation marks are separated by blanks.

    Some marks are escaped, such as & to &amp;. English keeps `'s` together; in other languages an apostrophe is
    a token of its own. Text that is tokenised already is unchanged.
    """
    text = re.sub(r"\s&apos;(?=\w)", "'", text)
    text = f" {html.unescape(text).translate(TYPED)} "
    text = re.sub(r"(\.{2,})", r" \1 ", text)
    text = re.sub(r"([^\w\s.',\-]|_)", r" \1 ", text)
    text = re.sub(r"(?<!\d),|,(?!\d)", " , ", text)
    if language == "en":
        text = re.sub(r"(?<![^\W\d_])'|'(?![^\W\d_])", " ' ", text)
        text = re.sub(r"(?<=[^\W\d_])'(?=[^\W\d_])", " '", text)
    else:
        text = text.replace("'", " ' ")
    words = text.split()
    tokens = [part for word, following in pairwise([*words, ""]) for part in _split_full_stop(word, following)]
    return " ".join("".join(ESCAPES.get(sign, sign) for sign in token) for token in tokens)


def moses_detokenize(text: str) -> str:
    """Convert Moses tokens back to plain text: punctuation marks are attached to words."""
    whole, quoted, attach_next = "", False, True
    for token in map(html.unescape, text.split()):
        attach = attach_next or token in CLOSING or bool(re.fullmatch(r"'[a-z]+", token, re.IGNORECASE))
        attach_next = token in OPENING
        if token == '"':
            attach, attach_next, quoted = attach or quoted, not quoted, not quoted
        elif token == "'":
            attach, attach_next = True, whole[-1:].isalpha() and whole[-1:] != "s"  # what's, but the ladies' hats
        whole += token if attach else f" {token}"
    return whole


def _split_full_stop(word: str, following: str) -> tuple[str, ...]:
    """Split a full stop off a word, unless the word is an abbreviation such as "e.g." or the sentence continues.

    The sentence continues if the word `following` begins with a lower-case letter.
    """
    stem = word[:-1]
    if not stem.strip(".") or not word.endswith(".") or following[:1].islower():
        return (word,)
    return (word,) if "." in stem and re.search(r"[^\W\d_]", stem) else (stem, ".")
