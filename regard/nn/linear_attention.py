"""Linear attention as a layer, and the state that takes the place of a KV cache."""

from dataclasses import replace
from inspect import signature

from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.core.absolute_positions import Positions
from regard.core.cache import Cache, CachedKeysValues, Stream, select_rows
from regard.core.linear import FeatureMap, LinearState, linear_attend
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.nn.attention import Attention


class LinearCache(Cache):
    """The state of linear attention, used in place of a KV cache.

    It holds sums over all earlier keys and values, so its size does not grow with the sequence.

    >>> layer, cache = regard.nn.LinearAttention(24, heads=3), regard.nn.LinearCache()
    >>> layer(torch.randn(1, 5, 24), mask=causal(), cache=cache).shape, cache.length
    (torch.Size([1, 5, 24]), 5)
    """

    def __init__(self) -> None:
        self.state: LinearState | None = None

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        """Count the new positions and return k and v unchanged.

        k and v are not stored here. The layer itself adds them to `state`.
        """
        positions = Positions(queries=self.length, keys=self.length)
        self.length += k.shape[2]
        return CachedKeysValues(k, v, positions)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        if self.state is not None:
            weighted, total, peak = select_rows(self.tensors(), rows)
            self.state = replace(self.state, weighted=weighted, total=total, peak=peak)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.state is None else (self.state.weighted, self.state.total, self.state.peak)


class LinearAttention(Attention):
    """Multi-head linear attention: an `Attention` layer with products of features as weights, not a softmax.

    features  function of `regard.core.linear` that maps queries and keys to features; default elu_plus_one()

    >>> LinearAttention(width=32, heads=4)(torch.randn(2, 5, 32), mask=causal()).shape
    torch.Size([2, 5, 32])
    """

    streams = False

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        bias: bool = True,
        rotary: Rotary | None = None,
        features: FeatureMap | None = None,
        **unknown: UnknownKeyword,
    ) -> None:
        if unknown:
            reject_keywords("LinearAttention", unknown, signature(LinearAttention).parameters)
        super().__init__(width, heads, kv_heads=kv_heads, bias=bias, rotary=rotary)
        self.features = features

    def stream(self, mask: Mask) -> Stream:
        raise ConfigError("linear attention has no stream; use cache=LinearCache() with causal()")

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, cache: Cache | None, stream: Stream | None
    ) -> Float[Tensor, "b h i c"]:
        if stream is not None or isinstance(mask, Tensor):
            raise ConfigError(
                "linear attention takes full, causal and padding masks, and cache=LinearCache() to continue"
            )
        if cache is None:
            return linear_attend(q, k, v, features=self.features, mask=mask).out
        if not isinstance(cache, LinearCache):
            raise ConfigError(f"the cache of linear attention is LinearCache(), not {type(cache).__name__}()")
        out, state = linear_attend(q, k, v, features=self.features, mask=mask, state=cache.state)
        cache.extend(k, v)
        cache.state = state
        return out
