"""Causal linear attention on a GPU with Triton kernels, forward and backward.

The kernels of `linear_triton_kernels` compute the features of q and k themselves, if the feature map is one of theirs.
For any other feature map, the features are passed in place of q and k. The kernels of `log_linear_triton_kernels` take
logarithms of features. Inside torch.compile the same kernels run as the operators `regard::linear_attention` and
`regard::linear_attention_backward`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from regard.base.extras import has_triton
from regard.base.tracing import assume_constant_result, in_compiled_code, is_meta_or_fake
from regard.core.kernels.operators import define_operator, register_once
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import transform_levels

KERNEL = "triton"
WIDEST = 128  # features and values per head, so that the sums of a head fit in registers
PROGRAMS = 1024  # a sequence is cut into segments until there are about as many programs
SHORTEST, LONGEST = 64, 4096  # tokens of a segment
# width of tiles; narrower ones gave wrong results that varied from run to run in bfloat16 (docs/log.md)
NARROWEST = 64
LINES, BLOCK = 32, 128  # a tile of `accumulate`

# the code of features that are given by their logarithms; those of feature maps are in `linear_triton_kernels`
LOGARITHMIC = 4
LOG_CHUNK = 16  # tokens in a chunk of logarithms: its pairs, times the features, are in registers
LOG_FEATURES = 16  # features that a program of `accumulate` adds up if they are logarithms

Sums = tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r"], Float[Tensor, "b h r"]]
Reference = Callable[..., tuple[Tensor, ...]]  # of q, k, v and the sums


@dataclass(frozen=True)
class Tile:
    """Launch options of a Triton kernel.

    chunk   tokens in a chunk, a divisor of 64
    warps   warps of a program (`num_warps` of Triton)
    stages  chunks that are loaded ahead (`num_stages` of Triton)
    """

    chunk: int
    warps: int
    stages: int


def refusals(q: Tensor, features: int, width: int) -> list[str]:
    """Return every reason why the Triton kernels cannot compute causal linear attention on these queries exactly.

    features  number of features of a head
    width     width of v per head
    """
    reasons = []
    if q.device.type != "cuda":
        reasons.append(f"it needs a GPU, but q is on {q.device}")
    elif not _has_triton():
        reasons.append("triton is not installed")
    elif _is_too_old(q.device):
        reasons.append("it needs a GPU of compute capability 8.0 or newer")
    compiling = torch.compiler.is_compiling()
    if not compiling and is_meta_or_fake(q):
        reasons.append("q is a fake tensor without values")
    if q.dtype == torch.float64:
        reasons.append("its sums are float32, but q is torch.float64")
    if max(features, width) > WIDEST:
        reasons.append(f"it has at most {WIDEST} features and columns of v, but this call has {features} and {width}")
    if _in_transform():
        reasons.append("torch.func transforms and forward-mode derivatives need operations that torch can transform")
    if compiling and not in_compiled_code():
        reasons.append("exported programs must not use operators of regard")
    return reasons


def run(
    q: Float[Tensor, "b h n r"],
    k: Float[Tensor, "b g n r"],
    v: Float[Tensor, "b g n e"],
    sums: Sums | None,
    map_code: int,
    reference: Reference,
) -> tuple[Float[Tensor, "b h n e"], Sums]:
    """Compute causal linear attention. Returns the outputs and the sums after the last token.

    sums       sums of earlier tokens: (matrix, vector, peak), that is `weighted`, `total` and `peak` of `LinearState`.
               If q and k are logarithms of features, matrix and vector are divided by exp(peak). None if there are no
               earlier tokens; only calls without gradients outside of torch.compile may pass None
    map_code   the feature map that the kernels apply to q and k, see `linear_triton_kernels`
    reference  function that computes the same with torch operations; it is used for second derivatives
    """
    if sums is None:
        out, matrix, vector, peak, _, _ = forward(q, k, v, None, None, None, map_code, keep=False)
        return out, (matrix, vector, peak if map_code == LOGARITHMIC else vector.new_zeros(()).expand(vector.shape))
    given = sums[0].contiguous(), sums[1].contiguous(), sums[2].contiguous()
    if torch.compiler.is_compiling():
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *given))
        out, matrix, vector, peak, _, _ = torch.ops.regard.linear_attention(q, k, v, *given, map_code, keep)
    else:
        out, matrix, vector, peak = _LinearAttention.apply(q, k, v, *given, map_code, reference)  # type: ignore[no-untyped-call]
    return out, (matrix, vector, peak if map_code == LOGARITHMIC else sums[2])


# torch.compile takes it for a constant
@assume_constant_result
def _has_triton() -> bool:
    return has_triton()


@assume_constant_result
def _is_too_old(device: torch.device) -> bool:
    return _capability(device) < (8, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _in_transform() -> bool:
    return len(transform_levels()) > 0 or (not torch.compiler.is_compiling() and forward_ad._current_level >= 0)


def choose_tile(kernel: str, widest: int, dtype: torch.dtype) -> Tile:
    """Return the launch options of a Triton kernel for a width and dtype; measured on an H200 (docs/log.md)."""
    sums = kernel.startswith("sum_")
    if widest > NARROWEST:
        return Tile(32, 8, 1)
    if dtype == torch.bfloat16:
        return Tile(64, 4, 3 if sums else 2)
    if kernel == "key_gradients":
        return Tile(32, 4, 1) if dtype == torch.float16 else Tile(16, 4, 1)
    return Tile(64, 4, 1) if dtype == torch.float16 else Tile(32, 4, 1)


def choose_length(n: int, heads: int) -> int:
    """Return the number of tokens in a segment: a power of two, from SHORTEST to LONGEST.

    Within these limits, it is chosen so that all heads together have about PROGRAMS segments.

    n      number of tokens in a sequence
    heads  number of heads of all sequences
    """
    most = max(SHORTEST, min(LONGEST, n * heads // PROGRAMS))
    return 1 << int(math.log2(most))


def padded(width: int) -> int:
    """Round a width up to a power of two, at least `NARROWEST`. The tiles of Triton must have such widths."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def product_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the dtype and precision of products for inputs of a dtype."""
    import triton.language as tl

    return {
        "OPERAND": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        # products of float16 need a wider range, and tf32 has as many digits
        "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3",
    }


def select_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager in which Triton launches kernels on the GPU of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class _Launch:
    """The launch options and arguments that all kernels of one linear attention call have in common."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, map_code: int) -> None:
        from regard.core import linear_triton_kernels, log_linear_triton_kernels

        self.logarithmic = map_code == LOGARITHMIC
        self.kernels = log_linear_triton_kernels if self.logarithmic else linear_triton_kernels
        self.b, self.h, self.n, c = q.shape
        e = v.shape[3]
        self.size = c * e + c + (c if self.logarithmic else 0)
        self.length = choose_length(self.n, self.b * self.h)
        self.segments = -(-self.n // self.length)
        self.grid = (self.segments, self.b * self.h)
        self.dtype = v.dtype
        self.known = {
            "H": self.h, "GROUP": self.h // k.shape[1], **product_options(v.dtype),
            "C": c, "W": e, "R": padded(c), "E": padded(e), **({} if self.logarithmic else {"MAP": map_code}),
        }  # fmt: skip

    def options(self, kernel: str) -> dict[str, Any]:
        """Return the keyword arguments with which a Triton kernel is launched."""
        if self.logarithmic:
            tile = Tile(LOG_CHUNK, 8 if self.known["R"] <= 64 else 16, 1)
        else:
            tile = choose_tile(kernel, max(self.known["R"], self.known["E"]), self.dtype)
        return {**self.known, "M": tile.chunk, "num_warps": tile.warps, "num_stages": tile.stages}

    def accumulate(self, sums: Tensor, start: tuple[Tensor, ...] | None, reverse: bool) -> tuple[Tensor, ...]:
        """Return the cumulative sum before each segment, and after them the total.

        The cumulative sum before a segment is `start` plus the sums of all earlier segments. The total is `start` plus
        the sums of all segments.

        sums     the sums of each segment
        start    a matrix, a vector and, for logarithms of features, the peak; None if there are no earlier tokens
        reverse  whether to add up later segments instead of earlier ones
        """
        c, e = self.known["C"], self.known["W"]
        before = torch.empty_like(sums)
        rows = (self.b, self.h, c)
        after = [sums.new_empty(size) for size in ((*rows, e), rows, rows)[: 3 if self.logarithmic else 2]]
        if self.logarithmic:
            programs, tile = -(-c // LOG_FEATURES), {"E": self.known["E"], "FEATURES": LOG_FEATURES}
        else:
            programs, tile = -(-self.size // BLOCK), {"LINES": LINES, "BLOCK": BLOCK}
        self.kernels.accumulate[(programs, self.b * self.h)](
            sums, before, *(after if start is None else start), *after, self.segments, FRESH=start is None,
            REVERSE=reverse, C=c, W=e, **tile, num_warps=4,
        )  # fmt: skip
        return before, *after

    def sums_before(self, k: Tensor, v: Tensor, start: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return the sums over all tokens before each segment, and the sums after the last segment."""
        sums = torch.empty(self.b * self.h, self.segments, self.size, device=k.device, dtype=torch.float32)
        self.kernels.sum_keys[self.grid](
            k, v, sums, self.n, self.length, *k.stride(), *v.stride(), **self.options("sum_keys")
        )
        return self.accumulate(sums, start if start is None or self.logarithmic else start[:2], reverse=False)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    vector: Tensor | None,
    peak: Tensor | None,
    map_code: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward pass of causal linear attention, computed with Triton kernels.

    Returns six tensors: the outputs; matrix, vector and peak after the last token; the sum of weights of each query;
    and the level of each query. If q and k are logarithms of features, the sum of weights is stored divided by
    exp(level), so that it does not overflow. Otherwise peak and level are empty.

    matrix, vector, peak  the sums over earlier tokens; None if there are none
    keep                  whether to return the sums of weights and the levels, which the backward pass needs. False
                          returns empty tensors in place of both
    """
    with select_device(q):
        record_kernel(KERNEL)
        launch = _Launch(q, k, v, map_code)
        given = None if matrix is None or vector is None or peak is None else (matrix, vector, peak)
        before, *after = launch.sums_before(k, v, given)
        out = torch.empty(*q.shape[:3], v.shape[3], device=v.device, dtype=v.dtype)
        rows = [before.new_empty(q.shape[:3] if keep else (0,)) for _ in after[1:]]
        strides = *q.stride(), *k.stride(), *v.stride()
        launch.kernels.attend_chunks[launch.grid](
            q, k, v, before, out, *rows, launch.n, launch.length, *strides, **launch.options("attend_chunks"), KEEP=keep
        )
        if not launch.logarithmic:  # no peak and no level
            after, rows = [*after, before.new_empty(0)], [*rows, before.new_empty(0)]
    return out, after[0], after[1], after[2], rows[0], rows[1]


def backward(
    of_out: Tensor,
    of_matrix: Tensor,
    of_vector: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor,
    vector: Tensor,
    peak: Tensor,
    out: Tensor,
    last: Tensor,
    mass: Tensor,
    top: Tensor,
    map_code: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward pass of causal linear attention: return the gradients of q, k, v and of the sums over earlier tokens.

    of_out                the gradient of the outputs
    of_matrix, of_vector  the gradients of the sums after the last token
    last                  the peak after the last token
    mass, top             the sum of weights and the level of each query, as `forward` returns them
    """
    with select_device(q):
        launch = _Launch(q, k, v, map_code)
        kernels, sizes = launch.kernels, (launch.n, launch.length)
        # computed again: kept, they would take a quarter of the memory of q, k and v in short segments
        before, *_ = launch.sums_before(k, v, (matrix, vector, peak))
        rows = (mass, top) if launch.logarithmic else (mass,)
        sums, of_mass = torch.empty_like(before), torch.empty_like(mass)
        kernels.sum_queries[launch.grid](
            q, out, *rows, of_out, of_mass, sums, *sizes, *q.stride(), *of_out.stride(), **launch.options("sum_queries")
        )
        of_q = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        strides = *q.stride(), *k.stride(), *v.stride(), *of_out.stride()
        kernels.query_gradients[launch.grid](
            q, k, v, before, *rows, of_mass, of_out, of_q, *sizes, *strides, **launch.options("query_gradients")
        )
        # gradients of the sums after the last token, which for logarithms were divided by exp(last)
        level = [torch.where(last == -torch.inf, last, -last)] if launch.logarithmic else []
        given = of_matrix.contiguous(), of_vector.contiguous(), *level
        after, of_matrix, of_vector, *level = launch.accumulate(sums, given, reverse=True)
        group = launch.known["GROUP"]
        of_k, of_v = (
            # the gradients of query heads that share a key head are added in float32
            torch.empty(*q.shape[:3], x.shape[3], device=x.device, dtype=torch.float32 if group > 1 else x.dtype)
            for x in (k, v)
        )
        kernels.key_gradients[launch.grid](
            q, k, v, after, *rows, of_mass, of_out, of_k, of_v, *sizes, *strides, **launch.options("key_gradients")
        )
        if group > 1:
            of_k, of_v = (x.unflatten(1, (-1, group)).sum(2).to(y.dtype) for x, y in ((of_k, k), (of_v, v)))
        if launch.logarithmic:
            factor = (level[0] + peak).exp()
            of_matrix, of_vector = of_matrix * factor[..., None], of_vector * factor
    return of_q, of_k, of_v, of_matrix, of_vector


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor,
        vector: Tensor,
        peak: Tensor,
        map_code: int,
        reference: Reference,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        out, *after, last, mass, top = forward(q, k, v, matrix, vector, peak, map_code, keep)
        ctx.mark_non_differentiable(last)
        if keep:
            ctx.map_code, ctx.reference = map_code, reference
            ctx.save_for_backward(q, k, v, matrix, vector, peak, out, last, mass, top)
        return out, after[0], after[1], last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph=True; the kernels have no derivative
            inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors[:5]]
            q, k, v, matrix, vector = inputs
            result = ctx.reference(q, k, v, (matrix, vector, ctx.saved_tensors[5]))
            found = torch.autograd.grad(result, inputs, grads[:3], create_graph=True)
        else:
            found = backward(*grads[:3], *ctx.saved_tensors, ctx.map_code)  # type: ignore[call-arg, arg-type]
        wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
        return *wanted, None, None, None


@register_once("linear_library")
def _register(library: torch.library.Library) -> None:
    inputs = "Tensor q, Tensor k, Tensor v, Tensor matrix, Tensor vector, Tensor peak"
    schema = f"linear_attention({inputs}, int map_code, bool keep) -> ({', '.join(['Tensor'] * 6)})"
    backward_schema = (
        f"linear_attention_backward(Tensor of_out, Tensor of_matrix, Tensor of_vector, {inputs}, Tensor out, "
        f"Tensor last, Tensor mass, Tensor top, int map_code) -> ({', '.join(['Tensor'] * 5)})"
    )

    def fake(
        q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, vector: Tensor, peak: Tensor, map_code: int, keep: bool
    ) -> tuple[Tensor, ...]:
        (b, h, n, r), e, logarithmic = q.shape, v.shape[3], map_code == LOGARITHMIC
        row = (b, h, n) if keep else (0,)
        sizes = (b, h, r, e), (b, h, r), (b, h, r) if logarithmic else (0,), row, row if logarithmic else (0,)
        return v.new_empty(b, h, n, e), *(v.new_empty(size, dtype=torch.float32) for size in sizes)

    def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in arguments[3:8])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.map_code, _ = inputs
        out, _, _, *rest = output
        ctx.mark_non_differentiable(*rest)
        ctx.save_for_backward(*tensors, out, *rest)

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = torch.ops.regard.linear_attention_backward(*grads[:3], *ctx.saved_tensors, ctx.map_code)
        return *(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 3

    define_operator(library, schema, forward, fake)
    define_operator(library, backward_schema, backward, fake_backward)
    torch.library.register_autograd("regard::linear_attention", differentiate, setup_context=setup_context, lib=library)
