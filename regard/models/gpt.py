"""GPT: a causal decoder that predicts each token from the tokens before it. GPT-2 (Radford et al. 2019) and Llama."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions
from regard.core.cache import DynamicCache, SlidingWindowCache, StaticCache
from regard.core.masks import causal, window
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.models.caches import Caches, check_caches
from regard.models.generation_types import GeneratedText, GenerationOptions, Prompts
from regard.models.model import Config, Model
from regard.models.padding_positions import is_left_padded, token_positions
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding, check_context
from regard.nn.feedforward import FeedForward, check_activation
from regard.nn.init import Initializers, constant, normal, uniform
from regard.nn.norms import norm
from regard.nn.projection import Linear
from regard.nn.synthesizer import Synthesizer, check_parts


@dataclass(frozen=True, slots=True)
class Learned:
    """Value of GPTConfig.positions: learned absolute position embeddings, one vector for each position."""


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """Value of GPTConfig.positions: fixed sinusoidal position embeddings. Vaswani et al. 2017."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DotProductAttention:
    """Value of GPTConfig.mixer: multi-head scaled dot-product attention.

    kv_heads              number of key and value heads (grouped-query attention); None is the number of query heads
    head_width            width of one head; None is width // heads
    qk_norm               norm of each query and key head, "rms" or "layer"; None is no norm
    query_key_value_bias  whether the query, key and value projections have a bias; None is the `bias` of the
                          model
    """

    kv_heads: int | None = None
    head_width: int | None = None
    qk_norm: str | None = None
    query_key_value_bias: bool | None = None

    def check(self, config: "GPTConfig") -> None:
        """Check that these settings fit the other settings of the model, else raise ConfigError."""
        check_heads(config.width, config.heads, self.kv_heads, self.head_width)
        if self.qk_norm is not None:
            norm(self.qk_norm, 1)
        if isinstance(config.positions, Rotary):
            if config.positions.axes != 1:
                raise ConfigError(f"tokens of a text have one position each: axes={config.positions.axes}; use axes=1")
            width = self.head_width or config.width // config.heads
            config.positions.frequencies(width, torch.device("meta"))  # raises for a width that does not fit

    def resolve(self, config: "GPTConfig") -> "DotProductAttention":
        """Return a copy of these settings in which None is replaced by the default for this model.

        qk_norm stays None, because that means no norm.
        """
        bias = config.bias if self.query_key_value_bias is None else self.query_key_value_bias
        kv_heads, head_width = self.kv_heads or config.heads, self.head_width or config.width // config.heads
        return replace(self, kv_heads=kv_heads, head_width=head_width, query_key_value_bias=bias)

    def build(self, config: "GPTConfig") -> Attention:
        """Return a new attention layer for one block."""
        settings = self.resolve(config)
        return Attention(
            config.width,
            config.heads,
            kv_heads=settings.kv_heads,
            head_width=settings.head_width,
            bias=bool(settings.query_key_value_bias),
            out_bias=config.bias,
            rotary=config.positions if isinstance(config.positions, Rotary) else None,
            qk_norm=self.qk_norm,
            qk_norm_eps=config.eps,
            dropout=config.attention_dropout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticAttention:
    """Value of GPTConfig.mixer: `Synthesizer` layers instead of dot-product attention.

    Tay et al. 2020, arXiv:2005.00743.

    parts    kinds of attention scores, which are added: "dense", "random", "dot"
    context  number of positions for which the layers learn scores; None is the model's context
    """

    parts: tuple[str, ...] = ("dense",)
    context: int | None = None

    def check(self, config: "GPTConfig") -> None:
        """Check that these settings fit the other settings of the model, else raise ConfigError."""
        check_heads(config.width, config.heads)
        check_parts(self.parts)
        if self.context is not None:
            check_integer("mixer.context", self.context, 1)
        if isinstance(config.positions, Rotary):
            raise ConfigError(
                "Rotary rotates queries and keys, and SyntheticAttention has none; choose positions=Learned()"
            )

    def build(self, config: "GPTConfig") -> Synthesizer:
        """Return a new attention layer for one block."""
        return Synthesizer(
            config.width,
            config.heads,
            config.context if self.context is None else self.context,
            parts=self.parts,
            bias=config.bias,
            dropout=config.attention_dropout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(Config):
    """Settings of a GPT, a causal decoder.

    vocab      number of tokens
    context    maximum number of tokens of an input
    width      model width
    depth      number of blocks
    positions  position encoding: Learned(), Sinusoidal(), Rotary(base=..., scaling=...) or None
    mixer      attention of each block: DotProductAttention(...) or SyntheticAttention(...)
    window     number of earlier tokens that each token sees; None is all
    ff_width   width of the hidden layer of the feed-forward network; None is 4 * width; 0 is no feed-forward
               network, an attention-only model
    tied       whether the output layer shares the token embeddings
    """

    vocab: int
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    ff_width: int | None = None
    positions: Learned | Sinusoidal | Rotary | None = Learned()
    mixer: DotProductAttention | SyntheticAttention = DotProductAttention()
    window: int | None = None
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "gelu-tanh"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check(zero=("ff_width",))
        check_activation(self.activation)
        norm(self.norm, 1, self.eps)
        self.mixer.check(self)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of an input: the smaller of `context` and the SyntheticAttention's context."""
        if isinstance(self.mixer, SyntheticAttention) and self.mixer.context is not None:
            return min(self.context, self.mixer.context)
        return self.context


class GPT(Model):
    """A GPT, a causal decoder. Maps token ids to logits of the token after each position.

    >>> model = regard.build("gpt2", depth=2)
    >>> model(torch.tensor([[5, 17, 3]])).shape
    torch.Size([1, 3, 50257])
    """

    Config = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.tokens = TokenEmbedding(config.vocab, config.width)
        self.positions: nn.Module | None = None
        if isinstance(config.positions, Learned):
            self.positions = LearnedPositions(config.context, config.width)
        elif isinstance(config.positions, Sinusoidal):
            self.positions = SinusoidalPositions(config.width)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.norm = norm(config.norm, config.width, config.eps)
        self.head = None if config.tied else Linear(config.width, config.vocab, bias=False)
        self.init_weights()

    @property
    def mask(self) -> Mask:
        """The attention mask: causal, or a causal sliding window if `window` is set."""
        return causal() if self.config.window is None else window(before=self.config.window)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        padding: Mask | None = None,
        cache: Caches | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "..."]:
        """Return the logits (b n w) of the token after each position.

        padding    mask of the padding: `padding(lengths)` if it is on the right,
                   `padding(lengths, side="left", width=n)` if it is on the left
        cache      KV cache from `self.cache()`; the tokens continue where it ends
        positions  position of each token; by default consecutive numbers, which start at the length of the cache
        head       function whose result is returned instead of the logits, such as a loss that does not hold all logits
                   at once. It is called with the hidden states (b n d) and the output weights (w d)
        """
        hidden = self.hidden(tokens, padding=padding, cache=cache, positions=positions)
        return self.unembed(hidden) if head is None else head(hidden, self.output_weight)

    def hidden(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        padding: Mask | None = None,
        cache: Caches | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states after the last block and the final norm. `unembed` converts them to logits.

        The arguments are those of `forward`.
        """
        start = 0 if cache is None else check_caches(cache, len(self.blocks)).length
        x = self.tokens(tokens)
        b, n = tokens.shape
        check_context(start + n, self.config.context)
        mask = self.mask if padding is None else self.mask & padding
        mask.check(Positions(start), n, start + n, b, self.config.heads)  # before any cache is changed
        if isinstance(self.config.mixer, SyntheticAttention) and is_left_padded(padding):
            raise ConfigError("SyntheticAttention has its weights by absolute position; pad sequences on the right")
        if self.positions is not None:
            where = token_positions(padding, start, n, tokens.device) if positions is None else positions
            x = x + self.positions(where).to(x.dtype)
        x = functional.dropout(x, self.config.dropout, self.training)
        recompute = self.gradient_checkpointing and cache is None
        for block, block_cache in zip(self.blocks, cache or [None] * len(self.blocks), strict=True):
            x = run_blocks([block], x, recompute=recompute, mask=mask, cache=block_cache, positions=positions)
        return self.norm(x)

    def unembed(self, hidden: Float[Tensor, "b n d"]) -> Float[Tensor, "b n w"]:
        """Convert hidden states to logits over the vocabulary (the language-model head)."""
        return self.tokens.unembed(hidden) if self.head is None else self.head(hidden)

    @property
    def output_weight(self) -> Float[Tensor, "w d"]:
        """The weights that convert hidden states to logits."""
        return self.tokens.weight if self.head is None else self.head.weight

    def cache(self, capacity: int | None = None) -> Caches:
        """Return an empty KV cache for this model.

        capacity  number of tokens for which memory is allocated now (static cache). None makes a cache that grows;
                  for a model with a window, this cache keeps only the keys that later tokens see
        """
        if capacity is not None:
            return Caches(lambda: StaticCache(capacity), self.config.depth)
        if self.config.window is not None:
            return Caches(lambda: SlidingWindowCache(self.mask), self.config.depth)
        return Caches(DynamicCache, self.config.depth)

    def generate(self, tokens: Prompts, **options: Unpack[GenerationOptions]) -> list[GeneratedText]:
        """Continue each prompt by autoregressive decoding. The keyword arguments are those of `regard.generate`.

        tokens  prompts: lists of token ids, or a tensor (b n)

        >>> model.generate([[5, 17, 3]], max_new_tokens=8, temperature=0.8, top_p=0.9, seed=0)[0].tokens
        """
        from regard.models.generation import generate  # it imports this file

        return generate(self, tokens, **options)

    def example_inputs(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        return (torch.zeros(batch, self.config.max_length if length is None else length, dtype=torch.long),)

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        cache = self.cache()
        self(*self.example_inputs(batch, length), cache=cache)
        return cache.nbytes

    def initializers(self) -> Initializers:
        into_residual = normal(0.02 / math.sqrt(2 * self.config.depth))  # keeps the variance of the residual stream
        return {
            "tokens.weight": normal(0.02),
            "positions.weight": normal(0.02),
            "head.weight": normal(0.02),
            "*norm.weight": constant(1.0),
            "*.dense_keys": uniform(0.001),
            "*.dense_bias": constant(0.0),
            "*.random_scores": normal(0.02),
            "*.shares": constant(0.0),
            "*.bias": constant(0.0),
            "*norm.bias": constant(0.0),
            "*.out.weight": into_residual,
            "*.down.weight": into_residual,
            "blocks.*.weight": normal(0.02),
        }


def _block(config: GPTConfig) -> Block:
    feedforward = None
    if config.ff_width != 0:
        feedforward = FeedForward(config.width, config.ff_width, activation=config.activation, bias=config.bias)
    return Block(
        config.width,
        config.mixer.build(config),
        feedforward,
        norm_kind=config.norm,
        eps=config.eps,
        dropout=config.dropout,
    )


_BIRTHPLACE = GPTConfig(vocab=256, context=128, width=256, depth=4, heads=8, activation="gelu", tied=False)

PRESETS = {
    "gpt2": GPTConfig(vocab=50257),
    "gpt2-medium": GPTConfig(vocab=50257, width=1024, depth=24, heads=16),
    "gpt2-large": GPTConfig(vocab=50257, width=1280, depth=36, heads=20),
    "gpt2-xl": GPTConfig(vocab=50257, width=1600, depth=48, heads=25),
    "birthplace": _BIRTHPLACE,
    "birthplace-rotary": replace(_BIRTHPLACE, positions=Rotary()),
    # the tables hold 127 positions: an input is a context without its last token
    "birthplace-synthesizer": replace(_BIRTHPLACE, mixer=SyntheticAttention(context=127)),
}
