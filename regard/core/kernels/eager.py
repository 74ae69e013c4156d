"""Eager attention with the whole score matrix: supports everything and needs i x j memory."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.kernels.products import (
    can_look_for_nonfinite,
    dot_products,
    has_nonfinite,
    weighted_sum,
    weighted_sum_of_visible,
)
from regard.core.kernels.request import Request, add_terms, visible_keys
from regard.core.scores import BoundTerm
from regard.core.softargmax import softargmax

SUMMARY = "the whole score matrix, step by step, in float32 or better"
RANK = 4


def refusals(request: Request) -> list[str]:
    if request.steep and request.terms:
        names = ", ".join(term.name for term in request.terms)
        return [f"at beta={request.beta:g} only the largest q . k counts, so {names} would be lost; drop the terms"]
    return []


def work(request: Request) -> float:
    b, h, _, i, j, _, _ = request.sizes
    return 4.0 * b * h * i * j


def memory(request: Request) -> int:
    b, h, _, i, j, _, _ = request.sizes
    # scores, masked scores, exponentials and weights, and half as much for boolean masks
    return 9 * b * h * i * j * max(4, request.q.element_size()) // 2


def run(request: Request) -> Float[Tensor, "b h i e"]:
    exact = torch.promote_types(request.q.dtype, torch.float32)
    return attention(request, request.q.to(exact), request.k.to(exact), request.v.to(exact)).to(request.q.dtype)


def attention(
    request: Request,
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    rows: slice | None = None,
) -> Float[Tensor, "b h i e"]:
    """Compute an attention call from explicit scores, in the dtype of q, k and v.

    rows  which query rows of the call are in q; None if all are
    """
    _, _, g, _, j, _, _ = request.sizes
    grid = request.grid(rows)
    visible = request.visible(grid)
    if visible is not None:
        keep = visible_keys(visible, g)
        k, v = k.masked_fill(~keep, 0), v.masked_fill(~keep, 0)
        q = q.masked_fill(~visible.any(-1, keepdim=True), 0)
    nonfinite = has_nonfinite(q, k, v)
    scores = dot_products(q, k, nonfinite)
    # softargmax applies a very large beta, after centring the scores; its sign says which infinity is a hidden score
    scores = scores * ((-1.0 if request.beta < 0 else 1.0) if request.steep else request.beta)
    sink = None if request.sink is None else request.sink.to(q.dtype)
    terms = _bound(request, q, rows)
    scores = add_terms(request, scores, terms, grid, visible, sink, nonfinite)
    if visible is not None:
        # a hidden score may be NaN
        hidden = ~visible if sink is None else torch.nn.functional.pad(~visible, (0, 1))
        scores = scores.masked_fill(hidden, -math.inf)
    weights = softargmax(scores, beta=abs(request.beta) if request.steep else 1.0)[..., :j]
    nonfinite = nonfinite or has_nonfinite(weights)  # NaN or +inf that terms added
    weights = torch.nn.functional.dropout(weights, request.dropout)
    if terms and not can_look_for_nonfinite(weights):
        return weighted_sum_of_visible(weights, v, scores[..., :j])
    return weighted_sum(weights, v, scores[..., :j] != -math.inf if nonfinite else None)


def _bound(request: Request, q: Tensor, rows: slice | None) -> list[BoundTerm]:
    """Return the score terms of an attention call as functions of (scores, grid), bound to all queries of the call.

    Some terms look up a query by its row index in the whole call. So if q has only some rows of the call, the other
    rows are taken from `request.q`.

    rows  which query rows of the call are in q; None if all are
    """
    if not request.terms:
        return []
    if rows is not None:
        before, after = request.q[:, :, : rows.start].to(q), request.q[:, :, rows.start + q.shape[2] :].to(q)
        q = torch.cat((before, q, after), 2)
    return [term.bind(q, request.beta) for term in request.terms]
