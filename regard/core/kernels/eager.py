"""Attention step by step with the whole matrix: serves everything, costs i x j memory."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.input_checks import disable_autocast
from regard.core.kernels.request import Request, centred_bias, seen_keys, summed
from regard.core.scores import BoundTerm
from regard.core.softargmax import softargmax

SUMMARY = "the whole matrix, step by step, in float32 or better"


def refusals(call: Request) -> list[str]:
    if call.steep and call.terms:
        names = ", ".join(term.name for term in call.terms)
        return [f"at beta={call.beta:g} only the largest q . k counts, so {names} would be lost; drop the terms"]
    return []


def work(call: Request) -> float:
    b, h, _, i, j, _, _ = call.sizes
    return 4.0 * b * h * i * j


def memory(call: Request) -> int:
    b, h, _, i, j, _, _ = call.sizes
    # scores, masked scores, their exponentials, weights, and half as much in booleans
    return 9 * b * h * i * j * max(4, call.q.element_size()) // 2


def run(call: Request) -> Float[Tensor, "b h i e"]:
    exact = torch.promote_types(call.q.dtype, torch.float32)
    return attention(call, call.q.to(exact), call.k.to(exact), call.v.to(exact)).to(call.q.dtype)


def attention(
    call: Request,
    q: Float[Tensor, "b h i c"],
    k: Float[Tensor, "b g j c"],
    v: Float[Tensor, "b g j e"],
    rows: slice | None = None,
) -> Float[Tensor, "b h i e"]:
    """The attention of a call, in the dtype of q, k and v. With `rows`, q holds only these rows of the queries."""
    b, h, g, _, j, _, _ = call.sizes
    grid = call.grid(rows)
    visible = call.visible(grid)
    if visible is not None:
        keep = seen_keys(visible, g)
        k, v = k.masked_fill(~keep, 0), v.masked_fill(~keep, 0)
    # r counts the query heads of one key head: they are rows of one product, so no key is copied
    with disable_autocast(q):
        scores = torch.einsum("bgric,bgjc->bgrij", q.unflatten(1, (g, h // g)), k).flatten(1, 2)
    # a large beta is left to softargmax, which centres scores first; terms, which come after beta, are refused there
    if not call.steep:
        scores = scores * call.beta
    sink = None if call.sink is None else call.sink.to(q.dtype)
    terms = _bound(call, q, rows)
    if terms and all(term.additive or term.name == "sink" for term in call.terms):
        added = centred_bias(summed(terms, grid, q), visible, sink, q.shape[2], j)
        scores = (scores if sink is None else torch.nn.functional.pad(scores, (0, 1))) + added
    else:
        for term in terms:
            scores = term(scores, grid)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(b, h, q.shape[2], 1)], -1)
    if visible is not None:
        # what is hidden may be NaN, and so may be what was added to it
        hidden = ~visible if sink is None else torch.nn.functional.pad(~visible, (0, 1))
        scores = scores.masked_fill(hidden, -math.inf)
    weights = softargmax(scores, beta=call.beta if call.steep else 1.0)[..., :j]
    weights = torch.nn.functional.dropout(weights, call.dropout)
    with disable_autocast(q):
        out = torch.einsum("bgrij,bgje->bgrie", weights.unflatten(1, (g, h // g)), v)
    return out.flatten(1, 2)


def _bound(call: Request, q: Tensor, rows: slice | None) -> list[BoundTerm]:
    """The terms, bound to all queries: some look up a row by its number."""
    if not call.terms:
        return []
    if rows is not None:
        before, after = call.q[:, :, : rows.start].to(q), call.q[:, :, rows.start + q.shape[2] :].to(q)
        q = torch.cat((before, q, after), 2)
    return [term.bind(q, call.beta) for term in call.terms]
