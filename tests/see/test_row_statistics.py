"""Statistics of attention weights, compared with the dense matrix in float64."""

import math

import pytest
import torch
from torch import Tensor

from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    attend,
    blocks,
    causal,
    chunks,
    dilated,
    documents,
    global_tokens,
    padding,
    prefix,
    random_links,
    shaw,
    sink,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.see import row_blocks as by_rows, triton_statistics
from regard.see.row_statistics import Statistics, statistics

B, H, G, N, J, C = 2, 6, 3, 37, 53, 7

MASKS = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(before=9),
    "both ways": window(before=5, after=3),
    "global": causal() & window(before=4) | global_tokens(2),
    "dilated": dilated(3) & causal(),
    "chunks": chunks(8, before=1),
    "blocks": blocks(7),
    "prefix": causal() | prefix(5),
    "padding": padding([53, 20]),
    "empty rows": padding([0, 31]) & causal(),
    "documents": documents(torch.arange(53) // 9),
    "random": random_links(5, seed=1),
    "predicate": Mask.of("odd", lambda i, j: (i + j) % 2 == 1),
    "matrix": torch.rand(B, H, N, J, generator=torch.Generator().manual_seed(0)) > 0.4,
}
TERMS = {
    "none": None,
    "alibi": alibi(heads=H),
    "t5": t5_buckets(torch.randn(8, H, generator=torch.Generator().manual_seed(1)), max_distance=40),
    "shaw": shaw(torch.randn(5, C, generator=torch.Generator().manual_seed(2))),
    "softcap": softcap(1.5),
    "sink": sink(torch.randn(H, generator=torch.Generator().manual_seed(3))),
    "added": additive(torch.randn(B, H, N, J, generator=torch.Generator().manual_seed(4))),
}


def draw(dtype: torch.dtype = torch.float32, *, i: int = N, j: int = J) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(5)
    q, k = (torch.randn(B, heads, n, C, generator=source) * 1.5 for heads, n in ((H, i), (G, j)))
    return q.to(dtype), k.to(dtype)


def dense(q: Tensor, k: Tensor, **rest: object) -> Tensor:
    """The weights in float64, read with the identity for values."""
    j = k.shape[2]
    identity = torch.eye(j, dtype=torch.float64).expand(*k.shape[:2], j, j)
    return attend(q.double(), k.double(), identity, **rest, kernel="reference")


def assert_matches_matrix(found: Statistics, w: Tensor, tolerance: float, positions: Positions | None = None) -> None:
    """Compare every statistic with that of the matrix."""
    b, h, i, j = w.shape
    start = j - i if positions is None else positions.queries
    far = (torch.arange(i)[:, None] + start - torch.arange(j)).abs().double()
    kept = w.sum(-1)
    expected = {
        "entropy": torch.special.entr(w).sum(-1),
        "largest": w.amax(-1),
        "distance": (w * far).sum(-1) / kept.masked_fill(kept == 0, 1),
        "received": w.sum(-2),
    }
    for name, truth in expected.items():
        actual = getattr(found, name)
        assert actual.shape == truth.shape, name
        scale = max(1.0, truth.abs().max().item())
        assert (actual.double() - truth).abs().max() <= tolerance * scale, name
    empty = kept == 0
    assert torch.equal(found.where == -1, empty)
    at = found.where.clamp(min=0)[..., None]
    assert (w.gather(-1, at)[..., 0] - w.amax(-1)).abs().max() <= tolerance
    assert torch.equal(found.lse == -math.inf, empty)
    assert (found.weights().double() - w).abs().max() <= tolerance
    assert (found.rows([i - 1, 0]).double() - w[:, :, [i - 1, 0]]).abs().max() <= tolerance
    x = torch.randn(b, h, i, dtype=torch.float64)
    assert (found.mixed(x).double() - torch.einsum("bhi,bhij->bhj", x, w)).abs().max() <= 10 * tolerance
    rows, columns = min(5, i), 3
    cell = torch.zeros(i, rows, dtype=torch.float64), torch.zeros(j, columns, dtype=torch.float64)
    for n, ones in ((i, cell[0]), (j, cell[1])):
        ones[torch.arange(n), torch.arange(n) * ones.shape[1] // n] = 1
    pooled = (cell[0] / cell[0].sum(0)).T @ w @ cell[1]
    assert (found.pooled((rows, columns)).double() - pooled).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_agrees_with_the_dense_matrix(mask: str) -> None:
    q, k = draw()
    assert_matches_matrix(statistics(q, k, mask=MASKS[mask]), dense(q, k, mask=MASKS[mask]), 2e-6)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("mask", ["none", "window"])
def test_every_term_agrees_with_the_dense_matrix(mask: str, term: str) -> None:
    q, k = draw()
    rest = {"mask": MASKS[mask], "scores": TERMS[term]}
    assert_matches_matrix(statistics(q, k, **rest), dense(q, k, **rest), 3e-6)


def test_statistics_print_their_sizes_and_mask() -> None:
    q, k = torch.randn(B, H, N, C), torch.randn(B, G, J, C)
    assert repr(statistics(q, k, mask=causal())) == "Statistics(b=2 h=6 i=37 j=53, mask=causal())"


def test_many_terms_act_in_their_order() -> None:
    q, k = draw()
    rest = {"mask": MASKS["empty rows"], "scores": [TERMS["alibi"], softcap(2.0), TERMS["sink"], TERMS["t5"]]}
    assert_matches_matrix(statistics(q, k, **rest), dense(q, k, **rest), 3e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float16, 2e-6), (torch.bfloat16, 2e-6)], ids=str
)
def test_half_precision_is_read_exactly_and_double_stays_double(dtype: torch.dtype, tolerance: float) -> None:
    q, k = draw(dtype)
    found = statistics(q, k, mask=causal())
    assert_matches_matrix(found, dense(q, k, mask=causal()), tolerance)
    assert found.entropy.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("beta", [0.0, 2.5, -1.0, 1e16, math.inf])
def test_every_temperature(beta: float) -> None:
    q, k = draw()
    assert_matches_matrix(statistics(q, k, mask=causal(), beta=beta), dense(q, k, mask=causal(), beta=beta), 2e-5)


def test_positions_of_a_cached_step() -> None:
    q, k = draw(i=3)
    positions = Positions(20, 0)
    mask = causal() & window(before=11)
    assert_matches_matrix(
        statistics(q, k, mask=mask, positions=positions), dense(q, k, mask=mask, positions=positions), 2e-6, positions
    )


def test_the_lse_is_that_of_the_scores() -> None:
    q, k = draw()
    scores = torch.einsum("bhic,bhjc->bhij", q.double(), k.double().repeat_interleave(2, 1)) * C**-0.5
    visible = (causal() & window(before=9)).dense(N, J)
    truth = scores.masked_fill(~visible, -math.inf).logsumexp(-1)
    assert (statistics(q, k, mask=MASKS["window"]).lse - truth).abs().max() < 2e-6
    logits = TERMS["sink"].logits.double()[:, None]
    with_sink = statistics(q, k, mask=MASKS["window"], scores=TERMS["sink"]).lse
    assert (with_sink - torch.logaddexp(truth, logits)).abs().max() < 2e-6


@pytest.mark.parametrize("mask", ["none", "window", "empty rows", "matrix"])
@pytest.mark.parametrize("count", [1, 4, 60])
def test_the_top_keys_are_exact_and_certified(mask: str, count: int) -> None:
    q, k = draw()
    top = statistics(q, k, mask=MASKS[mask]).top(count)
    w = dense(q, k, mask=MASKS[mask])
    kept = min(count, J)
    values = w.topk(kept, -1).values
    assert top.keys.shape == top.weights.shape == (B, H, N, count)
    assert (top.weights[..., :kept].double() - values).abs().max() < 2e-6
    assert not top.weights[..., kept:].any()
    seen = top.keys >= 0
    read = w.gather(-1, top.keys.clamp(min=0)) * seen
    assert (read - top.weights.double()).abs().max() < 2e-6
    listed = torch.zeros(B, H, N, J + 1).scatter(-1, top.keys.masked_fill(~seen, J), 1.0)[..., :J]
    left = w * (1 - listed)
    assert (left.sum(-1) - top.rest.double()).abs().max() < 2e-6


def test_a_listed_key_is_never_hidden() -> None:
    q, k = draw()
    visible = (causal() & window(before=2)).dense(N, J)
    keys = statistics(q, k, mask=causal() & window(before=2)).top(5).keys
    assert (keys >= 0).sum(-1).eq(visible.sum(-1)).all()
    assert visible[torch.arange(N)[:, None], keys.clamp(min=0)][keys >= 0].all()


def test_rows_are_returned_in_the_order_given() -> None:
    q, k = draw()
    found, w = statistics(q, k, mask=causal()), dense(q, k, mask=causal())
    assert (found.rows([9, 2, 9, -1]) - w[:, :, [9, 2, 9, -1]]).abs().max() < 2e-6
    assert torch.equal(found.top(2, rows=[9, 2]).keys, found.top(2).keys[:, :, [9, 2]])


def test_invisible_keys_may_hold_nan() -> None:
    q, k = draw()
    clean = statistics(q, k, mask=MASKS["padding"])
    k = k.clone()
    k[1, :, 20:] = math.nan
    found = statistics(q, k, mask=MASKS["padding"])
    for name in ("lse", "entropy", "largest", "where", "distance", "received"):
        assert torch.equal(getattr(found, name), getattr(clean, name)), name


@pytest.mark.parametrize(
    ("lse", "entropy", "exact"),
    [
        (3.0, 0.5, True), (-math.inf, 0.0, True), (4000.0, 0.5, True), (5000.0, 0.5, False), (-5000.0, 0.5, False),
        (math.inf, 0.5, False), (math.nan, math.nan, False), (3.0, math.nan, False),
    ],
)  # fmt: skip
def test_the_triton_result_is_used_only_if_exact(lse: float, entropy: float, exact: bool) -> None:
    line = torch.tensor([1.0, 0.0]).expand(1, 1, 2)
    lines = [torch.stack([line[..., 0], torch.full((1, 1), value)], -1) for value in (lse, entropy)]
    assert (
        triton_statistics.is_exact(triton_statistics.RowStatistics(*lines, line, line.long(), line, line, None))
        == exact
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("beta", [None, 1e5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinite_scores_make_only_their_rows_nan(bad: float, beta: float | None, device: str) -> None:
    q, k = (each.to(device) for each in draw(j=N))
    clean = statistics(q, k, mask=causal(), beta=beta)
    k = k.clone()
    k[1, 0, 5] = bad
    found = statistics(q, k, mask=causal(), beta=beta)
    scores = (q[1, 0] @ k[1, 0].mT).masked_fill(~causal().dense(N, N).to(device), -math.inf)
    broken = scores.softmax(-1).isnan().any(-1)
    assert broken.any()
    assert not broken[:5].any()
    for name in ("lse", "entropy", "largest", "distance"):
        assert torch.equal(getattr(found, name)[1, 0].isnan(), broken), name
        torch.testing.assert_close(getattr(found, name)[1, 0, ~broken], getattr(clean, name)[1, 0, ~broken])
    assert bool((found.where[1, 0, broken] == -1).all())
    assert bool(found.received[1, 0, 5].isnan())
    assert not found.lse[0].isnan().any()


def test_row_blocks_fit_the_budget_and_skip_hidden_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(by_rows.AT_ONCE, "cpu", 1 << 14)
    q, k = (torch.randn(1, 2, 2000, 8) for _ in range(2))
    sizes = [block.weights.numel() for block in by_rows.iterate_row_blocks(statistics(q, k)._request)]
    assert max(sizes) <= 1 << 14
    assert sum(sizes) == 2 * 2000 * 2000
    near = [
        block.weights.shape[-1]
        for block in by_rows.iterate_row_blocks(statistics(q, k, mask=causal() & window(before=99))._request)
    ]
    assert max(near) <= 2 * by_rows.BLOCK


def test_blocks_of_a_sparse_mask_give_what_the_matrix_gives() -> None:
    q, k = (torch.randn(1, 2, 700, 8) for _ in range(2))
    mask = causal() & window(before=150) | global_tokens(3)
    assert_matches_matrix(statistics(q, k, mask=mask), dense(q, k, mask=mask), 5e-6)


def test_values_give_the_output() -> None:
    q, k = draw()
    v = torch.randn(B, G, J, 11)
    assert torch.equal(statistics(q, k, mask=causal(), v=v).out, attend(q, k, v, mask=causal()))
    with pytest.raises(ConfigError, match=r"there is no output without values; pass them: statistics\(q, k, v=...\)"):
        _ = statistics(q, k).out


def test_no_gradient_is_kept() -> None:
    q, k = (x.requires_grad_() for x in draw())
    found = statistics(q, k, scores=t5_buckets(torch.randn(8, H, requires_grad=True), max_distance=40))
    assert not any(
        x.requires_grad for x in (found.lse, found.entropy, found.received, found.pooled(4), found.rows([1]))
    )


@pytest.mark.parametrize(("i", "j"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_lengths_zero_and_one(i: int, j: int) -> None:
    q, k = draw(i=i, j=j)
    found = statistics(q, k, mask=causal())
    assert found.entropy.shape == (B, H, i)
    assert found.received.shape == (B, H, j)
    assert found.weights().shape == (B, H, i, j)
    assert found.top(3).keys.shape == (B, H, i, 3)
    assert torch.equal(found.where, torch.full((B, H, i), 0 if j else -1))
    assert (found.lse == -math.inf).all() or j


def test_errors_of_statistics() -> None:
    found = statistics(*draw())
    with pytest.raises(ShapeError, match=r"pooled\(rows=40\) has more cells than the 37 positions"):
        found.pooled((40, 3))
    with pytest.raises(ConfigError, match=r"pooled\(rows\)"):
        found.pooled(0)
    with pytest.raises(ConfigError, match=r"pooled takes a number of cells, or \(rows, columns\), not \(3, 4, 5\)"):
        found.pooled((3, 4, 5))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"q must be a tensor read as \(b h i c\), not int"):
        statistics(1, 2)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"rows has index 37, but q has i=37"):
        found.rows([37])
    with pytest.raises(ConfigError, match="rows takes indices of queries"):
        found.rows(torch.tensor([0.5]))
    with pytest.raises(ConfigError, match=r"top\(count\)"):
        found.top(0)
    with pytest.raises(ShapeError, match=r"mixed takes one number for each query"):
        found.mixed(torch.zeros(B, N + 1))


@pytest.mark.parametrize(
    ("mask", "limits"),
    [
        (None, (None, None)),
        (causal(), (None, 0)),
        (window(before=4, after=2), (4, 2)),
        (causal() & window(before=9) & window(before=3, after=5), (3, 0)),
        (causal() & chunks(4), None),
        (causal() | prefix(3), None),
        (~causal(), None),
    ],
    ids=repr,
)
def test_windows_are_recognised(mask: Mask | None, limits: object) -> None:
    q, k = draw(i=J)
    assert statistics(q, k, mask=mask).mask.as_window() == limits


ON_A_GPU = [
    (None, torch.bfloat16, (3, 3), (700, 700, 64)),
    (causal(), torch.bfloat16, (3, 3), (700, 700, 128)),
    (causal(), torch.float16, (6, 2), (333, 515, 48)),
    (causal(), torch.float32, (2, 2), (515, 333, 32)),
    (causal() & window(before=255), torch.bfloat16, (2, 2), (1100, 1100, 64)),
    (window(before=70, after=190), torch.float32, (4, 1), (700, 650, 16)),
    (causal() | global_tokens(4), torch.bfloat16, (2, 2), (300, 300, 64)),
    (padding([300, 41]), torch.float16, (2, 2), (300, 300, 64)),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("mask", "dtype", "heads", "sizes"), ON_A_GPU, ids=str)
@pytest.mark.parametrize("with_values", [False, True])
def test_a_gpu_gives_the_same(mask, dtype, heads, sizes, with_values: bool) -> None:
    (h, g), (i, j, c) = heads, sizes
    q, k, v = (torch.randn(2, n, length, c).to(dtype) for n, length in ((h, i), (g, j), (g, j)))
    found = statistics(q.cuda(), k.cuda(), mask=mask, v=v.cuda() if with_values else None)
    w = dense(q, k, mask=mask)
    if with_values:
        error = (found.out.cpu().double() - w @ v.double().repeat_interleave(h // g, 1)).abs().max()
        assert error < {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert found.lse.is_cuda
    far = (torch.arange(i)[:, None] + j - i - torch.arange(j)).abs().double()
    for name, truth in {
        "entropy": torch.special.entr(w).sum(-1),
        "largest": w.amax(-1),
        "distance": (w * far).sum(-1),
        "received": w.sum(-2),
    }.items():
        actual = getattr(found, name).cpu().double()
        assert (actual - truth).abs().max() <= 1e-5 * max(1.0, truth.abs().max().item()), name
    at = found.where.cpu()
    assert torch.equal(at == -1, w.sum(-1) == 0)
    assert (w.gather(-1, at.clamp(min=0)[..., None])[..., 0] - w.amax(-1)).abs().max() <= 1e-6
    assert (found.pooled((5, 5)).cpu().double().sum(-1) * i / 5).sum() == pytest.approx(w.sum().item(), rel=1e-4)
    assert (found.rows([3, i - 1]).cpu().double() - w[:, :, [3, i - 1]]).abs().max() <= 1e-5


@pytest.mark.cuda
def test_a_gpu_pools_its_own_tiles() -> None:
    q, k = (torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = statistics(q, k, mask=causal())
    w = dense(q.cpu(), k.cpu(), mask=causal())
    truth = w.unflatten(3, (8, -1)).sum(4).unflatten(2, (4, -1)).mean(3)
    assert found._row_statistics.cells is not None
    assert (found.pooled((4, 8)).cpu().double() - truth).abs().max() < 1e-5
    uneven = found.pooled((3, 7)).cpu().double()  # cells that no tile fits: a pass of its own
    row, column = (torch.arange(1024) * parts // 1024 for parts in (3, 7))
    cells = torch.zeros(1, 2, 1024, 7, dtype=torch.float64).index_add_(3, column, w)
    truth = torch.zeros(1, 2, 3, 7, dtype=torch.float64).index_add_(2, row, cells) / row.bincount()[:, None]
    assert (uneven - truth).abs().max() < 1e-5


@pytest.mark.parametrize("cells", [64, (16, 13), (1, 211), (5, 64)])
@pytest.mark.parametrize("c", [37, 5])  # with few channels the sums over spans of rows would take more memory than q
@pytest.mark.parametrize("mask", [causal(), window(before=20, after=3)])
def test_maps_of_many_rows_are_sums_of_the_weights(cells: int | tuple[int, int], c: int, mask: Mask) -> None:
    i, j = 193, 211
    found = statistics(torch.randn(2, 3, i, c), torch.randn(2, 1, j, c), mask=mask)
    rows, columns = cells if isinstance(cells, tuple) else (cells, cells)
    row_cell, key_cell = torch.arange(i) * rows // i, torch.arange(j) * columns // j
    expected = torch.zeros(2, 3, rows, columns)
    weights = found.weights()
    for row in range(rows):
        for column in range(columns) if columns < 50 else (0, 7, columns - 1):
            part = weights[:, :, row_cell == row][..., key_cell == column]
            expected[:, :, row, column] = part.sum(-1).mean(-1)
    chosen = slice(None) if columns < 50 else [0, 7, columns - 1]
    torch.testing.assert_close(found.pooled(cells)[..., chosen], expected[..., chosen], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.received, weights.sum(2), atol=1e-5, rtol=1e-5)
