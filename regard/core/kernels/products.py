"""The two matrix products of attention, q . k and weights times v, with grouped heads.

The weight of a hidden key is zero, but 0 * NaN is NaN: in an ordinary product a hidden NaN reaches every row of the
result. If the inputs contain NaN or infinity, hidden pairs are left out of these products and of their gradients.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from regard.base.tracing import is_meta_or_fake
from regard.core.input_checks import disable_autocast

_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_finite(*tensors: Tensor) -> bool:
    """Return whether all values of the tensors are finite. May be False although they are.

    Only the sum of the values is tested, and a sum of large finite values can overflow.
    """
    if not _dispatch_modes():
        return _has_finite_sum(tensors)
    with torch._C._DisableTorchDispatch():  # counters of operations and bytes see the attention, not this check
        return _has_finite_sum(tensors)


def _has_finite_sum(tensors: tuple[Tensor, ...]) -> bool:
    total = 0.0
    for x in tensors:
        x = x.detach() if x.requires_grad else x
        total += (x.sum(dtype=torch.float32) if x.dtype.itemsize == 2 else x.sum()).item()
    return total - total == 0  # inf - inf is NaN


def has_nonfinite(*tensors: Tensor) -> bool:
    """Return whether NaN or infinity was found in the tensors. May be True for finite values, see `is_finite`.

    The result is always False if the values are not read: on a GPU, where reading is slow, and in compiled code (see
    `can_look_for_nonfinite`). Inside torch.func transforms all values of the batch are read.
    """
    return can_look_for_nonfinite(tensors[0]) and not is_finite(*map(_unwrap, tensors))


def can_look_for_nonfinite(x: Tensor) -> bool:
    """Return whether `has_nonfinite` reads the values of a tensor: only on the CPU, and not in compiled code."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_meta_or_fake(_unwrap(x))


def _unwrap(x: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def dot_products(
    q: Float[Tensor, "b h i c"], k: Float[Tensor, "b g j c"], nonfinite: bool = False
) -> Float[Tensor, "b h i j"]:
    """Compute the dot product q . k of every query-key pair.

    Query heads may share key heads (grouped-query attention).

    nonfinite  whether q or k may contain NaN or infinity. Then pairs with a zero gradient are left out of the
               backward pass, where 0 * NaN would be NaN
    """
    rows = _group_rows(q, k.shape[1])
    with disable_autocast(q):
        scores: Tensor = _DotProducts.apply(rows, k) if nonfinite else rows @ k.mT  # type: ignore[no-untyped-call]
    return _split_rows(scores, q)


def weighted_sum(
    weights: Float[Tensor, "b h i j"], v: Float[Tensor, "b g j e"], visible: Bool[Tensor, "b h i j"] | None = None
) -> Float[Tensor, "b h i e"]:
    """Compute the product of attention weights and v.

    visible  which keys each query sees. If passed, NaN or infinity in the value of a key changes only the outputs of
             queries that see this key. None computes an ordinary product
    """
    rows = _group_rows(weights, v.shape[1])
    with disable_autocast(v):
        seen = None if visible is None else _group_rows(visible, v.shape[1])
        out: Tensor = rows @ v if seen is None else _WeightedSum.apply(rows, v, seen)  # type: ignore[no-untyped-call]
    return _split_rows(out, weights)


def weighted_sum_of_visible(
    weights: Float[Tensor, "b h i j"], v: Float[Tensor, "b g j e"], scores: Float[Tensor, "b h i j"]
) -> Float[Tensor, "b h i e"]:
    """Compute the product of attention weights and v for scores that may contain NaN or +inf.

    If the weights of a query are NaN, its output is NaN. The gradients of the keys that this query sees are NaN too,
    but not those of hidden keys: the NaN is computed from visible weights and values only, outside of the product, in
    which 0 * NaN would be NaN. The code does not branch on values.

    scores  -inf where a key is hidden
    """
    g, seen = v.shape[1], scores != -math.inf
    lost = (weights.isnan() & seen).any(-1, keepdim=True)
    touched = (lost & seen).any(-2).unflatten(1, (g, -1)).any(2)[..., None]
    nan = torch.where(touched, v, 0).sum(-2, keepdim=True).repeat_interleave(scores.shape[1] // g, 1) * math.nan
    nan = nan + torch.where(seen, weights, 0).sum(-1, keepdim=True)
    return torch.where(lost, nan, weighted_sum(torch.where(lost, 0, weights), v))


def _group_rows(x: Shaped[Tensor, "b h i n"], g: int) -> Shaped[Tensor, "b g ri n"]:
    """Join the rows of all query heads that share a key head into one matrix.

    The shape (b h i n) becomes (b g ri n), where r = h / g is the number of query heads for each key head.
    """
    grouped: Tensor = x.unflatten(1, (g, x.shape[1] // g)).flatten(2, 3)
    return grouped


def _split_rows(x: Float[Tensor, "b g ri n"], like: Float[Tensor, "b h i m"]) -> Float[Tensor, "b h i n"]:
    """Split the rows that `_group_rows` joined into query heads again. The shape (b g ri n) becomes (b h i n).

    like  a tensor (b h i m), from which the numbers of heads and rows are taken
    """
    split: Tensor = x.unflatten(2, (like.shape[1] // x.shape[1], like.shape[2])).flatten(1, 2)
    return split


def masked_product(
    a: Float[Tensor, "*axes i j"], x: Float[Tensor, "*axes j e"], counts: Bool[Tensor, "*axes i j"]
) -> Float[Tensor, "*axes i e"]:
    """Compute a @ x with the entries of a where `counts` is True. Other entries of a are treated as 0.

    A NaN or infinity in row j of x changes only the output rows i for which counts[i, j] is True.
    """
    a = torch.where(counts, a, 0)
    finite = x.isfinite()
    reached = counts.to(x.dtype) @ (~finite).to(x.dtype) > 0
    return torch.where(reached, a @ x, a @ torch.where(finite, x, 0))


class _DotProducts(torch.autograd.Function):
    """The product q @ k.mT as an autograd function. The backward pass leaves out pairs with a gradient of zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        # the gradient of a hidden score is exactly zero; a visible one of NaN or +inf makes its whole row NaN
        counts = grad != 0
        return masked_product(grad, k, counts), masked_product(grad.mT, q, counts.mT)

    @staticmethod
    def jvp(ctx: Any, of_q: Tensor, of_k: Tensor) -> Tensor:
        q, k = ctx.saved_tensors
        tangent: Tensor = of_q @ k.mT + q @ of_k.mT
        return tangent


class _WeightedSum(torch.autograd.Function):
    """The product weights @ v as an autograd function. Forward and backward pass use the visible pairs only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return masked_product(weights, v, visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, v, visible = ctx.saved_tensors
        return torch.where(visible, grad @ v.mT, 0), masked_product(weights.mT, grad, visible.mT), None

    @staticmethod
    def jvp(ctx: Any, of_weights: Tensor, of_v: Tensor, _: None) -> Tensor:
        weights, v, visible = ctx.saved_tensors
        return masked_product(of_weights, v, visible) + masked_product(weights, of_v, visible)
