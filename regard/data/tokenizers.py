"""Text as tokens and back."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import Tokenizer as _Library

from regard.base.errors import CheckpointError, ConfigError

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


class Bytes:
    """The bytes of UTF-8 as tokens: no text is lost, and nothing has to be learned or loaded."""

    vocab = 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """One token for each byte; none are special. Half a surrogate pair, which UTF-8 cannot spell, becomes ?."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, and tokens that are no bytes, are shown as the replacement character."""
        tokens = list(ids)
        if any(token < 0 for token in tokens):
            raise ConfigError(f"tokens count from 0, so {min(tokens)} is none")
        # 255 occurs nowhere in UTF-8, so it stands for whatever a larger vocabulary holds
        return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "Bytes()"


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
        tokens = list(ids)
        if any(token < 0 for token in tokens):
            raise ConfigError(f"tokens count from 0, so {min(tokens)} is none")
        return str(self._library.decode(tokens, skip_special_tokens=True))

    def __repr__(self) -> str:
        return f"Loaded({str(self.file)!r})"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, as Hugging Face keeps them, or in a folder that has one."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is not there; a tokenizer is read from a {FILE}, or from a folder with one")
    return Loaded(file)


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
