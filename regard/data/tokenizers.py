"""Tokenizers: the protocol, a byte tokenizer, tokenizers of Hugging Face, and streaming decoding."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as _Library

from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError, ConfigError, UnknownNameError
from regard.base.files import MAX_JSON_BYTES, describe, is_file, is_folder, read_json, read_text

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"  # the replacement character of Unicode, for bytes that are not UTF-8


@runtime_checkable
class Tokenizer(Protocol):
    """Protocol of a tokenizer: text to token ids from 0 to vocab - 1, and back.

    >>> isinstance(ByteTokenizer(), Tokenizer)
    True
    >>> ByteTokenizer().decode(ByteTokenizer().encode("abc"))
    'abc'
    """

    @property
    def vocab(self) -> int:
        """The vocabulary size: the number of different tokens."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        special  add special tokens such as [CLS], if the tokenizer defines where they go
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""


class JSONTokenizer:
    """Base class of tokenizers that are saved as JSON, by `to_json`, and loaded by `tokenizer_from_json`."""

    def to_json(self) -> dict[str, Any]:
        """Return the tokenizer as a dict that can be written as JSON; `tokenizer_from_json` reads it."""
        return dict(to_json(self))


@dataclass(frozen=True)
class ByteTokenizer(JSONTokenizer):
    """A tokenizer with one token for each UTF-8 byte.

    The token ids 0 to 255 are the values of the bytes. Special tokens have the ids from 256.

    special  names of the special tokens, such as ("pad",)

    >>> ByteTokenizer().encode("Hi")
    [72, 105]
    """

    special: tuple[str, ...] = ()
    vocab = 256  # without special tokens

    def __post_init__(self) -> None:
        check_special(self.special)
        object.__setattr__(self, "vocab", 256 + len(self.special))

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name of each token, in the order of the ids.

        A byte is shown as its character, or as <0xFF> if the byte alone is not a character. A special token is
        shown as <name>.
        """
        return (*(decode_bytes(bytes([byte])) for byte in range(256)), *map(format_special, self.special))

    def token(self, name: str) -> int:
        """Return the id of a special token by its name, such as "pad"."""
        return 256 + special_index(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text: one for each UTF-8 byte.

        Lone surrogates, which UTF-8 cannot encode, become "?". `special` has no effect.
        """
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not valid UTF-8, and ids outside the vocabulary, become the replacement character U+FFFD.
        """
        tokens = check_tokens(ids)
        # 255 never occurs in UTF-8, so it replaces ids beyond the vocabulary
        known = (min(token, 255) for token in tokens if not 256 <= token < self.vocab)
        return bytes(known).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return f"ByteTokenizer({self.special or ''})"


class PretrainedTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library, loaded from its tokenizer.json."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = read_text(file, CheckpointError, MAX_JSON_BYTES)
        try:
            self._library = _Library.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file} is not a tokenizer: {describe(error)}") from None

    @property
    def vocab(self) -> int:
        """The vocabulary size: the number of different tokens, including added tokens."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._library.decode(check_tokens(ids), skip_special_tokens=True))

    def __repr__(self) -> str:
        return f"PretrainedTokenizer({str(self.file)!r})"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer from a `tokenizer.json` file of this package or of Hugging Face.

    path  the file, or a folder that contains a file named tokenizer.json

    >>> _ = Path("tokenizer.json").write_text(json.dumps(ByteTokenizer().to_json()))
    >>> load_tokenizer("tokenizer.json").encode("ab")
    [97, 98]
    """
    file = Path(path)
    if is_folder(file, CheckpointError):
        file = file / TOKENIZER_FILE
    if not is_file(file, CheckpointError):
        raise CheckpointError(f"{file} does not exist; pass a {TOKENIZER_FILE}, or a folder with one")
    about = read_json(file, CheckpointError)
    return tokenizer_from_json(about) if isinstance(about, dict) and "kind" in about else PretrainedTokenizer(file)


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """Create a tokenizer from the dict that the `to_json` method of a tokenizer returned.

    The entry "kind" is the name of the class: CharacterTokenizer, ByteTokenizer or BytePairTokenizer.

    >>> tokenizer_from_json(ByteTokenizer().to_json()).vocab
    256
    """
    from regard.data.byte_pairs import BytePairTokenizer  # both import this module
    from regard.data.characters import CharacterTokenizer

    kinds = {
        "CharacterTokenizer": CharacterTokenizer,
        "ByteTokenizer": ByteTokenizer,
        "BytePairTokenizer": BytePairTokenizer,
    }
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"a tokenizer's JSON has 'kind': one of {', '.join(kinds)}, not {kind!r}")
    return from_json("the tokenizer", kinds[kind], data)


class TextStreamer:
    """Decodes tokens to text one at a time, for streaming.

    Call `push` for each token and `finish` at the end. The returned strings concatenate to the text of all
    tokens. A character may need several tokens, so `push` can return an empty string. Text that was returned is
    never changed, even if the tokenizer would decode it differently with more tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._returned = 0  # characters

    def push(self, token: int) -> str:
        """Add a token id and return the text that is now complete; it may be empty."""
        self._ids.append(token)
        # incomplete bytes at the end may still become a character
        return self._up_to(self.tokenizer.decode(self._ids).rstrip(REPLACEMENT))

    def finish(self) -> str:
        """Return the text that was not yet returned; call it after the last token."""
        return self._up_to(self.tokenizer.decode(self._ids))

    def _up_to(self, text: str) -> str:
        part = text[self._returned :]
        self._returned += len(part)
        return part


def check_special(special: Sequence[str]) -> None:
    """Raise ConfigError unless the names of special tokens are nonempty strings, each only once."""
    for name in special:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"special tokens have names such as 'pad', not {name!r}")
        if list(special).count(name) > 1:
            raise ConfigError(f"special token {name!r} is repeated")


def special_index(special: Sequence[str], name: str) -> int:
    """Return the index of a special token in `special`; raise UnknownNameError if there is no token of this name."""
    if name not in special:
        available = f"it has {', '.join(special)}" if special else "it has none"
        raise UnknownNameError(f"the tokenizer has no special token {name!r} ({available}); pass it in special=(...)")
    return list(special).index(name)


def format_special(name: str) -> str:
    """Return a special token's name in angle brackets, such as <pad>."""
    return f"<{name}>"


def decode_bytes(some: bytes) -> str:
    """Decode bytes as UTF-8; bytes that are not valid UTF-8 are written in hexadecimal, such as <0xFF>."""
    try:
        return some.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in some)


def check_tokens(ids: Iterable[int], vocab: int | None = None) -> list[int]:
    """Return token ids as a list; raise ConfigError if one is negative or not less than `vocab`.

    vocab  the vocabulary size; None skips this check
    """
    tokens = list(ids)
    if any(token < 0 for token in tokens):
        raise ConfigError(f"token ids are 0 or more, not {min(tokens)}")
    if vocab is not None and any(token >= vocab for token in tokens):
        raise ConfigError(f"token ids are less than vocab={vocab}, not {max(tokens)}")
    return tokens
