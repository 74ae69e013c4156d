"""Text as tokens and back."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as _Library

from regard.base.config import from_json, to_json
from regard.base.errors import CheckpointError, ConfigError, UnknownNameError

FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"  # what stands for bytes that are no UTF-8


@runtime_checkable
class Tokenizer(Protocol):
    """Text as numbers from 0 to vocab - 1, and back."""

    @property
    def vocab(self) -> int:
        """How many tokens there are."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; `special` adds those that a model expects around it, if it expects any."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones say nothing."""


@dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8 as tokens: no text is lost, and nothing has to be learned or loaded.

    Special tokens come after the bytes, so that each byte is its own number.
    """

    special: tuple[str, ...] = ()
    vocab = 256  # of the bytes alone; a tokenizer with special tokens has more

    def __post_init__(self) -> None:
        check_special(self.special)
        object.__setattr__(self, "vocab", 256 + len(self.special))

    @property
    def names(self) -> tuple[str, ...]:
        """Each token as people read it: a character, or the number of a byte that is none."""
        return (*(shown_bytes(bytes([byte])) for byte in range(256)), *map(shown_special, self.special))

    def token(self, name: str) -> int:
        """The number of a special token."""
        return 256 + special_place(self.special, name)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """One token for each byte; none are added. Half a surrogate pair, which UTF-8 cannot spell, becomes ?."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, and tokens that are no bytes, are shown as the replacement character."""
        tokens = counted(ids)
        # 255 occurs nowhere in UTF-8, so it stands for whatever a larger vocabulary holds
        spoken = (min(token, 255) for token in tokens if not 256 <= token < self.vocab)
        return bytes(spoken).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return dict(to_json(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Bytes":
        return from_json("the tokenizer", Bytes, data)

    def __repr__(self) -> str:
        return f"Bytes({self.special or ''})"


class Loaded:
    """A tokenizer of the `tokenizers` library, from its file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._library = _Library.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises nothing more special
            raise CheckpointError(f"{file} holds no tokenizer: {error}") from None

    @property
    def vocab(self) -> int:
        """With the tokens that were added to it."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._library.decode(counted(ids), skip_special_tokens=True))

    def __repr__(self) -> str:
        return f"Loaded({str(self.file)!r})"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, ours or as Hugging Face keeps them, or in a folder that has one."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is not there; a tokenizer is read from a {FILE}, or from a folder with one")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = None  # what is wrong with it is told below
    return tokenizer_from_json(about) if isinstance(about, dict) and "kind" in about else Loaded(file)


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that its `to_json` wrote: characters, bytes or byte pairs."""
    from regard.data.byte_pairs import BytePairs  # both are built from what stands here
    from regard.data.characters import Characters

    kinds = {"Characters": Characters, "Bytes": Bytes, "BytePairs": BytePairs}
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind not in kinds:
        raise ConfigError(f"a tokenizer's JSON has 'kind': one of {', '.join(kinds)}, not {kind!r}")
    return from_json("the tokenizer", kinds[str(kind)], data)


class Unfolding:
    """Text from tokens one at a time: the parts, joined, are the text of all.

    A character may take several tokens, so a part can be empty and the next one make up for it. A tokenizer that takes
    back what it has said, as some do to tidy up blanks, keeps its first word here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # characters given out

    def push(self, token: int) -> str:
        """What this token adds for certain."""
        self._ids.append(token)
        # bytes at the end that are no UTF-8 may still become a character
        return self._up_to(self.tokenizer.decode(self._ids).rstrip(REPLACEMENT))

    def finish(self) -> str:
        """What was still waiting for its end."""
        return self._up_to(self.tokenizer.decode(self._ids))

    def _up_to(self, text: str) -> str:
        part = text[self._given :]
        self._given += len(part)
        return part


def check_special(special: Sequence[str]) -> None:
    """Raise where names of special tokens are empty or given twice."""
    for name in special:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"special tokens are named by words such as 'pad', not {name!r}")
        if list(special).count(name) > 1:
            raise ConfigError(f"special token {name!r} is named twice")


def special_place(special: Sequence[str], name: str) -> int:
    """Where a special token stands among them."""
    if name not in special:
        there = f"there are: {', '.join(special)}" if special else "it was made without any"
        raise UnknownNameError(f"the tokenizer has no special token {name!r} ({there}); name it in special=(...)")
    return list(special).index(name)


def shown_special(name: str) -> str:
    return f"<{name}>"


def shown_bytes(some: bytes) -> str:
    """The text of some bytes, or their numbers where they are no whole characters."""
    try:
        return some.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in some)


def counted(ids: Iterable[int], vocab: int | None = None) -> list[int]:
    """The tokens in a list, each at least 0 and, where that is given, less than vocab."""
    tokens = list(ids)
    if any(token < 0 for token in tokens):
        raise ConfigError(f"tokens count from 0, so {min(tokens)} is none")
    if vocab is not None and any(token >= vocab for token in tokens):
        raise ConfigError(f"tokens are less than vocab={vocab}, so {max(tokens)} is none")
    return tokens
