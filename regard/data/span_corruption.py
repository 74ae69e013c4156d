"""Span corruption for decoders: a masked span is moved to the end of the text, where the model predicts the span.

    prefix + MASK + suffix + MASK + content + padding

This is the span corruption of T5 (Raffel et al. 2019, arXiv:1910.10683), with input and target in one string of
characters. A question is the prefix, with an empty suffix, and its answer is the content of the masked span.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_range
from regard.data.sampler import random_index

PAD, MASK = "\u25a1", "\u2047"  # characters that hardly any text contains
IGNORED = -100  # ignore_index of the cross-entropy
PHRASE = re.compile(r"[A-Z][\w'-]*(?: [A-Z][\w'-]*)*")
MIN_TEXT = 4  # characters


@dataclass(frozen=True)
class MaskedText:
    """A training example of span infilling: a text with a masked span, padded to a length.

    text   the text with masks and padding
    start  index of the first character that the model has to predict
    end    index after the last character to predict. The first padding character is predicted too: it ends the text
    """

    text: str
    start: int
    end: int


def mask_span(prefix: str, content: str, suffix: str, length: int, *, whole_text: bool) -> MaskedText:
    """Mask the span `content` between `prefix` and `suffix`, and pad the text to `length` characters.

    The result is prefix, mask, suffix, mask, content, padding.

    whole_text  True: the loss is computed on the whole text. False: only on the content
    """
    text = f"{prefix}{MASK}{suffix}{MASK}{content}"
    if len(text) >= check_integer("length", length, 1):
        raise ShapeError(f"the masked text has {len(text)} characters and an end, but length is {length}")
    start = 1 if whole_text else len(text) - len(content)
    return MaskedText(text + PAD * (length - len(text)), start, len(text) + 1)


def corrupt_spans(
    text: str,
    length: int,
    draws: torch.Generator,
    *,
    phrases: float = 0.5,
    phrase: re.Pattern[str] = PHRASE,
    share: float = 0.25,
    whole_text: bool = True,
) -> MaskedText:
    """Mask a random span of a text (span corruption), or of a random crop if the text is too long.

    length      number of characters of the result, padding included
    draws       random generator
    phrases     probability that the span is a whole phrase, if the text has one; else it is a random part of the text
    phrase      pattern of a phrase; by default capitalised words in a row, such as a name
    share       mean length of a span that is not a phrase, as a fraction of the text
    whole_text  True: the loss is computed on the whole text. False: only on the content of the span
    """
    check_range("phrases", phrases, 0, 1)
    check_range("share", share, 0, 0.5, above=True)
    if PAD in text or MASK in text:
        raise ConfigError(f"a text may not contain {PAD!r} or {MASK!r}, the padding and mask characters: {text[:40]!r}")
    room = check_integer("length", length, MIN_TEXT + 3) - 3  # both masks and the end
    if len(text) < MIN_TEXT:
        raise ShapeError(f"a text needs at least {MIN_TEXT} characters, but this is {text!r}")
    if len(text) > room:
        begin = random_index(len(text) - room + 1, draws)
        text = text[begin : begin + room]
    spans = [found.span() for found in phrase.finditer(text)]
    if spans and float(torch.rand((), generator=draws)) < phrases:
        begin, end = spans[random_index(len(spans), draws)]
    else:
        # uniform from 1 to the maximum that gives the mean share
        size = 1 + random_index(max(1, round(2 * share * len(text)) - 1), draws)
        begin = random_index(len(text) - size + 1, draws)
        end = begin + size
    return mask_span(text[:begin], text[begin:end], text[end:], length, whole_text=whole_text)


def encode_question(question: str, answer: str, length: int) -> MaskedText:
    """Return a question with its answer as a training example; the loss is computed on the answer only."""
    return mask_span(question, answer, "", length, whole_text=False)


def question_prompt(question: str) -> str:
    """Return the prompt of a question: the question and two masks. The model continues it with the answer."""
    return question + MASK + MASK


def collect_alphabet(texts: Sequence[str]) -> str:
    """Return the padding and mask characters, followed by all characters of the texts, sorted.

    The index of a character is its token id.
    """
    return PAD + MASK + "".join(sorted(set().union(*texts) - {PAD, MASK}))


def encode_text(text: str, alphabet: str) -> list[int]:
    """Return the token ids of a text: the index of each character in `alphabet`."""
    unknown = sorted(set(text) - set(alphabet))
    if unknown:
        raise ConfigError(f"the alphabet does not contain {unknown[0]!r} of {text[:40]!r}")
    return [alphabet.index(letter) for letter in text]


def collate(texts: Sequence[MaskedText], alphabet: str) -> tuple[Int64[Tensor, "b n"], Int64[Tensor, "b n"]]:
    """Return a batch of input tokens and next-token targets. At positions without a loss the target is IGNORED (-100).

    alphabet  all characters; the index of a character is its token id
    """
    tokens = torch.tensor([encode_text(each.text, alphabet) for each in texts])
    positions = torch.arange(tokens.shape[1])
    inside = torch.tensor([[each.start, each.end] for each in texts])
    learned = (positions >= inside[:, :1]) & (positions < inside[:, 1:])
    return tokens[:, :-1], tokens.masked_fill(~learned, IGNORED)[:, 1:]
