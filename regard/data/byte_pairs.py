"""Byte pair encoding (BPE): a tokenizer that merges the most frequent pairs of adjacent tokens into new tokens.

Sennrich et al. 2016, arXiv:1508.07909. At first, each byte or each character is a token. Encoding a text never returns
the id of a special token, even if the text contains the name of the special token.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from regard.base.errors import ConfigError, DataError
from regard.base.validation import check_integer
from regard.data.characters import unknown_character_error
from regard.data.plain_text import check_utf8
from regard.data.tokenizers import (
    REPLACEMENT,
    JSONTokenizer,
    check_special,
    check_tokens,
    decode_bytes,
    format_special,
    special_index,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

WORD_END = " "  # marks the end of a word; words contain no blanks


def _byte_alphabet() -> dict[int, str]:
    """Return a printable character for each byte, the same as in GPT-2's tokenizer."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


BYTE_TO_CHARACTER = _byte_alphabet()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


@dataclass(frozen=True)
class BytePairTokenizer(JSONTokenizer):
    """A tokenizer with byte pair encoding (BPE). The ids of special tokens begin at 0, all other tokens follow.

    symbols  the tokens before any merge: bytes (each written as one printable character) or characters
    merges   the merged pairs of tokens, in the order in which they were learned
    special  names of special tokens
    words    False: tokens are made of bytes, and decoding restores the text exactly. True: tokens are made of
             characters. A character at the end of a word is a different symbol from the same character inside a
             word. Decoding puts one blank between words, so the original white space is lost

    >>> tokenizer = BytePairTokenizer.train("low lower lowest", vocab=260)
    >>> tokenizer.decode(tokenizer.encode("low"))
    'low'
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
                raise ConfigError(f"merges join {left!r} and {right!r} before both exist")
            known.add(left + right)

    @staticmethod
    def train(
        *texts: str | Iterable[str],
        vocab: int,
        special: tuple[str, ...] = (),
        words: bool = False,
        replace_unknown: bool = False,
    ) -> "BytePairTokenizer":
        """Train a byte pair encoding (BPE) on texts and return the tokenizer.

        texts            strings, or iterables of strings
        vocab            maximum number of tokens, special ones included; small texts give fewer
        special          names of special tokens
        words            whether tokens are made of characters instead of bytes, as described in the class
        replace_unknown  with words=True: encode unknown characters as the replacement character U+FFFD. If False,
                         they raise DataError
        """
        from tokenizers import Tokenizer, models, trainers

        check_special(special)
        check_integer("BytePairTokenizer.train(vocab)", vocab, 1, "tokens")
        several = [check_utf8(each) for text in texts for each in ([text] if isinstance(text, str) else text)]
        if words:
            several = [WORD_END.join(text.split()) for text in several]
        if not any(several):
            raise DataError("a byte-pair tokenizer needs a text that is not empty")
        symbols = (
            _word_symbols(several, replace_unknown) if words else tuple(BYTE_TO_CHARACTER[byte] for byte in range(256))
        )
        room = vocab - len(special) - len(symbols)
        if room < 0:
            raise ConfigError(
                f"vocab={vocab} is too small for {len(symbols)} symbols and {len(special)} special tokens; use "
                f"at least {vocab - room}"
            )
        # the library numbers word ends in an order that changes from run to run, which decides between equally
        # frequent pairs; for reproducibility the last character of a word is replaced by a placeholder in training
        ends = _placeholders(symbols) if words else {}
        library = Tokenizer(models.BPE())
        _set_pre_tokenizer(library, words)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - len(special),
            show_progress=False,
            initial_alphabet=[ends.get(symbol, symbol) for symbol in symbols],
        )
        ready = [_replace_word_ends(text, ends) for text in several] if words else several
        library.train_from_iterator(ready, trainer)
        spelled = {ord(stand_in): symbol for symbol, stand_in in ends.items()}
        merges = json.loads(library.to_str())["model"]["merges"]
        pairs = tuple((left.translate(spelled), right.translate(spelled)) for left, right in merges)
        return BytePairTokenizer(symbols, pairs, special, words)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The text of each token except special tokens, in the order of the ids.

        If different merges give the same text, this text is one token.
        """
        return tuple(dict.fromkeys([*self.symbols, *(left + right for left, right in self.merges)]))

    @cached_property
    def _library(self) -> "Library":
        from tokenizers import Tokenizer, models

        numbers = {piece: number for number, piece in enumerate(self.pieces, len(self.special))}
        merges = list(self.merges)
        library = Tokenizer(
            models.BPE(vocab=numbers, merges=merges, end_of_word_suffix=WORD_END)
            if self.words
            else models.BPE(vocab=numbers, merges=merges)
        )
        _set_pre_tokenizer(library, self.words)
        return library

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        return frozenset(symbol for symbol in self.symbols if len(symbol) == 1)

    @property
    def vocab(self) -> int:
        return len(self.special) + len(self.pieces)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A readable name of each token, in the order of the ids.

        </w> marks the end of a word. Bytes that are not valid UTF-8 are shown in hexadecimal, such as <0xFF>.
        """
        shown = [
            piece.replace(WORD_END, "</w>")
            if self.words
            else decode_bytes(bytes(CHARACTER_TO_BYTE[each] for each in piece))
            for piece in self.pieces
        ]
        return (*map(format_special, self.special), *shown)

    def token(self, name: str) -> int:
        """Return the id of a special token, given its name."""
        return special_index(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. No special tokens are added, so `special` has no effect."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. This is faster than encoding the texts one by one."""
        ready = [self._replace_unknown(text) if self.words else check_utf8(text) for text in texts]
        return [list(found.ids) for found in self._library.encode_batch(ready, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not UTF-8 become the replacement character.
        """
        first = len(self.special)
        spelled = "".join(self.pieces[token - first] for token in check_tokens(ids, self.vocab) if token >= first)
        if self.words:
            return spelled.removesuffix(WORD_END)
        return bytes(CHARACTER_TO_BYTE[each] for each in spelled).decode("utf-8", errors="replace")

    def _replace_unknown(self, text: str) -> str:
        """Replace unknown characters by the replacement character; raise DataError if the tokenizer has none.

        This is necessary because the `tokenizers` library drops unknown characters silently.
        """
        plain = WORD_END.join(text.split())
        unknown = set(plain) - self._alphabet - {WORD_END}
        if not unknown:
            return plain
        if REPLACEMENT not in self._alphabet:
            first = next(each for each in plain if each in unknown)
            raise unknown_character_error(plain, first, len(self._alphabet))
        return plain.translate({ord(each): REPLACEMENT for each in unknown})


def _word_symbols(texts: Sequence[str], replace_unknown: bool) -> tuple[str, ...]:
    """Return the initial symbols of a tokenizer with words=True.

    Each character of the texts gives two symbols: the character inside a word, and the character at the end of a word.
    """
    seen = sorted((set().union(*texts) - {WORD_END}) | ({REPLACEMENT} if replace_unknown else set()))
    return (*seen, *(each + WORD_END for each in seen))


def _placeholders(symbols: Sequence[str]) -> dict[str, str]:
    """Return a dict from each symbol that ends a word to a private-use Unicode character that is no symbol."""
    taken = set(symbols)
    free = (chr(code) for code in range(0xF0000, 0x110000) if chr(code) not in taken)
    return {symbol: next(free) for symbol in symbols if symbol.endswith(WORD_END)}


def _replace_word_ends(text: str, ends: Mapping[str, str]) -> str:
    """Replace the last character of each word by a placeholder.

    ends  dict from each symbol that ends a word to its placeholder, as `_placeholders` returns it
    """
    return WORD_END.join(word[:-1] + ends[word[-1] + WORD_END] for word in text.split(WORD_END)) if text else ""


def _set_pre_tokenizer(library: "Library", words: bool) -> None:
    from tokenizers import pre_tokenizers

    library.pre_tokenizer = (
        pre_tokenizers.Split(WORD_END, "removed") if words else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
