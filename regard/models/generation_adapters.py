"""Adapters for autoregressive decoding: one interface to every model that predicts the next token.

`GenerationAdapter` is all that `generate` knows of a model. Two readers feed it a batch of sequences of different
lengths: `AlignedReader` uses no padding, `LeftPaddedReader` pads on the left.
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
from regard.models.gpt import GPT, SyntheticAttention
from regard.models.transformer import Transformer
from regard.nn.embeddings import check_tokens


@runtime_checkable
class DecodingState(Protocol):
    """What a model keeps of the tokens it has read, such as a KV cache."""

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Replace sequence r by sequence rows[r]."""


@runtime_checkable
class GenerationAdapter(Protocol):
    """A model that predicts the next token, together with what it is conditioned on."""

    @property
    def module(self) -> nn.Module:
        """The network."""

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""

    @property
    def context(self) -> int:
        """The most tokens of a sequence that can be read."""

    def check_batch(self, prompts: int) -> None:
        """Raise where it cannot continue this number of prompts."""

    def start(self, capacity: int) -> DecodingState:
        """An empty state with room for `capacity` tokens of each sequence."""

    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        """Logits after the last of these tokens, which continue where the state ends; the state is extended."""

    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        """The same from whole sequences without a state; `rows[r]` is the prompt that sequence r continues."""


@dataclass(frozen=True)
class DecoderAdapter:
    """Adapter of a GPT, a decoder-only model."""

    module: GPT

    @property
    def vocab(self) -> int:
        return self.module.config.vocab

    @property
    def context(self) -> int:
        return self.module.config.max_length

    def check_batch(self, prompts: int) -> None:
        """A GPT continues any number of prompts."""

    def start(self, capacity: int) -> Caches:
        return self.module.cache(capacity)

    def step(self, tokens: Int[Tensor, "b n"], state: Caches) -> Float[Tensor, "b w"]:
        return self.last_logits(tokens, cache=state)

    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        return self.last_logits(tokens)

    def last_logits(self, tokens: Int[Tensor, "b n"], **options: Any) -> Float[Tensor, "b w"]:
        """Logits after the last token only: those of a whole long prompt would take much memory."""
        return self.module.unembed(self.module.hidden(tokens, **options)[:, -1:])[:, 0]


@dataclass(frozen=True)
class EncoderDecoderAdapter:
    """Adapter of a Transformer (encoder-decoder) that is conditioned on source sequences, one for each prompt.

    source          token ids (b m)
    source_padding  which source tokens are real: `padding(lengths)`
    """

    module: Transformer
    source: Int[Tensor, "b m"]
    source_padding: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, Transformer):
            raise ConfigError(f"only an encoder-decoder takes a source, not a {type(self.module).__name__}")
        check_tokens(self.source, self.vocab, "source")
        if self.source_padding is not None and not isinstance(self.source_padding, PaddingMask):
            raise ConfigError(f"source_padding takes padding(lengths), not {self.source_padding!r}")

    @property
    def vocab(self) -> int:
        return self.module.config.vocab

    @property
    def context(self) -> int:
        return self.module.config.context

    def check_batch(self, prompts: int) -> None:
        if prompts != len(self.source):
            raise ShapeError(f"there are {prompts} prompts, but {len(self.source)} sources; give one prompt for each")

    def start(self, capacity: int) -> DecodingState:
        return self.module.start(self.source, self.source_padding, capacity=capacity)

    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        return self.module.step(tokens, state)[:, -1]

    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        real = self.source_padding
        if isinstance(real, PaddingMask):
            real = PaddingMask(real.data[rows.to(real.data.device)], real.side, real.width)
        return self.module(self.source[rows], tokens, source_padding=real)[:, -1]


def make_adapter(model: object) -> GenerationAdapter:
    """The adapter of a model; an adapter is returned as it is."""
    if isinstance(model, GPT):
        return DecoderAdapter(model)
    if isinstance(model, Transformer):
        raise ConfigError("a Transformer needs a source; call model.generate(source, start_token=...)")
    if not isinstance(model, GenerationAdapter):
        name = f"a {type(model).__name__}" if isinstance(model, nn.Module) else repr(model)
        raise ConfigError(f"text is generated by a GPT, a Transformer or a GenerationAdapter, not by {name}")
    return model


TokenLists = Sequence[Sequence[int]]


class AlignedReader:
    """Reads sequences without padding, every token at its own position.

    The first pass reads as many tokens as the shortest prompt has. Then the shortest sequences are extended while the
    others still read their own prompts, so that the KV cache has no gaps.
    """

    def __init__(self, adapter: GenerationAdapter, prompts: int, capacity: int, use_cache: bool) -> None:
        self.adapter, self.length = adapter, 0
        self.device = _device(adapter.module)
        self.rows = torch.arange(prompts, device=self.device)
        self.state = adapter.start(capacity) if use_cache else None

    def read(self, texts: TokenLists) -> tuple[list[int], Float[Tensor, "r w"]]:
        """Which sequences have been read to their ends, and the logits of their next tokens."""
        end, start = min(map(len, texts)), 0 if self.state is None else self.length
        tokens = torch.tensor([list(text[start:end]) for text in texts], device=self.device)
        if self.state is None:
            logits = self.adapter.full_pass(tokens, self.rows)
        else:
            logits = self.adapter.step(tokens, self.state)
        self.length = end
        ready = [row for row, text in enumerate(texts) if len(text) == end]
        return ready, logits if len(ready) == len(texts) else logits[ready]

    def reorder(self, rows: Sequence[int]) -> None:
        """Replace sequence r by sequence rows[r]."""
        index = torch.tensor(rows, device=self.device)
        self.rows = self.rows[index]
        if self.state is not None:
            self.state.reorder(index)


class LeftPaddedReader:
    """Reads sequences of a GPT padded on the left, so that all end in the same column.

    A mask hides the padding, and positions are counted from the first real token. When the columns reach the context,
    the sequences that are left are shorter than it, and are padded again.
    """

    def __init__(self, adapter: GenerationAdapter, capacity: int, use_cache: bool) -> None:
        if not isinstance(adapter, DecoderAdapter):
            raise ConfigError("left_pad=True is for a GPT; leave it out for other models")
        if isinstance(adapter.module.config.mixer, SyntheticAttention):
            raise ConfigError("SyntheticAttention has its weights by absolute position; leave out left_pad=True")
        self.adapter, self.capacity, self.use_cache = adapter, capacity, use_cache
        self.device = _device(adapter.module)
        self.cache: Caches | None = None
        self.padding: list[int] = []  # columns before each sequence
        self.width = 0  # columns of the first pass

    def read(self, texts: TokenLists) -> tuple[list[int], Float[Tensor, "r w"]]:
        """As in `AlignedReader`; every sequence is ready."""
        if self.cache is None or self.cache.length == self.adapter.context:
            self.width = max(map(len, texts))
            self.padding = [self.width - len(text) for text in texts]
            self.cache = self.adapter.start(self.capacity) if self.use_cache else None
        start = 0 if self.cache is None else self.cache.length
        rows = [[0] * count + list(text) for count, text in zip(self.padding, texts, strict=True)]
        tokens = torch.tensor([row[start:] for row in rows], device=self.device)
        before = torch.tensor(self.padding, device=self.device)
        positions = torch.arange(start, start + tokens.shape[1], device=self.device) - before[:, None]
        real = padding(self.width - before.cpu(), side="left", width=self.width) if any(self.padding) else None
        logits = self.adapter.last_logits(tokens, cache=self.cache, padding=real, positions=positions.clamp(min=0))
        return list(range(len(texts))), logits

    def reorder(self, rows: Sequence[int]) -> None:
        """Replace sequence r by sequence rows[r]."""
        self.padding = [self.padding[row] for row in rows]
        if self.cache is not None:
            self.cache.reorder(torch.tensor(rows, device=self.device))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
