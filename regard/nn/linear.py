"""Linear attention as a layer: the projections of attention, and a sum that remembers all keys at once."""

from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError
from regard.core.absolute_positions import Positions
from regard.core.cache import Cache, CachedKeysValues, Stream
from regard.core.linear import FeatureMap, LinearState, linear_attend
from regard.core.masks.algebra import Mask
from regard.core.positions import Rotary
from regard.nn.attention import Attention


class Summed(Cache):
    """What linear attention keeps between calls: sums that do not grow with the sequence."""

    def __init__(self) -> None:
        self.state: LinearState | None = None

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        """Keys and values are not kept; the layer puts the sums into `state`."""
        positions = Positions(queries=self.length, keys=self.length)
        self.length += k.shape[2]
        return CachedKeysValues(k, v, positions)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        if self.state is not None:
            weighted, total, peak = (x.index_select(0, rows) for x in self.tensors())
            self.state = LinearState(weighted, total, peak, self.state.length)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.state is None else (self.state.weighted, self.state.total, self.state.peak)


class LinearAttention(Attention):
    """`Attention` whose weights are products of features; elu + 1 unless others are given."""

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
    ) -> None:
        super().__init__(width, heads, kv_heads=kv_heads, bias=bias, rotary=rotary)
        self.features = features

    def stream(self, mask: Mask) -> Stream:
        raise ConfigError("linear attention keeps sums and has no stream; use a Summed() cache with causal()")

    def mix(
        self,
        q: Float[Tensor, "b h i c"],
        k: Float[Tensor, "b g j c"],
        v: Float[Tensor, "b g j c"],
        mask: Mask | Tensor | None,
        cache: Cache | None,
        stream: Stream | None,
    ) -> Float[Tensor, "b h i c"]:
        if stream is not None or isinstance(mask, Tensor):
            raise ConfigError("linear attention takes full, causal and padding masks, and a Summed() cache to go on")
        if cache is None:
            return linear_attend(q, k, v, features=self.features, mask=mask).out
        if not isinstance(cache, Summed):
            raise ConfigError(f"linear attention keeps sums, so its cache is Summed(), not {type(cache).__name__}()")
        out, state = linear_attend(q, k, v, features=self.features, mask=mask, state=cache.state)
        cache.extend(k, v)
        cache.state = state
        return out
