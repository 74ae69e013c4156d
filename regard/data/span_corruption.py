"""Texts with a gap: what stood in a span is told at the end, so that a model that only reads forward learns to fill it.

    prefix + MASK + suffix + MASK + content + padding

The span corruption of T5 (Raffel et al. 2019, arXiv:1910.10683) in one string of characters. A question is such a text
too: its gap stands at its end, and the answer is what was in it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_number

PAD, MASK = "\u25a1", "\u2047"  # two characters that hardly any text has
IGNORED = -100  # the target of a position without loss, as torch's cross entropy has it
PHRASE = re.compile(r"[A-Z][\w'-]*(?: [A-Z][\w'-]*)*")
SHORTEST = 4  # characters of a text with a span in it


@dataclass(frozen=True)
class MaskedText:
    """A text with a gap, as long as was asked for, and the part of it that is learned.

    text   with masks and padding
    start  the first character that the model has to tell
    end    one past the last: the first padding counts, since it says that the content is over
    """

    text: str
    start: int
    end: int


def gapped(prefix: str, content: str, suffix: str, length: int, *, whole_text: bool) -> MaskedText:
    """The text with this gap, filled up to `length` characters.

    whole_text  whether all of it is learned, or only the content
    """
    told = f"{prefix}{MASK}{suffix}{MASK}{content}"
    if len(told) >= check_integer("length", length, 1):
        raise ShapeError(f"the text takes {len(told)} characters and one that ends it, but length is {length}")
    start = 1 if whole_text else len(told) - len(content)
    return MaskedText(told + PAD * (length - len(told)), start, len(told) + 1)


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
    """The text, or a piece of it where it is longer than fits, with one span moved to its end.

    phrases     how often the span is a whole phrase; otherwise it lies anywhere
    phrase      what a phrase is: capitalised words in a row, such as a name, unless another pattern says so
    share       the mean share of the piece that such another span takes
    whole_text  whether all of it is learned, or only what was in the span
    """
    if not 0.0 <= check_number("phrases", phrases, "a share of texts") <= 1.0:
        raise ConfigError(f"phrases is a share of texts, from 0 to 1, not {phrases}")
    if not 0.0 < check_number("share", share, "a share of the text") <= 0.5:
        raise ConfigError(f"share is a share of the text, above 0 and at most 0.5, not {share}")
    if PAD in text or MASK in text:
        raise ConfigError(f"a text may not hold {PAD!r} or {MASK!r}, which say where the gap is: {text[:40]!r}")
    room = check_integer("length", length, SHORTEST + 3) - 3  # both masks and the end
    if len(text) < SHORTEST:
        raise ShapeError(f"a text needs {SHORTEST} characters to have a gap, but this is {text!r}")
    if len(text) > room:
        begin = _below(len(text) - room + 1, draws)
        text = text[begin : begin + room]
    spans = [found.span() for found in phrase.finditer(text)]
    if spans and float(torch.rand((), generator=draws)) < phrases:
        begin, end = spans[_below(len(spans), draws)]
    else:
        # evenly from 1 to what makes the mean that was asked for
        size = 1 + _below(max(1, round(2 * share * len(text)) - 1), draws)
        begin = _below(len(text) - size + 1, draws)
        end = begin + size
    return gapped(text[:begin], text[begin:end], text[end:], length, whole_text=whole_text)


def encode_question(question: str, answer: str, length: int) -> MaskedText:
    """A question with its answer, of which only the answer is learned."""
    return gapped(question, answer, "", length, whole_text=False)


def prompt(question: str) -> str:
    """What a model reads before it answers."""
    return question + MASK + MASK


def alphabet(texts: Sequence[str]) -> str:
    """The characters of texts in order, after the two that mark gaps; a character's number is its token."""
    return PAD + MASK + "".join(sorted(set().union(*texts) - {PAD, MASK}))


def encode_text(text: str, letters: str) -> list[int]:
    """The numbers of a text's characters in an alphabet."""
    unknown = sorted(set(text) - set(letters))
    if unknown:
        raise ConfigError(f"the alphabet has no {unknown[0]!r}, which stands in {text[:40]!r}")
    return [letters.index(letter) for letter in text]


def batch(texts: Sequence[MaskedText], letters: str) -> tuple[Int64[Tensor, "b n"], Int64[Tensor, "b n"]]:
    """Tokens to read and the next one to tell at each, IGNORED where nothing is learned."""
    tokens = torch.tensor([encode_text(each.text, letters) for each in texts])
    places = torch.arange(tokens.shape[1])
    inside = torch.tensor([[each.start, each.end] for each in texts])
    learned = (places >= inside[:, :1]) & (places < inside[:, 1:])
    return tokens[:, :-1], tokens.masked_fill(~learned, IGNORED)[:, 1:]


def _below(count: int, draws: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=draws))
