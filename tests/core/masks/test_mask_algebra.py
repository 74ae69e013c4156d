"""Laws of the mask algebra, on expressions drawn at random from every form.

Each leaf is drawn together with its table: the matrix over all positions, written a second time in plain tensor
arithmetic. Combining masks combines tables, so every expression comes with a truth that none of the code under test
has touched.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor

from regard import (
    Mask,
    Positions,
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
    window,
)
from regard.core.masks import as_mask, block_tables, counts as mask_counts
from regard.core.masks.algebra import FAR
from regard.core.masks.block_tables import ALL, NONE, SOME, find_hidden_keys_and_empty_rows

N, B = 13, 3  # positions, and sequences where they differ
row, column = torch.arange(N)[:, None], torch.arange(N)[None, :]


class Known:
    """A mask and the pairs (b, N, N) it has to show."""

    def __init__(self, mask: Mask, table: Tensor) -> None:
        self.mask, self.table = mask, table

    def __repr__(self) -> str:
        return repr(self.mask)

    def at(self, where: "Where") -> Tensor:
        return self.table[:, where.queries][:, :, where.keys]


@dataclass
class Where:
    """Positions of queries and keys, and the call that means them."""

    queries: list[int]
    keys: list[int]
    positions: Positions | None

    @property
    def call(self) -> dict:
        return {"queries": len(self.queries), "keys": len(self.keys), "positions": self.positions}

    @property
    def settled(self) -> Positions:
        return self.positions or Positions.last_rows(len(self.queries), len(self.keys))


def known(mask: Mask, table: Tensor) -> Known:
    return Known(mask, table.expand(B, N, N))


def whole(mask: Mask, **call: object) -> Tensor:
    """The dense matrix with its axis of sequences."""
    shown = mask.dense(**call)
    return (shown if shown.ndim == 2 else shown[:, 0]).expand(B, *shown.shape[-2:])


sides = st.one_of(st.none(), st.integers(0, 4))
sizes = st.integers(1, 6)
counts = st.integers(0, 4)


@st.composite
def windows(draw: st.DrawFn) -> Known:
    before, after = draw(sides), draw(sides)
    low, high = (FAR if side is None else side for side in (before, after))
    return known(window(before, after), (row - low <= column) & (column <= row + high))


@st.composite
def chunked(draw: st.DrawFn) -> Known:
    size, before, after = draw(sizes), draw(sides), draw(sides)
    low, high = (FAR if side is None else side for side in (before, after))
    own, other = row // size, column // size
    return known(chunks(size, before, after), (own - low <= other) & (other <= own + high))


@st.composite
def packed(draw: st.DrawFn) -> Known:
    shape = draw(st.sampled_from([(N,), (B, N)]))
    ids = torch.randint(-1, 3, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    ids = ids.sort(-1).values if draw(st.booleans()) else ids  # one after the other, or coming again
    return known(documents(ids), (ids[..., :, None] == ids[..., None, :]).reshape(-1, N, N))


@st.composite
def padded(draw: st.DrawFn) -> Known:
    lengths = torch.tensor(draw(st.lists(st.integers(0, N), min_size=B, max_size=B)))
    if draw(st.booleans()):
        return known(padding(lengths), column < lengths[:, None, None])
    width = draw(st.integers(int(lengths.max()), N))
    return known(padding(lengths, side="left", width=width), column >= width - lengths[:, None, None])


def linked(count: int, seed: int) -> Known:
    mask = random_links(count, seed)
    return known(mask, mask.dense(N))  # test_masks.py says what they are


leaves = st.one_of(
    st.just(known(full(), column >= 0)),
    st.just(known(causal(), column <= row)),
    windows(),
    chunked(),
    packed(),
    padded(),
    sizes.map(lambda size: known(blocks(size), row // size == column // size)),
    sizes.map(lambda step: known(dilated(step), (row - column) % step == 0)),
    counts.map(lambda size: known(prefix(size), column < size)),
    counts.map(lambda size: known(global_tokens(size), (row < size) | (column < size))),
    st.builds(linked, counts, st.integers(0, 3)),
    st.integers(0, 2).map(lambda m: known(Mask.of(f"sum {m}", lambda i, j: (i + j) % 3 == m), (row + column) % 3 == m)),
)


def combined(inner: st.SearchStrategy[Known]) -> st.SearchStrategy[Known]:
    return st.one_of(
        st.builds(lambda a: Known(~a.mask, ~a.table), inner),
        st.builds(lambda a, b: Known(a.mask & b.mask, a.table & b.table), inner, inner),
        st.builds(lambda a, b: Known(a.mask | b.mask, a.table | b.table), inner, inner),
    )


expressions = st.recursive(leaves, combined, max_leaves=5)


@st.composite
def anywhere(draw: st.DrawFn, empty: bool = True) -> Where:
    """The last rows, a run of queries against a run of keys, or against keys in any order, some twice."""
    i, j = draw(st.integers(1 - empty, 7)), draw(st.integers(1 - empty, 9))
    form = draw(st.sampled_from(["last", "runs", "list"]))
    if form == "last":
        i = min(i, j)
        return Where(list(range(j - i, j)), list(range(j)), None)
    first = draw(st.integers(0, N - i))
    queries = list(range(first, first + i))
    if form == "runs":
        start = draw(st.integers(0, N - j))
        return Where(queries, list(range(start, start + j)), Positions(first, start))
    keys = draw(st.lists(st.integers(0, N - 1), min_size=j, max_size=j))
    return Where(queries, keys, Positions(first, torch.tensor(keys, dtype=torch.long)))


def examples(count: int):
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )


@examples(130)
@given(expressions, anywhere())
def test_the_matrix_is_the_table_wherever_it_is_asked_for(known, where):
    assert torch.equal(whole(known.mask, **where.call), known.at(where))


@examples(40)
@given(expressions, expressions, anywhere())
def test_and_or_and_not_act_pair_by_pair(a, b, where):
    left, right = whole(a.mask, **where.call), whole(b.mask, **where.call)
    assert torch.equal(whole(a.mask & b.mask, **where.call), left & right)
    assert torch.equal(whole(a.mask | b.mask, **where.call), left | right)
    assert torch.equal(whole(~a.mask, **where.call), ~left)


@examples(40)
@given(expressions, expressions, expressions, anywhere())
def test_the_laws_of_sets_hold(a, b, c, where):
    a, b, c = a.mask, b.mask, c.mask
    for one, other in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (a & b, b & a),
        (a | b, b | a),
        (a & (b | c), a & b | a & c),
        (a | b & c, (a | b) & (a | c)),
        (a & (a | b), a),
        (a & ~a, ~full()),
        (a | ~a, full()),
    ):
        assert torch.equal(whole(one, **where.call), whole(other, **where.call)), (one, other)
    assert ~~a == a
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)


@examples(130)
@given(expressions, anywhere())
def test_the_count_is_that_of_the_matrix(known, where):
    sequences = known.mask.batch() or 1
    assert known.mask.count(**where.call) == int(known.at(where)[:sequences].sum())


@examples(40)
@given(expressions, anywhere(), st.integers(0, 4), st.integers(1, 40))
def test_the_count_is_the_same_however_it_is_reached(known, where, most_terms, pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_counts, "_MOST_TERMS", most_terms)
        patch.setattr(mask_counts, "_PAIRS_AT_ONCE", pairs)
        swept = known.mask.count(**where.call)
    assert known.mask.count(**where.call) == swept


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    first, start = draw(st.integers(0, N - 1)), draw(st.integers(0, N - 1))
    return first, draw(st.integers(first, N - 1)), start, draw(st.integers(start, N - 1))


@examples(130)
@given(expressions, st.lists(boxes(), min_size=5, max_size=5))
def test_a_box_is_never_judged_wrongly(known, boxes):
    columns = known.mask.box(*(torch.tensor(edges) for edges in zip(*boxes, strict=True)))
    for which, (first, last, start, stop) in enumerate(boxes):
        seen = known.table[:, first : last + 1, start : stop + 1]
        verdict = known.mask.box(first, last, start, stop)
        for flag, certain in zip(verdict, (not seen.any(), bool(seen.all())), strict=True):
            assert type(flag) is bool
            assert flag <= certain, f"queries {first}..{last}, keys {start}..{stop}: {verdict}"
        # many boxes at once, as tensors, get the verdicts they get alone
        assert [bool(torch.as_tensor(flag).expand(5)[which]) for flag in columns] == list(verdict)


@examples(100)
@given(expressions, st.integers(0, N - 1))
def test_what_is_forgotten_is_seen_by_no_later_query(known, start):
    """A box may reach to the end of time."""
    keys = torch.arange(N)
    forgotten = torch.as_tensor(known.mask.box(start, FAR, keys, keys).none).expand(N)
    assert not (known.table[:, start:].any(1) & forgotten).any()
    waits_for_none = torch.as_tensor(known.mask.box(keys, keys, start, FAR).none).expand(N)
    assert not (known.table[:, :, start:].any(2) & waits_for_none).any()


@examples(100)
@given(expressions, anywhere(), st.integers(1, 11))
def test_a_block_table_is_never_wrong(known, where, size):
    table = known.mask.block_table(**where.call, size=size)
    i, j = len(where.queries), len(where.keys)
    blocks = -(-i // size), -(-j // size)
    assert table.state.dtype == torch.int8
    assert table.state.shape[-2:] == blocks
    assert table.state.ndim == 2 or len(table.state) == known.mask.batch()
    state, seen = table.state.expand(B, *blocks), known.at(where)
    for q in range(blocks[0]):
        for k in range(blocks[1]):
            block = seen[:, q * size : (q + 1) * size, k * size : (k + 1) * size].flatten(1)
            assert not block.any(1)[state[:, q, k] == NONE].any()
            assert block.all(1)[state[:, q, k] == ALL].all()


@examples(40)
@given(expressions, anywhere(), st.integers(1, 5))
def test_one_state_for_all_sequences_is_certain_only_where_all_agree(known, where, size):
    table = known.mask.block_table(**where.call, size=size)
    each = (table.state if table.state.ndim == 3 else table.state[None]).tolist()
    expected = [
        [states[0] if len(set(states)) == 1 else SOME for states in zip(*rows, strict=True)]
        for rows in zip(*each, strict=True)
    ]
    assert table.union().dtype == torch.int8
    assert table.union().tolist() == expected
    assert table.visited == sum(state != NONE for rows in each for row in rows for state in row)
    assert table.visited_by_any == sum(state != NONE for row in expected for state in row)


@examples(60)
@given(expressions, anywhere(), st.integers(1, 11), st.integers(1, 100))
def test_keys_that_nobody_sees_and_queries_that_see_nothing_are_found(known, where, size, pairs):
    i, j = len(where.queries), len(where.keys)
    table = known.mask.block_table(**where.call, size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tables, "_PAIRS_AT_ONCE", pairs)
        found = find_hidden_keys_and_empty_rows(known.mask, where.settled, i, j, table)
    seen = known.at(where)[: known.mask.batch() or 1]
    for flags, length, expected in zip(found, (j, i), (~seen.any(1), ~seen.any(2)), strict=True):
        if flags is None:
            assert not expected.any()
        else:
            assert expected.any()
            assert torch.equal(flags.expand(len(seen), length), expected)


@examples(100)
@given(expressions, boxes())
def test_a_simpler_mask_agrees_inside_its_box(known, box):
    first, last, start, stop = box
    simpler = known.mask.within(*box)
    shown = whole(simpler, queries=last - first + 1, keys=stop - start + 1, positions=Positions(first, start))
    assert torch.equal(shown, known.table[:, first : last + 1, start : stop + 1]), simpler


@examples(40)
@given(expressions)
def test_moving_and_rebuilding_change_nothing(known):
    moved = known.mask.to(torch.device("cpu"))
    assert moved == known.mask
    assert hash(moved) == hash(known.mask)
    assert moved.key() == known.mask.key()
    assert repr(moved) == repr(known.mask)
    assert known.mask.map_children(lambda child: child) == known.mask


@examples(40)
@given(expressions, st.sampled_from([(), (1, 1), (B, 1)]), st.integers(0, 9), st.sampled_from(["&", "|", "&~"]))
def test_a_boolean_matrix_obeys_the_same_laws(known, leading, seed, how):
    """It stands for rows and columns of one call, here five queries that begin at 6 and seven keys from 2 on."""
    rows, columns, positions = range(6, 11), range(2, 9), Positions(6, 2)
    data = torch.rand(*leading, 5, 7, generator=torch.Generator().manual_seed(seed)) < 0.5
    table = data.reshape(-1, 5, 7).expand(B, 5, 7)
    inner = known.at(Where(list(rows), list(columns), positions))
    mask, expected = {
        "&": (known.mask & data, inner & table),
        "|": (data | known.mask, inner | table),
        "&~": (known.mask & ~as_mask(data), inner & ~table),
    }[how]
    assert torch.equal(whole(mask, queries=5, keys=7, positions=positions), expected)
    assert mask.count(5, 7, positions=positions) == int(expected[: mask.batch() or 1].sum())
    state = mask.block_table(5, 7, 3, positions=positions).state.expand(B, 2, 3)
    for q in range(2):
        for k in range(3):
            block = expected[:, 3 * q : 3 * q + 3, 3 * k : 3 * k + 3].flatten(1)
            assert not block.any(1)[state[:, q, k] == NONE].any()
            assert block.all(1)[state[:, q, k] == ALL].all()


RULES = st.recursive(
    st.one_of(
        st.just(causal()),
        st.builds(window, sides, sides),
        st.builds(chunks, sizes, sides, sides),
        st.builds(dilated, sizes),
        st.builds(prefix, counts),
        st.builds(global_tokens, counts),
        st.builds(random_links, counts),
    ),
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=4,
)


@examples(50)
@given(RULES, st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_more_queries_than_keys_stand_before_the_first_position(mask, more, keys, size):
    queries = keys + more
    shown = mask.dense(queries, keys)
    assert torch.equal(shown[more:], mask.dense(keys))
    assert mask.count(queries, keys) == int(shown.sum())
    state = mask.block_table(queries, keys, size).state
    for q, k in (state != SOME).nonzero().tolist():
        block = shown[q * size : (q + 1) * size, k * size : (k + 1) * size]
        assert block.all() if state[q, k] == ALL else not block.any()
