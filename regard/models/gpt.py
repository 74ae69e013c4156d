"""A causal decoder: each token is told from those before it. GPT-2 (Radford et al. 2019), and Llama-style variants."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError
from regard.core.absolute_positions import Positions
from regard.core.cache import DynamicCache, SlidingWindowCache, StaticCache
from regard.core.masks import causal, window
from regard.core.masks.algebra import Mask
from regard.core.positions import NTK, Interpolate, Llama3, Rotary, YaRN
from regard.models.caches import Caches, check_caches
from regard.models.model import Config, Model
from regard.models.padding_positions import counted, is_filled_in_front
from regard.nn.attention import Attention, check_heads
from regard.nn.blocks import Block, run_blocks
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding, check_context
from regard.nn.feedforward import FeedForward, check_activation
from regard.nn.init import Initializer, constant, normal, uniform
from regard.nn.norms import norm
from regard.nn.synthesizer import Synthesizer, check_parts

POSITIONS = ("learned", "rotary", "sinusoidal", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(Config):
    """Settings of a causal decoder.

    synthesizer  score parts of a Synthesizer in place of attention: ("dense",), ("random",), ("dense", "dot")...
    reach        positions the synthesizer has a table for; None is the context
    window       earlier tokens that each one sees; None is all
    ff_width     None is 4 * width
    """

    vocab: int
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int | None = None
    head_width: int | None = None
    ff_width: int | None = None
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_pairing: str = "half"
    rotary_stretch: Interpolate | NTK | Llama3 | YaRN | None = None
    synthesizer: tuple[str, ...] = ()
    reach: int | None = None
    window: int | None = None
    norm: str = "layer"
    eps: float = 1e-5
    qk_norm: str | None = None
    activation: str = "gelu-tanh"
    bias: bool = True
    query_key_value_bias: bool | None = None  # None is as bias says
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        self.check_types()
        self.check_counts("vocab", "context", "depth", "ff_width", "reach", "window")
        self.check_shares("dropout", "attention_dropout")
        self.check_choice("positions", POSITIONS)
        check_heads(self.width, self.heads, self.kv_heads, self.head_width)
        check_activation(self.activation)
        norm(self.norm, 1, self.eps)
        if self.qk_norm is not None:
            norm(self.qk_norm, 1)
        if self.positions == "rotary":
            Rotary(base=self.rotary_base, pairing=self.rotary_pairing).frequencies(self.width_of_heads)
        self._check_mixer()

    def _check_mixer(self) -> None:
        """Raise where a setting would mean nothing to what mixes tokens here."""
        if not self.synthesizer:
            if self.reach is not None:
                raise ConfigError(f"reach is the table of a synthesizer, and here is none: reach={self.reach}")
            return
        check_parts(self.synthesizer)
        foreign = {"kv_heads": None, "head_width": None, "qk_norm": None, "query_key_value_bias": None}
        odd = [name for name, usual in foreign.items() if getattr(self, name) != usual]
        odd += ["positions='rotary'"] if self.positions == "rotary" else []
        if odd:
            raise ConfigError(f"a synthesizer has no use for {', '.join(odd)}; leave it out, or drop synthesizer")

    @property
    def width_of_heads(self) -> int:
        return self.width // self.heads if self.head_width is None else self.head_width


class GPT(Model):
    """Tokens to logits of each next token."""

    Config = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.tokens = TokenEmbedding(config.vocab, config.width)
        self.positions: nn.Module | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(config.context, config.width)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.width)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.norm = norm(config.norm, config.width, config.eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        self.initialise()

    @property
    def mask(self) -> Mask:
        """Who sees whom: everything before, or a window of it."""
        reach = self.config.window
        return causal() if reach is None else window(before=reach)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        padding: Mask | None = None,
        cache: Caches | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> Float[Tensor, "b n w"]:
        """Logits of the token after each one.

        padding    which tokens are real: `padding(lengths)`, or `padding(lengths, side="left", width=n)`
        cache      from `self.cache()`: tokens go on where it ends
        positions  where each token stands, if not one after the other from there
        """
        return self.unembed(self.hidden(tokens, padding=padding, cache=cache, positions=positions))

    def hidden(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        padding: Mask | None = None,
        cache: Caches | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """The last block's output, normalised: what `unembed` turns into logits."""
        start = 0 if cache is None else check_caches(cache, len(self.blocks)).length
        x = self.tokens(tokens)
        b, n = tokens.shape
        check_context(start + n, self.config.context)
        mask = self.mask if padding is None else self.mask & padding
        mask.check(Positions(start), n, start + n, b, self.config.heads)  # before any cache takes anything in
        if self.config.synthesizer and is_filled_in_front(padding):
            raise ConfigError("a synthesizer's weights belong to places of its table; fill sequences up at their end")
        if self.positions is not None:
            where = counted(padding, start, n, tokens.device) if positions is None else positions
            x = x + self.positions(where).to(x.dtype)
        x = functional.dropout(x, self.config.dropout, self.training)
        if cache is None:
            x = run_blocks(self.blocks, x, recompute=self.recompute, mask=mask, positions=positions)
        else:
            for block, kept in zip(self.blocks, cache, strict=True):
                x = block(x, mask=mask, cache=kept, positions=positions)
        return self.norm(x)

    def unembed(self, hidden: Float[Tensor, "b n d"]) -> Float[Tensor, "b n w"]:
        return self.tokens.unembed(hidden) if self.head is None else self.head(hidden)

    def cache(self, capacity: int | None = None) -> Caches:
        """An empty cache: with room for `capacity` tokens taken once, or growing, where a window keeps its reach."""
        if capacity is not None:
            return Caches(lambda: StaticCache(capacity), self.config.depth)
        return Caches(
            DynamicCache if self.config.window is None else lambda: SlidingWindowCache(self.mask), self.config.depth
        )

    def example(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        longest = min(self.config.context, self.config.reach or self.config.context)
        return (torch.zeros(batch, longest if length is None else length, dtype=torch.long),)

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        cache = self.cache()
        self(*self.example(batch, length), cache=cache)
        return cache.nbytes

    def initial(self) -> Mapping[str, Initializer]:
        into_residual = normal(0.02 / math.sqrt(2 * self.config.depth))  # so that its variance does not grow with depth
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
    mixer: nn.Module
    if config.synthesizer:
        reach = config.context if config.reach is None else config.reach
        parts, dropout = config.synthesizer, config.attention_dropout
        mixer = Synthesizer(config.width, config.heads, reach, parts=parts, bias=config.bias, dropout=dropout)
    else:
        rotary = None
        if config.positions == "rotary":
            rotary = Rotary(base=config.rotary_base, pairing=config.rotary_pairing, stretch=config.rotary_stretch)
        inner_bias = config.query_key_value_bias
        mixer = Attention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            bias=config.bias if inner_bias is None else inner_bias,
            out_bias=config.bias,
            rotary=rotary,
            qk_norm=config.qk_norm,
            qk_norm_eps=config.eps,
            dropout=config.attention_dropout,
        )
    hidden = 4 * config.width if config.ff_width is None else config.ff_width
    feedforward = FeedForward(config.width, hidden, activation=config.activation, bias=config.bias)
    return Block(config.width, mixer, feedforward, norm_kind=config.norm, eps=config.eps, dropout=config.dropout)


_BIRTHPLACE = GPTConfig(vocab=256, context=128, width=256, depth=4, heads=8, activation="gelu", tied=False)

PRESETS = {
    "gpt2": GPTConfig(vocab=50257),
    "gpt2-medium": GPTConfig(vocab=50257, width=1024, depth=24, heads=16),
    "gpt2-large": GPTConfig(vocab=50257, width=1280, depth=36, heads=20),
    "gpt2-xl": GPTConfig(vocab=50257, width=1600, depth=48, heads=25),
    "birthplace": _BIRTHPLACE,
    "birthplace-rotary": replace(_BIRTHPLACE, positions="rotary"),
    # the table serves 127 positions: an input is a context without its last token
    "birthplace-synthesizer": replace(_BIRTHPLACE, synthesizer=("dense",), reach=127),
}
