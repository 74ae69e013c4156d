"""Characters as tokens: those that a text has, and a word about any other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from regard.base.config import from_json, to_json
from regard.base.errors import ConfigError, DataError
from regard.data.tokenizers import REPLACEMENT, check_special, counted, shown_special, special_place


@dataclass(frozen=True)
class Characters:
    """One token for each character of an alphabet, after the special tokens.

    A character outside the alphabet is an error, unless the alphabet was made lenient: then it has the replacement
    character, which takes the place of every unknown one.
    """

    alphabet: str
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_special(self.special)
        if len(set(self.alphabet)) != len(self.alphabet):
            twice = next(each for each in self.alphabet if self.alphabet.count(each) > 1)
            raise ConfigError(f"an alphabet has each character once, but {twice!r} is there twice")

    @staticmethod
    def of(*texts: str, special: tuple[str, ...] = (), lenient: bool = False) -> "Characters":
        """All characters of some texts, in the order of their code points."""
        seen = set().union(*texts) | ({REPLACEMENT} if lenient else set())
        if not seen:
            raise DataError("an alphabet cannot be gathered from texts that are all empty")
        return Characters("".join(sorted(seen)), special)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {each: place for place, each in enumerate(self.alphabet, len(self.special))}

    @property
    def vocab(self) -> int:
        return len(self.special) + len(self.alphabet)

    @property
    def names(self) -> tuple[str, ...]:
        """Each token as people read it."""
        return (*map(shown_special, self.special), *self.alphabet)

    def token(self, name: str) -> int:
        """The number of a special token."""
        return special_place(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """One token for each character; none are added."""
        numbers, spare = self._numbers, self._numbers.get(REPLACEMENT)
        try:
            return [numbers[each] if spare is None else numbers.get(each, spare) for each in text]
        except KeyError as error:
            raise unknown_character(text, str(error.args[0]), len(self.alphabet)) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones say nothing."""
        first = len(self.special)
        return "".join(self.alphabet[token - first] for token in counted(ids, self.vocab) if token >= first)

    def to_json(self) -> dict[str, Any]:
        return dict(to_json(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Characters":
        return from_json("the tokenizer", Characters, data)


def unknown_character(text: str, character: str, size: int) -> DataError:
    """The error for a character that no text had when the alphabet was gathered."""
    place = text.index(character)
    near = text[max(0, place - 10) : place + 11]
    return DataError(
        f"character {character!r} (U+{ord(character):04X}) at place {place}, in {near!r}, is not among the {size} of "
        f"the alphabet; gather it from texts that have it, or with lenient=True, which puts {REPLACEMENT!r} in place"
    )
