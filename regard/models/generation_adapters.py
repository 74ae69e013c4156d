"""Models that write, seen alike: tokens go in, logits of the next one come out, and a state is kept between.

`Decoder` is all that generation knows of a model. Two readers stand on it, for texts of different lengths in one batch:
`Aligned` keeps every token at its own position and needs no padding at all, `Shifted` fills texts up at their front.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError, ShapeError
from regard.core.masks import padding
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.models.caches import Caches
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.nn.embeddings import check_tokens


@runtime_checkable
class DecodingState(Protocol):
    """What a model keeps of the tokens it has read."""

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Let text r go on from what text rows[r] held."""


@runtime_checkable
class GenerationAdapter(Protocol):
    """A model that tells each next token, together with whatever it writes about."""

    @property
    def module(self) -> nn.Module:
        """The network."""

    @property
    def vocab(self) -> int:
        """How many tokens there are."""

    @property
    def context(self) -> int:
        """How many tokens of a text can be read."""

    def check_texts(self, texts: int) -> None:
        """Raise where it cannot write so many texts at once."""

    def start(self, capacity: int) -> DecodingState:
        """The state of texts of which nothing was read, with room for `capacity` tokens each."""

    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        """Logits of the token after the last of these, which go on where the state ends; the state takes them in."""

    def whole(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        """The same from whole texts and no state; `rows` says which text of the batch each one continues."""


@dataclass(frozen=True)
class Continuing:
    """A GPT, which goes on with the text it is given."""

    module: GPT

    @property
    def vocab(self) -> int:
        return self.module.config.vocab

    @property
    def context(self) -> int:
        config = self.module.config
        return config.context if not config.synthesizer or config.reach is None else min(config.context, config.reach)

    def check_texts(self, texts: int) -> None:
        """Any number will do."""

    def start(self, capacity: int) -> Caches:
        return self.module.cache(capacity)

    def step(self, tokens: Int[Tensor, "b n"], state: Caches) -> Float[Tensor, "b w"]:
        return self.last(tokens, cache=state)

    def whole(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        return self.last(tokens)

    def last(self, tokens: Int[Tensor, "b n"], **settings: Any) -> Float[Tensor, "b w"]:
        """Logits after the last token alone: of a long prompt, all of them would be large."""
        return self.module.unembed(self.module.hidden(tokens, **settings)[:, -1:])[:, 0]


@dataclass(frozen=True)
class Answering:
    """An encoder-decoder that writes about a source, one text for each of its rows."""

    module: Transformer
    source: Int[Tensor, "b m"]
    source_padding: PaddingMask | None = None

    @property
    def vocab(self) -> int:
        return self.module.config.vocab

    @property
    def context(self) -> int:
        return self.module.config.context

    def check_texts(self, texts: int) -> None:
        if texts != len(self.source):
            raise ShapeError(f"there are {texts} prompts, but {len(self.source)} sources; they come in pairs")

    def start(self, capacity: int) -> DecodingState:
        return self.module.start(self.source, self.source_padding, capacity=capacity)

    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        return self.module.step(tokens, state)[:, -1]

    def whole(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        kept = self.source_padding
        if kept is not None:
            kept = PaddingMask(kept.data[rows.to(kept.data.device)], kept.side, kept.width)
        return self.module(self.source[rows], tokens, source_padding=kept)[:, -1]


def make_adapter(model: Transformer, source: Tensor, source_padding: Mask | None = None) -> GenerationAdapter:
    """The model as a writer about these sources, for `generate` and `stream`; prompts hold the token that says start.

    source          tokens (b m), one row for each text
    source_padding  which source tokens are real: `padding(lengths)`
    """
    if not isinstance(model, Transformer):
        raise ConfigError(f"only an encoder-decoder answers a source, not a {type(model).__name__}")
    check_tokens(source, model.config.vocab, "source")
    if source_padding is not None and not isinstance(source_padding, PaddingMask):
        raise ConfigError(f"source_padding says how long each source is, padding(lengths), not {source_padding!r}")
    return Answering(model, source, source_padding)


def as_decoder(model: object) -> GenerationAdapter:
    """The decoder that is meant by a model."""
    if isinstance(model, GPT):
        return Continuing(model)
    if isinstance(model, Transformer):
        raise ConfigError("a Transformer writes about a source; hand in make_adapter(model, source, source_padding)")
    if not isinstance(model, GenerationAdapter):
        raise ConfigError(
            f"text is generated by a GPT, make_adapter(model, source) or a Decoder, not by {_named(model)}"
        )
    return model


Texts = Sequence[Sequence[int]]


class Aligned:
    """Reads texts side by side, every token at its own position.

    What is known of all texts is read in one pass. Then the shortest of them get their next tokens while the others go
    on with what they already hold, so nothing is filled in, and no cache has a hole.
    """

    def __init__(self, decoder: GenerationAdapter, texts: int, capacity: int, cached: bool) -> None:
        self.decoder, self.length = decoder, 0
        self.device = _device(decoder.module)
        self.rows = torch.arange(texts, device=self.device)
        self.state = decoder.start(capacity) if cached else None

    def read(self, texts: Texts) -> tuple[list[int], Float[Tensor, "r w"]]:
        """The texts that have been read to their ends, and logits of their next tokens. Each has grown since before."""
        until = min(map(len, texts))
        if self.state is None:
            logits = self.decoder.whole(self._columns(texts, 0, until), self.rows)
        else:
            logits = self.decoder.step(self._columns(texts, self.length, until), self.state)
        self.length = until
        ready = [row for row, text in enumerate(texts) if len(text) == until]
        return ready, logits if len(ready) == len(texts) else logits[ready]

    def keep(self, rows: Sequence[int]) -> None:
        """Let text r be what text rows[r] was."""
        index = torch.tensor(rows, device=self.device)
        self.rows = self.rows[index]
        if self.state is not None:
            self.state.reorder(index)

    def _columns(self, texts: Texts, start: int, until: int) -> Int[Tensor, "b n"]:
        return torch.tensor([list(text[start:until]) for text in texts], device=self.device)


class Shifted:
    """Reads texts of a GPT that are filled up at their front, so that all end together and each goes on at every step.

    A mask hides what was filled in, and positions are counted from each text's own start. When the columns reach the
    context, the texts that are left are shorter than that and are filled up anew.
    """

    def __init__(self, decoder: GenerationAdapter, capacity: int, cached: bool) -> None:
        if not isinstance(decoder, Continuing):
            raise ConfigError("padding='left' is for a GPT; with any other decoder use padding='right'")
        if decoder.module.config.synthesizer:
            raise ConfigError(
                "a synthesizer has its weights by absolute position, so padding='left' would move them; "
                "use padding='right'"
            )
        self.decoder, self.capacity, self.cached = decoder, capacity, cached
        self.device = _device(decoder.module)
        self.cache: Caches | None = None
        self.filled: list[int] = []  # columns before each text
        self.width = 0  # columns of the pass that filled them

    def read(self, texts: Texts) -> tuple[list[int], Float[Tensor, "r w"]]:
        """As in `Aligned`; here every text is ready."""
        if self.cache is None or self.cache.length == self.decoder.context:
            self.width = max(map(len, texts))
            self.filled = [self.width - len(text) for text in texts]
            self.cache = self.decoder.start(self.capacity) if self.cached else None
            start = 0
        else:
            start = self.cache.length
        rows = [[0] * fill + list(text) for fill, text in zip(self.filled, texts, strict=True)]
        tokens = torch.tensor([row[start:] for row in rows], device=self.device)
        front = torch.tensor(self.filled, device=self.device)
        positions = torch.arange(start, start + tokens.shape[1], device=self.device) - front[:, None]
        hidden = padding(self.width - front.cpu(), side="left", width=self.width) if any(self.filled) else None
        logits = self.decoder.last(tokens, cache=self.cache, padding=hidden, positions=positions.clamp(min=0))
        return list(range(len(texts))), logits

    def keep(self, rows: Sequence[int]) -> None:
        """As in `Aligned`."""
        self.filled = [self.filled[row] for row in rows]
        if self.cache is not None:
            self.cache.reorder(torch.tensor(rows, device=self.device))


Reader = Aligned | Shifted


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _named(model: object) -> str:
    return f"a {type(model).__name__}" if isinstance(model, nn.Module) else repr(model)
