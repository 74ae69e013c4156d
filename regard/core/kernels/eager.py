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
    if call.steep and call.terms:
        names = ", ".join(term.name for term in call.terms)
        lost = f"at beta={call.beta:g} only the largest q . k counts, so {names} would be lost"
        return [f"{lost}; use a large finite beta, or drop the terms"]
    return []


def work(call: Call) -> float:
    b, h, _, i, j, _, _ = call.sizes
    return 4.0 * b * h * i * j


def memory(call: Call) -> int:
    b, h, _, i, j, _, _ = call.sizes
    # scores, masked scores, their exponentials, weights, and half as much in booleans
    return 9 * b * h * i * j * max(4, call.q.element_size()) // 2


def run(call: Call) -> Float[Tensor, "b h i e"]:
    b, h, g, i, j, _, _ = call.sizes
    exact = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = call.q.to(exact), call.k.to(exact), call.v.to(exact)
    visible = call.visible()
    if visible is not None:
        keep = seen_keys(visible, g)
        k, v = k.masked_fill(~keep, 0), v.masked_fill(~keep, 0)
    # r counts the query heads of one key head: they are rows of one product, so no key is copied
    with exactly(q):
        scores = torch.einsum("bgric,bgjc->bgrij", q.unflatten(1, (g, h // g)), k).flatten(1, 2)
    # a large beta is left to softargmax, which centres scores first; terms, which come after beta, are refused there
    if not call.steep:
        scores = scores * call.beta
    if call.terms:
        grid = call.grid()
        for bound in call.bound_terms():
            scores = bound(scores, grid)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if call.sink is not None:
        scores = torch.cat([scores, call.sink.to(exact)[:, None, None].expand(b, h, i, 1)], -1)
    weights = softargmax(scores, beta=call.beta if call.steep else 1.0)[..., :j]
    weights = torch.nn.functional.dropout(weights, call.dropout)
    with exactly(q):
        out = torch.einsum("bgrij,bgje->bgrie", weights.unflatten(1, (g, h // g)), v)
    return out.flatten(1, 2).to(call.q.dtype)
