"""Scaled dot-product attention: the public functions `attend` and `explain`."""

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.base.errors import ConfigError, ShapeError
from regard.base.keywords import UnknownKeyword, reject_keywords
from regard.base.validation import check_number
from regard.core import kernels
from regard.core.absolute_positions import Positions, check_positions
from regard.core.input_checks import check_has_values, check_inputs
from regard.core.kernels.products import weighted_sum
from regard.core.kernels.request import Request
from regard.core.masks import as_mask
from regard.core.masks.algebra import Full, Mask
from regard.core.scores import ScoreTerm, as_terms
from regard.core.softargmax import as_beta

if TYPE_CHECKING:
    from regard.core.explain_model import ModelExplanation
    from regard.core.kernels import Explanation

Scores = ScoreTerm | Tensor | Sequence[ScoreTerm | Tensor]


def attend(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh #i #j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
    positions: Positions | None = None,
    **unknown: UnknownKeyword,
) -> Float[Tensor, "b h i e"]:
    """Scaled dot-product attention: softargmax (softmax) of beta q . k + scores over the visible keys, times v.

    mask       which keys each query sees: `causal() & window(before=255)`, or a boolean matrix, True meaning visible
    scores     a score term such as `alibi(heads=8)`, a tensor to add, or several of them, applied in order
    beta       inverse temperature, the factor of q . k. None is c ** -0.5; 0 gives the mean of the visible values; inf
               gives hard attention, in which keys with equal maximum scores share the weight
    dropout    dropout probability of the attention weights; pass 0 outside training
    kernel     name of the kernel to use; None chooses the kernel. Raises KernelRefusedError if the named kernel cannot
               compute this call exactly
    positions  absolute positions of queries and keys, as `cache.extend` returns them. By default the keys are at
               0 .. j - 1 and the queries at the last i of these positions

    >>> q, k, v = torch.randn(3, 1, 4, 5, 8)
    >>> attend(q, k, v, mask=causal()).shape
    torch.Size([1, 4, 5, 8])
    >>> weights = (q @ k.mT * 8**-0.5).softmax(-1)
    >>> torch.allclose(attend(q, k, v), weights @ v, atol=1e-6)
    True
    """
    if unknown:
        reject_keywords("attend", unknown, signature(attend).parameters)
    simple = scores is None and kernel is None and dropout == 0.0
    if simple:
        out = kernels.run_prepared(q, k, v, mask, beta, positions)
        if out is not None:
            return out
    request = prepare_request(q, k, v, mask, scores, beta, dropout, positions)
    return kernels.run_kernel(request, kernel, (mask, beta, positions) if simple else None)


def attend_with_weights(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Bool[Tensor, "*bh #i #j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i j"]]:
    """Return the output of `attend`, and the attention weights (after dropout) that produced this output.

    `regard.watch` records this as one attention call. If `regard.intervene` edits the weights of this call, both the
    returned output and the returned weights change.
    """
    if not kernels.is_observed():
        return _compute_with_weights(q, k, v, dropout, mask, scores, beta, positions)
    with kernels.unobserved():
        out, weights = _compute_with_weights(q, k, v, dropout, mask, scores, beta, positions)
    request = prepare_request(q, k, v, mask, scores, beta, dropout, positions)
    request.weights = weights
    out = kernels.notify_observers(kernels.choose_kernel(request), request, out)
    return out, request.weights


def _compute_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    mask: Mask | Tensor | None,
    scores: Scores | None,
    beta: float | None,
    positions: Positions | None,
) -> tuple[Tensor, Tensor]:
    # attention is linear in the values, so values that are unit vectors give the weights
    units = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    weights = attend(q, k, units, mask=mask, scores=scores, beta=beta, positions=positions)
    if not dropout:
        return attend(q, k, v, mask=mask, scores=scores, beta=beta, positions=positions), weights
    visible = prepare_request(q, k, v, mask, scores, beta, 0.0, positions).visible()
    weights = torch.nn.functional.dropout(weights, dropout)
    # values of keys that a row does not see may be NaN
    seen = None if visible is None else visible.expand(weights.shape)
    return weighted_sum(weights, v, seen), weights


@overload
def explain(
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    *,
    mask: Mask | Tensor | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
    **unknown: UnknownKeyword,
) -> "Explanation": ...


@overload
def explain(q: nn.Module, k: object) -> "ModelExplanation": ...


def explain(
    q: Float[Tensor, "b h i c"] | nn.Module,
    k: Float[Tensor, "b g j c"] | object,
    v: Float[Tensor, "b g j e"] | None = None,
    *,
    mask: Mask | Bool[Tensor, "*bh #i #j"] | None = None,
    scores: Scores | None = None,
    beta: float | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
    **unknown: UnknownKeyword,
) -> "Explanation | ModelExplanation":
    """Report which kernel `attend` would choose for these arguments, and why other kernels cannot compute the call.

    The arguments are those of `attend`. The report also has the number of visible query-key pairs, and the memory that
    each kernel would need. `explain(model, inputs)` runs a model once and explains every call of `attend` inside the
    model; `inputs` is a tensor, a tuple of positional arguments or a dictionary of keyword arguments of the model.

    >>> q, k, v = torch.randn(3, 1, 4, 5, 8)
    >>> explain(q, k, v).chosen
    'sdpa'
    """
    if unknown:
        reject_keywords("explain", unknown, signature(explain).parameters)
    if isinstance(q, nn.Module):
        from regard.core.explain_model import explain_model  # not needed by those who explain one call

        return explain_model(q, k)
    return kernels.explain(prepare_request(q, k, v, mask, scores, beta, dropout, positions))  # type: ignore[arg-type]


def prepare_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    scores: Scores | None,
    beta: float | None,
    dropout: float,
    positions: Positions | None,
) -> Request:
    """Check the arguments of `attend`, fill in the defaults and return them as one `Request`."""
    q, k, v = check_inputs(q, k, v)
    b, h, i, c = q.shape
    j = k.shape[2]
    beta = c**-0.5 if beta is None else as_beta(beta)
    if dropout != 0.0 and not 0.0 <= check_number("dropout", dropout, "the probability of dropping a weight") < 1.0:
        raise ConfigError(f"dropout is the probability of dropping a weight: at least 0, less than 1, not {dropout!r}")
    visible = as_mask(mask)
    terms = as_terms(scores)
    for term in terms:
        term.check(q, j)
        for tensor in term.tensors():
            check_has_values(term.name, tensor, q)
    whole, positions = positions is None, check_positions(positions, i, j, b)
    check_has_values("positions.keys", positions.keys, q)
    check_has_values("positions.offsets", positions.offsets, q)
    if not isinstance(visible, Full):
        if visible.tensors() or visible.opaque():  # masks by position fit every call
            visible.check(positions, i, j, b, h)
            if whole and visible.required_keys() > j:
                raise ShapeError(
                    f"{visible!r} is for sequences padded to {visible.required_keys()} keys, but k has j={j}; "
                    f"use width={j}, or pass positions= if these are the first keys of a cache"
                )
            visible = visible.to(q.device)
        if i and j and isinstance(positions.keys, int) and positions.offsets is None:
            visible = visible.within(
                positions.queries, positions.queries + i - 1, positions.keys, positions.keys + j - 1
            )
    hides = any(term.may_hide() for term in terms)
    return Request(q, k, v, visible, terms, beta, dropout, positions, hides)
