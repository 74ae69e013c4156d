"""The Transformer: an encoder-decoder with cross-attention. Vaswani et al. 2017.

"Attention is all you need", arXiv:1706.03762. Other settings make it BART (Lewis et al. 2019, arXiv:1910.13461),
Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344) or T5 (Raffel et al. 2020, arXiv:1910.10683).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer
from regard.core.cache import DynamicCache, StaticCache
from regard.core.masks import causal
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.core.scores import t5_buckets
from regard.models.caches import Caches, check_caches
from regard.models.generation_types import GeneratedText, GenerationOptions
from regard.models.model import Config, Model
from regard.models.padding_positions import token_positions
from regard.nn.attention import Attention, KeysValues, check_heads
from regard.nn.blocks import ORDERS, Block, run_blocks
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding, check_context, check_integers
from regard.nn.feedforward import FeedForward
from regard.nn.init import Initializers, constant, normal, uniform, xavier
from regard.nn.learned_scores import LearnedBuckets
from regard.nn.norms import norm
from regard.nn.projection import Linear

POSITIONS = ("sinusoidal", "sinusoidal-half", "learned")


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeBuckets:
    """T5's relative position biases: one learned bias for each attention head and each bucket of distances.

    All blocks of the encoder share one table of biases, and all blocks of the decoder share another. See `t5_buckets`.

    buckets       number of buckets, in which distances between query and key are grouped
    max_distance  all distances of at least this are in the last bucket
    """

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        table = torch.empty(check_integer("buckets", self.buckets, 2), 1, device="meta")
        for bidirectional in (True, False):  # the encoder and the decoder
            t5_buckets(table, max_distance=self.max_distance, bidirectional=bidirectional)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(Config):
    """Settings of an encoder-decoder Transformer. Source, target and output have the same vocabulary.

    depth            number of blocks of the encoder
    decoder_depth    number of blocks of the decoder; None is `depth`
    head_width       width of one head; None is width // heads
    ff_width         width of the hidden layer of the feed-forward network; None is 4 * width
    ff_dropout       dropout inside the feed-forward network
    beta             inverse temperature of attention; None is head_width ** -0.5
    bias             whether linear layers have a bias
    order            "post" normalises after each residual sum, as in Vaswani et al. 2017; "pre" normalises before
                     attention and feed-forward, and after the last block
    positions        "sinusoidal" as in Vaswani et al. 2017, "sinusoidal-half" with all sines before all
                     cosines, "learned", or RelativeBuckets(...)
    scale_embedding  whether token embeddings are multiplied by sqrt(width) before positions are added
    embedding_norm   whether the sum of token embeddings and positions is normalised
    tied             whether the output layer shares the token embeddings
    output_scale     factor by which the decoder's output is multiplied before the output layer
    output_bias      whether a learned bias for each token is added to the logits
    """

    vocab: int
    context: int = 1024
    width: int = 512
    depth: int = 6
    decoder_depth: int | None = None
    heads: int = 8
    head_width: int | None = None
    ff_width: int | None = None
    order: str = "post"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "relu"
    beta: float | None = None
    bias: bool = True
    positions: str | RelativeBuckets = "sinusoidal"
    scale_embedding: bool = True
    embedding_norm: bool = False
    tied: bool = True
    output_scale: float = 1.0
    output_bias: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check()
        self.check_choice("order", ORDERS)
        if isinstance(self.positions, str):
            self.check_choice("positions", POSITIONS)
        check_heads(self.width, self.heads, head_width=self.head_width)


class Transformer(Model):
    """An encoder-decoder Transformer. Maps source and target token ids to logits of each next target token."""

    Config = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        depth = config.depth if config.decoder_depth is None else config.decoder_depth
        self.tokens = TokenEmbedding(
            config.vocab, config.width, scale=math.sqrt(config.width) if config.scale_embedding else 1
        )
        self.encoder = Stack(config, config.depth, cross_attention=False)
        self.decoder = Stack(config, depth, cross_attention=True)
        self.head = None if config.tied else Linear(config.width, config.vocab, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab)) if config.output_bias else None
        self.init_weights()

    def forward(
        self,
        source: Int[Tensor, "b m"],
        target: Int[Tensor, "b n"],
        *,
        source_padding: Mask | None = None,
        target_padding: Mask | None = None,
        indices: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "*n w"]:
        """Return the logits of the token after each target token. The target begins with a start token.

        source_padding, target_padding
                 masks of the padding: `padding(lengths)` if it is on the right,
                 `padding(lengths, side="left", width=n)` if it is on the left
        indices  if given, only the logits of t target tokens are returned: those with these indices in the target,
                 flattened to b * n tokens

        The shape is (b n w), or (t w) with `indices`.
        """
        memory = self.encode(source, source_padding)
        return self.decode(
            target, memory, source_padding=source_padding, target_padding=target_padding, indices=indices
        )

    def encode(self, source: Int[Tensor, "b m"], padding: Mask | None = None) -> Float[Tensor, "b m d"]:
        """Return the output of the encoder: one vector for each source token.

        padding  mask of the padding, as `source_padding` in `forward`
        """
        x = self._embed(self.encoder, "source", source, padding, 0)
        x = run_blocks(self.encoder.blocks, x, recompute=self.gradient_checkpointing, mask=padding)
        return self.encoder.final_norm(x)

    def decode(
        self,
        target: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m d"] | Sequence[KeysValues],
        *,
        source_padding: Mask | None = None,
        target_padding: Mask | None = None,
        cache: Caches | None = None,
        indices: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "*n w"]:
        """Return the logits of the token after each target token.

        memory   the output of `encode`, or the keys and values that each block projected from it
        cache    KV cache from `self.cache()`; the target continues where it ends
        source_padding, target_padding, indices
                 as in `forward`
        """
        rows = memory.shape[0] if isinstance(memory, Tensor) else len(memory[0].k)
        if isinstance(target, Tensor) and target.ndim == 2 and target.shape[0] != rows:
            raise ShapeError(
                f"target has {target.shape[0]} sequences, but the source has {rows}; give one target for each"
            )
        x = self._embed(self.decoder, "target", target, target_padding, 0 if cache is None else cache.length)
        mask = causal() if target_padding is None else causal() & target_padding
        blocks = self.decoder.blocks
        memories = [memory] * len(blocks) if isinstance(memory, Tensor) else memory
        caches = [None] * len(blocks) if cache is None else check_caches(cache, len(blocks))
        for block, keys_values, block_cache in zip(blocks, memories, caches, strict=True):
            settings = {"memory": keys_values, "mask": mask, "memory_mask": source_padding, "cache": block_cache}
            x = run_blocks([block], x, recompute=self.gradient_checkpointing and cache is None, **settings)
        x = self.decoder.final_norm(x)
        if indices is not None:
            x = x.flatten(0, 1)
            check_integers("indices", indices, "t", len(x), f"the target has tokens 0 to {len(x) - 1}")
            x = x.index_select(0, indices)
        x = x if self.config.output_scale == 1.0 else x * self.config.output_scale
        logits = self.tokens.unembed(x) if self.head is None else self.head(x)
        return logits if self.output_bias is None else logits + self.output_bias

    def start(
        self, source: Int[Tensor, "b m"], source_padding: Mask | None = None, *, capacity: int | None = None
    ) -> "DecoderState":
        """Encode the source and return a decoding state with an empty target, for `step`.

        capacity  as in `cache`
        """
        if source_padding is not None and not isinstance(source_padding, PaddingMask):
            raise ConfigError(f"source_padding takes padding(lengths), not {source_padding!r}")
        memory = self.encode(source, source_padding)
        return DecoderState(self.decoder.project_memory(memory), source_padding, self.cache(capacity))

    def step(self, tokens: Int[Tensor, "b n"], state: "DecoderState") -> Float[Tensor, "b n w"]:
        """Run the decoder on the next target tokens, update the KV cache and return the logits after each token."""
        return self.decode(tokens, state.memory, source_padding=state.source_padding, cache=state.caches)

    def cache(self, capacity: int | None = None) -> Caches:
        """Return an empty KV cache for the decoder.

        capacity  number of tokens for which memory is allocated now (static cache); None makes a cache that grows
        """
        return Caches(DynamicCache if capacity is None else lambda: StaticCache(capacity), len(self.decoder.blocks))

    def generate(
        self,
        source: Int[Tensor, "b m"],
        *,
        start_token: int,
        source_padding: Mask | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GeneratedText]:
        """Generate a target for each source by autoregressive decoding.

        source          token ids (b m)
        start_token     the first token of every target (`decoder_start_token_id` of Hugging Face)
        source_padding  mask of the padding of the source, as in `forward`
        options         the keyword arguments of `regard.generate`

        >>> model.generate(source, start_token=1, max_new_tokens=40, num_beams=4, stop=[2])[0].body
        """
        from regard.models.generation import generate  # it imports this file
        from regard.models.generation_adapters import EncoderDecoderAdapter

        adapter = EncoderDecoderAdapter(self, source, source_padding)
        return generate(adapter, [[start_token]] * len(source), **options)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        text = torch.zeros(batch, self.config.context if length is None else length, dtype=torch.long)
        return text, text

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        source, target = self.example_inputs(batch, length)
        state = self.start(source)
        self.step(target, state)
        return state.nbytes

    def initializers(self) -> Initializers:
        width = self.config.width
        return {
            "tokens.weight": normal(width**-0.5),  # variance 1 after scaling; so have the first logits
            "*.positions.weight": normal(1.0 if self.config.scale_embedding else width**-0.5),
            "*.relative.weight": normal(width**-0.5),
            "output_bias": constant(0.0),
            "*norm.weight": constant(1.0),
            "*.bias": constant(0.0),
            "*.query_key_value.weight": uniform(math.sqrt(3.0 / width)),  # each third as xavier alone
            "*.weight": xavier(),
        }

    def _embed(self, stack: "Stack", name: str, tokens: Tensor, padding: Mask | None, start: int) -> Tensor:
        x = self.tokens(tokens, name)
        check_context(start + tokens.shape[1], self.config.context)
        x = stack.add_positions(x, token_positions(padding, start, tokens.shape[1], tokens.device))
        return functional.dropout(x, self.config.dropout, self.training)


class Stack(nn.Module):
    """The encoder or the decoder of a Transformer, without the token embeddings."""

    def __init__(self, config: TransformerConfig, depth: int, *, cross_attention: bool) -> None:
        super().__init__()
        self.positions, self.relative = _positions(config), None
        if isinstance(config.positions, RelativeBuckets):
            self.relative = LearnedBuckets(
                config.heads,
                buckets=config.positions.buckets,
                max_distance=config.positions.max_distance,
                bidirectional=not cross_attention,
            )
        self.embedding_norm = norm(config.norm, config.width, config.eps) if config.embedding_norm else None
        self.blocks = nn.ModuleList(_block(config, cross_attention, self.relative) for _ in range(depth))
        self.norm = norm(config.norm, config.width, config.eps) if config.order == "pre" else None

    def add_positions(self, x: Float[Tensor, "b n d"], positions: Int[Tensor, "*b n"]) -> Float[Tensor, "b n d"]:
        """Add absolute positions to token embeddings and apply the embedding norm, if the model has these."""
        x = x if self.positions is None else x + self.positions(positions).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def final_norm(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Apply the final norm of a pre-norm model. Returns x unchanged in a post-norm model."""
        return x if self.norm is None else self.norm(x)

    def project_memory(self, memory: Float[Tensor, "b m d"]) -> tuple[KeysValues, ...]:
        """Return the cross-attention keys and values of each block, projected from the encoder's output."""
        layers = [block.cross for block in self.blocks if isinstance(block, Block)]
        return tuple(layer.keys_values(memory) for layer in layers if layer is not None)


@dataclass
class DecoderState:
    """The state of incremental decoding: each block's keys and values of the source, and the KV cache."""

    memory: tuple[KeysValues, ...]
    source_padding: PaddingMask | None
    caches: Caches

    @property
    def length(self) -> int:
        """The number of target tokens read so far."""
        return self.caches.length

    @property
    def nbytes(self) -> int:
        """The size of the state in bytes."""
        return self.caches.nbytes + sum(x.numel() * x.element_size() for pair in self.memory for x in pair)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Reorder the sequences of the batch, as beam search does: sequence r becomes the old sequence rows[r].

        The keys, values and lengths of the source and the KV cache of the target are reordered in the same way. `rows`
        may repeat sequences or leave some out, so that the batch grows or shrinks.
        """
        self.memory = tuple(KeysValues(*(x.index_select(0, rows) for x in pair)) for pair in self.memory)
        if self.source_padding is not None:
            lengths = self.source_padding.data
            self.source_padding = replace(self.source_padding, data=lengths.index_select(0, rows.to(lengths.device)))
        self.caches.reorder(rows)


def _positions(config: TransformerConfig) -> nn.Module | None:
    if isinstance(config.positions, RelativeBuckets):
        return None
    if config.positions == "learned":
        return LearnedPositions(config.context, config.width)
    return SinusoidalPositions(config.width, pairing="half" if config.positions == "sinusoidal-half" else "interleaved")


def _block(config: TransformerConfig, cross_attention: bool, relative: LearnedBuckets | None) -> Block:
    settings: dict[str, Any] = {
        "head_width": config.head_width,
        "bias": config.bias,
        "beta": config.beta,
        "dropout": config.attention_dropout,
    }
    scores = None if relative is None else relative.forward
    attention = Attention(config.width, config.heads, scores=scores, **settings)
    cross = Attention(config.width, config.heads, **settings) if cross_attention else None
    feedforward = FeedForward(
        config.width, config.ff_width, activation=config.activation, bias=config.bias, dropout=config.ff_dropout
    )
    return Block(
        config.width,
        attention,
        feedforward,
        cross=cross,
        norm_kind=config.norm,
        eps=config.eps,
        order=config.order,
        dropout=config.dropout,
    )


# The paper says "about 37000" byte pairs, 65 M and 213 M parameters, but 37000 give 63.1 M and 214.2 M. A preset has
# the vocabulary that gives the published count; pass vocab= for another one.
PRESETS = {
    "transformer-tiny": TransformerConfig(vocab=10000, width=128, depth=4, heads=4, ff_width=256),
    "transformer-base": TransformerConfig(vocab=40700),
    "transformer-big": TransformerConfig(vocab=35800, width=1024, heads=16, dropout=0.3),
}
