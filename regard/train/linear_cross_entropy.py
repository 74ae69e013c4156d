"""The cross-entropy of a linear output layer, without holding the logits of all tokens at once.

The forward pass computes logits for some tokens at a time, then their gradients, and discards the logits. So memory
does not grow with tokens times vocabulary, and every product with the output weights is computed once.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.base.extras import has_triton

IGNORED = -100  # the target that is skipped, torch's `ignore_index`
CPU_BYTES = 1 << 24  # of the logits that are held at once
GPU_BYTES = 1 << 29
ALIGNED = 128  # matrix products on a GPU are fast if their sizes are multiples of this
HALF_SCALE = 1024.0  # float16 holds probabilities of rare tokens only if they are multiplied by this


def linear_cross_entropy(
    hidden: Float[Tensor, "*n d"],
    weight: Float[Tensor, "w d"],
    targets: Int[Tensor, "*n"],
    *,
    ignored: int = IGNORED,
) -> Float[Tensor, ""]:
    """Return the cross-entropy of the logits `hidden @ weight.T`, summed over the targets that are not `ignored`.

    Only the logits of some tokens are held at a time, so memory does not grow with tokens times vocabulary. Gradients
    are computed in the forward pass; second derivatives are not supported. In half precision and under autocast,
    logits are rounded to half precision, as in a linear layer; sums are computed in float32.

    weight   weights of the output layer, one row for each token of the vocabulary
    ignored  value of the targets that are skipped (torch's `ignore_index`)

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(97, 8)
    >>> linear_cross_entropy(hidden, weight, torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([])
    """
    if hidden.shape[-1:] != weight.shape[1:] or weight.ndim != 2:
        raise ShapeError(
            f"weight is {tuple(weight.shape)} read as (w d), but hidden is {tuple(hidden.shape)} read as (*n d); "
            "d must be the same"
        )
    if hidden.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets is {tuple(targets.shape)}, but hidden is {tuple(hidden.shape)} and needs targets of shape "
            f"{tuple(hidden.shape[:-1])}"
        )
    if targets.dtype != torch.int64:
        raise DtypeError(f"targets must be int64, not {targets.dtype}; use targets.long()")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:  # as autocast of torch does
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    learns = torch.is_grad_enabled()
    of_hidden, of_weight = learns and hidden.requires_grad, learns and weight.requires_grad
    total: Tensor = _linear_cross_entropy(
        hidden.flatten(0, -2), weight, targets.flatten(), ignored, of_hidden, of_weight
    )[0]
    return total


@torch.library.custom_op("regard::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients with respect to `hidden` and `weight`.

    A gradient is an empty tensor if `of_hidden` or `of_weight` is False. This is a custom operator, so that
    torch.compile does not trace its loop.
    """
    total, by_hidden, by_weight = _make_results(hidden, weight, of_hidden, of_weight)
    fused = hidden.is_cuda and hidden.dtype != torch.float64 and has_triton()
    if hidden.is_cuda:
        inside = ((targets >= 0) & (targets < len(weight))) | (targets == ignored)
        torch._assert_async(inside.all(), f"a target is not a token of the vocabulary, 0 to {len(weight) - 1}")
    padded = _cast_and_pad(weight, hidden.dtype) if hidden.is_cuda else weight.to(hidden.dtype)
    total.zero_()
    for rows in _slices(hidden, padded):
        some, wanted = hidden[rows], targets[rows]
        logits = some @ padded.T
        if fused:
            from regard.train import triton_kernels  # needs triton

            losses = triton_kernels.cross_entropy_and_gradient(
                logits, wanted, len(weight), ignored, _scale(hidden.dtype), of_hidden or of_weight
            )
            total += losses.sum()
            gradient = logits
        else:
            loss, gradient = _cross_entropy_and_gradient(logits, wanted, len(weight), ignored)
            total += loss
        if of_hidden:
            by_hidden[rows] = _product(gradient, padded, by_hidden.dtype)
        if of_weight:
            _add_product(by_weight, gradient[:, : len(weight)].T, some)
    if _scale(hidden.dtype) != 1.0:
        by_hidden /= _scale(hidden.dtype)
        by_weight /= _scale(hidden.dtype)
    return total, by_hidden, by_weight.to(weight.dtype)


def _make_results(hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate tensors for the loss and for the gradients of `hidden` and `weight`.

    The tensor of a gradient is empty if `of_hidden` or `of_weight` is False. The gradient of the weights is accumulated
    in float32, or in float64 if `hidden` is float64.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    kept = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    by_hidden = torch.empty_like(hidden, dtype=kept) if of_hidden else hidden.new_empty(0, dtype=kept)
    by_weight = torch.zeros_like(weight, dtype=exact) if of_weight else weight.new_empty(0, dtype=exact)
    return hidden.new_empty((), dtype=exact), by_hidden, by_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total, by_hidden, by_weight = _make_results(hidden, weight, of_hidden, of_weight)
    return total, by_hidden, by_weight.to(weight.dtype)


def _keep_gradients(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, by_hidden, by_weight = output
    ctx.save_for_backward(by_hidden, by_weight)
    ctx.dtype, ctx.of_hidden, ctx.of_weight = inputs[0].dtype, inputs[4], inputs[5]


def _scale_gradients(ctx, of_total, *others):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        raise ConfigError("linear_cross_entropy can be differentiated once; for create_graph=True compute the logits")
    by_hidden, by_weight = ctx.saved_tensors
    hidden = (by_hidden * of_total).to(ctx.dtype) if ctx.of_hidden else None
    return hidden, by_weight * of_total if ctx.of_weight else None, None, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _cross_entropy_and_gradient(logits: Tensor, targets: Tensor, vocab: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some rows of logits, and its gradient with respect to the logits.

    The gradient has the dtype of the logits. In float16 it is multiplied by `HALF_SCALE`.

    vocab    number of columns that are logits; the other columns are padding
    ignored  value of the targets that are skipped
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    skipped = targets == ignored
    if logits.device.type == "cpu" and bool(((targets < 0) | (targets >= vocab)).logical_and_(~skipped).any()):
        raise ShapeError(
            f"targets has values from {int(targets.min())} to {int(targets.max())}, but tokens are 0 to {vocab - 1}"
        )
    logs = logits[:, :vocab].to(exact).log_softmax(-1)
    chosen = targets.masked_fill(skipped, 0)[:, None]
    losses = -logs.gather(1, chosen)[:, 0]
    gradient = logs.exp_()
    gradient.scatter_add_(1, chosen, gradient.new_full((1, 1), -1.0).expand(len(gradient), 1))
    gradient.masked_fill_(skipped[:, None], 0)
    gradient = gradient.mul_(_scale(logits.dtype)).to(logits.dtype)
    if gradient.shape != logits.shape:
        gradient = torch.nn.functional.pad(gradient, (0, logits.shape[1] - vocab))
    return losses.masked_fill(skipped, 0).sum(), gradient


def _slices(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Split the rows of `hidden` into slices, so that the logits of a slice take at most `CPU_BYTES` or `GPU_BYTES`.

    A slice has at least `ALIGNED` rows.
    """
    size = GPU_BYTES if hidden.is_cuda else CPU_BYTES
    most = max(ALIGNED, size // (len(weight) * hidden.element_size()) // ALIGNED * ALIGNED)
    return [slice(start, min(start + most, len(hidden))) for start in range(0, len(hidden), most)]


def _cast_and_pad(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the weights to a dtype and pad them with rows of zeros to a size for which matrix products are fast."""
    padded = weight.new_zeros(len(weight) + -len(weight) % ALIGNED, weight.shape[1], dtype=dtype)
    padded[: len(weight)] = weight
    return padded


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b in place and in the dtype of `total`: float32 if a and b are in half precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scale(dtype: torch.dtype) -> float:
    return HALF_SCALE if dtype == torch.float16 else 1.0
