"""Compute all statistics in one pass of a Triton kernel, for band masks (full, causal or a window).

The kernel takes the log-sum-exp of each query, which a fused forward pass returns. It computes the scores again, one
tile (queries x keys) at a time. All statistics are computed while a tile is in registers.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.base.extras import has_triton
from regard.core import kernels
from regard.core.kernels import sdpa
from regard.core.kernels.request import Request

ROWS, KEYS = 64, 128  # a tile; the fastest on an H200 (docs/log.md)
WARPS, STAGES = 4, 3
SPANS = 128  # rows of the pooled map that the kernel computes
LARGEST_LSE = 4096.0  # up to this log-sum-exp, weights in float32 have three digits
AT_ONCE = 1 << 26  # numbers in memory at a time while a map is pooled: 256 MiB


@dataclass(frozen=True)
class RowStatistics:
    """The statistics of the weights of each query, and the sum of the weights on each key."""

    lse: Float[Tensor, "b h i"]
    entropy: Float[Tensor, "b h i"]
    largest: Float[Tensor, "b h i"]
    where: Int[Tensor, "b h i"]
    distance: Float[Tensor, "b h i"]
    received: Float[Tensor, "b h j"]
    cells: Float[Tensor, "b h rows columns"] | None  # sums over spans of rows and tiles of keys, on a GPU
    row_sums: Float[Tensor, "b h spans j"] | None = None  # sums over spans of rows, on a CPU


def is_supported(call: Request) -> bool:
    """Return whether the Triton kernels support this attention call.

    The kernels need CUDA, a dtype other than float64, a width of at most 256, a window mask and no score terms.
    """
    fits = call.q.is_cuda and call.q.dtype != torch.float64 and call.q.shape[-1] <= 256 and 0 not in call.sizes
    plain = (
        not call.terms and not call.steep and isinstance(call.positions.keys, int) and call.mask.as_window() is not None
    )
    return fits and plain and has_triton()


def attend_with_lse(call: Request) -> tuple[Float[Tensor, "b h i e"], Float[Tensor, "b h i"] | None]:
    """Return the attention output, and the log-sum-exp if the kernel returns one, else None."""
    if call.q.is_cuda and call.plain and not sdpa.refusals(call):
        found = sdpa.fused_attention_with_lse(call)
        if found is not None:
            return found
    return kernels.run_kernel(call, None), None


def compute_row_statistics(call: Request, lse: Float[Tensor, "b h i"] | None) -> RowStatistics:
    """Compute the statistics of all rows with the Triton kernels.

    lse  the log-sum-exp of each row; if None, it is computed first
    """
    from regard.see import triton_kernels  # needs triton

    b, h, _, i, j, _, _ = call.sizes
    q, k = call.q, call.k
    device = q.device
    sizes, known = _arguments(call)
    if lse is None:
        lse = torch.empty(b, h, i, device=device)
        triton_kernels.normalise[(-(-i // ROWS), b * h)](q, k, lse, *sizes, *q.stride(), *k.stride(), **known)
    lse = lse.contiguous()
    sums = torch.zeros(b, h, i, 2, device=device)  # sums of weight x log weight, and of weight x distance
    best = torch.zeros(b, h, i, device=device, dtype=torch.int64)
    received = torch.empty(b, h, j, device=device)
    span = _span(i)
    cells = torch.zeros(b, h, -(-i // span), -(-j // KEYS), device=device)
    _, high = _band(call)
    triton_kernels.gather[(-(-j // KEYS), b * h)](
        _tile_descriptor(q, known["WIDTH"]), k, _lse_in_bits(lse), sums, best, received, cells, span, *sizes,
        *k.stride(),
        **{**known, **_occupancy_options(known["WIDTH"], q)}, BACK=high is not None and high <= 0,
    )  # fmt: skip
    largest, where = torch.empty(b, h, i, device=device), torch.empty(b, h, i, device=device, dtype=torch.int32)
    few = {**known, "BM": 16, "num_warps": 4, "num_stages": 1}
    triton_kernels.locate[(-(-i // 16), b * h)](q, k, best, largest, where, *sizes, *q.stride(), *k.stride(), **few)
    entropy, distance = sums.mul_(torch.tensor([-math.log(2), 1.0], device=device)).unbind(-1)
    return RowStatistics(lse, entropy, largest, where.long(), distance, received, cells)


def is_exact(found: RowStatistics) -> bool:
    """Return whether the statistics are reliable: all entropies are finite and no log-sum-exp is too large."""
    finite_lse = found.lse.masked_fill(found.lse == -math.inf, 0)
    return bool((found.entropy.isfinite() & (finite_lse.abs() < LARGEST_LSE)).all())


def pool_map(call: Request, found: RowStatistics, rows: int, columns: int) -> Float[Tensor, "b h rows columns"]:
    """Return the attention map of a call at a lower resolution, with `rows` x `columns` cells.

    If every such cell is a union of the finer cells in `found`, the map is computed from these. Otherwise another
    kernel computes the map.
    """
    from regard.see import triton_kernels

    assert found.cells is not None
    b, h, _, i, j, _, _ = call.sizes
    r, s = found.cells.shape[-2:]
    if not (i % _span(i) or r % rows or j % KEYS or s % columns):
        whole: Tensor = found.cells.unflatten(3, (columns, -1)).sum(4).unflatten(2, (rows, -1)).sum(3)
        return whole * (rows / i)
    sizes, known = _arguments(call)
    bits = _lse_in_bits(found.lse)
    edges = (torch.arange(rows + 1, device=bits.device) * i + rows - 1) // rows
    key_cell = torch.arange(j, device=bits.device) * columns // j
    sums = torch.zeros(b, h, rows, columns, device=bits.device)
    step = max(1, AT_ONCE // (b * h * j))
    for first in range(0, rows, step):
        some = edges[first : first + step + 1]
        given = torch.empty(b, h, len(some) - 1, j, device=bits.device)
        triton_kernels.pool[(-(-j // KEYS), len(some) - 1, b * h)](
            call.q, call.k, bits, some, given, *sizes, *call.q.stride(), *call.k.stride(), **known
        )
        sums[:, :, first : first + step].index_add_(3, key_cell, given)
    return sums / edges.diff()[:, None]


def _arguments(call: Request) -> tuple[tuple[int | float, ...], dict[str, Any]]:
    """Return the arguments that all kernels share: lengths, window and scale, and the compile-time constants."""
    _, h, g, i, j, c, _ = call.sizes
    low, high = _band(call)
    assert isinstance(call.positions.keys, int)
    shift = call.positions.queries - call.positions.keys
    known = {
        "H": h, "GROUP": h // g, "C": c, "WIDTH": max(16, 1 << (c - 1).bit_length()),
        "LOW": low is not None, "HIGH": high is not None,
        "BM": ROWS, "BN": KEYS, "num_warps": WARPS, "num_stages": STAGES if call.q.element_size() == 2 else 2,
    }  # fmt: skip
    return (i, j, shift, low or 0, high or 0, call.beta * math.log2(math.e)), known


def _occupancy_options(width: int, q: Tensor) -> dict[str, int]:
    """Return launch options that limit registers and stages, so that a multiprocessor runs three programs at a time.

    Returns {} in float32, or if the width is above 128.
    """
    if q.element_size() != 2 or width > 128:
        return {}
    return {"maxnreg": 168} if width <= 64 else {"maxnreg": 168, "num_stages": 2}


def _band(call: Request) -> tuple[int | None, int | None]:
    """Return the limits (low, high) of a window mask, low <= j - i <= high; None for no limit."""
    before, after = call.mask.as_window() or (None, None)
    return None if before is None else -before, after


def _lse_in_bits(lse: Float[Tensor, "b h i"]) -> Float[Tensor, "b h i"]:
    """Convert log-sum-exps to base 2; for a query that sees no key the result is inf, so that all weights are 0."""
    return torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))


def _tile_descriptor(q: Float[Tensor, "b h i c"], width: int) -> Any:
    """Return a Triton tensor descriptor of q for tiles of rows; q is copied and padded if it is not aligned."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    aligned = all(stride * q.element_size() % 16 == 0 for stride in q.stride()[:3]) and q.data_ptr() % 16 == 0
    if q.stride(3) != 1 or not aligned:
        q = pad(q, (0, width - q.shape[3])).contiguous()
    return TensorDescriptor(q, list(q.shape), list(q.stride()), [1, 1, ROWS, width])


def _span(i: int) -> int:
    """Return the number of queries in each cell of the pooled map that the kernel `gather` computes.

    i  number of queries
    """
    return ROWS * max(1, i // ROWS // SPANS)
