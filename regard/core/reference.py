"""The float64 reference implementation of attention, which all kernels are tested against."""

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
from regard.core.kernels.request import Request, add_terms
from regard.core.softargmax import softargmax


def reference(request: Request) -> Float[Tensor, "b h i e"]:
    """Compute attention in float64 by its definition: softmax(beta q . k + terms, over visible keys) times v.

    This is the slow reference with which all kernels are tested.
    """
    b, h, g, i, j, _, _ = request.sizes
    q, k, v = request.q.double(), request.k.double(), request.v.double()
    visible = request.visible()
    visible = (
        torch.ones(b, h, i, j, dtype=torch.bool, device=q.device) if visible is None else visible.expand(b, h, i, j)
    )
    seen = visible.unflatten(1, (g, h // g)).any(3).any(2)[..., None]
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    q = torch.where(visible.any(-1, keepdim=True), q, 0.0)
    k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
    nonfinite = has_nonfinite(q, k, v)
    # a very large beta is applied after centring, but its sign says which infinity is a hidden score
    scores = dot_products(q, k, nonfinite) * ((-1.0 if request.beta < 0 else 1.0) if request.steep else request.beta)
    sink = None if request.sink is None else request.sink.double()
    terms = [term.bind(q, request.beta) for term in request.terms]
    scores = add_terms(request, scores, terms, request.grid(), visible, sink, nonfinite)
    hidden = torch.nn.functional.pad(~visible, (0, scores.shape[-1] - j))
    scores = torch.where(hidden, -math.inf, scores)
    weights = softargmax(scores, beta=abs(request.beta) if request.steep else 1.0)[..., :j]
    nonfinite = nonfinite or has_nonfinite(weights)  # NaN or +inf that terms added
    weights = torch.nn.functional.dropout(weights, request.dropout)
    if terms and not can_look_for_nonfinite(weights):
        return weighted_sum_of_visible(weights, v, scores[..., :j]).to(request.q.dtype)
    return weighted_sum(weights, v, scores[..., :j] != -math.inf if nonfinite else None).to(request.q.dtype)
