"""All statistics in one pass of a GPU kernel, for masks that are bands: full, causal, windows.

The pass is given the log-sum-exp, which a fused forward pass has anyway; so each pair is scored once more and all
else is arithmetic on the tile at hand.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import kernels
from regard.core.algebra import And, Full, Mask
from regard.core.kernels import sdpa
from regard.core.kernels.call import Call
from regard.core.rules import Causal, Window

ROWS, KEYS = 64, 128  # a tile: measured on an H200 (docs/log.md)
WARPS, STAGES = 4, 3
SPANS = 128  # rows of the finest map that is pooled along the way


@dataclass(frozen=True)
class Passed:
    """What the pass gives."""

    lse: Float[Tensor, "b h i"]
    entropy: Float[Tensor, "b h i"]
    largest: Float[Tensor, "b h i"]
    where: Int[Tensor, "b h i"]
    distance: Float[Tensor, "b h i"]
    received: Float[Tensor, "b h j"]
    cells: Float[Tensor, "b h rows columns"] | None  # sums over spans of rows and tiles of keys


def serves(call: Call) -> bool:
    """Whether the pass can tell these weights."""
    fits = call.q.is_cuda and call.q.dtype != torch.float64 and call.q.shape[-1] <= 256 and 0 not in call.sizes
    plain = not call.terms and not call.steep and isinstance(call.places.keys, int) and band(call.mask) is not None
    return fits and plain and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def band(mask: Mask) -> tuple[int | None, int | None] | None:
    """(low, high) where the mask sees just those keys with low <= j - i <= high; None is no limit, or no band."""
    if isinstance(mask, Full):
        return None, None
    if isinstance(mask, Causal):
        return None, 0
    if isinstance(mask, Window):
        return None if mask.before is None else -mask.before, mask.after
    if isinstance(mask, And):
        bands = [band(part) for part in mask.parts]
        lows = [found[0] for found in bands if found is not None and found[0] is not None]
        highs = [found[1] for found in bands if found is not None and found[1] is not None]
        return None if None in bands else (max(lows, default=None), min(highs, default=None))
    return None


def forward(call: Call) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i"] | None]:
    """The attention, and the log-sum-exp where its kernel gives it along."""
    if call.q.is_cuda and call.plain and not sdpa.refusals(call):
        found = sdpa.with_lse(call)
        if found is not None:
            return found
    return kernels.run(call, None), None


def passed(call: Call, lse: Float[Tensor, "b h i"] | None) -> Passed:
    """The pass, after one for the log-sum-exp where nobody has it yet."""
    from regard.see import passes  # needs triton

    b, h, g, i, j, c, _ = call.sizes
    q, k = call.q, call.k
    limits = band(call.mask)
    assert limits is not None
    assert isinstance(call.places.keys, int)
    low, high = limits
    shift = call.places.queries - call.places.keys
    device = q.device
    sizes = (i, j, shift, low or 0, high or 0, call.beta * math.log2(math.e), *q.stride(), *k.stride())
    width = max(16, 1 << (c - 1).bit_length())
    known = {
        "H": h, "GROUP": h // g, "C": c, "WIDTH": width, "LOW": low is not None, "HIGH": high is not None,
        "BM": ROWS, "BN": KEYS, "num_warps": WARPS, "num_stages": STAGES if q.element_size() == 2 else 2,
    }  # fmt: skip
    grid = (-(-i // ROWS), b * h)
    if lse is None:
        lse = torch.empty(b, h, i, device=device)
        passes.normalise[grid](q, k, lse, *sizes, **known)
    lse = lse.contiguous()
    entropy, distance = (torch.zeros(b, h, i, device=device) for _ in range(2))
    best = torch.zeros(b, h, i, device=device, dtype=torch.int64)
    received = torch.empty(b, h, j, device=device)
    span = _span(i)
    cells = torch.zeros(b, h, -(-i // span), -(-j // KEYS), device=device)
    back = high is not None and high <= 0
    in_bits = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))  # a blind row then weighs nothing
    passes.gather[(-(-j // KEYS), b * h)](
        q, k, in_bits, entropy, best, distance, received, cells, span, *sizes, **known, BACK=back
    )
    largest, where = torch.empty(b, h, i, device=device), torch.empty(b, h, i, device=device, dtype=torch.int32)
    few = {**known, "BM": 16, "num_warps": 4, "num_stages": 1}
    passes.locate[(-(-i // 16), b * h)](q, k, best, largest, where, *sizes, **few)
    entropy *= -math.log(2)
    return Passed(lse, entropy, largest, where.long(), distance, received, cells)


def _span(i: int) -> int:
    """How many rows are summed together along the way."""
    return ROWS * max(1, i // ROWS // SPANS)


def pooled(cells: Float[Tensor, "b h r s"], i: int, j: int, rows: int, columns: int) -> Tensor | None:
    """A map from the sums that the pass left, where none of them belongs to two of its cells."""
    r, s = cells.shape[-2:]
    if i % _span(i) or r % rows or j % KEYS or s % columns:
        return None
    sums: Tensor = cells.unflatten(3, (columns, -1)).sum(4).unflatten(2, (rows, -1)).sum(3)
    return sums * (rows / i)
