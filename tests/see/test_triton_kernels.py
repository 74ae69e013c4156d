"""The Triton kernels of statistics against float64: compiled on a GPU, by Triton's interpreter on a CPU."""

import math

import pytest
import torch
from torch import Tensor

from regard import Mask, Positions, attend, causal, full, window
from regard.core.kernels.request import Request
from regard.see import triton_statistics

pytest.importorskip("triton", reason="triton is not installed; it has wheels for Linux only")
# the interpreter computes with NumPy, which warns about the logarithm of an empty row
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# the interpreter multiplies bfloat16 as integers, so that only a GPU can run it
CASES = [
    (full(), torch.float32, (1, 1), (37, 131, 16)),
    (causal(), torch.float32, (2, 1), (97, 131, 24)),
    (causal(), torch.float16, (2, 2), (150, 70, 32)),  # more queries than keys: empty rows
    (causal() & window(before=30), torch.float16, (2, 2), (131, 197, 24)),
    (window(before=70, after=40), torch.float32, (3, 3), (67, 259, 7)),
    pytest.param(causal(), torch.bfloat16, (2, 1), (97, 131, 24), marks=pytest.mark.cuda),
]


def make_request(
    mask: Mask, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int, int]
) -> tuple[Request, Tensor]:
    """A call with random q and k, and its weights in float64."""
    (h, g), (i, j, c) = heads, sizes
    q, k = (torch.randn(2, n, length, c).to(dtype) for n, length in ((h, i), (g, j)))
    identity = torch.eye(j, dtype=torch.float64).expand(2, g, j, j)
    weights = attend(q.double(), k.double(), identity, mask=mask, kernel="reference")
    q, k = q.to(DEVICE), k.to(DEVICE)
    return Request(q, k, k, mask, (), c**-0.5, 0.0, Positions(j - i, 0)), weights


@pytest.mark.parametrize(("mask", "dtype", "heads", "sizes"), CASES, ids=str)
def test_statistics_equal_those_of_the_matrix(
    mask: Mask, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int, int]
) -> None:
    call, weights = make_request(mask, dtype, heads, sizes)
    i, j, _ = sizes
    found = triton_statistics.compute_row_statistics(call, None)
    distance = (torch.arange(i)[:, None] + j - i - torch.arange(j)).abs()
    for name, truth in {
        "entropy": torch.special.entr(weights).sum(-1),
        "largest": weights.amax(-1),
        "distance": (weights * distance).sum(-1),
        "received": weights.sum(-2),
    }.items():
        actual = getattr(found, name).cpu().double()
        assert (actual - truth).abs().max() <= 1e-5 * max(1.0, truth.abs().max().item()), name
    empty = weights.sum(-1) == 0
    assert torch.equal(found.lse.cpu() == -math.inf, empty)
    where = found.where.cpu()
    assert torch.equal(where == -1, empty)
    assert (weights.gather(-1, where.clamp(min=0)[..., None])[..., 0] - weights.amax(-1)).abs().max() <= 1e-6


@pytest.mark.parametrize("cells", [(2, 2), (3, 5)])  # cells that are sums of tiles, and cells that are not
def test_pooled_maps_are_means_over_rows_of_sums_over_keys(cells: tuple[int, int]) -> None:
    call, weights = make_request(causal() & window(before=90), torch.float32, (2, 1), (128, 256, 16))
    found = triton_statistics.compute_row_statistics(call, None)
    row, column = (torch.arange(n) * parts // n for n, parts in zip(weights.shape[2:], cells, strict=True))
    by_key = torch.zeros(2, 2, 128, cells[1], dtype=torch.float64).index_add_(3, column, weights)
    truth = torch.zeros(2, 2, *cells, dtype=torch.float64).index_add_(2, row, by_key) / row.bincount()[:, None]
    assert (triton_statistics.pool_map(call, found, *cells).cpu() - truth).abs().max() < 1e-5
