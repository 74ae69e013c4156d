"""An encoder that reads a source and a decoder that writes a target, looking at both. Vaswani et al. 2017.

"Attention is all you need", arXiv:1706.03762. With other values of the same settings it is the network of BART (Lewis
et al. 2019, arXiv:1910.13461) and of Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.core.cache import DynamicCache, StaticCache
from regard.core.masks import causal
from regard.core.masks.algebra import Mask
from regard.core.masks.forms.padding import PaddingMask
from regard.models.caches import Caches, check_caches
from regard.models.model import Config, Model
from regard.models.padding_positions import counted
from regard.nn.attention import Attention, CachedAttention, check_heads
from regard.nn.blocks import ORDERS, Block, run_blocks
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions, TokenEmbedding, check_context
from regard.nn.feedforward import FeedForward
from regard.nn.init import Initializer, constant, normal, uniform, xavier
from regard.nn.norms import norm

POSITIONS = ("sinusoidal", "sinusoidal-half", "learned")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(Config):
    """Settings of an encoder-decoder; one vocabulary serves source, target and output.

    depth           blocks of the encoder
    decoder_depth   blocks of the decoder; None is as many
    ff_width        None is 4 * width
    order           "post" normalises after each sum, as in 2017; "pre" before each part, and once more at the end
    positions       "sinusoidal" as in 2017, "sinusoidal-half" with all sines before all cosines, or "learned"
    scaled          whether token vectors are multiplied by sqrt(width) before positions are added
    embedding_norm  whether their sum is normalised
    output_bias     whether every token of the output has a number of its own, added to its logit
    """

    vocab: int
    context: int = 1024
    width: int = 512
    depth: int = 6
    decoder_depth: int | None = None
    heads: int = 8
    ff_width: int | None = None
    order: str = "post"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "relu"
    positions: str = "sinusoidal"
    scaled: bool = True
    embedding_norm: bool = False
    output_bias: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0  # inside the feed-forward part

    def __post_init__(self) -> None:
        self.check_types()
        self.check_counts("vocab", "context", "depth", "decoder_depth", "ff_width")
        self.check_shares("dropout", "attention_dropout", "ff_dropout")
        self.check_choice("order", ORDERS)
        self.check_choice("positions", POSITIONS)
        check_heads(self.width, self.heads)


class Transformer(Model):
    """A source and a target to logits of each next target token."""

    Config = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        depth = config.depth if config.decoder_depth is None else config.decoder_depth
        self.tokens = TokenEmbedding(config.vocab, config.width, scale=math.sqrt(config.width) if config.scaled else 1)
        self.encoder = Stack(config, config.depth, crossing=False)
        self.decoder = Stack(config, depth, crossing=True)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab)) if config.output_bias else None
        self.initialise()

    def forward(
        self,
        source: Int[Tensor, "b m"],
        target: Int[Tensor, "b n"],
        *,
        source_padding: Mask | None = None,
        target_padding: Mask | None = None,
        places: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "*n w"]:
        """Logits of the target token after each one; the target begins with a token that says start.

        Padding says which tokens are real: `padding(lengths)`, or `padding(lengths, side="left", width=n)`.

        places  numbers into the flattened target (b n): only these tokens get their logits, which are (t w) then
        """
        memory = self.encode(source, source_padding)
        return self.decode(target, memory, source_padding=source_padding, target_padding=target_padding, places=places)

    def encode(self, source: Int[Tensor, "b m"], padding: Mask | None = None) -> Float[Tensor, "b m d"]:
        """What the decoder looks at: one vector for each token of the source."""
        x = self._embedded(self.encoder, "source", source, padding, 0)
        return self.encoder.close(run_blocks(self.encoder.blocks, x, recompute=self.recompute, mask=padding))

    def decode(
        self,
        target: Int[Tensor, "b n"],
        memory: Float[Tensor, "b m d"] | Sequence[CachedAttention],
        *,
        source_padding: Mask | None = None,
        target_padding: Mask | None = None,
        cache: Caches | None = None,
        places: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "*n w"]:
        """Logits of the target token after each one, given what `encode` made or what each block remembers of it.

        cache   from `self.cache()`: the target goes on where it ends
        places  as in `forward`
        """
        rows = memory.shape[0] if isinstance(memory, Tensor) else len(memory[0].k)
        if isinstance(target, Tensor) and target.ndim == 2 and target.shape[0] != rows:
            raise ShapeError(f"target has {target.shape[0]} sequences, but the source has {rows}; they come in pairs")
        x = self._embedded(self.decoder, "target", target, target_padding, 0 if cache is None else cache.length)
        mask = causal() if target_padding is None else causal() & target_padding
        blocks = self.decoder.blocks
        if isinstance(memory, Tensor) and cache is None:
            x = run_blocks(blocks, x, recompute=self.recompute, memory=memory, mask=mask, memory_mask=source_padding)
        else:
            if cache is not None:
                check_caches(cache, len(blocks))
            memories = [memory] * len(blocks) if isinstance(memory, Tensor) else memory
            caches = [None] * len(blocks) if cache is None else cache
            for block, seen, kept in zip(blocks, memories, caches, strict=True):
                x = block(x, seen, mask=mask, memory_mask=source_padding, cache=kept)
        x = self.decoder.close(x)
        if places is not None:
            x = x.flatten(0, 1).index_select(0, _checked(places, x.shape[0] * x.shape[1]))
        logits = self.tokens.unembed(x)
        return logits if self.output_bias is None else logits + self.output_bias

    def start(
        self, source: Int[Tensor, "b m"], source_padding: Mask | None = None, *, capacity: int | None = None
    ) -> "Decoding":
        """A target with no tokens yet, to be continued by `step`; capacity is as in `cache`."""
        if source_padding is not None and not isinstance(source_padding, PaddingMask):
            raise ConfigError(f"source_padding says how long each source is, padding(lengths), not {source_padding!r}")
        memory = self.encode(source, source_padding)
        return Decoding(self.decoder.remember(memory), source_padding, self.cache(capacity))

    def step(self, tokens: Int[Tensor, "b n"], state: "Decoding") -> Float[Tensor, "b n w"]:
        """Logits of the token after each of these, which go on where the state ends; the state takes them in."""
        return self.decode(tokens, state.remembered, source_padding=state.source_padding, cache=state.caches)

    def cache(self, capacity: int | None = None) -> Caches:
        """An empty cache for the decoder: with room for `capacity` tokens taken once, or growing."""
        return Caches(DynamicCache if capacity is None else lambda: StaticCache(capacity), len(self.decoder.blocks))

    def example(self, batch: int = 1, length: int | None = None) -> tuple[Tensor, ...]:
        text = torch.zeros(batch, self.config.context if length is None else length, dtype=torch.long)
        return text, text

    def cache_bytes(self, batch: int = 1, length: int | None = None) -> int:
        source, target = self.example(batch, length)
        state = self.start(source)
        self.step(target, state)
        return state.nbytes

    def initial(self) -> Mapping[str, Initializer]:
        width = self.config.width
        return {
            "tokens.weight": normal(width**-0.5),  # of variance 1 after scaling, and so are the logits at the start
            "*.positions.weight": normal(1.0 if self.config.scaled else width**-0.5),
            "output_bias": constant(0.0),
            "*norm.weight": constant(1.0),
            "*.bias": constant(0.0),
            "*.query_key_value.weight": uniform(math.sqrt(3.0 / width)),  # each third as xavier would fill it alone
            "*.weight": xavier(),
        }

    def _embedded(self, stack: "Stack", name: str, tokens: Tensor, padding: Mask | None, start: int) -> Tensor:
        x = self.tokens(tokens, name)
        check_context(start + tokens.shape[1], self.config.context)
        x = stack.open(x, counted(padding, start, tokens.shape[1], tokens.device))
        return functional.dropout(x, self.config.dropout, self.training)


class Stack(nn.Module):
    """Blocks with what stands before and after them: the encoder or the decoder without its token vectors."""

    def __init__(self, config: TransformerConfig, depth: int, *, crossing: bool) -> None:
        super().__init__()
        self.positions = _positions(config)
        self.embedding_norm = norm(config.norm, config.width, config.eps) if config.embedding_norm else None
        self.blocks = nn.ModuleList(_block(config, crossing) for _ in range(depth))
        self.norm = norm(config.norm, config.width, config.eps) if config.order == "pre" else None

    def open(self, x: Float[Tensor, "b n d"], positions: Int[Tensor, "*b n"]) -> Float[Tensor, "b n d"]:
        x = x + self.positions(positions).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def close(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return x if self.norm is None else self.norm(x)

    def remember(self, memory: Float[Tensor, "b m d"]) -> tuple[CachedAttention, ...]:
        """The keys and values that each block looks up in a memory."""
        crossings = [block.cross for block in self.blocks if isinstance(block, Block)]
        return tuple(cross.remember(memory) for cross in crossings if cross is not None)


class Decoding:
    """A target under way: what every decoder block remembers of the source, and of the target so far."""

    def __init__(
        self, remembered: tuple[CachedAttention, ...], source_padding: PaddingMask | None, caches: Caches
    ) -> None:
        self.remembered, self.source_padding, self.caches = remembered, source_padding, caches

    @property
    def length(self) -> int:
        """Target tokens taken in."""
        return self.caches.length

    @property
    def nbytes(self) -> int:
        return self.caches.nbytes + sum(x.numel() * x.element_size() for pair in self.remembered for x in pair)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Let sequence r go on from what sequence rows[r] held, source and target; there may be more rows or fewer."""
        self.remembered = tuple(CachedAttention(*(x.index_select(0, rows) for x in pair)) for pair in self.remembered)
        if self.source_padding is not None:
            kept = self.source_padding
            self.source_padding = replace(kept, data=kept.data.index_select(0, rows.to(kept.data.device)))
        self.caches.reorder(rows)


def _checked(places: object, tokens: int) -> Int[Tensor, " t"]:
    """Positions in so many tokens; those on a GPU are not looked at, since that would be waited for."""
    if not isinstance(places, Tensor) or places.ndim != 1 or places.dtype not in (torch.int32, torch.int64):
        kind = f"{tuple(places.shape)} of {places.dtype}" if isinstance(places, Tensor) else f"{places!r:.40}"
        raise ShapeError(f"places is {kind}, but is a tensor (t) of whole numbers into the flattened target (b n)")
    if places.device.type == "cpu" and not torch.compiler.is_compiling() and len(places):
        least, most = int(places.min()), int(places.max())
        if least < 0 or most >= tokens:
            raise ShapeError(f"places has {least if least < 0 else most}, but the target has tokens 0 to {tokens - 1}")
    return places


def _positions(config: TransformerConfig) -> nn.Module:
    if config.positions == "learned":
        return LearnedPositions(config.context, config.width)
    return SinusoidalPositions(config.width, pairing="half" if config.positions == "sinusoidal-half" else "interleaved")


def _block(config: TransformerConfig, crossing: bool) -> Block:
    attention = Attention(config.width, config.heads, dropout=config.attention_dropout)
    cross = Attention(config.width, config.heads, dropout=config.attention_dropout) if crossing else None
    hidden = 4 * config.width if config.ff_width is None else config.ff_width
    return Block(
        config.width,
        attention,
        FeedForward(config.width, hidden, activation=config.activation, dropout=config.ff_dropout),
        cross=cross,
        norm_kind=config.norm,
        eps=config.eps,
        order=config.order,
        dropout=config.dropout,
    )


# The paper says "about 37000" byte pairs, 65 M and 213 M parameters, but 37000 give 63.1 M and 214.2 M. Counts are
# what a preset is checked by, so each has a vocabulary that leads to its published count; one's own replaces it.
PRESETS = {
    "transformer-tiny": TransformerConfig(vocab=10000, width=128, depth=4, heads=4, ff_width=256),
    "transformer-base": TransformerConfig(vocab=40700),
    "transformer-big": TransformerConfig(vocab=35800, width=1024, heads=16, dropout=0.3),
}
