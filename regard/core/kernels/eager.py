"""Attention step by step with the whole matrix: serves everything, costs i x j memory."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.checks import exactly
from regard.core.kernels.call import Call, seen_keys
from regard.core.softargmax import softargmax

SUMMARY = "the whole matrix, step by step, in float32 or better"


def refusals(call: Call) -> list[str]:
    if math.isinf(call.beta) and call.terms:
        names = ", ".join(term.name for term in call.terms)
        lost = f"at beta=inf only the largest q . k counts, so {names} would be lost"
        return [f"{lost}; use a large finite beta, or drop the terms"]
    return []


def work(call: Call) -> float:
    b, h, _, i, j, _, _ = call.sizes
    return 4.0 * b * h * i * j


def memory(call: Call) -> int:
    b, h, _, i, j, _, _ = call.sizes
    return 2 * b * h * i * j * max(4, call.q.element_size())  # scores and weights


def run(call: Call) -> Float[Tensor, "b h i e"]:
    b, h, g, i, j, c, e = call.sizes
    exact = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = call.q.to(exact), call.k.to(exact), call.v.to(exact)
    visible = call.visible()
    if visible is not None:
        keep = seen_keys(visible, g)
        k, v = k.masked_fill(~keep, 0), v.masked_fill(~keep, 0)
    # the query heads of one key head are stacked as rows, so no key is copied
    with exactly(q):
        scores = (q.reshape(b, g, h // g * i, c) @ k.mT).view(b, h, i, j)
    if math.isfinite(call.beta):
        scores = scores * call.beta
    if call.terms:
        grid = call.grid()
        for bound in call.bound_terms():
            scores = bound(scores, grid)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if call.sink is not None:
        scores = torch.cat([scores, call.sink.to(exact)[:, None, None].expand(b, h, i, 1)], -1)
    weights = softargmax(scores, beta=1.0 if math.isfinite(call.beta) else math.inf)[..., :j]
    weights = torch.nn.functional.dropout(weights, call.dropout)
    with exactly(q):
        out = weights.reshape(b, g, h // g * i, j) @ v
    return out.view(b, h, i, e).to(call.q.dtype)
