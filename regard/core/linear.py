"""Linear attention: softargmax is replaced by a product of features, so that all keys fit in sums of fixed size.

    out_i = phi(q_i) S / (phi(q_i) . z),    S = sum_j phi(k_j) v_j^T,    z = sum_j phi(k_j)

S and z do not grow with the sequence. There are three algorithms with the same result. With a causal mask:

    parallel   multiplies every query with every earlier key of the call, as ordinary attention does
    chunked    does this inside each chunk of `chunk` keys, and reads the keys of earlier chunks from S and z; several
               chunks are computed in one batch
    recurrent  adds one key at a time to S and z

Without a causal mask, S and z are summed over all keys before the queries read them: at once, by chunks or key by key.
Feature maps are registered in FEATURE_MAPS.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.base.axes import format_axis, format_shape
from regard.base.errors import ConfigError, DeviceError, DtypeError, ShapeError, kernel_refused
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.base.registry import Registry
from regard.base.seeds import make_generator
from regard.base.validation import check_integer, check_number, suggest
from regard.core import linear_triton
from regard.core.absolute_positions import Positions
from regard.core.input_checks import check_inputs, is_autocasting
from regard.core.kernels.gradients import needs_gradient
from regard.core.kernels.products import dot_products, has_nonfinite, weighted_sum
from regard.core.masks import as_mask
from regard.core.masks.algebra import And, Mask
from regard.core.masks.forms.causal import Causal

FORMS = ("parallel", "chunked", "recurrent")
KERNELS = ("triton", "torch")
_AT_ONCE = 1 << 26  # numbers in the states of chunks that are computed together
_AT_ONCE_ON_CPU = 1 << 19  # more would leave the cache
FEATURE_MAPS: Registry[Callable[..., "FeatureMap"]] = Registry("feature map")


class FeatureMap(ABC):
    """A feature map phi of linear attention: the weight of key j for query i is phi(q_i) . phi(k_j).

    The weights must not be negative.

    logarithmic  whether `query_features` and `key_features` return ln phi, because phi itself may overflow
    chunk        default number of keys that the chunked form processes at once
    """

    logarithmic: ClassVar[bool] = False
    chunk: ClassVar[int] = 64  # default number of keys processed at once

    @abstractmethod
    def __call__(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n r"]:
        """Return phi(x)."""

    def size(self, c: int) -> int:
        """Return the number of features for a vector of width c."""
        return c

    def query_features(self, q: Float[Tensor, "b h i c"]) -> Float[Tensor, "b h i r"]:
        """Return phi(q), or ln phi(q) if `logarithmic`.

        A subclass may multiply the features of each query by any positive factor: an output is the quotient of two
        sums that both contain the factor of its query, so the factor cancels.
        """
        return self(q)

    def key_features(self, k: Float[Tensor, "b g j c"]) -> Float[Tensor, "b g j r"]:
        """Return phi(k), or ln phi(k) if `logarithmic`.

        A subclass may multiply the features of all keys by the same positive factor: an output is the quotient of two
        sums over keys, so a factor that is common to all keys cancels.
        """
        return self(k)


@dataclass(frozen=True)
class Elementwise(FeatureMap):
    """A feature map that applies one function to each coordinate."""

    name: str
    fn: Callable[[Tensor], Tensor] = field(repr=False)

    def __call__(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n r"]:
        return self.fn(x)

    def query_features(self, q: Float[Tensor, "b h i c"]) -> Float[Tensor, "b h i r"]:
        # the largest feature of a row becomes 1, so that products with small ones of keys do not vanish
        phi = self.fn(q)
        largest = phi.detach().amax(-1, keepdim=True)
        return phi / largest.masked_fill(largest == 0, 1)


@dataclass(frozen=True)
class Performer(FeatureMap):
    """The feature map of `performer`: positive random features (FAVOR+).

    phi(x)_r = exp(w_r . y - |y|^2 / 2) / sqrt(count) with y = x beta^(1/2). The w_r are standard normal
    (orthogonal in groups of `width`), hence E[phi(q) . phi(k)] = exp(beta q . k): an unbiased estimate of the
    weights of softargmax (softmax) before they are normalised. Choromanski et al. 2021, arXiv:2009.14794. phi may
    overflow, so `query_features` and `key_features` return ln phi.
    """

    width: int
    count: int
    seed: int = 0
    beta: float | None = None
    orthogonal: bool = True
    directions: Float[Tensor, "r c"] = field(init=False, repr=False, compare=False)

    logarithmic: ClassVar[bool] = True
    chunk: ClassVar[int] = 16  # a chunk's own keys cost chunk * count numbers per token here

    def __post_init__(self) -> None:
        check_integer("performer(width)", self.width, 1, "the coordinates of a head")
        check_integer("performer(count)", self.count, 1, "random features")
        check_integer("performer(seed)", self.seed, 0)
        if self.beta is not None and not 0 <= check_number("performer(beta)", self.beta) < math.inf:
            raise ConfigError(f"performer needs a finite beta that is not negative: beta={self.beta}")
        # drawn once: a second draw would differ, and compiled code cannot draw from a seed
        object.__setattr__(self, "directions", _random_directions(self.width, self.count, self.seed, self.orthogonal))

    def __call__(self, x: Float[Tensor, "b h n c"]) -> Float[Tensor, "b h n r"]:
        return self.key_features(x).exp() / math.sqrt(self.count)

    def size(self, c: int) -> int:
        if c != self.width:
            raise ShapeError(
                f"q has {format_axis('c', c)}, but performer was made with width={self.width}; use width={c}"
            )
        return self.count

    def query_features(self, q: Float[Tensor, "b h i c"]) -> Float[Tensor, "b h i r"]:
        return torch.einsum("bhic,rc->bhir", self._scaled(q), self.directions.to(q))

    def key_features(self, k: Float[Tensor, "b g j c"]) -> Float[Tensor, "b g j r"]:
        return self.query_features(k) - self._scaled(k).square().sum(-1, keepdim=True) / 2

    def _scaled(self, x: Tensor) -> Tensor:
        return x * math.sqrt(self.width**-0.5 if self.beta is None else self.beta)


@FEATURE_MAPS.add("elu_plus_one")
def elu_plus_one() -> FeatureMap:
    """Feature map phi(x) = elu(x) + 1: exp(x) below zero, x + 1 above. Katharopoulos et al. 2020, arXiv:2006.16236.

    >>> elu_plus_one()(torch.tensor([[[[0.0, 2.0]]]]))
    tensor([[[[1., 3.]]]])
    """
    return Elementwise("elu_plus_one", _elu_plus_one)


@FEATURE_MAPS.add("relu")
def relu() -> FeatureMap:
    """Feature map phi(x) = max(x, 0). Kasai et al. 2021, arXiv:2103.13076.

    In linear attention, the output of a query is zero if phi(q) . phi(k) = 0 for every visible key.

    >>> relu()(torch.tensor([[[[-1.0, 2.0]]]]))
    tensor([[[[0., 2.]]]])
    """
    return Elementwise("relu", torch.relu)


@FEATURE_MAPS.add("squared_relu")
def squared_relu() -> FeatureMap:
    """Feature map phi(x) = max(x, 0)^2, sharper than relu: the activation of So et al. 2021, arXiv:2109.08668.

    >>> squared_relu()(torch.tensor([[[[-1.0, 2.0]]]]))
    tensor([[[[0., 4.]]]])
    """
    return Elementwise("squared_relu", _squared_relu)


@FEATURE_MAPS.add("performer")
def performer(width: int, count: int, seed: int = 0, beta: float | None = None, orthogonal: bool = True) -> FeatureMap:
    """Return the positive random features of Performer (FAVOR+), a feature map that estimates softmax attention.

    width       width of a head
    count       number of random features
    seed        seed of the random features
    beta        inverse temperature, as in `attend`
    orthogonal  whether the directions are orthogonal in groups of `width`, which lowers the variance

    >>> performer(width=8, count=16)(torch.randn(1, 2, 5, 8)).shape
    torch.Size([1, 2, 5, 16])
    """
    return Performer(width, count, seed, beta, orthogonal)


@dataclass(frozen=True, eq=False)
class LinearState:
    """The recurrent state of linear attention: sums over all keys so far.

    weighted  sum of phi(k) v^T, divided by exp(peak)
    total     sum of phi(k), divided by exp(peak)
    peak      for logarithmic maps, the largest ln phi(k) of each feature so far, -inf before the first key; else 0
    length    number of keys so far, hidden ones included; the next key has this position
    features  feature map with which the sums were computed
    """

    weighted: Float[Tensor, "b h r e"]
    total: Float[Tensor, "b h r"]
    peak: Float[Tensor, "b h r"]
    length: int
    features: FeatureMap


class LinearResult(NamedTuple):
    """The outputs of linear attention, and the state from which the next call continues."""

    out: Float[Tensor, "b h i e"]
    state: LinearState


def linear_attend(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    features: FeatureMap | None = None,
    mask: Mask | None = None,
    form: str | None = None,
    chunk: int | None = None,
    state: LinearState | None = None,
    kernel: str | None = None,
    **unknown: UnknownKeyword,
) -> LinearResult:
    """Linear attention: weights are products of features, phi(q_i) . phi(k_j).

    Returns outputs and a recurrent state.

    features  feature map; default elu_plus_one()
    mask      None, full(), causal(), padding(lengths), or several of them combined with `&`
    form      algorithm: "parallel" (all pairs of the call at once), "chunked" or "recurrent" (one key at a time). All
              give the same result. A causal parallel call stores i * j numbers for each head, and `count` times as
              many for performer. Default: chunked for a causal mask, parallel otherwise
    chunk     number of keys that the chunked form processes at once; default `features.chunk`
    state     the state that the previous call returned. The first key of this call follows the last key of the state
    kernel    "triton" (causal masks on a GPU, chunked form) or "torch" (all forms on every device). Default: triton
              for bfloat16 and float16 if it can compute the call, else torch. A named kernel that cannot compute the
              call raises KernelRefusedError with the reasons

    Sums are computed in float32 or better, also under autocast, which only casts q, k and v. The output of a
    query is zero if phi(q) . phi(k) = 0 for every visible key. In the example, the returned state has summed the five
    keys of the call.

    >>> q, k, v = torch.randn(3, 1, 4, 5, 8)
    >>> out, state = linear_attend(q, k, v, mask=causal())
    >>> out.shape, state.length
    (torch.Size([1, 4, 5, 8]), 5)
    """
    if unknown:
        reject_keywords("linear_attend", unknown, signature(linear_attend).parameters)
    features = elu_plus_one() if features is None else features
    if not isinstance(features, FeatureMap):
        raise ConfigError(f"features takes a feature map such as relu(), with its parentheses, not {features!r}")
    if state is not None and not isinstance(state, LinearState):
        raise ConfigError(f"state takes the .state of an earlier linear_attend, or None to begin, not {state!r}")
    q, k, v = check_inputs(q, k, v)
    is_causal, visible = _read_mask(as_mask(mask), q, k, 0 if state is None else state.length)
    step = _step_size(form, chunk, features.chunk, is_causal, k.shape[2])
    exact = torch.promote_types(q.dtype, torch.float32)
    size = (*q.shape[:2], features.size(q.shape[3]), v.shape[3])
    if state is not None:
        _check_state(state, features, size, exact, q)
    chosen = _choose_kernel(kernel, q, size, features, is_causal, form, chunk)

    # sums over a whole sequence overflow the half precision of autocast
    with torch.autocast(q.device.type, enabled=False) if is_autocasting(q) else nullcontext():
        if visible is not None:
            # before any arithmetic, because hidden values may be NaN, and NaN times zero is NaN
            k, v = k.masked_fill(~visible, 0), v.masked_fill(~visible, 0)
        if chosen == "triton":
            return _attend_with_triton(q, k, v, visible, features, state, size)
        nonfinite = has_nonfinite(q, k, v)
        nothing = -torch.inf if features.logarithmic else 0.0
        state = _initial_state(features, size, q.new_empty(0, dtype=exact)) if state is None else state
        queries, keys, values = features.query_features(q.to(exact)), features.key_features(k.to(exact)), v.to(exact)
        if visible is not None:
            keys = keys.masked_fill(~visible, nothing)
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        if is_causal:
            out, state = _attend_causally(state, queries, keys, values, step, nonfinite)
        else:
            for some_keys, some_values in zip(*(_split(x, step) for x in (keys, values)), strict=True):
                state = _add_keys(state, some_keys, some_values, features)
            out = _read_state(state, queries, features)
    return LinearResult(out.to(q.dtype), state)


def _choose_kernel(
    kernel: str | None,
    q: Float[Tensor, "b h i c"],
    size: tuple[int, int, int, int],
    features: FeatureMap,
    is_causal: bool,
    form: str | None,
    chunk: int | None,
) -> str:
    """Return the kernel for a linear attention call: the named one, or Triton where it can run and is exact enough.

    Raises KernelRefusedError if the named kernel cannot compute the call.

    size  sizes of the state: (b, h, number of features, width of v)
    """
    if kernel not in (None, *KERNELS):
        raise ConfigError(
            f"kernel must be one of {', '.join(map(repr, KERNELS))}, or None to choose one, not {kernel!r}"
        )
    # products of float32 in tf32 parts are less exact than our rule for kernels allows, so they must be asked for
    if kernel == "torch" or (kernel is None and (q.device.type != "cuda" or q.dtype == torch.float32)):
        return "torch"
    reasons = linear_triton.refusals(q, *size[2:])
    if not is_causal:
        reasons.append("the mask is not causal, so that two products with all keys are enough")
    if form not in (None, "chunked"):
        reasons.append(f"it computes the chunked form, but form={form!r}")
    if chunk is not None:
        reasons.append(f"it chooses its own chunks, but chunk={chunk}")
    if q.shape[2] == 0:
        reasons.append("there are no tokens")
    if not reasons:
        return "triton"
    if kernel is not None:
        raise kernel_refused(kernel, reasons, ["torch"])
    return "torch"


def _attend_with_triton(
    q: Float[Tensor, "b h n c"],
    k: Float[Tensor, "b g n c"],
    v: Float[Tensor, "b g n e"],
    visible: Bool[Tensor, "b 1 n 1"] | None,
    features: FeatureMap,
    state: LinearState | None,
    size: tuple[int, int, int, int],
) -> LinearResult:
    """Compute a causal linear attention call with the Triton kernels.

    If every key is visible, the kernels apply the feature maps in _MAP_CODES themselves. Otherwise torch applies the
    feature map first, and sets the features of keys that are not `visible` to 0.

    size  sizes of the state: (b, h, number of features, width of v)
    """
    code = _MAP_CODES.get(features.fn, 0) if visible is None and isinstance(features, Elementwise) else 0
    exact = torch.promote_types(q.dtype, torch.float32)
    if not code:
        q, k = features.query_features(q.to(exact)), features.key_features(k.to(exact))
        k = k if visible is None else k.masked_fill(~visible, -torch.inf if features.logarithmic else 0)
    if state is None and (torch.compiler.is_compiling() or needs_gradient(q, k, v)):
        state = _initial_state(features, size, q.new_empty(0, dtype=exact))
    out, sums = linear_triton.run(
        *(q, k, v, None if state is None else (state.weighted, state.total, state.peak)),
        linear_triton.LOGARITHMIC if features.logarithmic else code,
        partial(_attend_with_torch, features, code == 0),
    )
    earlier = 0 if state is None else state.length
    return LinearResult(out, LinearState(*sums, earlier + q.shape[2], features))


def _attend_with_torch(
    features: FeatureMap, computed: bool, q: Tensor, k: Tensor, v: Tensor, sums: linear_triton.Sums
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same result as the Triton kernels with torch operations, for derivatives of any order.

    Returns the outputs and the two sums after the last token, `weighted` and `total` of `LinearState`.

    computed  whether q and k are already features; if not, the feature map is applied here
    sums      sums over earlier tokens: `weighted`, `total` and `peak` of `LinearState`
    """
    q, k = q.float(), k.float()
    if not computed:
        q, k = features.query_features(q), features.key_features(k)
    k, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v.float()))
    out, state = _attend_causally(LinearState(*sums, 0, features), q, k, values, features.chunk, False)
    return out.to(v.dtype), state.weighted, state.total


def _attend_causally(
    state: LinearState,
    queries: Float[Tensor, "b h n r"],
    keys: Float[Tensor, "b h n r"],
    values: Float[Tensor, "b h n e"],
    step: int,
    nonfinite: bool,
) -> LinearResult:
    """Compute causal linear attention from features. Returns the outputs, and the state after the last key.

    step       number of keys that are processed at once
    nonfinite  whether the inputs may contain NaN or infinity
    """
    features = state.features
    at_once = step * _chunks_at_once(
        features, step, (*queries.shape[:2], keys.shape[3], values.shape[3]), keys.device.type
    )
    rows = []
    parts = zip(*(_split(x, at_once) for x in (queries, keys, values)), strict=True)
    for some_queries, some_keys, some_values in parts:
        if features.logarithmic:
            rows.append(_read_log_chunk(state, some_queries, some_keys, some_values, nonfinite))
            state = _add_keys(state, some_keys, some_values, features)
        else:
            out, state = _read_chunks(state, some_queries, some_keys, some_values, step, nonfinite)
            rows.append(out)
    return LinearResult(torch.cat(rows, 2) if rows else values, state)  # no keys, so no rows either


def _split(x: Float[Tensor, "b h n c"], size: int) -> tuple[Float[Tensor, "b h j c"], ...]:
    """Split a tensor along the sequence into chunks of `size`.

    This is faster than slicing: the backward pass of each slice would fill a tensor as large as x with zeros.
    """
    return x.split(size, 2) if x.shape[2] else ()


def _add_keys(
    state: LinearState, keys: Float[Tensor, "b h j r"], values: Float[Tensor, "b h j e"], features: FeatureMap
) -> LinearState:
    """Return the linear attention state with more keys and values added to its sums.

    keys  features of the keys
    """
    weighted, total, peak = state.weighted, state.total, state.peak
    if features.logarithmic:
        # the peak cancels in the output, so it needs no gradient
        peak = torch.maximum(peak, keys.detach().amax(2))
        level = _or_zero(peak)
        fading, keys = (state.peak - level).exp(), (keys - level[:, :, None]).exp()
        weighted, total = weighted * fading[..., None], total * fading
    weighted = weighted + torch.einsum("bhjr,bhje->bhre", keys, values)
    return LinearState(weighted, total + keys.sum(2), peak, state.length + keys.shape[2], features)


def _chunks_at_once(features: FeatureMap, step: int, size: tuple[int, int, int, int], device: str) -> int:
    """Return the number of chunks to compute in one batched product, limited by the memory for the sums of each chunk.

    The number is 1 for the recurrent form, so that the sums are stored only once, and for logarithmic features, because
    their sums are rescaled after each chunk.

    step  number of keys in a chunk; 1 is the recurrent form
    size  sizes of the sums: (b, h, number of features, width of v)
    """
    most = _AT_ONCE_ON_CPU if device == "cpu" else _AT_ONCE
    return 1 if step == 1 or features.logarithmic else max(1, most // max(1, math.prod(size)))


def _read_chunks(
    state: LinearState,
    queries: Float[Tensor, "b h n r"],
    keys: Float[Tensor, "b h n r"],
    values: Float[Tensor, "b h n e"],
    step: int,
    nonfinite: bool,
) -> LinearResult:
    """Compute causal linear attention for several chunks of `step` keys in one batch.

    Returns the outputs and the state after the last chunk. A query sees its own chunk up to its own key, and all
    earlier chunks, whose sums are computed by one cumulative sum.

    nonfinite  whether the inputs may contain NaN or infinity
    """
    (b, h, n, r), e = queries.shape, values.shape[3]
    chunks = -(-n // step)
    values = torch.cat((values, values.new_ones(b, h, n, 1)), 3)  # the last column sums up the weights
    padded = [torch.nn.functional.pad(x, (0, 0, 0, chunks * step - n)) for x in (queries, keys, values)]
    q, k, v = (x.reshape(b * h, chunks, step, x.shape[3]) for x in padded)
    before = torch.cat((state.weighted, state.total[..., None]), 3).reshape(b * h, 1, r, e + 1)
    sums = torch.cat((before, k.mT @ v), 1).cumsum(1)
    own = dot_products(q, k, nonfinite).tril()
    visible = torch.ones_like(own, dtype=torch.bool).tril() if nonfinite else None
    found = (q @ sums[:, :-1] + weighted_sum(own, v, visible)).reshape(b, h, chunks * step, e + 1)[:, :, :n]
    weighted, total = sums[:, -1].reshape(b, h, r, e + 1).split((e, 1), 3)
    after = replace(state, weighted=weighted, total=total[..., 0], length=state.length + n)
    return LinearResult(_normalise(*found.split((e, 1), 3)), after)


def _read_log_chunk(
    state: LinearState,
    queries: Float[Tensor, "b h n r"],
    keys: Float[Tensor, "b h n r"],
    values: Float[Tensor, "b h n e"],
    nonfinite: bool,
) -> Float[Tensor, "b h n e"]:
    """Compute the outputs of one chunk of causal linear attention from logarithmic features (see `Performer`).

    A query sees all keys of the state, and the keys of its chunk up to its own position. The logarithms of queries and
    keys are added pair by pair, and the largest sum of each row is subtracted before exp. If queries and keys were each
    scaled by their own maximum, both factors could underflow although their product does not.
    """
    later = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=keys.device).triu(1)
    pairs = (queries[:, :, :, None] + keys[:, :, None]).masked_fill(later[..., None], -torch.inf)
    pairs = torch.cat(((queries + state.peak[:, :, None])[:, :, :, None], pairs), 3)
    pairs = (pairs - _or_zero(pairs.detach().amax((3, 4), keepdim=True))).exp()
    past, own = pairs[:, :, :, 0], pairs[:, :, :, 1:].sum(-1)
    found = past @ state.weighted + weighted_sum(own, values, ~later.expand_as(own) if nonfinite else None)
    return _normalise(found, past @ state.total[..., None] + own.sum(-1, keepdim=True))


def _read_state(
    state: LinearState, queries: Float[Tensor, "b h i r"], features: FeatureMap
) -> Float[Tensor, "b h i e"]:
    """Compute the outputs of linear attention for queries that see all keys of the state."""
    if features.logarithmic:
        queries = queries + state.peak[:, :, None]
        queries = (queries - _or_zero(queries.detach().amax(-1, keepdim=True))).exp()
    return _normalise(queries @ state.weighted, queries @ state.total[..., None])


def _normalise(found: Float[Tensor, "b h i e"], mass: Float[Tensor, "b h i 1"]) -> Float[Tensor, "b h i e"]:
    """Divide the weighted sums of values (`found`) by the sums of weights (`mass`); 0 where `mass` is 0."""
    nothing = mass == 0
    return (found / mass.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def _elu_plus_one(x: Tensor) -> Tensor:
    # exp, because elu rounds exp(x) - 1 to -1 where x is very negative
    return x.clamp(max=0).exp() + x.relu()


def _squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


_MAP_CODES = {_elu_plus_one: 1, torch.relu: 2, _squared_relu: 3}  # as in linear_triton_kernels


def _or_zero(peak: Tensor) -> Tensor:
    """Return the peak of a state with -inf replaced by 0. The peak is -inf before the first key."""
    return peak.masked_fill(peak == -torch.inf, 0)


def _random_directions(width: int, count: int, seed: int, orthogonal: bool) -> Float[Tensor, "r c"]:
    """Return `count` standard normal vectors, the same on every device.

    orthogonal  whether each group of `width` successive vectors is orthogonal; their lengths stay those of
                independent normal vectors
    """
    draws = make_generator(seed)
    normal = torch.randn(count, width, dtype=torch.float64, generator=draws, device="cpu")
    if not orthogonal:
        return normal
    groups = torch.randn(-(-count // width), width, width, dtype=torch.float64, generator=draws, device="cpu")
    turns, triangle = torch.linalg.qr(groups)
    # qr fixes the signs; without this the directions would not be uniform, and the estimate biased
    uniform: Tensor = (turns * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]).flatten(0, 1)[:count]
    lengths: Tensor = torch.linalg.vector_norm(normal, dim=-1, keepdim=True)
    return uniform * lengths


def _initial_state(features: FeatureMap, size: tuple[int, int, int, int], like: Tensor) -> LinearState:
    """Return the initial state of linear attention, before the first key.

    size  sizes of the state: (b, h, number of features, width of v)
    like  a tensor that has the dtype and device of the new sums
    """
    rows = math.prod(size[:3])
    # one tensor for all: on a GPU a call that fills a tensor takes longer than a view
    weighted, total, peak = like.new_zeros(rows * (size[3] + 2)).split((rows * size[3], rows, rows))
    peak = peak.view(size[:3])
    if features.logarithmic:
        peak = peak - torch.inf
    return LinearState(weighted.view(size), total.view(size[:3]), peak, 0, features)


def _check_state(
    state: LinearState, features: FeatureMap, size: tuple[int, int, int, int], exact: torch.dtype, q: Tensor
) -> None:
    """Check that a linear attention call can continue from a state: features, sizes, dtype and device fit."""
    if tuple(state.weighted.shape) != size:
        raise ShapeError(
            f"{format_shape('state.weighted', state.weighted.shape, 'b h r e')}, but this call needs {size}; "
            "continue with the same batch, heads, widths and features, or pass state=None"
        )
    if state.weighted.device != q.device:
        raise DeviceError(f"state is on {state.weighted.device}, but q is on {q.device}; keep them on one device")
    if state.weighted.dtype != exact:
        raise DtypeError(
            f"state is {state.weighted.dtype}, but this call sums in {exact}; keep q, k and v in one dtype"
        )
    # maps that do not define equality are compared by their class
    by_class = type(features).__eq__ is object.__eq__
    if type(state.features) is not type(features) or not (by_class or state.features == features):
        raise ConfigError(
            f"state was made with features={state.features!r}, but this call has {features!r}; "
            "continue with the same features, or pass state=None"
        )


def _read_mask(mask: Mask, q: Tensor, k: Tensor, start: int) -> tuple[bool, Bool[Tensor, "b 1 j 1"] | None]:
    """Return whether the mask of a linear attention call is causal, and which keys its padding leaves visible.

    The second is None if no key is hidden. Raises ConfigError for masks that linear attention does not support.

    start  position of the first key
    """
    i, j = q.shape[2], k.shape[2]
    if type(mask) is Causal and i == j:
        return True, None
    mask = mask.to(k.device)
    mask.check(Positions(start, start), i, j, b=q.shape[0])
    is_causal, visible = False, []
    for part in mask.parts if isinstance(mask, And) else (mask,):
        window = part.as_window()
        if window == (None, 0):
            is_causal = True
        elif window != (None, None):
            at, batch = torch.arange(j, device=k.device) + start, torch.arange(q.shape[0], device=k.device)[:, None]
            keys = None if window else part.visible_keys(at, batch)
            if keys is not None:
                visible.append(keys.expand(q.shape[0], j))
                continue
            raise ConfigError(
                f"linear_attend cannot apply {part!r}: its sums hold all keys and hide none from single queries; "
                "use full(), causal(), padding(lengths) or their &, or attend(q, k, v, mask=...)"
            )
    if is_causal and i != j:
        raise ShapeError(
            f"q has {format_axis('i', i)}, but k has {format_axis('j', j)}; a causal mask needs "
            "one query per key here: pass the keys before them through state="
        )
    return is_causal, torch.stack(visible).all(0)[:, None, :, None] if visible else None


def _step_size(form: str | None, chunk: int | None, default: int, is_causal: bool, j: int) -> int:
    """Return the number of keys that the algorithm `form` of linear attention processes at once.

    chunk    number of keys in a chunk, as passed by the user; None is `default`
    default  number of keys in a chunk if the user passed none: the attribute `chunk` of the feature map
    j        number of keys of the call
    """
    form = ("chunked" if is_causal else "parallel") if form is None else form
    if form not in FORMS:
        raise ConfigError(f"unknown form {form!r}{suggest(form, FORMS)} (there are: {', '.join(FORMS)})")
    if chunk is None:
        chunk = default  # not checked: it is a symbol in compiled code with dynamic shapes
    else:
        check_integer("chunk", chunk, 1, "keys taken at once")
    return {"parallel": max(j, 1), "chunked": chunk, "recurrent": 1}[form]
