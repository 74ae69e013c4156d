"""Adapters for autoregressive decoding: one interface to every model that predicts the next token.

`generate` uses a model only through a `GenerationAdapter`. `BatchReader` runs an adapter on sequences of different
lengths.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.models.caches import Caches
from regard.models.gpt import GPT
from regard.models.transformer import DecoderState, Transformer
from regard.nn.embeddings import check_tokens


@dataclass
class GenerationAdapter(ABC):
    """Base class of adapters for text generation: a model together with its conditioning input, such as a source text.

    module  the model
    """

    module: Any

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return int(self.module.config.vocab)

    @property
    def context(self) -> int:
        """The maximum number of tokens of a sequence."""
        return int(self.module.config.context)

    @property
    def batch(self) -> int | None:
        """The number of prompts that must be passed to `generate`; None if any number is possible."""
        return None

    @abstractmethod
    def start(self, capacity: int) -> Caches | DecoderState:
        """Return an empty decoding state (KV cache) with room for `capacity` tokens of each sequence."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        """Run the model on the next tokens, update the KV cache and return the logits after the last token."""

    @abstractmethod
    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        """Return the logits after the last token of whole sequences, computed without a KV cache.

        rows  index of the prompt that each sequence continues
        """


@dataclass
class DecoderAdapter(GenerationAdapter):
    """The generation adapter of a GPT, a decoder-only model."""

    @property
    def context(self) -> int:
        return int(self.module.config.max_length)

    def start(self, capacity: int) -> Caches:
        cache: Caches = self.module.cache(capacity)
        return cache

    def step(self, tokens: Int[Tensor, "b n"], state: Caches) -> Float[Tensor, "b w"]:
        return self._last_logits(tokens, state)

    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        return self._last_logits(tokens, None)

    def _last_logits(self, tokens: Int[Tensor, "b n"], cache: Caches | None) -> Float[Tensor, "b w"]:
        """Return the logits after the last token, without computing those of the other tokens.

        The logits of all tokens of a long prompt would take much memory.
        """
        return self.module.unembed(self.module.hidden(tokens, cache=cache)[:, -1:])[:, 0]


@dataclass
class EncoderDecoderAdapter(GenerationAdapter):
    """The generation adapter of an encoder-decoder Transformer with source sequences, one for each prompt.

    source          token ids (b m)
    source_padding  mask of the padding of the source, as in `Transformer.forward`
    """

    source: Int[Tensor, "b m"]
    source_padding: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, Transformer):
            raise ConfigError(f"only an encoder-decoder takes a source, not a {type(self.module).__name__}")
        check_tokens(self.source, self.vocab, "source")
        if self.source_padding is not None and not isinstance(self.source_padding, PaddingMask):
            raise ConfigError(f"source_padding takes padding(lengths), not {self.source_padding!r}")

    @property
    def batch(self) -> int:
        return len(self.source)

    def start(self, capacity: int) -> DecoderState:
        return self.module.start(self.source, self.source_padding, capacity=capacity)

    def step(self, tokens: Int[Tensor, "b n"], state: Any) -> Float[Tensor, "b w"]:
        return self.module.step(tokens, state)[:, -1]

    def full_pass(self, tokens: Int[Tensor, "b n"], rows: Int[Tensor, "b"]) -> Float[Tensor, "b w"]:
        real = self.source_padding
        if isinstance(real, PaddingMask):
            real = PaddingMask(real.data[rows.to(real.data.device)], real.side, real.width)
        return self.module(self.source[rows], tokens, source_padding=real)[:, -1]


def make_adapter(model: object) -> GenerationAdapter:
    """Return the generation adapter of a model; an adapter is returned unchanged."""
    if isinstance(model, GPT):
        return DecoderAdapter(model)
    if isinstance(model, Transformer):
        raise ConfigError("a Transformer needs a source; call model.generate(source, start_token=...)")
    if not isinstance(model, GenerationAdapter):
        name = f"a {type(model).__name__}" if isinstance(model, nn.Module) else repr(model)
        raise ConfigError(f"text is generated by a GPT, a Transformer or a GenerationAdapter, not by {name}")
    return model


TokenLists = Sequence[Sequence[int]]


class BatchReader:
    """Runs a model on a batch of sequences of different lengths, without padding.

    Every pass reads all sequences up to the length of the shortest one. Then the caller appends new tokens to the
    sequences that are read completely, while the longer ones are still reading their prompts. So the KV cache has the
    same number of positions for every sequence.

    prompts    number of sequences
    capacity   maximum number of tokens of a sequence
    use_cache  False computes whole sequences in every pass, without a KV cache
    """

    def __init__(self, adapter: GenerationAdapter, prompts: int, capacity: int, use_cache: bool) -> None:
        self.adapter, self.length = adapter, 0
        self.device = next(adapter.module.parameters()).device
        self.rows = torch.arange(prompts, device=self.device)
        self.state = adapter.start(capacity) if use_cache else None

    def read(self, texts: TokenLists) -> tuple[list[int], Float[Tensor, "r w"]]:
        """Run the model on the next tokens of each text, up to the length of the shortest.

        Returns the indices of the texts that are read completely, and the logits of their next tokens.
        """
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
        """Reorder the sequences and the KV cache, as beam search does: sequence r becomes the old sequence rows[r]."""
        index = torch.tensor(rows, device=self.device)
        self.rows = self.rows[index]
        if self.state is not None:
            self.state.reorder(index)
