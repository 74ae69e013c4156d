"""Tokenizers: the protocol, a byte tokenizer, tokenizers of Hugging Face, and streaming decoding."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as _Library

from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError, ConfigError, UnknownNameError
from regard.base.files import MAX_JSON_BYTES, describe, read_json, read_text

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
        """Number of tokens."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text; `special` adds special tokens such as [CLS] if the tokenizer has a template."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""


class JSONTokenizer:
    """Base of the tokenizers that `to_json` and `tokenizer_from_json` save and load."""

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON."""
        return dict(to_json(self))


@dataclass(frozen=True)
class ByteTokenizer(JSONTokenizer):
    """A tokenizer of UTF-8 bytes. Special tokens come after the bytes, so that each byte is its own token id.

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
        """A readable name of each token: a character, or the number of a byte that is not one."""
        return (*(format_bytes(bytes([byte])) for byte in range(256)), *map(format_special, self.special))

    def token(self, name: str) -> int:
        """The id of a special token."""
        return 256 + special_index(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """One token for each byte. Lone surrogates, which UTF-8 cannot encode, become ?."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become the replacement character."""
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
        """Number of tokens, added tokens included."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._library.decode(check_tokens(ids), skip_special_tokens=True))

    def __repr__(self) -> str:
        return f"PretrainedTokenizer({str(self.file)!r})"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a `tokenizer.json`, of this package or of Hugging Face, or a folder that has one.

    >>> _ = Path("tokenizer.json").write_text(json.dumps(ByteTokenizer().to_json()))
    >>> load_tokenizer("tokenizer.json").encode("ab")
    [97, 98]
    """
    file = Path(path)
    if file.is_dir():
        file = file / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; pass a {TOKENIZER_FILE}, or a folder with one")
    about = read_json(file, CheckpointError)
    return tokenizer_from_json(about) if isinstance(about, dict) and "kind" in about else PretrainedTokenizer(file)


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a `to_json` wrote: characters, bytes or byte pairs.

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
    if kind not in kinds:
        raise ConfigError(f"a tokenizer's JSON has 'kind': one of {', '.join(kinds)}, not {kind!r}")
    return from_json("the tokenizer", kinds[str(kind)], data)


class TextStreamer:
    """Streaming decoding: text from tokens one at a time. The parts concatenate to the text of all tokens.

    A character may take several tokens, so a part can be empty. Text that was returned is never changed, even if the
    tokenizer would decode it differently with more tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._returned = 0  # characters

    def push(self, token: int) -> str:
        """The text that is final with this token."""
        self._ids.append(token)
        # incomplete bytes at the end may still become a character
        return self._up_to(self.tokenizer.decode(self._ids).rstrip(REPLACEMENT))

    def finish(self) -> str:
        """The remaining text, at the end."""
        return self._up_to(self.tokenizer.decode(self._ids))

    def _up_to(self, text: str) -> str:
        part = text[self._returned :]
        self._returned += len(part)
        return part


def check_special(special: Sequence[str]) -> None:
    """Raise if names of special tokens are empty or repeated."""
    for name in special:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"special tokens have names such as 'pad', not {name!r}")
        if list(special).count(name) > 1:
            raise ConfigError(f"special token {name!r} is repeated")


def special_index(special: Sequence[str], name: str) -> int:
    """The index of a special token."""
    if name not in special:
        available = f"it has {', '.join(special)}" if special else "it has none"
        raise UnknownNameError(f"the tokenizer has no special token {name!r} ({available}); pass it in special=(...)")
    return list(special).index(name)


def format_special(name: str) -> str:
    """The readable name of a special token."""
    return f"<{name}>"


def format_bytes(some: bytes) -> str:
    """The text of bytes, or their numbers if they are not complete characters."""
    try:
        return some.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in some)


def check_tokens(ids: Iterable[int], vocab: int | None = None) -> list[int]:
    """Check that token ids are at least 0 and less than vocab; returns them as a list."""
    tokens = list(ids)
    if any(token < 0 for token in tokens):
        raise ConfigError(f"token ids are 0 or more, not {min(tokens)}")
    if vocab is not None and any(token >= vocab for token in tokens):
        raise ConfigError(f"token ids are less than vocab={vocab}, not {max(tokens)}")
    return tokens
