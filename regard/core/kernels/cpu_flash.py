"""torch's flash attention on the CPU, with exact gradients at large scores and exact results for NaN and infinity.

`run_directly` calls torch's kernel, and autograd uses the kernel's own backward pass. If the result would not be exact,
and in torch.func transforms, the functions `forward` and `backward` of this module run as an autograd function. In
compiled code they run as the operator `regard::cpu_attention`. If torch's kernel is not exact, `forward` and `backward`
compute explicit scores, a slice of query rows at a time.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.core.input_checks import disable_autocast, is_autocasting
from regard.core.kernels.gradients import (
    add_sink_key,
    attention_by_rows,
    dense_row_attention,
    gradients_by_rows,
    lse_limit,
    needs_gradient,
)
from regard.core.kernels.operators import define_operator, register_once
from regard.core.kernels.products import is_finite
from regard.core.kernels.record import record_kernel
from regard.core.kernels.request import transform_levels
from regard.core.masks.plan_cache import planning

# a named overload spares its search at every call
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_innermost_transform = torch._C._functorch.peek_interpreter_stack
SHORTEST = 32  # keys; at least the width of the CPU's vectors
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float]  # q, k, v, added, causal, beta


def flash_attention(
    q: Float[Tensor, "n h i c"],
    k: Float[Tensor, "n g j c"],
    v: Float[Tensor, "n g j c"],
    added: Tensor | None,
    causal: bool,
    beta: float,
) -> Float[Tensor, "n h i c"]:
    """Compute softmax attention with torch's CPU flash kernel, with exact gradients of q, k and v.

    added  boolean mask, or additive bias without gradient; an attention sink is one more column. None if there is no
           mask and no bias
    beta   the factor of q . k
    """
    arguments = (q, k, v, added if added is None else as_bias(added, q.dtype), causal, beta)
    out: Tensor
    if torch.compiler.is_compiling():
        operators = torch.ops.regard
        training = needs_gradient(q, k, v)
        out = operators.cpu_attention(*arguments)[0] if training else operators.cpu_attention_inference(*arguments)
        return out
    direct = run_directly(*arguments)
    if direct is not None:
        return direct
    if not needs_gradient(q, k, v):
        return _by_rows(*arguments)
    out = _FlashAttention.apply(*arguments)[0]  # type: ignore[no-untyped-call]
    return out


def run_directly(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, beta: float) -> Tensor | None:
    """Compute `flash_attention` with torch's kernel, whose own backward pass gives the gradients.

    Returns None if the output or the gradients may be inexact, and if gradients are needed inside a torch.func
    transform.

    added  additive bias, not a boolean mask; None if there is no mask and no bias
    """
    out: Tensor
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if _innermost_transform() is not None and (learning or needs_gradient(q, k, v)):
        return None
    if not learning:
        out, sums = _infer(q, k, v, added, causal, beta)
        fake = type(out) is not Tensor  # under a fake tensor mode: it has no values to read
        return out if fake or _is_exact(out, sums, q, k) else None
    factor, scale = _factor_tensor(beta, q.dtype)
    keys, values = add_sink_key(k, v, added)
    out, lse = _FORWARD(q if factor is None else q * factor, keys, values, 0.0, causal, attn_mask=added, scale=scale)
    # a key may hold an infinity that scores of -inf hide: then its gradients would be NaN
    read = (out, k) if k.shape[2] >= SHORTEST else (out, k, q)
    if type(out) is not Tensor:
        return out
    if not (_is_small(lse, lse_limit(q)) and is_finite(*read)):
        return None
    out.grad_fn.register_hook(_make_differentiable)  # type: ignore[union-attr]
    return out


def _make_differentiable(
    grads: tuple[Tensor | None, ...], upstream: tuple[Tensor | None]
) -> tuple[Tensor | None, ...] | None:
    """Replace the gradients of torch's backward pass by differentiable gradients, for second derivatives.

    This function is a hook of the kernel's autograd node, which has saved the inputs of the kernel. The hook changes
    the gradients only with create_graph=True, because torch's own gradients cannot be differentiated.

    grads     the gradients that torch's backward pass has computed
    upstream  the gradient of the attention output; None if it is zero everywhere
    """
    if not torch.is_grad_enabled() or upstream[0] is None:  # the usual case: create_graph=False
        return None
    node: Any = torch._C._current_autograd_node()
    attention = dense_row_attention(node._saved_attn_mask, node._saved_is_causal, node._saved_scale)
    found = gradients_by_rows(attention, upstream[0], node._saved_query, node._saved_key, node._saved_value)
    return (*(None if own is None else new for own, new in zip(grads, found, strict=False)), *grads[3:])


def as_bias(added: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a boolean mask to an additive mask of 0 and -inf.

    A bias that is already additive is returned as it is.
    """
    if added is None or added.dtype != torch.bool:
        return added
    return torch.zeros_like(added, dtype=dtype).masked_fill_(~added, -math.inf)


def _kernel(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, beta: float) -> tuple[Tensor, Tensor]:
    out, lse = _FORWARD(q, *add_sink_key(k, v, added), 0.0, causal, attn_mask=added, scale=beta)
    return out, lse


def _is_exact(out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Return whether torch's kernel is known to be exact for these inputs, which may contain NaN or infinity.

    The output must be finite. A finite output can still be wrong in two cases. In half precision the kernel returns
    zeros for a row with a score of +inf, so the log-sum-exp must be finite too. If there are fewer keys than a vector
    register has entries, the kernel returns zeros for a row of NaN, so q and k must be finite too.
    """
    read = (out,) if lse is None else (out, lse)
    return is_finite(*read) if k.shape[2] >= SHORTEST else is_finite(*read, q, k)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, beta: float) -> Tensor:
    """Compute the attention output from explicit scores, without gradients, a slice of rows at a time."""
    with torch.no_grad():
        return attention_by_rows(dense_row_attention(added, causal, beta), q, k, v)


def _infer(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, beta: float
) -> tuple[Tensor, Tensor | None]:
    """Compute the output without gradients. Returns the output, and in half precision the log-sum-exp, else None."""
    if q.dtype.itemsize == 2:
        return _kernel(q, k, v, added, causal, beta)
    grouped = q.shape[1] != k.shape[1]
    k, v = add_sink_key(k, v, added)
    if added is not None and torch.is_autocast_enabled("cpu") and is_autocasting(q):  # it would round a float32 bias
        with disable_autocast(q):
            return scaled_dot_product_attention(q, k, v, added, 0.0, causal, scale=beta, enable_gqa=grouped), None
    # the same kernel as `_FORWARD`, with less to do in Python
    return scaled_dot_product_attention(q, k, v, added, 0.0, causal, scale=beta, enable_gqa=grouped), None


def _is_small(lse: Tensor, limit: float) -> bool:
    """Return whether every |log-sum-exp| is at most `limit`. False if there is a NaN."""
    low, high = torch.aminmax(lse)
    return high.item() <= limit and low.item() >= -limit


def forward(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, beta: float) -> tuple[Tensor, Tensor]:
    """Compute the attention output and the log-sum-exp of each row.

    If torch's backward pass would not be exact, the log-sum-exp is NaN everywhere.
    """
    factor, scale = split_scale(beta, q.dtype)
    out, lse = _kernel(q if factor == 1.0 else q * factor, k, v, added, causal, scale)
    sums = lse
    if not _is_small(lse, lse_limit(q)):
        # scores that are exactly equal must stay equal, which rounding q * factor would prevent
        out, sums = _kernel(q, k, v, added, causal, beta)
        lse = torch.full_like(lse, math.nan)
    if not _is_exact(out, sums, q, k):
        out, lse = _by_rows(q, k, v, added, causal, beta), torch.full_like(lse, math.nan)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    again = needs_gradient(grad, q, k, v, added)  # whether these gradients may be differentiated again
    if not again and "Vmap" not in transform_levels() and is_finite(lse):
        factor, scale = split_scale(beta, q.dtype)
        scaled = q if factor == 1.0 else q * factor
        keys, values = add_sink_key(k, v, added)
        of_q, of_k, of_v = _BACKWARD(grad, scaled, keys, values, out, lse, 0.0, causal, attn_mask=added, scale=scale)
        if is_finite(of_q):  # else a key may hold an infinity that scores of -inf hide
            of_k, of_v = of_k[:, :, : k.shape[2]], of_v[:, :, : k.shape[2]]
            return of_q if factor == 1.0 else of_q * factor, of_k, of_v
    return gradients_by_rows(dense_row_attention(added, causal, beta), grad, q, k, v)


@lru_cache(maxsize=64)
def _factor_tensor(beta: float, dtype: torch.dtype) -> tuple[Tensor | None, float]:
    """Return the two factors of beta from `split_scale`. The first is a tensor, or None if it is 1.

    torch multiplies by a tensor of one number in half the time that it needs for a Python number.
    """
    factor, scale = split_scale(beta, dtype)
    with planning(), torch.inference_mode(False):
        return (None if factor == 1.0 else torch.tensor(factor, dtype=dtype)), scale


def split_scale(beta: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split beta into two factors: one to multiply q with, and a power of two as the scale of the kernel.

    The kernel rounds score * scale differently in the forward and in the backward pass, which makes gradients
    several times less exact than those of naive attention. Multiplying by a power of two is exact. In half
    precision beta is not split, because the product of q and the first factor would be rounded.
    """
    mantissa, exponent = math.frexp(beta)
    if dtype.itemsize < 4 or mantissa in (0.0, 0.5, -0.5):
        return 1.0, beta
    return mantissa, math.ldexp(1.0, exponent)


class _FlashAttention(torch.autograd.Function):
    """The autograd function with `forward` and `backward` of this module, which torch.func can transform."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Saved, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.causal, ctx.beta = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, added, out, lse = ctx.saved_tensors
        return *backward(grad, q, k, v, added, out, lse, ctx.causal, ctx.beta), None, None, None


@register_once("library")
def _register_operators(library: torch.library.Library) -> None:
    """Register the custom operators `regard::cpu_attention...` for compiled code.

    The results are made contiguous, because torch.compile assumes that they have the same strides as the tensors that
    the fake functions of the operators return.
    """
    inputs, rest = "Tensor q, Tensor k, Tensor v, Tensor? added", "bool causal, float beta"
    gradients = f"cpu_attention_backward(Tensor grad, {inputs}, Tensor out, Tensor lse, {rest})"

    def contiguous(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in values)

    def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=exact)

    def fake_gradients(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:3])

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.regard.cpu_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.beta)
        return *grads, None, None, None

    def infer(*arguments: Any) -> Tensor:
        record_kernel("sdpa")
        q, k, v, *rest = contiguous(arguments)
        out, sums = _infer(q, k, v, *rest)
        return (out if _is_exact(out, sums, q, k) else _by_rows(q, k, v, *rest)).contiguous()

    def learn(*arguments: Any) -> tuple[Any, ...]:
        record_kernel("sdpa")
        return contiguous(forward(*contiguous(arguments)))

    def compute_gradients(*arguments: Any) -> tuple[Any, ...]:
        return contiguous(backward(*contiguous(arguments)))

    define_operator(
        library, f"cpu_attention_inference({inputs}, {rest}) -> Tensor", infer, lambda *x: fake(*x)[0], "CPU"
    )
    define_operator(library, f"cpu_attention({inputs}, {rest}) -> (Tensor, Tensor)", learn, fake, "CPU")
    define_operator(library, f"{gradients} -> (Tensor, Tensor, Tensor)", compute_gradients, fake_gradients, "CPU")
    torch.library.register_autograd(
        "regard::cpu_attention", differentiate, setup_context=_FlashAttention.setup_context, lib=library
    )
