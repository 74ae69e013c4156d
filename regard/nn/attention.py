"""Attention with its projections: to itself or to a memory, whole, through a cache or as a stream."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.axes import format_axis
from regard.base.errors import ConfigError, ShapeError
from regard.base.validation import check_integer, check_number
from regard.core.absolute_positions import Positions
from regard.core.attend import attend
from regard.core.cache import Cache, Stream
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.core.scores import ScoreTerm
from regard.nn.norms import norm


class CachedAttention(NamedTuple):
    """The keys and values of a memory: made once, used at every step."""

    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j c"]


class Attention(nn.Module):
    """Queries from x, keys and values from x or from a memory, attended to and projected back.

    kv_heads      fewer key and value heads than query heads; each serves heads // kv_heads of them
    memory_width  the width of the memory, where it is not that of x
    rotary        positions as rotations of queries and keys
    scores        a term such as alibi(heads=8), or a module of `regard.nn.learned_scores` that learns one
    qk_norm       the norm of each query and key head, "rms" or "layer"
    beta          inverse temperature; None is head_width ** -0.5
    dropout       share of weights set to zero in training
    """

    streams = True  # whether its rows can be given out one after the other; a kind that keeps other things says no

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
        scores: ScoreTerm | nn.Module | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float = 1e-6,
        beta: float | None = None,
        dropout: float = 0.0,
        kernel: str | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads, kv_heads, head_width)
        check_probability("dropout", dropout)
        memory_width = width if memory_width is None else check_integer("memory_width", memory_width, 1)
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_width = width // heads if head_width is None else head_width
        self.rotary, self.scores, self.beta, self.dropout, self.kernel = rotary, scores, beta, dropout, kernel
        queries, others = self.heads * self.head_width, 2 * self.kv_heads * self.head_width
        if memory_width == width:
            # one product for all three; where a memory comes, its rows are used in two parts
            self.query_key_value = nn.Linear(width, queries + others, bias=bias)
        else:
            self.query = nn.Linear(width, queries, bias=bias)
            self.key_value = nn.Linear(memory_width, others, bias=bias)
        self.width, self.memory_width = width, memory_width
        self.out = nn.Linear(self.heads * self.head_width, width, bias=bias if out_bias is None else out_bias)
        self.query_norm = None if qk_norm is None else norm(qk_norm, self.head_width, qk_norm_eps)
        self.key_norm = None if qk_norm is None else norm(qk_norm, self.head_width, qk_norm_eps)

    def forward(
        self,
        x: Float[Tensor, "b i d"],
        memory: Float[Tensor, "b j m"] | CachedAttention | None = None,
        *,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        stream: Stream | None = None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "b r d"]:
        """One row for every row of x; from a stream, those that are complete.

        positions  where each token of x stands, (n) or (b n), for rotary; otherwise x goes on where the cache ends
        """
        check_width(x, self.width)
        if stream is not None:
            _check_stream(mask, memory, cache)
        where: int | Tensor = _start(cache, stream) if positions is None else positions
        if memory is None and self.width == self.memory_width:
            heads = split_heads(self.query_key_value(x), self.heads + 2 * self.kv_heads)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
            q, k = self._placed(q, self.query_norm, where), self._placed(k, self.key_norm, where)
        else:
            q = self.queries(x, where)
            if not isinstance(memory, CachedAttention):
                memory = self.remember(x, where) if memory is None else self.remember(memory)
            k, v = memory
        return self.project(self.mix(q, k, v, mask, cache, stream))

    def remember(self, memory: Float[Tensor, "b j m"], where: int | Tensor = 0) -> CachedAttention:
        """The keys and values of a memory whose tokens stand at `where`, or go on from there."""
        check_width(memory, self.memory_width, "memory")
        if self.width == self.memory_width:
            both = _some_rows(self.query_key_value, memory, slice(self.heads * self.head_width, None))
        else:
            both = self.key_value(memory)
        k, v = split_heads(both, 2 * self.kv_heads).chunk(2, 1)
        return CachedAttention(self._placed(k, self.key_norm, where), v)

    def queries(self, x: Float[Tensor, "b i d"], where: int | Tensor = 0) -> Float[Tensor, "b h i c"]:
        """The queries of tokens that stand at `where`, or go on from there."""
        if self.width == self.memory_width:
            flat = _some_rows(self.query_key_value, x, slice(self.heads * self.head_width))
        else:
            flat = self.query(x)
        return self._placed(split_heads(flat, self.heads), self.query_norm, where)

    def _placed(self, heads: Tensor, norm: nn.Module | None, where: int | Tensor) -> Tensor:
        """Heads normalised and turned to where they stand, if this layer does so."""
        heads = heads if norm is None else norm(heads)
        return heads if self.rotary is None else self.rotary(heads, where)

    def mix(
        self,
        q: Float[Tensor, "b h i c"],
        k: Float[Tensor, "b g j c"],
        v: Float[Tensor, "b g j c"],
        mask: Mask | Tensor | None,
        cache: Cache | None,
        stream: Stream | None,
    ) -> Float[Tensor, "b h r c"]:
        """The attention itself."""
        if stream is not None:
            return stream.push(q, k, v)
        positions: Positions | None = None
        if cache is not None:
            k, v, positions = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return attend(
            q,
            k,
            v,
            mask=mask,
            scores=self.term(),
            beta=self.beta,
            dropout=dropout,
            kernel=self.kernel,
            positions=positions,
        )

    def project(self, heads: Float[Tensor, "b h r c"]) -> Float[Tensor, "b r d"]:
        """Heads side by side and back to the width of x."""
        return self.out(merge_heads(heads))

    def term(self) -> ScoreTerm | None:
        """The score term of this moment: a learned one is made of today's parameters."""
        return self.scores() if isinstance(self.scores, nn.Module) else self.scores

    def stream(self, mask: Mask) -> Stream:
        """The state of a stream through this layer, to be handed to `forward`."""
        if self.training and self.dropout:
            raise ConfigError(f"dropout={self.dropout} is for training; a stream is exact: call eval() first")
        return Stream(mask, scores=self.term(), beta=self.beta, kernel=self.kernel)


def split_heads(x: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "b h n c"]:
    """The last axis cut into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b n d"]:
    """Heads side by side again."""
    return x.transpose(1, 2).flatten(2)


def check_heads(width: int, heads: int, kv_heads: int | None = None, head_width: int | None = None) -> None:
    """Raise where heads do not share the width evenly, or key heads the query heads."""
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
    """Raise where a share to drop is not one."""
    if not 0.0 <= check_number(name, share) < 1.0:
        raise ConfigError(f"{name} is a share, at least 0 and less than 1: {name}={share}")


def check_width(x: Tensor, width: int, name: str = "x") -> None:
    if x.ndim != 3 or x.shape[-1] != width:
        raise ShapeError(f"{name} is {tuple(x.shape)}, but is read as (b n d) with {format_axis('d', width)}")


def _check_stream(mask: object, memory: object, cache: object) -> None:
    if mask is not None:
        raise ConfigError("a stream takes no mask here, its mask was given to it: attention.stream(mask)")
    if memory is not None or cache is not None:
        raise ConfigError("a stream keeps keys and values of its own, so it takes no memory and no cache")


def _some_rows(linear: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """Some of the outputs of a linear map."""
    return functional.linear(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _start(cache: Cache | None, stream: Stream | None) -> int:
    if stream is not None:
        return stream.received
    return 0 if cache is None else cache.length
