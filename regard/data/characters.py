"""A character tokenizer: each character is a token."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from regard.base.errors import ConfigError, DataError
from regard.data.tokenizers import (
    REPLACEMENT,
    JSONTokenizer,
    check_special,
    check_tokens,
    format_special,
    special_index,
)


@dataclass(frozen=True)
class CharacterTokenizer(JSONTokenizer):
    """A character tokenizer: one token for each character of an alphabet, after the special tokens.

    If the alphabet contains the replacement character U+FFFD, characters outside the alphabet are encoded as this
    character. Otherwise they raise DataError.

    alphabet  the characters, in the order of their ids
    special   names of special tokens, which have the ids from 0

    >>> CharacterTokenizer.from_texts("abba").encode("ab")
    [0, 1]
    """

    alphabet: str
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_special(self.special)
        if len(set(self.alphabet)) != len(self.alphabet):
            twice = next(each for each in self.alphabet if self.alphabet.count(each) > 1)
            raise ConfigError(f"the alphabet has {twice!r} more than once")

    @staticmethod
    def from_texts(*texts: str, special: tuple[str, ...] = (), replace_unknown: bool = False) -> "CharacterTokenizer":
        """Return a tokenizer with all characters of the texts, sorted.

        special          names of special tokens
        replace_unknown  add the replacement character U+FFFD, as which all other characters are encoded
        """
        seen = set().union(*texts) | ({REPLACEMENT} if replace_unknown else set())
        if not seen:
            raise DataError("a character tokenizer needs a text that is not empty")
        return CharacterTokenizer("".join(sorted(seen)), special)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {each: number for number, each in enumerate(self.alphabet, len(self.special))}

    @property
    def vocab(self) -> int:
        return len(self.special) + len(self.alphabet)

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name of each token, in the order of the ids."""
        return (*map(format_special, self.special), *self.alphabet)

    def token(self, name: str) -> int:
        """Return the id of a special token, given its name."""
        return special_index(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return one token id for each character. No special tokens are added, so `special` has no effect."""
        numbers, spare = self._numbers, self._numbers.get(REPLACEMENT)
        try:
            return [numbers[each] if spare is None else numbers.get(each, spare) for each in text]
        except KeyError as error:
            raise unknown_character_error(text, str(error.args[0]), len(self.alphabet)) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        first = len(self.special)
        return "".join(self.alphabet[token - first] for token in check_tokens(ids, self.vocab) if token >= first)


def unknown_character_error(text: str, character: str, size: int) -> DataError:
    """Return the error to raise for a character outside the alphabet.

    size  number of characters in the alphabet
    """
    position = text.index(character)
    near = text[max(0, position - 10) : position + 11]
    return DataError(
        f"character {character!r} (U+{ord(character):04X}) at position {position}, in {near!r}, is not one of the "
        f"{size} of the alphabet; train on texts that have it, or with replace_unknown=True, which uses {REPLACEMENT!r}"
    )
