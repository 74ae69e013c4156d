"""KV caches and streams.

`cache.extend(k, v)` appends new keys and values, and returns the keys and values to attend to with their positions. One
mask object can therefore be used for training, for generation with a cache and for a stream. The results are the same
whether a sequence is computed in one pass, in several steps with a cache or in chunks with a stream.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.axes import format_axis, format_shape
from regard.base.errors import CacheError, ConfigError, DtypeError, ShapeError
from regard.base.validation import check_integer
from regard.core.absolute_positions import Positions
from regard.core.attend import Scores, attend, prepare_request
from regard.core.input_checks import check_inputs
from regard.core.masks.algebra import FAR, Mask
from regard.core.masks.data import can_read
from regard.core.scores import Additive, as_terms


class CachedKeysValues(NamedTuple):
    """The result of `Cache.extend`: the keys and values to attend to, and the positions of queries and keys."""

    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    positions: Positions


class Cache(ABC):
    """Base class of KV caches, which store the keys and values of earlier positions during generation."""

    length = 0  # positions received

    @abstractmethod
    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        """Append the keys and values of n new positions.

        Returns the keys and values that the n new queries attend to.
        """

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the stored tensors."""

    @abstractmethod
    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Reorder the batch, as for beam search. Sequence r of the new batch is sequence rows[r] of the old batch.

        `rows` may repeat sequences or leave some out, so that the batch grows or shrinks.
        """

    @property
    def nbytes(self) -> int:
        """The memory of the stored tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors())


class DynamicCache(Cache):
    """A KV cache that grows by concatenation. Its length is not limited, and gradients flow through it.

    In the example, three positions are appended to an empty cache, so the first query is at position 0.

    >>> k, v, positions = DynamicCache().extend(torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8))
    >>> k.shape, positions.queries
    (torch.Size([1, 4, 3, 8]), 0)
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, ...] = ()

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        _check_continues(self._held, k, v)
        positions = Positions(queries=self.length)
        self._held = _append(self._held, k, v)
        self.length += k.shape[2]
        return CachedKeysValues(*self._held, positions)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._held = select_rows(self._held, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held


class StaticCache(Cache):
    """A KV cache allocated once for `capacity` positions and written in place.

    It is for generation, not for training. In the example, five of the 16 allocated positions are filled.

    >>> cache = StaticCache(capacity=16)
    >>> cache.extend(k, v).positions.queries, cache.tensors()[0].shape
    (0, torch.Size([1, 4, 16, 8]))
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_integer("StaticCache(capacity)", capacity, 1, "positions")
        self._buffers: tuple[Tensor, ...] = ()

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        _check_continues(self._buffers, k, v)
        start, end = self.length, self.length + k.shape[2]
        if end > self.capacity:
            raise CacheError(
                f"the cache has room for {self.capacity} positions and holds {start}, so {k.shape[2]} more do not fit; "
                f"make it StaticCache({end}) or larger, or use DynamicCache()"
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise CacheError(
                "StaticCache is written in place and keeps no gradient; use DynamicCache(), "
                "or generate under torch.no_grad()"
            )
        if not self._buffers:
            self._buffers = tuple(x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v))
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, start:end] = new
        self.length = end
        keys, values = (buffer[:, :, :end] for buffer in self._buffers)
        return CachedKeysValues(keys, values, Positions(queries=start))

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._buffers = select_rows(self._buffers, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._buffers


class SlidingWindowCache(Cache):
    """A KV cache that drops the keys that the mask hides from all later queries.

    For every mask, the attention output is the same as with a cache of all keys. All keys are kept in two cases: the
    mask never hides earlier keys, such as `causal()`, or the mask cannot tell which keys a range of queries sees, such
    as `Mask.of`, because it does not define the method `box`.

    In the example, five keys are appended. A later query sees at most the last two of them, so two are kept.

    >>> cache = SlidingWindowCache(causal() & window(before=2))
    >>> cache.extend(k, v).k.shape, cache.tensors()[0].shape
    (torch.Size([1, 4, 5, 8]), torch.Size([1, 4, 2, 8]))
    """

    def __init__(self, mask: Mask) -> None:
        _check_mask(mask)
        self.mask = mask
        self._held: tuple[Tensor, ...] = ()
        self._positions = _position_range(0, 0)

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        if torch.compiler.is_compiling():
            raise CacheError(
                "SlidingWindowCache computes in Python which keys it drops; compile with DynamicCache or StaticCache"
            )
        _check_continues(self._held, k, v)
        start, self.length = self.length, self.length + k.shape[2]
        keys, values = _append(self._held, k, v)
        with _disable_current_modes():  # positions are real tensors even if keys are fake
            positions = torch.cat([self._positions, _position_range(start, self.length)])
            needed = may_see(self.mask, self.length, positions).nonzero()[:, 0]
            self._positions = positions[needed]
        self._held = tuple(x.index_select(2, needed.to(x.device)) for x in (keys, values))
        return CachedKeysValues(keys, values, Positions(start, _compact_positions(positions)))

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._held = select_rows(self._held, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held


class Stream:
    """Streaming attention: push queries, keys and values in chunks of any size and get the outputs in order.

    The output of a query is returned as soon as no later key can be visible to this query or to an earlier query. With
    a causal mask that is at once; with `window(after=2)` it is two positions later. Keys that no later query can see
    are dropped.

    In the example, six positions are pushed. The chunk of the first four is complete. The other two wait for the rest
    of their chunk, or for `finish`.

    >>> stream = Stream(chunks(4, before=1))
    >>> stream.push(*torch.randn(3, 1, 2, 6, 8)).shape, stream.finish().shape
    (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 2, 8]))
    """

    def __init__(
        self, mask: Mask, *, scores: Scores | None = None, beta: float | None = None, kernel: str | None = None
    ) -> None:
        _check_mask(mask)
        for term in as_terms(scores):
            if isinstance(term, Additive):
                raise ConfigError("a stream has no fixed rows and columns to add a tensor to; use a term such as alibi")
        self.mask, self.scores, self.beta, self.kernel = mask, scores, beta, kernel
        self.received = 0  # number of positions pushed
        self.returned = 0  # number of rows returned
        self._ended = False
        self._waiting: Tensor | None = None  # queries of positions returned .. received - 1
        self._held: tuple[Tensor, ...] = ()
        self._positions = _position_range(0, 0)

    def push(
        self, q: Float[Tensor, "b h n c"], k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]
    ) -> Float[Tensor, "b h r e"]:
        """Append n positions. Returns the outputs of the r queries that are complete after this call; r may be 0."""
        if torch.compiler.is_compiling():
            raise CacheError("a stream computes in Python which rows are complete; compile the code around it")
        if self._ended:
            raise CacheError("this stream is finished; make another with Stream(...)")
        _check_continues(self._held, k, v)
        check_inputs(q, k, v)
        if q.shape[2] != k.shape[2]:
            raise CacheError(
                f"a stream takes a query with each key, but q has n={q.shape[2]} and k n={k.shape[2]} (positions)"
            )
        if self._waiting is not None:
            _check_same("q", self._waiting, q, "b h n c")
        waiting = q if self._waiting is None else torch.cat([self._waiting, q], 2)
        received = self.received + k.shape[2]
        with _disable_current_modes():  # positions are real tensors even if keys are fake
            positions = torch.cat([self._positions, _position_range(self.received, received)])
            rows = torch.arange(self.returned, received, device="cpu")
            waits = _expand_flag(self.mask.box(rows, rows, received, FAR).none, rows).logical_not()
            ready = int((waits.cumsum(0) == 0).sum())
        return self._emit(ready, waiting, _append(self._held, k, v), positions, received)

    def finish(self) -> Float[Tensor, "b h r e"]:
        """End the stream and return the outputs of the remaining queries."""
        if self._waiting is None:
            raise CacheError("nothing was pushed into this stream, so there is nothing to finish")
        rows = self._emit(self.received - self.returned, self._waiting, self._held, self._positions, self.received)
        self._ended = True
        return rows

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the stored tensors: keys, values, and queries whose outputs are not complete."""
        return (*self._held, *(() if self._waiting is None else (self._waiting,)))

    def _emit(
        self, rows: int, waiting: Tensor, held: tuple[Tensor, ...], key_positions: Tensor, received: int
    ) -> Float[Tensor, "b h r e"]:
        """Compute and return the outputs of the next `rows` queries, then update the state of the stream.

        If an error is raised, the stream is unchanged.

        rows           number of queries to compute
        waiting        the queries whose outputs were not returned yet
        held           the keys and values to attend to
        key_positions  the positions of these keys
        received       number of positions pushed so far
        """
        now, (k, v) = waiting[:, :, :rows], held
        positions = Positions(self.returned, _compact_positions(key_positions))
        if rows:
            out = attend(
                now, k, v, mask=self.mask, scores=self.scores, beta=self.beta, kernel=self.kernel, positions=positions
            )
        else:
            prepare_request(now, k, v, self.mask, self.scores, self.beta, 0.0, positions)
            out = v.new_zeros(*now.shape[:3], v.shape[3])
        self.returned, self.received, self._waiting = self.returned + rows, received, waiting[:, :, rows:]
        with _disable_current_modes():
            needed = may_see(self.mask, self.returned, key_positions).nonzero()[:, 0]
            self._positions = key_positions[needed]
        self._held = tuple(x.index_select(2, needed.to(x.device)) for x in held)
        return out


def select_rows(held: tuple[Tensor, ...], rows: Int[Tensor, "r"]) -> tuple[Tensor, ...]:
    """Return each tensor with the sequences rows[0], rows[1], ... of its batch axis."""
    if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        given = rows.dtype if isinstance(rows, Tensor) else repr(rows)
        raise DtypeError(f"reorder takes a tensor of whole numbers, the sequence to continue each from, not {given}")
    if rows.ndim != 1:
        raise ShapeError(f"reorder takes one axis of sequences (r,), not {tuple(rows.shape)}")
    if held and can_read(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(held[0]):
        raise CacheError(
            f"reorder takes sequences 0 to {len(held[0]) - 1}, those that the cache holds, not {rows.tolist()}"
        )
    return tuple(x.index_select(0, rows.to(x.device)) for x in held)


def may_see(mask: Mask, start: int, keys: Int[Tensor, "j"]) -> Bool[Tensor, "j"]:
    """Return for each key position whether a query at position `start` or later may see this key.

    False means that no such query sees the key. True may also mean unknown.
    """
    return _expand_flag(mask.box(start, FAR, keys, keys).none, keys).logical_not()


def _position_range(start: int, end: int) -> Int[Tensor, "n"]:
    with _disable_current_modes():  # real even if keys are fake tensors
        return torch.arange(start, end, device="cpu")


def _expand_flag(flag: bool | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(flag, device=like.device).expand(like.shape)


def _compact_positions(positions: Int[Tensor, "j"]) -> int | Int[Tensor, "j"]:
    """Return the first of the key positions as an int if they are consecutive; else return the tensor unchanged."""
    if not len(positions):
        return 0
    with _disable_current_modes():
        first, last = int(positions[0]), int(positions[-1])
    return first if last - first + 1 == len(positions) else positions


def _append(held: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # the first ones are copied too, because the caller may overwrite them
    return (torch.cat([held[0], k], 2), torch.cat([held[1], v], 2)) if held else (k.clone(), v.clone())


def _check_mask(mask: Mask) -> None:
    if not isinstance(mask, Mask):
        raise ConfigError(f"a mask such as regard.causal() says what to keep, not {mask!r}")
    if part := mask.by_pair():
        raise ConfigError(f"{part} has fixed rows, columns or heads; write the rule with regard's masks")


def _check_continues(held: tuple[Tensor, ...], k: Tensor, v: Tensor) -> None:
    for name, x, letters in (("k", k, "b g n c"), ("v", v, "b g n e")):
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} must be a tensor read as ({letters}), not {type(x).__name__}")
        if x.ndim != 4:
            raise ShapeError(f"{name} has {x.ndim} axes, {tuple(x.shape)}, but is read as ({letters})")
    if k.shape[2] != v.shape[2]:
        raise CacheError(
            f"{format_shape('v', v.shape, 'b g n e')}, but k has {format_axis('n', k.shape[2])}; k and v come in pairs"
        )
    for name, old, new, letters in zip("kv", held, (k, v), ("b g n c", "b g n e"), strict=False):
        _check_same(name, old, new, letters)
    if k.shape[:2] != v.shape[:2]:
        raise CacheError(f"{format_shape('v', v.shape, 'b g n e')}, but k is {tuple(k.shape)}; k and v come in pairs")


def _check_same(name: str, old: Tensor, new: Tensor, letters: str) -> None:
    same = (old.shape[:2], old.shape[3]) == (new.shape[:2], new.shape[3])
    if not same or old.dtype != new.dtype or old.device != new.device:
        raise CacheError(
            f"{format_shape(name, new.shape, letters)}, {new.dtype} on {new.device}, does not continue the cache, "
            f"which holds {tuple(old.shape)}, {old.dtype} on {old.device}; only the number of positions may change"
        )
