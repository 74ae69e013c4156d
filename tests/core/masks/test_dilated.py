"""Dilations under the blocked kernel: rows and columns are brought together by their remainders, so that it skips."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
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
    full,
    global_tokens,
    padding,
    prefix,
    random_links,
    shaw,
    sink,
    t5_buckets,
    window,
)
from regard.core import kernels
from regard.core.attend import prepare_request
from regard.core.kernels import blocked, cpu_flash
from regard.core.masks import block_tables
from regard.core.masks.algebra import Full
from regard.core.masks.block_tables import (
    ALL,
    NONE,
    Spans,
    block_table,
    find_hidden_keys_and_empty_rows,
    sparsest_table,
)
from regard.core.masks.plan_cache import Memo

B, H, G, C, E = 2, 4, 2, 3, 5


def draw(i: int, j: int, *, b: int = B, h: int = H, g: int = G, c: int = C, e: int = E, **options: object) -> tuple:
    options = {"dtype": torch.float64, **options}
    return tuple(torch.randn(b, heads, n, w, **options) for heads, n, w in ((h, i, c), (g, j, c), (g, j, e)))


def settled(*inputs: Tensor, mask=None, scores=None, dropout=0.0, positions=None):
    return prepare_request(*inputs, mask, scores, None, dropout, positions)


def bidirectional(i: int, j: int, **rest: object) -> None:
    """Outputs and gradients of the blocked kernel are those of the eager one."""
    inputs = draw(i, j, requires_grad=True)
    results = []
    for kernel in ("blocked", "eager"):
        out = attend(*inputs, **rest, kernel=kernel)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)))
    for name, one, other in zip(["out", "dq", "dk", "dv"], *results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def hides(mask: Mask, i: int, j: int, positions: Positions) -> bool:
    """Whether the kernel is left anything to hide; where not, it refuses."""
    return not isinstance(settled(*draw(i, j), mask=mask, positions=positions).mask, Full)


@pytest.fixture
def small(monkeypatch):
    """Blocks of four, so that a short call has many, and rows that cost nothing to move."""
    monkeypatch.setattr(blocked, "SIZE", 4)
    monkeypatch.setattr(blocked, "_plans", Memo(16))
    monkeypatch.setattr(block_tables, "_tables", Memo(64))
    monkeypatch.setattr(block_tables, "_BLOCKS_MOVED_PER_VISIT", math.inf)


steps = st.integers(1, 9)
N = 40  # positions that documents and places reach
LEAVES = st.one_of(
    steps.map(dilated),
    steps.map(dilated),
    st.just(causal()),
    st.builds(window, st.integers(0, 9), st.none() | st.integers(0, 9)),
    st.builds(chunks, st.integers(1, 9), st.integers(0, 2), st.integers(0, 1)),
    st.builds(prefix, st.integers(0, 5)),
    st.builds(global_tokens, st.integers(0, 3)),
    st.builds(random_links, st.integers(1, 2), seed=st.integers(0, 3)),
    st.lists(st.integers(0, N), min_size=B, max_size=B).map(padding),
    st.lists(st.integers(0, 3), min_size=N, max_size=N).map(documents),
)
MASKS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=5,
)


@st.composite
def lengths_and_places(draw: st.DrawFn) -> tuple[int, int, Positions]:
    i, j = draw(st.integers(1, 19)), draw(st.integers(1, 23))
    if draw(st.booleans()):
        keys = torch.tensor(draw(st.lists(st.integers(0, N - 1), min_size=j, max_size=j)))
        return i, j, Positions(draw(st.integers(0, N - i)), keys)
    return i, j, Positions(draw(st.integers(0, N - i)), draw(st.integers(0, N - j)))


ORDERS = st.lists(st.integers(2, 9), min_size=1, max_size=3, unique=True).map(lambda found: tuple(sorted(found)))
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=50, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(MASKS, lengths_and_places())
def test_the_chosen_order_changes_no_output_and_no_gradient(small, mask, where):
    i, j, positions = where
    torch.manual_seed(i * j)
    assume(hides(mask, i, j, positions))
    bidirectional(i, j, mask=mask, positions=positions)


@settings(max_examples=50, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(MASKS, lengths_and_places(), ORDERS)
def test_any_order_at_all_changes_no_output_and_no_gradient(small, mask, where, order):
    """Even one that has nothing to do with the mask, a predicate among its parts."""
    i, j, positions = where
    torch.manual_seed(i * j)
    mask = mask | Mask.of("rare", lambda i, j: (i * 7 + j) % 11 == 0)
    assume(hides(mask, i, j, positions))

    def ordered(mask, queries, keys, size, *, positions):
        return block_tables._build_table(mask, Spans(positions, queries, keys, size, order))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "sparsest_table", ordered)
        bidirectional(i, j, mask=mask, positions=positions)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(MASKS, lengths_and_places(), ORDERS, st.integers(1, 6))
def test_a_table_in_another_order_is_never_wrong(mask, where, order, size):
    i, j, positions = where
    spans = Spans(positions, i, j, size, order)
    table = block_tables._build_table(mask, spans)
    assert table.steps == order
    dense = mask.dense(i, j, positions=positions).expand(B, 1, i, j)[:, 0]
    state = table.state.expand(B, *spans.shape)
    for q, rows in enumerate(spans.rows):
        for k, columns in enumerate(spans.columns):
            block = dense[:, rows][:, :, columns].flatten(1)
            assert not block.any(1)[state[:, q, k] == NONE].any()
            assert block.all(1)[state[:, q, k] == ALL].all()
    seen = dense[: mask.batch() or 1]
    found = find_hidden_keys_and_empty_rows(mask, positions, i, j, table)
    for flags, expected in zip(found, (~seen.any(1), ~seen.any(2)), strict=True):
        assert torch.equal(expected if flags is None else flags.expand_as(expected), expected)
        assert (flags is None) == (not expected.any())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(-9, 60), max_size=40), ORDERS, st.integers(1, 7))
def test_every_row_gets_one_slot_and_remainders_stay_together(positions, order, size):
    at = torch.tensor(positions, dtype=torch.long)
    laid = block_tables._cut_into_blocks(at, size, order)
    assert laid.index.shape == laid.real.shape
    assert laid.index[laid.real].sort().values.tolist() == list(range(len(at)))
    assert laid.index.flatten()[laid.slots].tolist() == list(range(len(at)))
    assert laid.real.flatten()[laid.slots].all()
    kept: dict[tuple[int, ...], set[int]] = {}
    for block, (index, real) in enumerate(zip(laid.index.tolist(), laid.real.tolist(), strict=True)):
        count = sum(real)
        assert count > 0
        assert real == [True] * count + [False] * (size - count)
        assert index[count:] == [index[count - 1]] * (size - count)
        for row in index:
            kept.setdefault(tuple(positions[row] % step for step in order), set()).add(block)
    for remainders, held in kept.items():
        rows = sum(tuple(place % step for step in order) == remainders for place in positions)
        assert len(held) == -(-rows // size), "more blocks hold these remainders than have to"


def test_rows_are_sorted_by_the_smallest_step_first_and_then_by_position():
    spans = Spans(Positions(1, torch.tensor([8, 3, 0, 4, 5])), 7, 5, 2, (2, 4))
    assert spans.query_positions().tolist() == [[4, 4], [2, 6], [1, 5], [3, 7]]
    assert spans.key_positions().tolist() == [[0, 4], [8, 5], [3, 3]]
    assert spans.column_blocks.real.tolist() == [[True, True], [True, True], [True, False]]
    assert spans.column_blocks.slots.tolist() == [2, 4, 0, 1, 3]
    assert spans.shape == (4, 3)


def test_a_dilation_is_all_or_nothing_in_its_own_order():
    state = block_tables._build_table(dilated(4), Spans(Positions(0), 32, 32, 4, (4,))).state
    assert torch.equal(state.bool(), torch.eye(4, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1))
    assert (state[state.bool()] == ALL).all()


@pytest.mark.parametrize(
    ("mask", "n", "visited"),
    [
        (dilated(64), 4096, 64),
        (dilated(64) & causal(), 4096, 64),
        (dilated(64), 4001, 64),  # fewer than 64 of some remainders
        (dilated(16), 4096, 16 * 4 * 4),
        (dilated(16) & causal(), 4096, 16 * 10),
        (dilated(512), 4096, 64),  # eight remainders share a block
        (dilated(3) & window(before=3 * 63), 3 * 64 * 9, 3 * 17),
        (dilated(2) & blocks(128) | dilated(4) & blocks(256) | dilated(8) & blocks(512), 4096, 4 * 64),
    ],
    ids=repr,
)
def test_blocks_are_visited_only_where_remainders_meet(mask, n, visited, monkeypatch):
    """What is handed to the fused kernel is as little as the remainders allow, and no block more than is told."""
    handed = []

    def noted(q, k, *rest, **options):
        handed.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return original(q, k, *rest, **options)

    original = cpu_flash.scaled_dot_product_attention
    monkeypatch.setattr(cpu_flash, "scaled_dot_product_attention", noted)
    q, k, v = draw(n, n, b=1, c=2, e=2, dtype=torch.float32)
    call = settled(q, k, v, mask=mask)
    assert kernels.choose_kernel(call) == "blocked"
    assert blocked.work(call) == 1.5 * H * visited * 64 * 64 + 2e5
    out = attend(q, k, v, mask=mask)
    assert sum(handed) == H * visited * 64 * 64
    assert visited < mask.block_table(n, size=64).visited
    rows = [0, n // 3, n - 1]
    for row in rows:
        exact = attend(q[:, :, row : row + 1], k, v, mask=mask, positions=Positions(row), kernel="eager")
        assert torch.allclose(out[:, :, row : row + 1], exact, atol=1e-5)


def test_the_rows_of_a_dilation_slide_over_one_copy_of_the_keys(monkeypatch):
    held = []

    def noted(q, k, *rest, **options):
        held.append((k.untyped_storage().data_ptr(), k.untyped_storage().nbytes()))
        return original(q, k, *rest, **options)

    original = cpu_flash.scaled_dot_product_attention
    monkeypatch.setattr(cpu_flash, "scaled_dot_product_attention", noted)
    q, k, v = draw(1024, 1024, c=4, e=4)
    attend(q, k, v, mask=dilated(16), kernel="blocked")
    assert held == [(held[0][0], k.numel() * k.element_size())]
    assert held[0][0] != k.untyped_storage().data_ptr()


COMPOSED = {
    "causal window": lambda j: dilated(3) & causal() & window(before=63),
    "or a window": lambda j: dilated(4) | window(before=8),
    "padding": lambda j: dilated(2) & padding([j - 7, 3]),
    "padding on the left": lambda j: dilated(5) & padding([j - 7, 3], side="left", width=j),
    "several": lambda j: dilated(2) & blocks(32) | dilated(4) & blocks(64) | dilated(8),
    "steps without a common factor": lambda j: dilated(5) | dilated(7) & causal(),
    "hidden": lambda j: ~dilated(6),
    "documents": lambda j: dilated(3) & documents(torch.arange(400) // 37),
    "links": lambda j: dilated(9) & causal() | random_links(1, seed=2),
    "global tokens": lambda j: dilated(8) & causal() | global_tokens(2),
    "farther than there are keys": lambda j: dilated(1000),
    "nothing": lambda j: dilated(5) & ~full(),
}


@pytest.mark.parametrize(
    "positions", [None, Positions(3), Positions(200, 7)], ids=["last rows", "queries at 3", "keys from 7"]
)
@pytest.mark.parametrize("name", COMPOSED)
def test_a_composed_mask_is_exact_at_lengths_that_the_steps_do_not_divide(name, positions):
    torch.manual_seed(3)
    i, j = 131, 197
    bidirectional(i, j, mask=COMPOSED[name](j), positions=positions)


TERMS = {
    "alibi": lambda i, j: alibi(heads=H),
    "added": lambda i, j: additive(torch.randn(i, j, dtype=torch.float64)),
    "added by head": lambda i, j: additive(torch.randn(H, i, j, dtype=torch.float64)),
    "t5": lambda i, j: t5_buckets(torch.randn(10, H, dtype=torch.float64), max_distance=30),
    "shaw": lambda i, j: shaw(torch.randn(9, C, dtype=torch.float64)),
    "sink": lambda i, j: sink(torch.randn(H, dtype=torch.float64)),
}


@pytest.mark.parametrize(
    "positions", [Positions(0), Positions(9, 4), Positions(2, torch.arange(29).flip(0) * 2)], ids=str
)
@pytest.mark.parametrize("name", TERMS)
def test_score_terms_get_the_rows_and_positions_that_are_meant(small, name, positions):
    torch.manual_seed(5)
    mask = dilated(3) & window(before=20, after=30) & padding([70, 11])
    assert blocked._get_block_table(settled(*draw(27, 29), mask=mask, positions=positions)).steps == (3,)
    bidirectional(27, 29, mask=mask, scores=TERMS[name](27, 29), positions=positions)


def test_what_nobody_sees_may_hold_anything(small):
    """Keys that no query sees are cleared where they stand, not where they are moved to."""
    inputs = draw(21, 21)
    mask = dilated(4) & padding([13, 6]) & ~prefix(2)
    clean = attend(*inputs, mask=mask, kernel="eager")
    for poisoned in inputs[1:]:
        poisoned[0, :, 13:] = poisoned[1, :, 6:] = poisoned[:, :, :2] = math.nan
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves, mask=mask, kernel="blocked")
    assert blocked._get_block_table(settled(*inputs, mask=mask)).steps == (4,)
    assert torch.allclose(out, clean)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


def test_inputs_may_lie_in_memory_in_any_way(small):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(22, 22))
    assert not q.is_contiguous()
    out = attend(q, k, v, mask=dilated(3), kernel="blocked")
    assert torch.allclose(out, attend(q, k, v, mask=dilated(3), kernel="eager"))


@pytest.mark.parametrize(
    "mask",
    [
        full(),
        window(before=63),
        dilated(1) & window(before=3),
        dilated(513),
        dilated(2) & window(before=63),  # two blocks a row either way
        dilated(64) & window(before=63) | window(before=63),  # all remainders meet within a window
        dilated(8) & Mask.of("late", lambda i, j: i + j > 9),  # it would be swept in every order
    ],
    ids=repr,
)
def test_rows_stay_as_they_come_where_moving_them_gains_nothing(mask):
    table = sparsest_table(mask, 512, 512, 64, positions=Positions(0))
    assert table.steps == ()
    assert torch.equal(table.state, mask.block_table(512, size=64).state)


def test_the_public_table_keeps_the_order_of_positions():
    mask = dilated(8)
    assert sparsest_table(mask, 512, 512, 64, positions=Positions(0)).steps == (8,)
    assert mask.block_table(512, size=64).steps == ()
    assert mask.block_table(512, size=64).density == 1.0
    assert block_table(mask, 512, 512, 64) is mask.block_table(512, size=64)


def test_the_sparsest_table_is_made_once(monkeypatch):
    made = []
    original = block_tables._build_table
    monkeypatch.setattr(block_tables, "_tables", Memo(8))
    monkeypatch.setattr(
        block_tables, "_build_table", lambda mask, spans: made.append(spans.steps) or original(mask, spans)
    )
    mask = dilated(4) & causal() | dilated(6)
    first = sparsest_table(mask, 200, 200, 8, positions=Positions(0))
    assert sorted(made) == [(), (4,), (4, 6), (6,)]
    assert sparsest_table(dilated(4) & causal() | dilated(6), 200, 200, 8, positions=Positions(0)) is first
    assert len(made) == 4
    sparsest_table(mask, 200, 200, 8, positions=Positions(1))
    assert len(made) == 8
    at = torch.arange(200)
    for _ in range(2):  # positions in a list may change unseen
        sparsest_table(mask, 200, 200, 8, positions=Positions(0, at))
    assert len(made) == 16


def test_memory_tells_of_the_copies_in_order():
    q, k, v = draw(640, 512, dtype=torch.float32)
    mask = dilated(64)
    table = sparsest_table(mask, 640, 512, 64, positions=Positions(-128))
    assert table.steps == (64,)
    touched, rows, columns = table.visited, *table.state.shape
    gathered = B * H * touched * 64 * (C + E) * 4 + touched * 64 * 64
    assert blocked.memory(settled(q, k, v, mask=mask)) == gathered + B * 64 * (H * rows + G * columns) * (C + E) * 4


@pytest.mark.parametrize(("training", "matrices"), [(False, 2), (True, 4)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 4)], ids=str)
def test_memory_counts_scores_and_weights_where_torch_keeps_them(training, matrices, dtype, size):
    """On a CPU torch has no fused dropout and no fused gradient of what is added."""
    inputs = draw(256, 256, dtype=dtype, requires_grad=training)
    mask = window(before=63)
    pairs = B * H * 7 * 64 * 64
    plain = blocked.memory(settled(*inputs, mask=mask))
    assert blocked.memory(settled(*inputs, mask=mask, dropout=0.1)) == plain + matrices * pairs * size
    with torch.no_grad():
        assert blocked.memory(settled(*inputs, mask=mask, dropout=0.1)) == plain + 2 * pairs * size
    slopes = torch.rand(H, requires_grad=True)
    added = pairs * inputs[0].element_size()
    assert blocked.memory(settled(*inputs, mask=mask, scores=alibi(heads=H))) == plain + added
    assert blocked.memory(settled(*inputs, mask=mask, scores=alibi(slopes=slopes))) == plain + added + 4 * pairs * size
