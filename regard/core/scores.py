"""Score terms: biases and other functions of the scores, applied after beta and before the softargmax.

`ScoreTerm.bind` returns the term for one attention call: an elementwise function of scores and query-key pairs. Every
kernel uses this function, for the whole score matrix or for parts of it. Several terms are applied in order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.axes import format_axis, format_shape
from regard.base.errors import ConfigError, DeviceError, DtypeError, ShapeError
from regard.base.registry import Registry
from regard.base.tracing import can_read_values, is_symbol, outside_inference_mode
from regard.base.validation import check_integer, check_number
from regard.core.absolute_positions import Grid

BoundTerm = Callable[[Tensor, Grid], Tensor]
_SMALL = 1024  # largest number of elements of a tensor whose contents become part of a cache key


class ScoreTerm(ABC):
    """Base class of score terms: functions that change the attention scores before the softargmax (softmax).

    additive       whether the term only adds a value to the score of each pair
    relative       whether the effect of the term depends only on the head and the distance of query and key
    reads_queries  whether `bind` needs the values of q. If False, kernels may pass an empty tensor of the same dtype
                   in place of q
    """

    name: str
    additive = True
    relative = False
    reads_queries = True

    @abstractmethod
    def bind(self, q: Float[Tensor, "b h i c"], beta: float) -> BoundTerm:
        """Return this score term for one attention call: a function of scores and a `Grid` that returns new scores."""

    def check(self, q: Float[Tensor, "b h i c"], j: int) -> None:  # noqa: B027 (a term may fit all shapes)
        """Raise an error if this score term does not fit the heads of q, or the numbers of queries and keys."""

    def may_hide(self) -> bool:
        """Return whether this score term may hide keys by adding -inf to their scores."""
        return False

    def hidden(self, grid: Grid) -> Bool[Tensor, "..."] | None:
        """Return which query-key pairs this score term hides by adding -inf to their scores.

        None if this kind of score term cannot hide pairs.
        """
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of this score term, such as a table of biases, whether learned or not."""
        return ()

    def key(self) -> Hashable | None:
        """Return a cache key of the values of this score term.

        None if the values depend on q, or on a tensor that is learned or large.
        """
        return None

    def settings(self) -> Hashable:
        """Return the constants of this score term for compiled kernels: all but the contents of its tensors."""
        return (self.name, *(tuple(tensor.shape) for tensor in self.tensors()))

    def __repr__(self) -> str:
        return self.name


TERMS: Registry[Callable[..., ScoreTerm]] = Registry("score term")


class Sizes(NamedTuple):
    """The sizes for which an example of a score term is made: heads, queries, keys and width of a head.

    tensor  function that makes a tensor of given sizes
    """

    h: int
    i: int
    j: int
    c: int
    tensor: Callable[..., Tensor]


# a term for given sizes, for `regard explain --scores NAME` and for the tests; some take the number of NAME:NUMBER
EXAMPLES: Registry[Callable[..., ScoreTerm]] = Registry("score term")


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(ScoreTerm):
    """The score term of `alibi`: score - slopes[h] * |i - j|."""

    slopes: Float[Tensor, "h"]
    name = "alibi"
    reads_queries = False
    relative = True

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        slopes = self.slopes.to(q)
        # abs of a float costs nothing in a fused kernel
        return lambda scores, grid: scores - slopes[grid.head] * (grid.i - grid.j).to(slopes.dtype).abs()

    def check(self, q: Tensor, j: int) -> None:
        _check_heads(self, len(self.slopes), q)

    def key(self) -> Hashable | None:
        return _contents(self.name, self.slopes)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)


@dataclass(frozen=True, eq=False, repr=False)
class T5Buckets(ScoreTerm):
    """The score term of `t5_buckets`: score + table[bucket(j - i), h]."""

    table: Float[Tensor, "buckets h"]
    max_distance: int
    bidirectional: bool
    name = "t5_buckets"
    reads_queries = False
    relative = True

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        look_up, hides = self._look_up(self.table.to(q)), self.may_hide()
        return lambda scores, grid: _add(scores, look_up(grid), hides)

    def may_hide(self) -> bool:
        return _may_hold_minus_infinity(self.table)

    def hidden(self, grid: Grid) -> Bool[Tensor, "..."]:
        return self._look_up(self.table)(grid) == -math.inf

    def _look_up(self, table: Tensor) -> Callable[[Grid], Tensor]:
        """Return a function that takes a `Grid` and returns the bias of each of its query-key pairs."""
        # all distances beyond the largest share a bucket, so a table from -largest to largest has every value
        largest = self.max_distance
        if can_read_values(table) and not (table.is_cuda and torch.cuda.is_current_stream_capturing()):
            buckets = _bucket_by_distance(len(table), largest, self.bidirectional, table.device)
        else:
            buckets = t5_bucket(_distances(largest, table.device), len(table), largest, self.bidirectional)
        by_distance = table[buckets].T
        return lambda grid: by_distance[grid.head, (grid.j - grid.i).clamp(-largest, largest) + largest]

    def key(self) -> Hashable | None:
        return _contents((self.name, self.table.shape[1], self.max_distance, self.bidirectional), self.table)

    def settings(self) -> Hashable:
        return self.name, tuple(self.table.shape), self.max_distance, self.bidirectional

    def check(self, q: Tensor, j: int) -> None:
        _check_heads(self, self.table.shape[1], q)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)


@dataclass(frozen=True, eq=False, repr=False)
class Shaw(ScoreTerm):
    """The score term of `shaw`: score + beta * q_i . keys[clip(j - i, -max_distance, max_distance)]."""

    keys: Float[Tensor, "distances c"]
    name = "shaw"

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        from regard.core.kernels.products import dot_products, has_nonfinite  # the kernels import this module

        largest, keys = len(self.keys) // 2, self.keys.to(q).expand(len(q), 1, -1, -1)
        nonfinite = has_nonfinite(q, keys)
        # one score per query and distance, from which pairs gather: no (i, j, c) tensor is built
        by_distance = dot_products(q, keys, nonfinite) * beta

        def add(scores: Tensor, grid: Grid) -> Tensor:
            distance = (grid.j - grid.i).clamp(-largest, largest) + largest
            if grid.whole:
                values = by_distance.gather(-1, distance.expand(*by_distance.shape[:2], *distance.shape[-2:]))
            else:
                values = by_distance[grid.batch, grid.head, grid.row, distance]
            return _add(scores, values, nonfinite)

        return add

    def check(self, q: Tensor, j: int) -> None:
        c = q.shape[-1]
        if self.keys.shape[1] != c:
            raise ShapeError(
                f"shaw keys have {format_axis('c', self.keys.shape[1])}, but q has c={c}; "
                f"make the relative keys {c} wide"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keys,)


@dataclass(frozen=True, repr=False)
class Softcap(ScoreTerm):
    """The score term of `softcap`: cap * tanh(score / cap). Infinity and NaN stay, so that -inf still hides its key."""

    cap: float
    name = "softcap"
    reads_queries = False
    additive = False

    def settings(self) -> Hashable:
        return self.name, self.cap

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        cap = self.cap

        def apply_cap(scores: Tensor, grid: Grid) -> Tensor:
            finite = scores.abs() < math.inf
            # zero instead of NaN inside tanh: its gradient at NaN would be NaN for hidden scores too
            return torch.where(finite, torch.tanh(torch.where(finite, scores, 0) / cap) * cap, scores)

        return apply_cap

    def bind_in_kernel(self, q: Tensor, tanh: Callable[[Tensor], Tensor]) -> BoundTerm:
        """Return the same function as `bind`, written with fewer instructions for use inside a GPU kernel.

        The kernel must ignore gradients of hidden scores.

        tanh  the function to use for tanh
        """
        # flex_attention takes no symbols of the compiler
        cap = torch.full((), self.cap, dtype=q.dtype, device=q.device) if is_symbol(self.cap) else self.cap
        # 1.2e-38, the smallest normal float32, changes no finite score below 1e30, and infinity and NaN stay; it is a
        # literal, as the compiler makes symbols of global numbers. A torch.where took half as long as tanh
        return lambda scores, grid: tanh(scores * (1 / cap)) * cap + scores * 1.2e-38


@dataclass(frozen=True, eq=False, repr=False)
class Sink(ScoreTerm):
    """The score term of `sink` (attention sink): one more logit per head in the softmax, without a value.

    The logit is added only to the denominator of the softmax, after all other terms have been applied.
    """

    logits: Float[Tensor, "h"]
    name = "sink"
    reads_queries = False
    additive = False
    relative = True

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        return lambda scores, grid: scores

    def check(self, q: Tensor, j: int) -> None:
        _check_heads(self, len(self.logits), q)

    def key(self) -> Hashable | None:
        return _contents(self.name, self.logits)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,)


@dataclass(frozen=True, eq=False, repr=False)
class Additive(ScoreTerm):
    """The score term of `additive`: score + values. A value of -inf hides its key as a mask does."""

    values: Float[Tensor, "*bh i j"]
    name = "additive"
    reads_queries = False

    def settings(self) -> Hashable:
        return self.name, tuple(
            size == 1 for size in (1, 1, *self.values.shape)[-4:]
        )  # the lengths may change between calls

    def bind(self, q: Tensor, beta: float) -> BoundTerm:
        look_up, hides = self._look_up(self.values.to(q.dtype)), self.may_hide()
        return lambda scores, grid: _add(scores, look_up(grid), hides)

    def may_hide(self) -> bool:
        return _may_hold_minus_infinity(self.values)

    def hidden(self, grid: Grid) -> Bool[Tensor, "..."]:
        return self._look_up(self.values)(grid) == -math.inf

    def _look_up(self, values: Tensor) -> Callable[[Grid], Tensor]:
        """Return a function that takes a `Grid` and returns the value of each of its query-key pairs."""
        sizes = (1, 1, *values.shape)[-4:]
        used = [axis for axis in range(4) if sizes[axis] != 1]
        values, squeezed = values.reshape(sizes), values.reshape([sizes[axis] for axis in used])

        def look_up(grid: Grid) -> Tensor:
            if grid.whole:
                return values
            index = tuple((grid.batch, grid.head, grid.row, grid.column)[axis] for axis in used)
            return squeezed[index] if used else squeezed

        return look_up

    def check(self, q: Tensor, j: int) -> None:
        if self.values.layout != torch.strided:
            raise DtypeError(f"scores are {self.values.layout}, but every pair needs a number; call .to_dense() first")
        wanted = (*q.shape[:-1], j)
        have = tuple(self.values.shape)
        letters = ["b", "h", "i", "j"][-len(have) :]
        for letter, own, size in zip(letters, have, wanted[-len(have) :], strict=True):
            if own not in (1, size):
                raise ShapeError(
                    f"scores have {format_axis(letter, own)}, but {'k' if letter == 'j' else 'q'} has {letter}={size}; "
                    f"{format_shape('scores', have, ' '.join(letters)).replace(' is ', ' are ')}; "
                    f"each axis must be 1 or that of (b h i j) = {wanted}"
                )
        if self.values.device != q.device:
            raise DeviceError(
                f"additive scores lie on {self.values.device}, but q on {q.device}; move them with .to(q.device)"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@TERMS.add("alibi")
def alibi(heads: int | None = None, *, slopes: Float[Tensor, "h"] | None = None) -> ScoreTerm:
    """ALiBi, a bias linear in the distance: score - slopes[h] |i - j|. Press et al. 2022, arXiv:2108.12409.

    heads   number of query heads; the slopes are those of `alibi_slopes`
    slopes  one slope per query head, to use instead of `heads`

    >>> alibi(heads=4).slopes
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if (heads is None) == (slopes is None):
        raise ConfigError("alibi takes either heads= (the paper's slopes) or slopes= (your own), one of the two")
    return Alibi(alibi_slopes(heads) if slopes is None and heads is not None else _floats("alibi", "slopes", slopes, 1))


@EXAMPLES.add("alibi")
def _alibi_example(sizes: Sizes) -> ScoreTerm:
    return alibi(sizes.h)


def alibi_slopes(heads: int) -> Float[Tensor, "h"]:
    """Return the slopes of ALiBi for a number of heads h.

    If h is a power of two, slope n is 2^(-8 n / h) for n = 1 .. h. Otherwise let p be the largest power of two
    below h. The slopes for p heads come first. Then follow the slopes number 1, 3, 5 ... for 2 p heads, until there
    are h slopes. This is the rule of the authors' code.

    >>> alibi_slopes(3)  # 2^-4 and 2^-8 of two heads, then 2^-2, the first of four heads
    tensor([0.0625, 0.0039, 0.2500])
    """
    heads = check_integer("alibi(heads)", heads, 1, "query heads")
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    between = [2 ** (-4 * (n + 1) / power) for n in range(0, 2 * (heads - power), 2)]
    return torch.tensor(own + between)


@TERMS.add("t5_buckets")
def t5_buckets(table: Float[Tensor, "buckets h"], *, max_distance: int = 128, bidirectional: bool = True) -> ScoreTerm:
    """T5's relative position bias: score + table[bucket(j - i), h]. Raffel et al. 2020, arXiv:1910.10683.

    Each short distance has its own bucket. Longer distances share buckets of logarithmically growing width.

    table          learned biases, one row per bucket, one column per query head
    max_distance   all distances of at least this are in the last bucket
    bidirectional  whether keys after the query have their own buckets, as in an encoder

    In the example, v is the identity matrix, so the output is the attention weights; they are those of the last query.

    >>> q, table = torch.zeros(1, 1, 6, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]]).log1p()
    >>> term = t5_buckets(table, max_distance=4, bidirectional=False)
    >>> attend(q, q, torch.eye(6)[None, None], scores=term)[0, 0, -1]  # distances 5, 4, 3 share one
    tensor([0.2222, 0.2222, 0.2222, 0.1667, 0.1111, 0.0556])
    """
    table = _floats("t5_buckets", "table", table, 2)
    buckets = len(table) // 2 if bidirectional else len(table)
    if bidirectional and len(table) % 2:
        raise ConfigError(
            f"t5_buckets both ways needs an even number of buckets, not {len(table)}; try {len(table) + 1}"
        )
    if buckets < 2:
        raise ConfigError(f"t5_buckets needs at least 2 buckets a side, not {buckets}; make the table longer")
    if check_integer("t5_buckets(max_distance)", max_distance, 1, "positions") <= buckets // 2:
        near = f"{buckets // 2} near buckets{' a side' if bidirectional else ''}"
        least = buckets // 2 + 1
        raise ConfigError(f"t5_buckets has {near}, so max_distance={max_distance} is too short; use at least {least}")
    return T5Buckets(table, max_distance, bidirectional)


@EXAMPLES.add("t5_buckets")
def _t5_buckets_example(sizes: Sizes, number: float = 32) -> ScoreTerm:
    return t5_buckets(sizes.tensor(int(number), sizes.h))


def t5_bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the T5 bucket of each distance j - i.

    The borders of the buckets are computed as integers, so that no distance is in a wrong bucket by rounding.
    """
    side = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        side = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)  # later keys get the bucket of distance 0
    near = buckets // 2
    far = buckets - near
    thresholds = [math.ceil(near * (max_distance / near) ** (step / far) - 1e-9) for step in range(1, far)]
    beyond = sum(((distance >= edge).long() for edge in thresholds), torch.zeros_like(distance))
    return side + torch.where(distance < near, distance, near + beyond)


def _distances(largest: int, device: torch.device) -> Int[Tensor, "distances"]:
    return torch.arange(-largest, largest + 1, device=device)


@lru_cache(maxsize=32)
def _bucket_by_distance(
    buckets: int, largest: int, bidirectional: bool, device: torch.device
) -> Int[Tensor, "distances"]:
    """Return the T5 bucket of each distance from -largest to largest.

    The result is cached: computing it takes some thirty operations, which on a GPU take longer than short calls.
    """
    with _disable_current_modes(), outside_inference_mode():
        return t5_bucket(_distances(largest, device), buckets, largest, bidirectional)


@TERMS.add("shaw")
def shaw(keys: Float[Tensor, "distances c"]) -> ScoreTerm:
    """Relative position keys: score + beta q_i . keys[clip(j - i, -max_distance, max_distance)].

    Shaw et al. 2018, arXiv:1803.02155.

    keys  one learned key for each distance from -max_distance to max_distance: an odd number of rows, the middle one
          for i = j

    In the example, v is the identity matrix, so the output is the attention weights.

    >>> q, k = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 3, 1)
    >>> earlier = torch.tensor([[3.0], [0.0], [0.0]])  # i - j >= 1, i = j, i - j <= -1
    >>> attend(q, k, torch.eye(3)[None, None], scores=shaw(earlier))[0, 0]
    tensor([[0.3333, 0.3333, 0.3333],
            [0.9094, 0.0453, 0.0453],
            [0.4879, 0.4879, 0.0243]])
    """
    keys = _floats("shaw", "keys", keys, 2)
    if len(keys) % 2 == 0:
        raise ConfigError(f"shaw takes an odd number of relative keys (-max_distance .. max_distance), not {len(keys)}")
    return Shaw(keys)


@EXAMPLES.add("shaw")
def _shaw_example(sizes: Sizes, number: float = 8) -> ScoreTerm:
    return shaw(sizes.tensor(2 * int(number) + 1, sizes.c))


@TERMS.add("softcap")
def softcap(cap: float) -> ScoreTerm:
    """Logit soft-capping: cap tanh(score / cap), so that scores are in (-cap, cap). Gemma 2, arXiv:2408.00118.

    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[0.0], [100.0]]]])
    >>> attend(q, k, torch.eye(2)[None, None], scores=softcap(2.0))  # the score 100 becomes 2
    tensor([[[[0.1192, 0.8808]]]])
    """
    if not 0 < check_number("softcap(cap)", cap) < math.inf:
        raise ConfigError(f"softcap({cap}) needs a positive finite cap")
    return Softcap(float(cap))


@EXAMPLES.add("softcap")
def _softcap_example(sizes: Sizes, number: float = 30) -> ScoreTerm:
    return softcap(number)


@TERMS.add("sink")
def sink(logits: Float[Tensor, "h"]) -> ScoreTerm:
    """Attention sink: one more logit per head in the softmax, without a value.

    The weights of the keys then sum to less than 1. In the example, the two keys and the sink have equal weights.
    Xiao et al. 2024, arXiv:2309.17453; learned as in gpt-oss, arXiv:2508.10925.

    logits  the additional logit of each query head

    >>> q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    >>> attend(q, k, torch.ones(1, 1, 2, 1), scores=sink(torch.zeros(1)))  # the sink takes one third
    tensor([[[[0.6667]]]])
    """
    return Sink(_floats("sink", "logits", logits, 1))


@EXAMPLES.add("sink")
def _sink_example(sizes: Sizes) -> ScoreTerm:
    return sink(sizes.tensor(sizes.h))


@TERMS.add("additive")
def additive(values: Float[Tensor, "*bh i j"]) -> ScoreTerm:
    """Additive bias: score + values. A value of -inf hides its key, as a mask does.

    values  floating-point tensor that broadcasts to (b, h, i, j)

    In the first example, the bias gives the two keys the weights 3/4 and 1/4. In the second, it hides the second key.

    >>> q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> attend(q, k, v, scores=additive(torch.tensor([[3.0, 1.0]]).log()))  # weights 3/4 and 1/4
    tensor([[[[1.5000]]]])
    >>> attend(q, k, v, scores=additive(torch.tensor([[0.0, -torch.inf]])))
    tensor([[[[1.]]]])
    """
    if not isinstance(values, Tensor):
        raise DtypeError(
            f"additive takes a floating tensor, not {type(values).__name__}; make it one with torch.tensor(...)"
        )
    if values.dtype == torch.bool:
        raise DtypeError("additive scores are boolean; a boolean matrix goes in mask=, True meaning visible")
    if values.is_complex():
        raise DtypeError(f"additive scores are {values.dtype}, but scores are real numbers; take .real or .abs()")
    if not values.is_floating_point():
        raise DtypeError(f"additive scores are {values.dtype}, but scores are floating numbers; call .float() first")
    if not 2 <= values.ndim <= 4:
        raise ShapeError(
            f"additive scores are {tuple(values.shape)}, but are read as (i j), (h i j) or (b h i j); "
            + ("for one row of keys write scores[None]" if values.ndim == 1 else "reshape them to one of these")
        )
    return Additive(values)


@EXAMPLES.add("additive")
def _additive_example(sizes: Sizes) -> ScoreTerm:
    return additive(sizes.tensor(sizes.i, sizes.j))


def as_terms(scores: "ScoreTerm | Tensor | Sequence[ScoreTerm | Tensor] | None") -> tuple[ScoreTerm, ...]:
    """Convert the argument `scores=` to a tuple of score terms.

    The argument is a score term, a tensor to add to the scores, a list of these, or None.
    """
    if scores is None:
        return ()
    several = list(scores) if isinstance(scores, tuple | list) else [scores]
    return tuple(_as_term(term) for term in several)


def _as_term(term: object) -> ScoreTerm:
    if isinstance(term, ScoreTerm):
        return term
    if isinstance(term, Tensor):
        return additive(term)
    raise DtypeError(f"scores takes terms such as alibi(heads=8) or a tensor to add, not {type(term).__name__}")


def _add(scores: Tensor, values: Tensor, hides: bool) -> Tensor:
    """Add values to scores. If `hides` is True, a value of -inf gives -inf even where the score is NaN."""
    return torch.where(values == -math.inf, values, scores + values) if hides else scores + values


def _may_hold_minus_infinity(values: Tensor) -> bool:
    """Return whether a tensor may contain -inf. Its values are read on the CPU only; elsewhere the result is True."""
    values = values.detach()
    if values.device.type != "cpu" or not can_read_values(values) or not values.numel():
        return True
    return not values.amin().item() > -math.inf  # amin of NaN is NaN


def _contents(settings: Hashable, values: Tensor) -> Hashable | None:
    """Return a cache key: the settings of a score term and the contents of its tensor.

    None unless the tensor is small, on the CPU and not learned.
    """
    learned = values.requires_grad and torch.is_grad_enabled()
    if learned or values.device.type != "cpu" or values.numel() > _SMALL or not can_read_values(values):
        return None
    return settings, values.dtype, tuple(values.tolist() if values.ndim == 1 else values.flatten().tolist())


def _check_heads(term: ScoreTerm, heads: int, q: Tensor) -> None:
    if heads != q.shape[1]:
        raise ShapeError(
            f"{term.name} has {format_axis('h', heads)}, but q has h={q.shape[1]}; make the term for {q.shape[1]} heads"
        )


def _floats(term: str, name: str, values: object, axes: int) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise DtypeError(
            f"{term}({name}) takes a floating tensor, not {getattr(values, 'dtype', type(values).__name__)}"
        )
    if values.layout != torch.strided:
        raise DtypeError(f"{term}({name}) is {values.layout}, but every number is needed; call .to_dense() first")
    if values.ndim != axes:
        form = {1: "one axis (h,)", 2: "two axes (rows, columns)"}[axes]
        raise ShapeError(f"{term}({name}) takes {form}, not {tuple(values.shape)}")
    return values
