"""The definition of attention, in float64: the truth that everything else is held against."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.kernels.request import Request, centred_bias, summed
from regard.core.softargmax import softargmax


def reference(call: Request) -> Float[Tensor, "b h i e"]:
    """softargmax(beta q . k + terms, over visible keys) times v, every step written out."""
    b, h, g, i, j, _, _ = call.sizes
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    visible = call.visible()
    visible = (
        torch.ones(b, h, i, j, dtype=torch.bool, device=q.device) if visible is None else visible.expand(b, h, i, j)
    )
    seen = visible.unflatten(1, (g, h // g)).any(3).any(2)[..., None]
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
    scores = torch.einsum("bhic,bhjc->bhij", q, k) * (1.0 if call.steep else call.beta)
    sink = None if call.sink is None else call.sink.double()
    terms = [term.bind(q, call.beta) for term in call.terms]
    if terms and all(term.additive or term.name == "sink" for term in call.terms):
        added = centred_bias(summed(terms, call.grid(), q), visible, sink, i, j)
        scores = torch.nn.functional.pad(scores, (0, added.shape[-1] - j)) + added
    else:
        for term in terms:
            scores = term(scores, call.grid())
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(b, h, i, 1)], -1)
    hidden = torch.nn.functional.pad(~visible, (0, scores.shape[-1] - j))
    scores = torch.where(hidden, -math.inf, scores)
    weights = softargmax(scores, beta=call.beta if call.steep else 1.0)[..., :j]
    weights = torch.nn.functional.dropout(weights, call.dropout)
    return torch.einsum("bhij,bhje->bhie", weights, v).to(call.q.dtype)
