"""Causal linear attention on a GPU with the kernels of `linear_triton_kernels`, forward and backward.

Linear attention with `features` of type `Elementwise` is computed from q, k and v themselves; other feature maps pass
their features. Inside torch.compile the same kernels run as operators, `regard::linear_attention` and its backward.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from regard.base.tracing import assume_constant_result, in_compiled_code, is_meta_or_fake
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import transform_levels

KERNEL = "triton"
WIDEST = 128  # features and values per head, so that the sums of a head fit in registers
PROGRAMS = 1024  # a sequence is cut into segments until there are about as many programs
SHORTEST, LONGEST = 64, 4096  # tokens of a segment
# width of tiles; narrower ones gave wrong results that varied from run to run in bfloat16 (docs/log.md)
NARROWEST = 64
LINES, BLOCK = 32, 128  # a tile of `accumulate`

Sums = tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r"]]
Result = tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h r e"], Float[Tensor, "b h r"]]
Reference = Callable[..., tuple[Tensor, ...]]  # of q, k, v and the sums


@dataclass(frozen=True)
class Tile:
    """Launch options of a Triton kernel.

    chunk   tokens in a chunk, a divisor of 64
    warps   warps of a program
    stages  chunks that are loaded ahead
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
) -> Result:
    """Compute causal linear attention. Returns the outputs and the sums after the last token.

    sums       sums of earlier tokens
    map_code   the feature map that the kernels apply to q and k, see `linear_triton_kernels`
    reference  computes the same with operations of torch, for second derivatives
    """
    matrix, vector = (None, None) if sums is None else (x.contiguous() for x in sums)
    if torch.compiler.is_compiling():
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, matrix, vector))
        out, *after, _ = torch.ops.regard.linear_attention(q, k, v, matrix, vector, map_code, keep)
    else:
        out, *after = _LinearAttention.apply(q, k, v, matrix, vector, map_code, reference)  # type: ignore[no-untyped-call]
    return out, after[0], after[1]


# torch.compile takes it for a constant
@assume_constant_result
def _has_triton() -> bool:
    return _find_triton()


@assume_constant_result
def _is_too_old(device: torch.device) -> bool:
    return _capability(device) < (8, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _find_triton() -> bool:
    return find_spec("triton") is not None


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
    """Return the number of tokens in a segment: a power of two, such that there are enough programs."""
    most = max(SHORTEST, min(LONGEST, n * heads // PROGRAMS))
    return 1 << int(math.log2(most))


def padded(width: int) -> int:
    """Round a width up to a power of two, at least `NARROWEST`, as Triton needs it."""
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
        self.b, self.h, self.n, c = q.shape
        e = v.shape[3]
        self.size = c * e + c
        self.length = choose_length(self.n, self.b * self.h)
        self.segments = -(-self.n // self.length)
        self.grid = (self.segments, self.b * self.h)
        self.dtype = v.dtype
        self.known = {
            "H": self.h, "GROUP": self.h // k.shape[1], "MAP": map_code, **product_options(v.dtype),
            "C": c, "W": e, "R": padded(c), "E": padded(e),
        }  # fmt: skip

    def options(self, kernel: str) -> dict[str, Any]:
        """Return the keyword arguments with which a Triton kernel is launched."""
        tile = choose_tile(kernel, max(self.known["R"], self.known["E"]), self.dtype)
        return {**self.known, "M": tile.chunk, "num_warps": tile.warps, "num_stages": tile.stages}

    def accumulate(self, sums: Tensor, start: tuple[Tensor | None, Tensor | None], reverse: bool) -> tuple[Tensor, ...]:
        """Return, for each segment, `start` plus the sums of all earlier segments; and `start` plus the sums of all.

        sums     the sums of each segment
        reverse  whether to add up later segments instead of earlier ones
        """
        from regard.core import linear_triton_kernels

        c, e = self.known["C"], self.known["W"]
        before = torch.empty_like(sums)
        matrix, vector = sums.new_empty(self.b, self.h, c, e), sums.new_empty(self.b, self.h, c)
        starts = start[0] is not None
        given = start if starts else (sums, sums)  # pointers that are not read
        linear_triton_kernels.accumulate[(-(-self.size // BLOCK), self.b * self.h)](
            sums, before, *given, matrix, vector, self.segments,
            STARTS=starts, REVERSE=reverse, C=c, W=e, LINES=LINES, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return before, matrix, vector

    def sums_before(self, k: Tensor, v: Tensor, start: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, ...]:
        """Return the sums over all tokens before each segment, and the sums after the last segment."""
        from regard.core import linear_triton_kernels

        sums = torch.empty(self.b * self.h, self.segments, self.size, device=k.device, dtype=torch.float32)
        linear_triton_kernels.sum_keys[self.grid](
            k, v, sums, self.n, self.length, *k.stride(), *v.stride(), **self.options("sum_keys")
        )
        return self.accumulate(sums, start, reverse=False)


def forward(
    q: Tensor, k: Tensor, v: Tensor, matrix: Tensor | None, vector: Tensor | None, map_code: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward pass of causal linear attention: the outputs, the sums after the last token, and the sum of weights of
    each row.

    matrix, vector  the sums of earlier tokens; None for 0
    keep            whether the sums of weights are returned, which the backward pass needs; else they are empty
    """
    from regard.core import linear_triton_kernels as kernels

    with select_device(q):
        record_kernel(KERNEL)
        launch = _Launch(q, k, v, map_code)
        before, *after = launch.sums_before(k, v, (matrix, vector))
        out = torch.empty(*q.shape[:3], v.shape[3], device=v.device, dtype=v.dtype)
        mass = before.new_empty(q.shape[:3] if keep else (0,))
        kernels.attend_chunks[launch.grid](
            q,
            k,
            v,
            before,
            out,
            mass,
            launch.n,
            launch.length,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            **launch.options("attend_chunks"),
            KEEP=keep,
        )
    return out, after[0], after[1], mass


def backward(
    of_out: Tensor,
    of_matrix: Tensor,
    of_vector: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    vector: Tensor | None,
    out: Tensor,
    mass: Tensor,
    map_code: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward pass of causal linear attention: the gradients of q, k, v and of the sums of earlier tokens."""
    from regard.core import linear_triton_kernels as kernels

    with select_device(q):
        launch = _Launch(q, k, v, map_code)
        # computed again: kept, they would take a quarter of the memory of q, k and v in short segments
        before, *_ = launch.sums_before(k, v, (matrix, vector))
        sums, of_mass = torch.empty_like(before), torch.empty_like(mass)
        kernels.sum_queries[launch.grid](
            q, out, mass, of_out, of_mass, sums, launch.n, launch.length, *q.stride(), *of_out.stride(),
            **launch.options("sum_queries"),
        )  # fmt: skip
        of_q = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        strides = *q.stride(), *k.stride(), *v.stride(), *of_out.stride()
        kernels.query_gradients[launch.grid](
            q, k, v, before, mass, of_mass, of_out, of_q, launch.n, launch.length, *strides,
            **launch.options("query_gradients"),
        )  # fmt: skip
        after, *of_start = launch.accumulate(sums, (of_matrix.contiguous(), of_vector.contiguous()), reverse=True)
        group = launch.known["GROUP"]
        of_k, of_v = (
            # the gradients of query heads that share a key head are added in float32
            torch.empty(*q.shape[:3], x.shape[3], device=x.device, dtype=torch.float32 if group > 1 else x.dtype)
            for x in (k, v)
        )
        kernels.key_gradients[launch.grid](
            q, k, v, after, mass, of_mass, of_out, of_k, of_v, launch.n, launch.length, *strides,
            **launch.options("key_gradients"),
        )  # fmt: skip
        if group > 1:
            of_k, of_v = (x.unflatten(1, (-1, group)).sum(2).to(y.dtype) for x, y in ((of_k, k), (of_v, v)))
    return of_q, of_k, of_v, of_start[0], of_start[1]


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        vector: Tensor | None,
        map_code: int,
        reference: Reference,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        out, *after, mass = forward(q, k, v, matrix, vector, map_code, keep)
        if keep:
            ctx.map_code, ctx.reference = map_code, reference
            ctx.save_for_backward(q, k, v, matrix, vector, out, mass)
        return out, after[0], after[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:5]
        if torch.is_grad_enabled():  # with create_graph=True; the kernels have no derivative
            found = _differentiable_backward(ctx.reference, inputs, grads)
        else:
            found = backward(*grads, *ctx.saved_tensors, ctx.map_code)  # type: ignore[call-arg, arg-type]
        wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
        return *wanted, None, None


def _differentiable_backward(
    reference: Reference, inputs: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of linear attention with torch operations, so that they can be differentiated again."""
    own = [None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
    q, k, v, matrix, vector = own
    assert q is not None
    assert k is not None
    assert v is not None
    sums = None if matrix is None or vector is None else (matrix, vector)
    given = [x for x in own if x is not None]
    found = torch.autograd.grad(reference(q, k, v, sums), given, grads, create_graph=True)
    return *found, *(None,) * (5 - len(found))


def _register(library: torch.library.Library) -> None:
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? matrix, Tensor? vector"
    library.define(f"linear_attention({inputs}, int map_code, bool keep) -> (Tensor, Tensor, Tensor, Tensor)")
    library.define(
        f"linear_attention_backward(Tensor of_out, Tensor of_matrix, Tensor of_vector, {inputs}, Tensor out, "
        "Tensor mass, int map_code) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("linear_attention", forward, "CompositeExplicitAutograd")
    library.impl("linear_attention_backward", backward, "CompositeExplicitAutograd")

    def fake(q: Tensor, k: Tensor, v: Tensor, matrix: Any, vector: Any, map_code: int, keep: bool) -> list[Tensor]:
        (b, h, n, r), e = q.shape, v.shape[3]
        sizes = (b, h, r, e), (b, h, r), (b, h, n) if keep else (0,)
        return [v.new_empty(b, h, n, e), *(v.new_empty(size, dtype=torch.float32) for size in sizes)]

    def fake_backward(*arguments: Any) -> list[Tensor]:
        q, k, v, _, _, out, _, _ = arguments[3:]
        b, h, _, r = q.shape
        sums = (b, h, r, out.shape[3]), (b, h, r)
        return [*(x.new_empty(x.shape) for x in (q, k, v)), *(v.new_empty(x, dtype=torch.float32) for x in sums)]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.map_code, _ = inputs
        ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(*tensors, output[0], output[3])

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = torch.ops.regard.linear_attention_backward(*grads[:3], *ctx.saved_tensors, ctx.map_code)
        return *(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None

    torch.library.register_fake("regard::linear_attention", fake, lib=library)
    torch.library.register_fake("regard::linear_attention_backward", fake_backward, lib=library)
    torch.library.register_autograd("regard::linear_attention", differentiate, setup_context=setup_context, lib=library)


if getattr(torch.ops.regard, "linear_library", None) is None:  # this module may be imported again, operators may not
    _library = torch.library.Library("regard", "FRAGMENT")
    torch.ops.regard.linear_library = _library  # type: ignore[attr-defined]  # operators live as long as their library
    _register(_library)
