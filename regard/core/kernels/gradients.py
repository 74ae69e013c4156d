"""Exact gradients of fused kernels at large scores.

A fused kernel keeps one number for each row, the log-sum-exp, and its backward pass computes the weights again as
exp(score - lse). In float32 a log-sum-exp of 1e9 is rounded to a multiple of 64, so these weights are wrong: the
forward pass is right, the gradients are not. All kernels of torch have this error: flash attention on the CPU, and
flash, cuDNN, memory-efficient and flex attention on a GPU. Up to a log-sum-exp of `lse_limit`, their gradients are
about as exact as those of naive attention, which computes the whole score matrix. Above this limit, this module
computes the gradients as naive attention does, some rows of scores at a time.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.base.errors import KernelRefusedError
from regard.core.input_checks import disable_autocast
from regard.core.kernels.products import (
    can_look_for_nonfinite,
    dot_products,
    has_nonfinite,
    weighted_sum,
    weighted_sum_of_visible,
)
from regard.core.kernels.request import in_transform
from regard.core.softargmax import softargmax

TRACED_LIMIT = 3e4  # limit of the bound on scores in compiled code
ORDINARY_BETA = 64.0  # beta in units of c ** -0.5; above it large scores are intended
WRONG_LSE = 1e5  # |log-sum-exp| above which recomputed weights are off by more than the rounding of half precision
_AT_ONCE = 1 << 24  # scores held at once

# Attention of some rows: q of these rows, k, v and which rows they are; returns their output
RowAttention = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


def lse_limit(q: Tensor) -> float:
    """Return the largest |log-sum-exp| at which a fused backward pass is exact enough (measured, see docs/log.md)."""
    return 1e4 if q.device.type == "cuda" and q.element_size() == 2 else 1e3


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether gradients are enabled and at least one of the tensors requires a gradient.

    Inside a torch.func transform, a tensor also counts if an outer transform or autograd needs its gradient.
    """
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
        if not torch.compiler.is_compiling() and in_transform():
            return any(_needs_outer_gradient(x) for x in tensors if x is not None)
    return False


def _needs_outer_gradient(x: Tensor) -> bool:
    """Return whether a tensor inside a torch.func transform requires a gradient of an outer transform or of autograd.

    `x.requires_grad` itself says this for the innermost transform only.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def attention_by_rows(attention: RowAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention output from explicit scores, in float32 or better, a slice of query rows at a time.

    Only the forward pass is computed this way; see `gradients_by_rows` for gradients.

    attention  function of the q of some rows, k, v and the slice that says which rows these are
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(exact), v.to(exact)
    with disable_autocast(q):
        outs = [attention(q[:, :, rows].to(exact), k, v, rows).to(q.dtype) for rows in _row_slices(q, k)]
    return torch.cat(outs, 2)


def _row_slices(q: Tensor, k: Tensor) -> list[slice]:
    n, h, i, _ = q.shape
    step = max(1, _AT_ONCE // max(1, n * h * k.shape[2]))
    return [slice(start, start + step) for start in range(0, i, step)]


def gradients_by_rows(
    attention: RowAttention, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v by autograd through explicit scores, in float32 or better.

    attention  function of the q of some rows, k, v and the slice that says which rows these are
    grad       gradient of the attention output
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    if in_transform() or needs_gradient(grad, q, k, v):  # these gradients may be differentiated again
        i = q.shape[2]
        with disable_autocast(q):
            whole: Callable[..., Tensor] = lambda q, k, v: attention(q.to(exact), k.to(exact), v.to(exact), slice(0, i))  # noqa: E731
            vjp: Callable[..., Any] = torch.func.vjp  # its annotation knows only the form with has_aux
            out, pull = vjp(whole, q, k, v)
            found: tuple[Tensor, Tensor, Tensor] = pull(grad.to(out.dtype))
        return found
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
    for rows in _row_slices(q, k):
        inputs = [x.detach().to(exact).requires_grad_() for x in (q[:, :, rows], k, v)]
        with torch.enable_grad(), disable_autocast(q):
            out = attention(inputs[0], inputs[1], inputs[2], rows)
        own, of_keys, of_values = torch.autograd.grad(out, inputs, grad[:, :, rows].to(out.dtype))
        of_q[:, :, rows] = own.to(q.dtype)
        of_k += of_keys
        of_v += of_values
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def has_sink(k: Tensor, added: Tensor | None) -> bool:
    """Return whether a bias has one more column than there are keys. The additional column is an attention sink."""
    return True if added is not None and added.shape[-1] == k.shape[2] + 1 else False  # noqa: SIM210 (a guard)


def add_sink_key(k: Tensor, v: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return k and v, with one more key of zeros at the end if the bias `added` has a column for an attention sink."""
    return (pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))) if has_sink(k, added) else (k, v)


def dense_row_attention(added: Tensor | None, causal: bool, beta: float, dropout: float = 0.0) -> RowAttention:
    """Return a function of (q, k, v, rows) that computes softmax attention of some rows from explicit scores.

    added  boolean mask or additive bias of all rows; an attention sink is one more column. None if there is no mask
           and no bias
    beta   the factor of q . k
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        nonfinite, j = has_nonfinite(q, k, v), k.shape[2]
        scores = dot_products(q, k, nonfinite) * beta
        if added is not None:
            # the score of a sink is what is added: a product with a key of zeros would be NaN for a query of infinity
            scores = pad(scores, (0, 1)) if has_sink(k, added) else scores
            some = added[..., rows, :] if added.shape[-2] > 1 else added
            bias = torch.where(some, 0.0, -math.inf) if some.dtype == torch.bool else some
            # a hidden score is -inf even where q . k is NaN
            scores = torch.where(bias == -math.inf, -math.inf, scores + bias)
        if causal:
            row = torch.arange(rows.start, rows.start + q.shape[2], device=q.device)[:, None]
            scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > row, -math.inf)
        weights, scores = softargmax(scores)[..., :j], scores[..., :j]
        nonfinite = nonfinite or has_nonfinite(weights)  # NaN or +inf in the bias
        weights = torch.nn.functional.dropout(weights, dropout)
        if added is not None and not can_look_for_nonfinite(weights):
            return weighted_sum_of_visible(weights, v, scores)
        return weighted_sum(weights, v, scores != -math.inf if nonfinite else None)

    return attention


class GradientGuard:
    """Replaces wrong gradients of a fused attention call on a GPU by the gradients of naive attention.

    Fused gradients are wrong if scores are too large. The forward pass does not synchronise: the largest score
    is copied to pinned memory asynchronously and read in the backward pass. If naive attention cannot repeat the call,
    because it has dropout for example, the backward pass raises KernelRefusedError.
    """

    def __init__(self, attention: RowAttention, refusal: str = "") -> None:
        self.attention = attention
        self.refusal = refusal  # why naive attention cannot repeat this call
        self.grad: Tensor | None = None

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v for the fused kernel. In the backward pass, their gradients pass through this guard."""
        passed: tuple[Tensor, Tensor, Tensor] = _GuardedInputs.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return passed

    def leave(self, out: Tensor, largest: Tensor) -> Tensor:
        """Return the kernel's output, with a hook that checks the scores in the backward pass.

        largest  the largest |score| or |log-sum-exp| of the call
        """
        if torch.cuda.is_current_stream_capturing():
            return poison_gradient(out, largest > lse_limit(out))  # a captured graph cannot branch on the host
        self.largest = torch.empty((), dtype=largest.dtype, pin_memory=True)
        self.largest.copy_(largest.detach(), non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record(torch.cuda.current_stream(largest.device))
        out.register_hook(self._receive)
        return out

    def _receive(self, grad: Tensor) -> None:
        self.copied.synchronize()
        large = not self.largest.item() <= lse_limit(grad)  # NaN is large
        if large and self.refusal:
            reached = f"scores reach {self.largest.item():.1e}, where fused kernels have wrong gradients"
            raise KernelRefusedError(f"{reached}, and {self.refusal}; use attend(..., kernel='eager')")
        self.grad = grad if large else None


class _GuardedInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guard: GradientGuard, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.guard = guard
        ctx.save_for_backward(q, k, v)
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, ctx.guard.grad = ctx.guard.grad, None
        if grad is None:
            return None, *grads
        return None, *gradients_by_rows(ctx.guard.attention, grad, *ctx.saved_tensors)


def can_poison_rows(q: Tensor, beta: float) -> bool:
    """Return whether `poison_saved_lse` may be used for this GPU call, to make wrong gradients NaN.

    NaN is acceptable only if wrong gradients are rare: in half precision with an ordinary beta (see `is_ordinary`).
    `poison_saved_lse` reads a saved tensor in the forward pass. Saved-tensor hooks, such as those of
    torch.utils.checkpoint, would already run then, so False is returned if there are any.
    """
    return is_ordinary(q, beta) and not _has_saved_tensor_hooks()


def is_ordinary(q: Tensor, beta: float) -> bool:
    """Return whether q is in half precision and beta is not unusually large, so that wrong gradients are rare."""
    return q.element_size() == 2 and abs(beta) * q.shape[-1] ** 0.5 <= ORDINARY_BETA


def _has_saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def saved_lse(out: Tensor) -> Tensor | None:
    """Return the log-sum-exp that a fused kernel has saved for its backward pass. None if no fused kernel ran."""
    node = out.grad_fn
    saved = getattr(node, "_saved_logsumexp", None)
    lse: Tensor | None = getattr(node, "_saved_log_sumexp", None) if saved is None else saved
    return lse


def poison_saved_lse(out: Tensor) -> None:
    """Set the log-sum-exp that a fused kernel has saved to NaN where its absolute value is above WRONG_LSE.

    The gradients of these rows are then NaN instead of wrong.
    """
    lse = saved_lse(out)
    if lse is None:
        return
    rows = lse.data  # does not count as a change of a saved tensor, which autograd would refuse
    if "Efficient" in out.grad_fn.name():  # type: ignore[union-attr]
        # it pads the log-sum-exp with +inf, which means rows that do not exist
        rows.masked_fill_((rows.abs() > WRONG_LSE) & rows.isfinite(), math.nan)
    else:
        rows.masked_fill_(rows.abs() > WRONG_LSE, math.nan)


def poison_large_rows(out: Tensor, largest: Tensor) -> None:
    """Make the gradients of a query row NaN if its |log-sum-exp| (`largest`) is above WRONG_LSE.

    The log-sum-exp that compiled flex_attention has saved for its backward pass is set to NaN in place. If the saved
    tensor is not found, a hook sets the gradient of the output to NaN, which costs a copy of this gradient.
    """
    kept = [
        x for x in getattr(out.grad_fn, "saved_tensors", ()) if x.shape == largest.shape and x.dtype == largest.dtype
    ]
    if len(kept) == 1:
        # .data: it does not count as a change of a saved tensor, which autograd would refuse
        kept[0].data.masked_fill_(largest > WRONG_LSE, math.nan)
    else:
        out.register_hook(lambda grad: grad.masked_fill(largest[..., None] > WRONG_LSE, math.nan))


def keep_layout(out: Tensor) -> None:
    """Register a hook that gives the gradient the strides of the output, if cuDNN computed the output.

    torch caches cuDNN's backward plans by the shapes and strides of q, k and v only. So cuDNN would read a gradient
    with other strides in the wrong order (measured with torch 2.11, see docs/log.md).
    """
    node = out.grad_fn
    if node is not None and "Cudnn" in node.name():
        strides = out.stride()
        out.register_hook(lambda grad: with_strides(grad, strides))


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor with these strides. It is copied only if its strides differ."""
    return (
        x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    )


def score_bound(q: Tensor, k: Tensor, beta: float) -> Tensor:
    """Return an upper bound of |beta * q . k| over all query-key pairs."""
    exact = torch.promote_types(q.dtype, torch.float32)
    longest = [torch.linalg.vector_norm(x.detach(), dim=-1, dtype=exact).amax() for x in (q, k)]
    largest: Tensor = longest[0] * longest[1] * abs(beta)
    return largest


def poison_gradient(out: Tensor, wrong: Tensor) -> Tensor:
    """Return the output unchanged, but set its gradient to NaN where `wrong` is True.

    Used in compiled code, torch.func transforms and CUDA graphs, which cannot branch on values.

    wrong  where scores are so large that the gradients of the fused kernel are wrong
    """
    marked: Tensor = _PoisonGradient.apply(out, wrong)  # type: ignore[no-untyped-call]
    return marked


class _PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor, wrong: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.strides = inputs[0].stride()
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (wrong,) = ctx.saved_tensors
        return with_strides(grad.masked_fill(wrong, math.nan), ctx.strides), None


def poison_input_gradients(q: Tensor, k: Tensor, v: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v unchanged, but set their gradients to NaN if `wrong` is True.

    It is used in place of `poison_gradient` where it is faster: the compiler fuses it with later operations on the
    gradients of q, k and v, while `poison_gradient` needs its own pass over the gradient of the output.
    """
    marked: tuple[Tensor, Tensor, Tensor] = _PoisonInputGradients.apply(wrong, q, k, v)  # type: ignore[no-untyped-call]
    return marked


class _PoisonInputGradients(torch.autograd.Function):
    @staticmethod
    def forward(wrong: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (wrong,) = ctx.saved_tensors
        return None, *(grad.masked_fill(wrong, math.nan) for grad in grads)


def keep_traced_layout(out: Tensor) -> Tensor:
    """Return the output unchanged, but give its gradient the strides of the output, as `keep_layout` does.

    It works in compiled code and torch.func transforms, in which the output has no hooks.
    """
    kept: Tensor = _KeepLayout.apply(out)  # type: ignore[no-untyped-call]
    return kept


class _KeepLayout(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.strides = inputs[0].stride()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return with_strides(grad, ctx.strides)
