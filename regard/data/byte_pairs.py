"""Byte pairs: tokens that grow from single symbols by joining the pair that is most frequent.

Sennrich et al. 2016, arXiv:1508.07909. Special tokens are numbers of their own that no text can spell.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regard.base.config import from_json, to_json
from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer
from regard.data.characters import unknown_character
from regard.data.tokenizers import (
    REPLACEMENT,
    check_special,
    counted,
    shown_bytes,
    shown_special,
    special_place,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

END = " "  # ends a word: text is split at blanks, so no word has one inside


def _spelling() -> dict[int, str]:
    """A visible character for each byte, as GPT-2 and the library write them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


SPELLED = _spelling()
BYTE_OF = {character: byte for byte, character in SPELLED.items()}


@dataclass(frozen=True)
class BytePairs:
    """Pieces of text as tokens, after the special ones; `merges` are the pairs joined, the most frequent first.

    symbols  the single symbols that all pieces grow from
    merges   what was joined, in order
    special  names of special tokens
    words    False: symbols are bytes and no text is lost. True: for text whose words stand apart by blanks; symbols
             are characters, some at the end of a word, and runs of white space become one blank
    """

    symbols: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special: tuple[str, ...] = ()
    words: bool = False

    def __post_init__(self) -> None:
        check_special(self.special)
        known = set(self.symbols)
        for left, right in self.merges:
            if left not in known or right not in known:
                raise ConfigError(f"byte pairs join {left!r} and {right!r} before both are there")
            known.add(left + right)

    @staticmethod
    def trained(
        *texts: str | Iterable[str],
        vocab: int,
        special: tuple[str, ...] = (),
        words: bool = False,
        lenient: bool = False,
    ) -> "BytePairs":
        """Byte pairs of all texts together, at most `vocab` tokens with the special ones: small texts give fewer.

        A text is a string, or many of them, such as the sentences of one language. With `words`, a character that no
        text has is an error when it is met later, unless lenient: then the replacement character takes its place.
        """
        from tokenizers import Tokenizer, models, trainers

        check_special(special)
        check_integer("BytePairs.trained(vocab)", vocab, 1, "tokens")
        several = [_spellable(each) for text in texts for each in ([text] if isinstance(text, str) else text)]
        if words:
            several = [END.join(text.split()) for text in several]
        if not any(several):
            raise DataError("byte pairs cannot be trained on texts that are all empty")
        symbols = _word_symbols(several, lenient) if words else tuple(SPELLED[byte] for byte in range(256))
        room = vocab - len(special) - len(symbols)
        if room < 0:
            raise ConfigError(
                f"vocab={vocab} has no room for {len(symbols)} single symbols and {len(special)} special tokens; "
                f"give at least {vocab - room}"
            )
        # the library numbers word ends in an order of its own that changes from run to run, and with it which of two
        # equally frequent pairs comes first; so in training the last character of a word is one character of its own
        ends = _stand_ins(symbols) if words else {}
        library = Tokenizer(models.BPE())
        _split(library, words)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - len(special),
            show_progress=False,
            initial_alphabet=[ends.get(symbol, symbol) for symbol in symbols],
        )
        ready = [_ended(text, ends) for text in several] if words else several
        library.train_from_iterator(ready, trainer)
        spelled = {ord(stand_in): symbol for symbol, stand_in in ends.items()}
        merges = json.loads(library.to_str())["model"]["merges"]
        pairs = tuple((left.translate(spelled), right.translate(spelled)) for left, right in merges)
        return BytePairs(symbols, pairs, special, words)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """What each token stands for, without the special ones. Two pairs may join to the same piece: one token."""
        return tuple(dict.fromkeys([*self.symbols, *(left + right for left, right in self.merges)]))

    @cached_property
    def _library(self) -> "Library":
        from tokenizers import Tokenizer, models

        numbers = {piece: place for place, piece in enumerate(self.pieces, len(self.special))}
        merges = list(self.merges)
        library = Tokenizer(
            models.BPE(vocab=numbers, merges=merges, end_of_word_suffix=END)
            if self.words
            else models.BPE(vocab=numbers, merges=merges)
        )
        _split(library, self.words)
        return library

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        return frozenset(symbol for symbol in self.symbols if len(symbol) == 1)

    @property
    def vocab(self) -> int:
        return len(self.special) + len(self.pieces)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each token as people read it: the end of a word is </w>, bytes that are no whole character are numbers."""
        shown = [
            piece.replace(END, "</w>") if self.words else shown_bytes(bytes(BYTE_OF[each] for each in piece))
            for piece in self.pieces
        ]
        return (*map(shown_special, self.special), *shown)

    def token(self, name: str) -> int:
        """The number of a special token."""
        return special_place(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; none are added."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, faster than one after the other."""
        ready = [self._known(text) if self.words else _spellable(text) for text in texts]
        return [list(found.ids) for found in self._library.encode_batch(ready, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones say nothing, bytes that are no UTF-8 are shown as replacement."""
        first = len(self.special)
        spelled = "".join(self.pieces[token - first] for token in counted(ids, self.vocab) if token >= first)
        if self.words:
            return spelled.removesuffix(END)
        return bytes(BYTE_OF[each] for each in spelled).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return dict(to_json(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "BytePairs":
        return from_json("the tokenizer", BytePairs, data)

    def _known(self, text: str) -> str:
        """Words with one blank between them, all of whose characters are symbols: the library drops others silently."""
        plain = END.join(text.split())
        unknown = set(plain) - self._alphabet - {END}
        if not unknown:
            return plain
        if REPLACEMENT not in self._alphabet:
            first = next(each for each in plain if each in unknown)
            raise unknown_character(plain, first, len(self._alphabet))
        return plain.translate({ord(each): REPLACEMENT for each in unknown})


def _word_symbols(texts: Sequence[str], lenient: bool) -> tuple[str, ...]:
    """Every character of the texts, inside a word and at its end."""
    seen = sorted((set().union(*texts) - {END}) | ({REPLACEMENT} if lenient else set()))
    return (*seen, *(each + END for each in seen))


def _stand_ins(symbols: Sequence[str]) -> dict[str, str]:
    """One character, of those for private use, for each symbol that ends a word; none that is a symbol itself."""
    taken = set(symbols)
    free = (chr(code) for code in range(0xF0000, 0x110000) if chr(code) not in taken)
    return {symbol: next(free) for symbol in symbols if symbol.endswith(END)}


def _ended(text: str, ends: Mapping[str, str]) -> str:
    """Words whose last characters are replaced by what stands for them."""
    return END.join(word[:-1] + ends[word[-1] + END] for word in text.split(END)) if text else ""


def _split(library: "Library", words: bool) -> None:
    from tokenizers import pre_tokenizers

    library.pre_tokenizer = (
        pre_tokenizers.Split(END, "removed") if words else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )


def _spellable(text: str) -> str:
    """The text, unless it holds half a surrogate pair, of which there are no bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has U+{ord(text[error.start]):04X}, half of a surrogate pair, at place {error.start}; "
            "UTF-8 cannot spell it: read the text with errors='replace'"
        ) from None
    return text
