"""What attention keeps between calls: key/value caches and the state of a stream.

A cache is extended by new keys and values and hands back all that it holds together with their places, so that one
mask object serves training, a cache step and a stream. One pass, every split through a cache and every chunking of
a stream give the same numbers.
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
from regard.core.masks.data import has_matrix
from regard.core.scores import Additive, as_terms


class CachedKeysValues(NamedTuple):
    """Keys and values to attend to, and where they and the newest queries stand."""

    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    positions: Positions


class Cache(ABC):
    """Keys and values of the positions so far."""

    length = 0  # positions received

    @abstractmethod
    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        """Take in n new positions; hand back what their queries attend to."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored."""

    @abstractmethod
    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        """Let sequence r go on from what sequence rows[r] holds: beams that branch, sequences that have ended."""

    @property
    def nbytes(self) -> int:
        """The memory that is held."""
        return sum(x.numel() * x.element_size() for x in self.tensors())


class DynamicCache(Cache):
    """Keeps everything and grows by copying: any length, and gradients flow through it."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, ...] = ()

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        _check_continues(self._held, k, v)
        positions = Positions(queries=self.length)
        self._held = _joined(self._held, k, v)
        self.length += k.shape[2]
        return CachedKeysValues(*self._held, positions)

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._held = tuple(x.index_select(0, rows) for x in self._held)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held


class StaticCache(Cache):
    """Room for `capacity` positions, taken once and written in place: for generating, not for training."""

    def __init__(self, capacity: int) -> None:
        self.capacity = check_integer("StaticCache(capacity)", capacity, 1, "positions")
        self._room: tuple[Tensor, ...] = ()

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        _check_continues(self._room, k, v)
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
        if not self._room:
            self._room = tuple(x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v))
        for room, new in zip(self._room, (k, v), strict=True):
            room[:, :, start:end] = new
        self.length = end
        keys, values = (room[:, :, :end] for room in self._room)
        return CachedKeysValues(keys, values, Positions(queries=start))

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._room = tuple(x.index_select(0, rows) for x in self._room)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._room


class SlidingWindowCache(Cache):
    """Keeps only what a mask may still show to later queries: a window's reach, a prefix, the chunks looked back to.

    Exact for every mask. One that never forgets, such as `causal()` alone, keeps everything.
    """

    def __init__(self, mask: Mask) -> None:
        _check_by_position(mask)
        self.mask = mask
        self._held: tuple[Tensor, ...] = ()
        self._positions = _counted(0, 0)

    def extend(self, k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]) -> CachedKeysValues:
        if torch.compiler.is_compiling():
            raise CacheError(
                "what a rolling cache forgets is worked out in Python; compile with DynamicCache or StaticCache"
            )
        _check_continues(self._held, k, v)
        start, self.length = self.length, self.length + k.shape[2]
        keys, values = _joined(self._held, k, v)
        with _disable_current_modes():  # positions are real even where keys are fake tensors
            positions = torch.cat([self._positions, _counted(start, self.length)])
            needed = may_see(self.mask, self.length, positions).nonzero()[:, 0]
            self._positions = positions[needed]
        self._held = tuple(x.index_select(2, needed.to(x.device)) for x in (keys, values))
        return CachedKeysValues(keys, values, Positions(start, _run_or_list(positions)))

    def reorder(self, rows: Int[Tensor, "r"]) -> None:
        self._held = tuple(x.index_select(0, rows) for x in self._held)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held


class Stream:
    """Attention over an endless input: queries, keys and values come in chunks of any size, outputs leave in order.

    A row is given out as soon as no key still to come can be visible to it, so the delay is the mask's look-ahead and
    nothing more; what no later row can see is forgotten.
    """

    def __init__(
        self, mask: Mask, *, scores: Scores | None = None, beta: float | None = None, kernel: str | None = None
    ) -> None:
        _check_by_position(mask)
        for term in as_terms(scores):
            if isinstance(term, Additive):
                raise ConfigError("a stream has no fixed rows and columns to add a tensor to; use a term such as alibi")
        self.mask, self.scores, self.beta, self.kernel = mask, scores, beta, kernel
        self.received = 0  # positions taken in
        self.given = 0  # positions given out
        self._ended = False
        self._waiting: Tensor | None = None  # queries of positions given..received - 1
        self._held: tuple[Tensor, ...] = ()
        self._positions = _counted(0, 0)

    def push(
        self, q: Float[Tensor, "b h n c"], k: Float[Tensor, "b g n c"], v: Float[Tensor, "b g n e"]
    ) -> Float[Tensor, "b h r e"]:
        """Take in n positions; give out the r rows that are complete now, possibly none."""
        if torch.compiler.is_compiling():
            raise CacheError("which rows a stream gives out is worked out in Python; compile what stands around it")
        if self._ended:
            raise CacheError("this stream was finished, so nothing can follow; begin another with Stream(...)")
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
        with _disable_current_modes():  # positions are real even where keys are fake tensors
            positions = torch.cat([self._positions, _counted(self.received, received)])
            rows = torch.arange(self.given, received)
            waits = _flags(self.mask.box(rows, rows, received, FAR).none, rows).logical_not()
            ready = int((waits.cumsum(0) == 0).sum())
        return self._give(ready, waiting, _joined(self._held, k, v), positions, received)

    def finish(self) -> Float[Tensor, "b h r e"]:
        """The input has ended: give out the rows that were still waiting for keys."""
        if self._waiting is None:
            raise CacheError("nothing was pushed into this stream, so there is nothing to finish")
        rows = self._give(self.received - self.given, self._waiting, self._held, self._positions, self.received)
        self._ended = True
        return rows

    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored: held keys and values, and waiting queries."""
        return (*self._held, *(() if self._waiting is None else (self._waiting,)))

    def _give(
        self, rows: int, waiting: Tensor, held: tuple[Tensor, ...], key_positions: Tensor, received: int
    ) -> Float[Tensor, "b h r e"]:
        """The next rows. The stream changes only once they are there: a refusal leaves it as it was."""
        now, (k, v) = waiting[:, :, :rows], held
        positions = Positions(self.given, _run_or_list(key_positions))
        if rows:
            out = attend(
                now, k, v, mask=self.mask, scores=self.scores, beta=self.beta, kernel=self.kernel, positions=positions
            )
        else:
            prepare_request(now, k, v, self.mask, self.scores, self.beta, 0.0, positions)
            out = v.new_zeros(*now.shape[:3], v.shape[3])
        self.given, self.received, self._waiting = self.given + rows, received, waiting[:, :, rows:]
        with _disable_current_modes():
            needed = may_see(self.mask, self.given, key_positions).nonzero()[:, 0]
            self._positions = key_positions[needed]
        self._held = tuple(x.index_select(2, needed.to(x.device)) for x in held)
        return out


def may_see(mask: Mask, start: int, keys: Int[Tensor, "j"]) -> Bool[Tensor, "j"]:
    """Which keys some query at position `start` or later may see."""
    return _flags(mask.box(start, FAR, keys, keys).none, keys).logical_not()


def _counted(start: int, end: int) -> Int[Tensor, "n"]:
    with _disable_current_modes():  # real even where keys are fake tensors
        return torch.arange(start, end)


def _flags(flag: bool | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(flag).expand(like.shape)


def _run_or_list(positions: Int[Tensor, "j"]) -> int | Int[Tensor, "j"]:
    """The first of consecutive positions, which serves more kernels, or all of them."""
    if not len(positions):
        return 0
    with _disable_current_modes():
        first, last = int(positions[0]), int(positions[-1])
    return first if last - first + 1 == len(positions) else positions


def _joined(held: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # the first are copied too: the caller may write over its own
    return (torch.cat([held[0], k], 2), torch.cat([held[1], v], 2)) if held else (k.clone(), v.clone())


def _check_by_position(mask: Mask) -> None:
    if not isinstance(mask, Mask):
        raise ConfigError(f"a mask such as regard.causal() says what to keep, not {mask!r}")
    if has_matrix(mask):
        raise ConfigError("a boolean matrix has fixed rows and columns; write the rule with regard's masks")


def _check_continues(held: tuple[Tensor, ...], k: Tensor, v: Tensor) -> None:
    for name, x, letters in (("k", k, "b g n c"), ("v", v, "b g n e")):
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} must be a tensor read as ({letters}), not {type(x).__name__}")
        if x.ndim != 4:
            raise ShapeError(f"{name} has {x.ndim} axes, {tuple(x.shape)}, but is read as ({letters})")
    if k.shape[2] != v.shape[2]:
        raise CacheError(
            f"{format_shape('v', v.shape, 'b g n e')}, but k has {format_axis('n', k.shape[2])}; they come in pairs"
        )
    for name, old, new, letters in zip("kv", held, (k, v), ("b g n c", "b g n e"), strict=False):
        _check_same(name, old, new, letters)
    if k.shape[:2] != v.shape[:2]:
        raise CacheError(f"{format_shape('v', v.shape, 'b g n e')}, but k is {tuple(k.shape)}; they come in pairs")


def _check_same(name: str, old: Tensor, new: Tensor, letters: str) -> None:
    same = (old.shape[:2], old.shape[3]) == (new.shape[:2], new.shape[3])
    if not same or old.dtype != new.dtype or old.device != new.device:
        raise CacheError(
            f"{format_shape(name, new.shape, letters)}, {new.dtype} on {new.device}, does not continue the cache, "
            f"which holds {tuple(old.shape)}, {old.dtype} on {old.device}; only the number of positions may change"
        )
