"""Multi-head attention with projections: self-attention and cross-attention, with a KV cache or in streaming mode."""

from collections.abc import Callable
from inspect import signature
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.base.validation import check_integer, check_number
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.cache import Cache, Stream
from regard.core.heads import merge_heads as merge_heads, split_heads as split_heads
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.core.scores import ScoreTerm
from regard.nn.int8 import Int8Linear
from regard.nn.norms import norm
from regard.nn.projection import Linear, linear


class KeysValues(NamedTuple):
    """The key and value heads of cross-attention, computed once from the memory and used in all decoding steps."""

    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j c"]


class Attention(nn.Module):
    """Multi-head attention: queries from x, keys and values from x or from a memory, and an output projection.

    The memory is a second sequence, such as the output of an encoder; attention to a memory is cross-attention.

    width         model width
    heads         number of query heads
    kv_heads      number of key and value heads, for grouped-query attention; default `heads`
    head_width    width per head; default width // heads
    memory_width  width of the memory, for cross-attention; default `width`
    bias          whether the input projections have a bias
    out_bias      whether the output projection has a bias; default `bias`
    rotary        rotary positions, made by `regard.rotary`; None for none
    scores        a score term such as alibi(heads=8), a module such as LearnedSinks(heads=8), or another function
                  without arguments that returns a score term, such as the `forward` of a module that several layers
                  share
    qk_norm       norm of each query and key head, "rms" or "layer"; None for none
    beta          scale of q . k; None is head_width ** -0.5
    dropout       dropout probability of the attention weights, in training only
    kernel        name of the implementation to use, as in `regard.attend`; None chooses one

    >>> layer = Attention(width=32, heads=4)
    >>> layer(torch.randn(2, 5, 32), mask=causal()).shape
    torch.Size([2, 5, 32])
    """

    streams = True  # whether `stream` works; subclasses that keep another state set it to False

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        memory_width: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        rotary: Rotary | None = None,
        scores: ScoreTerm | Callable[[], ScoreTerm] | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float = 1e-6,
        beta: float | None = None,
        dropout: float = 0.0,
        kernel: str | None = None,
        **unknown: UnknownKeyword,
    ) -> None:
        super().__init__()
        if unknown:
            reject_keywords(type(self).__name__, unknown, signature(type(self)).parameters)
        check_heads(width, heads, kv_heads, head_width)
        check_probability("dropout", dropout)
        memory_width = width if memory_width is None else check_integer("memory_width", memory_width, 1)
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_width = width // heads if head_width is None else head_width
        self.rotary, self.scores, self.beta, self.dropout, self.kernel = rotary, scores, beta, dropout, kernel
        queries, others = self.heads * self.head_width, 2 * self.kv_heads * self.head_width
        if memory_width == width:
            # one product for all three; with a memory, its rows are used in two parts
            self.query_key_value = Linear(width, queries + others, bias=bias)
        else:
            self.query = Linear(width, queries, bias=bias)
            self.key_value = Linear(memory_width, others, bias=bias)
        self.width, self.memory_width = width, memory_width
        self.out = Linear(self.heads * self.head_width, width, bias=bias if out_bias is None else out_bias)
        self.query_norm = None if qk_norm is None else norm(qk_norm, self.head_width, qk_norm_eps)
        self.key_norm = None if qk_norm is None else norm(qk_norm, self.head_width, qk_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "b i d"],
        memory: Float[Tensor, "b j m"] | KeysValues | None = None,
        *,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        stream: Stream | None = None,
        positions: Tensor | None = None,
        **unknown: UnknownKeyword,
    ) -> Float[Tensor, "b r d"]:
        """Return one output for each token of x (r = i); with a stream, only the r outputs that are complete.

        In streaming attention, tokens are passed in parts. An output is complete if no later token can change it.

        memory     sequence from which keys and values are computed (cross-attention), or the keys and values themselves
                   (see `keys_values`); default x
        mask       which keys each query sees, as in `regard.attend`
        cache      KV cache, to which the keys and values of x are appended
        stream     state of streaming attention, made by `stream(mask)`
        positions  position of each token for rotary positions, (n) or (b n); by default the first token of x follows
                   the last token in the cache
        """
        if unknown:
            reject_keywords(f"{type(self).__name__}.forward", unknown, signature(self.forward).parameters)
        check_width(x, self.width)
        if stream is not None:
            _check_stream(mask, memory, cache)
        where: int | Tensor = _first_position(cache, stream) if positions is None else positions
        if memory is None and self.width == self.memory_width:
            heads = split_heads(self.query_key_value(x), self.heads + 2 * self.kv_heads)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
            q = self._normalise_and_rotate(q, self.query_norm, where)
            k = self._normalise_and_rotate(k, self.key_norm, where)
        else:
            q = self.queries(x, where)
            if not isinstance(memory, KeysValues):
                memory = self.keys_values(x, where) if memory is None else self.keys_values(memory)
            k, v = memory
        return self.project(self.mix(q, k, v, mask, cache, stream))

    def queries(self, x: Float[Tensor, "b i d"], positions: int | Tensor = 0) -> Float[Tensor, "b h i c"]:
        """Return the query heads of the tokens in x.

        positions  position of the first token, if the positions are consecutive, or a tensor of all positions
        """
        fused, rows = self.width == self.memory_width, slice(self.heads * self.head_width)
        flat = _partial_linear(self.query_key_value, x, rows) if fused else self.query(x)
        return self._normalise_and_rotate(split_heads(flat, self.heads), self.query_norm, positions)

    def keys_values(self, memory: Float[Tensor, "b j m"], positions: int | Tensor = 0) -> KeysValues:
        """Return the key and value heads of the tokens in a memory.

        positions  position of the first token, if the positions are consecutive, or a tensor of all positions
        """
        check_width(memory, self.memory_width, "memory")
        fused, rows = self.width == self.memory_width, slice(self.heads * self.head_width, None)
        both = _partial_linear(self.query_key_value, memory, rows) if fused else self.key_value(memory)
        k, v = split_heads(both, 2 * self.kv_heads).chunk(2, 1)
        return KeysValues(self._normalise_and_rotate(k, self.key_norm, positions), v)

    def _normalise_and_rotate(self, heads: Tensor, norm: nn.Module | None, positions: int | Tensor) -> Tensor:
        """Apply the norm and the rotary positions to query or key heads, if this layer has them."""
        heads = heads if norm is None else norm(heads)
        return heads if self.rotary is None else self.rotary(heads, positions)

    def mix(
        self,
        q: Float[Tensor, "b h i c"],
        k: Float[Tensor, "b g j c"],
        v: Float[Tensor, "b g j c"],
        mask: Mask | Tensor | None,
        cache: Cache | None,
        stream: Stream | None,
    ) -> Float[Tensor, "b h r c"]:
        """Append k and v to the cache or the stream, if there is one; then return the output of each head.

        r is the number of queries, or, with a stream, the number of outputs that are complete.
        """
        if stream is not None:
            return stream.push(q, k, v)
        positions: Positions | None = None
        if cache is not None:
            k, v, positions = cache.extend(k, v)
            if positions.consecutive and positions.keys == 0 and positions.queries + q.shape[2] == k.shape[2]:
                positions = None  # the default, for which `attend` takes less time
        dropout = self.dropout if self.training else 0.0
        scores, beta, kernel = self.term(), self.beta, self.kernel
        return attend(q, k, v, mask=mask, scores=scores, beta=beta, dropout=dropout, kernel=kernel, positions=positions)

    def project(self, heads: Float[Tensor, "b h r c"]) -> Float[Tensor, "b r d"]:
        """Concatenate heads and apply the output projection."""
        return self.out(merge_heads(heads))

    def term(self) -> ScoreTerm | None:
        """Return the score term of this layer, or None. A learned term is computed from its parameters.

        A score term, such as ALiBi, changes the scores before the softmax.
        """
        return self.scores() if callable(self.scores) else self.scores

    def stream(self, mask: Mask) -> Stream:
        """Return a new state for streaming attention through this layer, to be passed to `forward`."""
        if self.training and self.dropout:
            raise ConfigError(f"dropout={self.dropout} is active in training; call eval() before streaming")
        return Stream(mask, scores=self.term(), beta=self.beta, kernel=self.kernel)


def check_heads(width: int, heads: int, kv_heads: int | None = None, head_width: int | None = None) -> None:
    """Check that `width` is a multiple of `heads`, and `heads` of `kv_heads`, else raise ConfigError.

    head_width  width per head; if it is not None, `width` may be any number
    """
    check_integer("width", width, 1)
    check_integer("heads", heads, 1)
    if head_width is None and width % heads:
        near = [number for number in range(1, width + 1) if width % number == 0]
        closest = min(near, key=lambda number: (abs(number - heads), number))
        raise ConfigError(f"width must be a multiple of heads: width={width}, heads={heads}; try heads={closest}")
    if head_width is not None:
        check_integer("head_width", head_width, 1)
    if kv_heads is not None and heads % check_integer("kv_heads", kv_heads, 1):
        raise ConfigError(f"heads must be a multiple of kv_heads: heads={heads}, kv_heads={kv_heads}")


def check_probability(name: str, share: float) -> None:
    """Check that a dropout probability is at least 0 and below 1, else raise ConfigError."""
    if not 0.0 <= check_number(name, share) < 1.0:
        raise ConfigError(f"{name} is a share, at least 0 and less than 1: {name}={share}")


def check_width(x: Tensor, width: int, name: str = "x") -> None:
    """Check that x has the axes (b n d) and the width d = `width`, else raise ShapeError."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ShapeError(f"{name} is {tuple(x.shape)}, but is read as (b n d) with {format_axis('d', width)}")


def _check_stream(mask: object, memory: object, cache: object) -> None:
    if mask is not None:
        raise ConfigError("with stream= pass no mask: the stream has its own, attention.stream(mask)")
    if memory is not None or cache is not None:
        raise ConfigError("with stream= pass no memory and no cache: the stream keeps keys and values")


def _partial_linear(layer: nn.Linear | Int8Linear, x: Tensor, rows: slice) -> Tensor:
    """Compute only some output features of a linear layer: those whose indices are in the slice `rows`."""
    return linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])


def _first_position(cache: Cache | None, stream: Stream | None) -> int:
    if stream is not None:
        return stream.received
    return 0 if cache is None else cache.length
