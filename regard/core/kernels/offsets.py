"""Attention calls whose sequences have different query offsets, as in batched decoding of texts of different lengths.

Such a call is split into one call for each offset. In each of these calls all sequences have the same positions, so
that sparse kernels can compute the call.
"""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from regard.base.tracing import can_read_values
from regard.core.absolute_positions import Positions
from regard.core.kernels.request import Request
from regard.core.scores import Additive, Alibi, Shaw, Sink, Softcap, T5Buckets

_TERMS = (Additive, Alibi, Shaw, Sink, Softcap, T5Buckets)


def group_by_offset(positions: Positions) -> list[tuple[Positions, Int[Tensor, "_"]]]:
    """Group the sequences by query offset. Returns (positions, indices of the sequences) for each distinct offset.

    The indices are CPU tensors.
    """
    assert positions.offsets is not None
    values, which = positions.offsets.cpu().unique(return_inverse=True)
    return [
        (Positions(positions.queries + value, positions.keys), (which == number).nonzero()[:, 0])
        for number, value in enumerate(values.tolist())
    ]


def refusals(request: Request) -> list[str]:
    """Return the reasons why a call with offsets cannot be split into calls without offsets; empty if it can."""
    if request.positions.offsets is None:
        return []
    if request.q.device.type != "cpu" or not can_read_values(request.positions.offsets):
        return ["its blocks follow from the offsets of the sequences, which it reads on the CPU only"]
    for term in request.terms:
        own = isinstance(term, Additive) and term.values.ndim == 4 and term.values.shape[0] > 1
        if own or not isinstance(term, _TERMS):
            return [f"{term.name} may differ between sequences, and these have offsets of their own"]
    return []


def split_by_offset(request: Request) -> list[tuple[Int[Tensor, "_"], Request]]:
    """Split an attention call into one call for each distinct query offset of its sequences.

    Returns pairs (indices of the sequences with this offset, the call for these sequences).
    """
    parts = []
    for positions, index in group_by_offset(request.positions):
        q, k, v = (x.index_select(0, index.to(x.device)) for x in (request.q, request.k, request.v))
        mask = request.mask.of_sequences(index)
        parts.append((index, replace(request, q=q, k=k, v=v, mask=mask, positions=positions)))
    return parts


def join_by_offset(outs: list[Tensor], parts: list[tuple[Int[Tensor, "_"], Request]]) -> Tensor:
    """Join the outputs of the calls of `split_by_offset` to one output, in the original order of the sequences."""
    order = torch.cat([index for index, _ in parts]).argsort()
    return torch.cat(outs).index_select(0, order.to(outs[0].device))
