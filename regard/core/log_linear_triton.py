"""Causal linear attention on a GPU with features that are given by their logarithms, as those of `performer`.

The kernels are those of `log_linear_triton_kernels`. Inside torch.compile they run as operators,
`regard::log_linear_attention` and its backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.kernels.record import record_kernel
from regard.core.linear_triton import KERNEL, choose_length, padded, product_options, select_device

CHUNK = 16  # the pairs of a chunk, times the features, are in registers
FEATURES = 16  # features that a program of `accumulate` adds up

Sums = tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r"], Float[Tensor, "b h r"]]
Result = tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h r e"], Float[Tensor, "b h r"], Float[Tensor, "b h r"]]
Reference = Callable[..., tuple[Tensor, ...]]  # of q, k, v and the sums


def run(
    q: Float[Tensor, "b h n r"],
    k: Float[Tensor, "b g n r"],
    v: Float[Tensor, "b g n e"],
    sums: Sums,
    reference: Reference,
) -> Result:
    """Compute causal linear attention. Returns the outputs, and the sums after the last token with their peak.

    q, k       logarithms of the features, in float32
    sums       sums of earlier tokens, divided by exp(peak), and the peak
    reference  computes the same with operations of torch, for second derivatives
    """
    given = [x.contiguous() for x in sums]
    if torch.compiler.is_compiling():
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *given))
        out, *after, _, _ = torch.ops.regard.log_linear_attention(q, k, v, *given, keep)
    else:
        out, *after = _LogLinearAttention.apply(q, k, v, *given, reference)  # type: ignore[no-untyped-call]
    return out, after[0], after[1], after[2]


class _Launch:
    """The launch options and arguments that all kernels of one linear attention call have in common."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.b, self.h, self.n, c = q.shape
        e = v.shape[3]
        self.size = c * e + 2 * c
        self.length = choose_length(self.n, self.b * self.h)
        self.segments = -(-self.n // self.length)
        self.grid = (self.segments, self.b * self.h)
        self.options = {
            "H": self.h, "GROUP": self.h // k.shape[1], **product_options(v.dtype),
            "C": c, "W": e, "R": padded(c), "E": padded(e), "M": CHUNK,
            "num_warps": 8 if padded(c) <= 64 else 16, "num_stages": 1,
        }  # fmt: skip

    def accumulate(self, sums: Tensor, start: tuple[Tensor, ...], reverse: bool) -> tuple[Tensor, ...]:
        """Return, for each segment, `start` plus the sums of all earlier segments; and `start` plus the sums of all.

        sums     the sums of each segment
        reverse  whether to add up later segments instead of earlier ones
        """
        from regard.core import log_linear_triton_kernels

        c, e = self.options["C"], self.options["W"]
        before = torch.empty_like(sums)
        vectors = [sums.new_empty(self.b, self.h, c) for _ in range(2)]
        after = sums.new_empty(self.b, self.h, c, e), *vectors
        log_linear_triton_kernels.accumulate[(-(-c // FEATURES), self.b * self.h)](
            sums, before, *start, *after, self.segments,
            REVERSE=reverse, C=c, W=e, E=self.options["E"], FEATURES=FEATURES, num_warps=4,
        )  # fmt: skip
        return before, *after

    def sums_before(self, k: Tensor, v: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums over all tokens before each segment, and the sums after the last segment."""
        from regard.core import log_linear_triton_kernels

        sums = torch.empty(self.b * self.h, self.segments, self.size, device=k.device, dtype=torch.float32)
        log_linear_triton_kernels.sum_keys[self.grid](
            k, v, sums, self.n, self.length, *k.stride(), *v.stride(), **self.options
        )
        return self.accumulate(sums, start, reverse=False)


def forward(
    q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, vector: Tensor, peak: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward pass of causal linear attention: the outputs, the sums after the last token, the sum of weights of each
    row.

    matrix, vector, peak  the sums of earlier tokens
    keep                  whether the sums of weights are returned, which the backward pass needs; else they are empty
    """
    from regard.core import log_linear_triton_kernels as kernels

    with select_device(q):
        record_kernel(KERNEL)
        launch = _Launch(q, k, v)
        before, *after = launch.sums_before(k, v, (matrix, vector, peak))
        out = torch.empty(*q.shape[:3], v.shape[3], device=v.device, dtype=v.dtype)
        mass, top = (before.new_empty(q.shape[:3] if keep else (0,)) for _ in range(2))
        strides = *q.stride(), *k.stride(), *v.stride()
        kernels.attend_chunks[launch.grid](
            q, k, v, before, out, mass, top, launch.n, launch.length, *strides, **launch.options, KEEP=keep
        )
    return out, after[0], after[1], after[2], mass, top


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
    mass: Tensor,
    top: Tensor,
    last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward pass of causal linear attention: the gradients of q, k, v and of the sums of earlier tokens.

    last  the peak after the last token
    """
    from regard.core import log_linear_triton_kernels as kernels

    with select_device(q):
        launch = _Launch(q, k, v)
        before, *_ = launch.sums_before(k, v, (matrix, vector, peak))
        sums, of_mass = torch.empty_like(before), torch.empty_like(mass)
        kernels.sum_queries[launch.grid](
            q, out, mass, top, of_out, of_mass, sums, launch.n, launch.length,
            *q.stride(), *of_out.stride(), **launch.options,
        )  # fmt: skip
        strides = *q.stride(), *k.stride(), *v.stride(), *of_out.stride()
        of_q = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        kernels.query_gradients[launch.grid](
            q, k, v, before, mass, top, of_mass, of_out, of_q, launch.n, launch.length, *strides, **launch.options
        )
        # gradients of the sums after the last token, which were divided by exp(last)
        level = torch.where(last == -torch.inf, last, -last)
        after, *of_start, level = launch.accumulate(sums, (of_matrix.contiguous(), of_vector.contiguous(), level), True)
        group = launch.options["GROUP"]
        of_k, of_v = (
            # the gradients of query heads that share a key head are added in float32
            torch.empty(*q.shape[:3], x.shape[3], device=x.device, dtype=torch.float32 if group > 1 else x.dtype)
            for x in (k, v)
        )
        kernels.key_gradients[launch.grid](
            q, k, v, after, mass, top, of_mass, of_out, of_k, of_v, launch.n, launch.length, *strides, **launch.options
        )
        if group > 1:
            of_k, of_v = (x.unflatten(1, (-1, group)).sum(2).to(y.dtype) for x, y in ((of_k, k), (of_v, v)))
        factor = (level + peak).exp()
        return of_q, of_k, of_v, of_start[0] * factor[..., None], of_start[1] * factor


class _LogLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor,
        vector: Tensor,
        peak: Tensor,
        reference: Reference,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        out, *after, mass, top = forward(q, k, v, matrix, vector, peak, keep)
        ctx.mark_non_differentiable(after[2])
        if keep:
            ctx.reference = reference
            ctx.save_for_backward(q, k, v, matrix, vector, peak, out, mass, top, after[2])
        return out, after[0], after[1], after[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph=True; the kernels have no derivative
            inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors[:5]]
            q, k, v, matrix, vector = inputs
            result = ctx.reference(q, k, v, (matrix, vector, ctx.saved_tensors[5]))
            found = torch.autograd.grad(result[:3], inputs, grads[:3], create_graph=True)
        else:
            found = backward(*grads[:3], *ctx.saved_tensors)
        wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
        return *wanted, None, None


def _register(library: torch.library.Library) -> None:
    inputs = "Tensor q, Tensor k, Tensor v, Tensor matrix, Tensor vector, Tensor peak"
    library.define(f"log_linear_attention({inputs}, bool keep) -> ({', '.join(['Tensor'] * 6)})")
    library.define(
        f"log_linear_attention_backward(Tensor of_out, Tensor of_matrix, Tensor of_vector, {inputs}, Tensor out, "
        f"Tensor mass, Tensor top, Tensor last) -> ({', '.join(['Tensor'] * 5)})"
    )
    library.impl("log_linear_attention", forward, "CompositeExplicitAutograd")
    library.impl("log_linear_attention_backward", backward, "CompositeExplicitAutograd")

    def fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (b, h, n, r), e, keep = q.shape, v.shape[3], rest[-1]
        sizes = (b, h, r, e), (b, h, r), (b, h, r), *[(b, h, n) if keep else (0,)] * 2
        return v.new_empty(b, h, n, e), *(v.new_empty(size, dtype=torch.float32) for size in sizes)

    def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in arguments[3:8])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[3:])
        ctx.save_for_backward(*inputs[:6], output[0], output[4], output[5], output[3])

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = torch.ops.regard.log_linear_attention_backward(*grads[:3], *ctx.saved_tensors)
        return *(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None

    name = "regard::log_linear_attention"
    torch.library.register_fake(name, fake, lib=library)
    torch.library.register_fake(f"{name}_backward", fake_backward, lib=library)
    torch.library.register_autograd(name, differentiate, setup_context=setup_context, lib=library)


# this module may be imported again, operators may not
if getattr(torch.ops.regard, "log_linear_library", None) is None:
    _library = torch.library.Library("regard", "FRAGMENT")
    torch.ops.regard.log_linear_library = _library  # type: ignore[attr-defined]  # operators live as long as it
    _register(_library)
