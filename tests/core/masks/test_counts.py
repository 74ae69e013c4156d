"""Exact counts of visible pairs: a million positions against closed formulas, with no matrix on the way."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from regard.base.errors import ConfigError, ShapeError
from regard.core.masks import algebra, as_mask, counts
from regard.core.masks.expression import parse_mask

N = 1_000_003  # a prime, so that no chunk, step or document fits evenly
LENGTHS = [700_001, 3, 0, N]
DOCUMENTS = [300_007, 1, 199_999, 500_000 - 4]  # lengths, one after the other


class Effort(TorchDispatchMode):
    """Notes the size of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest, self.total = max(self.largest, x.numel()), self.total + x.numel()
        return out


@contextmanager
def no_matrix() -> Iterator[Effort]:
    """Inside, nothing may look at pairs, and nothing larger than a few rows may exist."""

    def refuse(*_: object) -> None:
        raise AssertionError("the count looks at pairs")

    with pytest.MonkeyPatch.context() as patch, Effort() as effort:
        patch.setattr(counts, "_count_pairs", refuse)
        patch.setattr(algebra, "whole_grid", refuse)
        yield effort


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def squares_of_blocks(size: int) -> int:
    whole, rest = divmod(N, size)
    return whole * size**2 + rest**2


def triangles_of_blocks(size: int) -> int:
    whole, rest = divmod(N, size)
    return whole * triangle(size) + triangle(rest)


def in_chunks(size: int, before: int, after: int) -> int:
    """Pairs of chunks at each distance, then those of the last, shorter chunk as query and as key."""
    whole, rest = divmod(N, size)
    among = sum((whole - abs(distance)) * size**2 for distance in range(-before, after + 1))
    return among + rest * (before * size + rest) + after * size * rest


def of_one_remainder(n: int, step: int) -> int:
    """Pairs of n positions whose distance is a multiple of the step."""
    whole, rest = divmod(n, step)
    return rest * (whole + 1) ** 2 + (step - rest) * whole**2


def steps_back(n: int, step: int, reach: int) -> int:
    """Sum over n rows of 1 + floor(min(row, reach) / step)."""
    whole, rest = divmod(reach + 1, step)
    return n + step * triangle(whole - 1) + rest * whole + (n - 1 - reach) * (reach // step)


def ids() -> Tensor:
    return torch.repeat_interleave(torch.tensor([5, 2, 9, 3]), torch.tensor(DOCUMENTS))


def packed() -> Mask:
    return documents(ids())


FORMULAS = {
    "full": (full, N**2),
    "causal": (causal, triangle(N)),
    "not causal": (lambda: ~causal(), triangle(N - 1)),
    "nothing": (lambda: ~full(), 0),
    "window before": (lambda: window(before=255), 256 * N - triangle(255)),
    "window both ways": (lambda: window(before=255, after=31), 287 * N - triangle(255) - triangle(31)),
    "window open before": (lambda: window(before=None, after=31), triangle(N) + 31 * N - triangle(31)),
    "window open after": (lambda: window(before=255, after=None), triangle(N) + 255 * N - triangle(255)),
    "not in the window": (lambda: ~window(before=255), N**2 - 256 * N + triangle(255)),
    "dilated": (lambda: dilated(7), of_one_remainder(N, 7)),
    "dilated twice": (lambda: dilated(6) & dilated(10), of_one_remainder(N, 30)),
    "dilated one way or the other": (
        lambda: dilated(6) | dilated(10),
        of_one_remainder(N, 6) + of_one_remainder(N, 10) - of_one_remainder(N, 30),
    ),
    "blocks": (lambda: blocks(1021), squares_of_blocks(1021)),
    "causal blocks": (lambda: blocks(1021) & causal(), triangles_of_blocks(1021)),
    "causal or blocks": (
        lambda: causal() | blocks(1021),
        triangle(N) + squares_of_blocks(1021) - triangles_of_blocks(1021),
    ),
    "chunks before": (lambda: chunks(1021, before=2), in_chunks(1021, 2, 0)),
    "chunks both ways": (lambda: chunks(1021, before=2, after=3), in_chunks(1021, 2, 3)),
    "chunks without limit": (lambda: chunks(1021, None, None), N**2),
    "prefix": (lambda: prefix(5), 5 * N),
    "a prefix of everything": (lambda: prefix(N + 7), N**2),
    "global tokens": (lambda: global_tokens(5), 10 * N - 25),
    "neither global nor seen by all": (lambda: ~global_tokens(5), (N - 5) ** 2),
    "causal window": (lambda: causal() & window(before=255), 256 * N - triangle(255)),
    "causal window with attention sinks": (
        lambda: causal() & (window(before=255) | prefix(4)),
        260 * N - triangle(259),
    ),
    "causal window or global tokens": (
        lambda: causal() & window(before=255) | global_tokens(4),
        4 * N + (N - 4) * 260 - triangle(255),
    ),
    "causal beyond the window": (lambda: causal() & ~window(before=255), triangle(N - 256)),
    "padding": (lambda: padding(LENGTHS), N * sum(LENGTHS)),
    "padding on the left": (
        lambda: padding([700_001, 3, 0], side="left", width=900_000),
        N * (3 * (N - 900_000) + 700_004),
    ),
    "causal padding": (lambda: padding(LENGTHS) & causal(), sum(triangle(x) + (N - x) * x for x in LENGTHS)),
    "causal padding on the left": (
        lambda: causal() & padding(LENGTHS, side="left", width=N),
        sum(triangle(x) for x in LENGTHS),
    ),
    "what is padded": (lambda: ~padding(LENGTHS), N * sum(N - x for x in LENGTHS)),
    "documents": (packed, sum(n**2 for n in DOCUMENTS)),
    "causal documents": (lambda: packed() & causal(), sum(triangle(n) for n in DOCUMENTS)),
    "other documents": (lambda: ~packed() & causal(), triangle(N) - sum(triangle(n) for n in DOCUMENTS)),
    "documents that come again": (lambda: documents(torch.arange(N) % 7), of_one_remainder(N, 7)),
    "documents within documents": (
        lambda: packed() & documents(torch.arange(N) % 7),
        sum(of_one_remainder(n, 7) for n in DOCUMENTS),
    ),
    "documents of a batch": (
        lambda: documents(torch.stack([ids(), ids().flip(0), torch.zeros(N).long()])) & causal(),
        2 * sum(triangle(n) for n in DOCUMENTS) + triangle(N),
    ),
    "dilated documents": (lambda: packed() & dilated(7), sum(of_one_remainder(n, 7) for n in DOCUMENTS)),
    "documents in a causal window": (
        lambda: packed() & causal() & window(before=255),
        sum(256 * n - triangle(255) for n in DOCUMENTS if n > 255) + 1,
    ),
    "documents in a window that leaves the prefix": (
        lambda: packed() & window(before=255) & prefix(1000),
        256 * 1000,  # the window slides in over 255 rows and out over 255 rows
    ),
    "a dilated causal window": (lambda: dilated(7) & causal() & window(before=255), steps_back(N, 7, 255)),
    "random links": (lambda: random_links(11), 11 * N - triangle(10)),
    "causal random links": (lambda: random_links(11) & causal(), 11 * N - triangle(10)),
    "random links into the future": (lambda: random_links(11) & ~causal(), 0),
    "causal or random links": (lambda: random_links(11) | causal(), triangle(N)),
    "random links or global tokens": (
        lambda: random_links(1) & ~prefix(N) | global_tokens(3),
        6 * N - 9,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_million_positions_are_counted_exactly_without_the_matrix(name):
    make, expected = FORMULAS[name]
    mask = make()
    with no_matrix() as effort:
        assert mask.count(N) == expected
    assert effort.largest <= 4 * N
    assert effort.total <= 3000 * N  # of a million times a million pairs


def links_by_hand(count: int, reach: int) -> int:
    """Random links at most `reach` back: all drawn, row by row."""
    rule, i = random_links(count), torch.arange(N)
    drawn = [rule.link(i, which) for which in range(count)]
    return sum(int((exists & (i - key <= reach)).sum()) for key, exists in drawn)


def test_random_links_beside_a_window_count_once():
    shared = links_by_hand(3, 255)
    assert 0 < shared < 3 * N
    with no_matrix():
        assert (random_links(3) & window(before=255)).count(N) == shared
        assert (random_links(3) | window(before=255)).count(N) == 3 * N - 3 + 256 * N - triangle(255) - shared


def test_random_links_meet_everything_else():
    """Every other form asked about each link: at a size where the matrix can be built."""
    n, seed = 307, torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (2, n), generator=seed)
    others = [
        causal(), ~window(before=5), dilated(3), blocks(7), prefix(20), global_tokens(9), padding([100, 307]),
        padding([100, 307], side="left", width=307), documents(ids), documents(ids[0]), random_links(2, seed=1),
        random_links(5) & dilated(2) & documents(ids),
    ]  # fmt: skip
    for other in others:
        for mask in (random_links(5) & other, random_links(5) | other, random_links(5) & ~other):
            with no_matrix():
                counted = mask.count(n)
            assert counted == int(mask.dense(n).sum()), mask


def test_the_last_rows_of_a_million_keys_are_counted():
    rows, before = 1009, N - 1009
    with no_matrix() as effort:
        assert causal().count(rows, N) == triangle(N) - triangle(before)
        assert window(before=255, after=31).count(rows, N) == 287 * rows - triangle(31)
        assert global_tokens(5).count(rows, N) == 5 * rows
        assert random_links(11).count(rows, N) == 11 * rows
        assert dilated(7).count(7, N) == N
        assert padding(LENGTHS).count(rows, N) == rows * sum(LENGTHS)
    assert effort.largest <= 4 * rows


def test_placed_runs_of_a_million_are_counted():
    """Queries 2,000 .. 1,002,002 against keys 5,000 .. 6,006."""
    positions, keys = Positions(2_000, 5_000), 1007
    with no_matrix():
        assert causal().count(N, keys, positions=positions) == sum(1_002_003 - j for j in range(5_000, 6_007))
        assert window(before=255, after=31).count(N, keys, positions=positions) == 287 * keys
        assert prefix(5_004).count(N, keys, positions=positions) == 4 * N
        assert global_tokens(2_003).count(N, keys, positions=positions) == 3 * keys
        assert padding([5_004, 9]).count(N, keys, positions=positions) == 4 * N
        assert documents(torch.arange(2_000 + N) // 1_003).count(N, keys, positions=positions) == 1_003 * keys


def test_more_queries_than_keys_are_counted():
    """A million queries of which the last three stand at the keys."""
    with no_matrix():
        assert causal().count(N, 3) == 6
        assert window(before=0, after=2).count(N, 3) == 9
        assert random_links(2).count(N, 3) == 5


@contextmanager
def sweeps(pairs: int) -> Iterator[list[Mask]]:
    """The masks that are counted by looking, at most so many pairs at a time."""
    swept: list[Mask] = []
    by_looking = counts._count_pairs

    def note(mask: Mask, *rest: object) -> int:
        swept.append(mask)
        return by_looking(mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "_count_pairs", note)
        patch.setattr(counts, "_PAIRS_AT_ONCE", pairs)
        yield swept


def test_a_rule_of_ones_own_is_counted_by_looking_a_few_rows_at_a_time():
    mask = Mask.of("late", lambda i, j: i + j >= 1009) & causal()
    with sweeps(pairs=1 << 12) as swept, Effort() as effort:
        counted = mask.count(1009)
    assert counted == sum(max(0, 2 * i - 1008) for i in range(1009))
    assert swept == [mask]
    assert effort.largest <= 1 << 12


def test_sequences_are_counted_by_looking_at_each():
    mask = padding([3, 0, 5]) & Mask.of("even", lambda i, j: j % 2 == 0)
    for pairs in (7, 43):
        with sweeps(pairs), Effort() as effort:
            assert mask.count(11, 7) == 11 * (2 + 0 + 3)
        assert effort.largest <= max(pairs, 3 * 7)  # one row of every sequence is the least


def test_a_part_that_ignores_the_queries_is_counted_for_each():
    assert Mask.of("key 2", lambda i, j: j == 2).count(11, 7) == 11
    assert Mask.of("query 5", lambda i, j: i == 5).count(5, 7) == 7


def test_an_expression_of_too_many_terms_is_counted_by_looking():
    mask = causal() & window(before=1) | prefix(1) | dilated(7)
    for which in range(2, 9):
        mask = mask | blocks(which) & ~window(before=which)
    assert counts.expand(mask) is None
    assert counts.expand(~mask & causal()) is None
    with sweeps(pairs=500) as swept:
        assert mask.count(41) == int(mask.dense(41).sum())
    assert swept == [mask]


def test_an_expression_of_some_terms_is_not():
    mask = causal() & window(before=1) | prefix(1) | blocks(3) & ~window(before=2) | dilated(5)
    assert len(counts.expand(mask)) > 8
    with no_matrix():
        counted = mask.count(41)
    assert counted == int(mask.dense(41).sum())


def test_terms_that_cancel_are_dropped():
    a, b = frozenset([causal()]), frozenset([prefix(2)])
    assert counts.expand(causal() & ~causal()) == {}
    assert counts.expand(causal() | ~causal()) == {frozenset(): 1}
    assert counts.expand(causal() & causal()) == {a: 1}
    assert counts.expand(causal() | prefix(2)) == {a: 1, b: 1, a | b: -1}
    assert counts.expand(~causal()) == {frozenset(): 1, a: -1}


def test_equal_data_is_one_factor():
    mask = padding([3, 5]) & padding(torch.tensor([3, 5]))
    assert list(counts.expand(mask).values()) == [1]
    assert len(next(iter(counts.expand(mask)))) == 1


def test_keys_in_a_list_of_positions_are_counted_by_looking():
    at = torch.tensor([8, 0, 3, 3, 12])
    positions = Positions(2, at)
    with sweeps(pairs=9) as swept:
        assert causal().count(7, 5, positions=positions) == sum(int((at <= i).sum()) for i in range(2, 9))
        assert padding([4, 0]).count(7, 5, positions=positions) == 7 * 3
    assert len(swept) == 2


@pytest.mark.parametrize("mask", [causal(), ~causal(), random_links(2), padding([3, 1]), Mask.of("x", torch.eq)])
def test_nothing_asked_is_nothing_seen(mask):
    assert [mask.count(0), mask.count(0, 5), mask.count(5, 0)] == [0, 0, 0]


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 5, 7), (3, 5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7)]
)
def test_a_boolean_matrix_is_counted_over_its_sequences_and_heads(shape):
    data = torch.rand(shape) < 0.4
    assert as_mask(data).count(5, 7) == int(data.sum())
    assert (as_mask(data) & ~causal()).count(5, 7) == int((data & ~causal().dense(5, 7)).sum())


def test_a_count_is_checked_as_the_matrix_is():
    with pytest.raises(ShapeError, match="covers n=3"):
        documents([0, 1, 1]).count(4)


LONG = {
    "six windows": (
        window(before=3)
        | window(before=9, after=2) & ~window(before=5)
        | ~window(before=40) & window(before=50)
        | prefix(4)
        | chunks(13, before=1) & ~blocks(13)
        | ~window(before=None, after=90)
    ),
    "two long reaches and tokens": (
        global_tokens(3) | window(before=2, after=1) | (causal() & ~window(before=17)) & prefix(9) | ~chunks(5, after=2)
    ),
    "with padding": (padding([31, 0, 7]) & causal() | prefix(2) | window(before=5) & ~blocks(4) | global_tokens(1)),
    "with padding in front": (
        ~padding([31, 0, 7], side="left", width=40) & causal() | prefix(2) | window(before=5) & ~blocks(4) | blocks(9)
    ),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("i", "j"), [(40, 40), (7, 40), (1, 40)])
def test_a_long_expression_of_bands(name, i, j):
    with no_matrix():
        counted = LONG[name].count(i, j)
    assert counted == int(LONG[name].dense(i, j).sum())


def test_a_union_of_many_windows():
    """A sum over conjunctions would have 2^12 terms here."""
    union = window(before=0)
    for reach in range(10, 130, 10):
        union = union | window(before=reach) & ~window(before=reach - 1)
    with no_matrix():
        assert union.count(100_003) == 100_003 + sum(100_003 - reach for reach in range(10, 130, 10))


BILLION = 10**9
CLOSED = {
    "causal()": BILLION * (BILLION + 1) // 2,
    "~causal()": BILLION * (BILLION - 1) // 2,
    "full()": BILLION**2,
    "causal() & window(before=255)": BILLION * 256 - 255 * 256 // 2,
    "window(before=2, after=3)": BILLION * 6 - 3 - 6,
    "causal() & ~window(before=1)": BILLION * (BILLION + 1) // 2 - (2 * BILLION - 1),
    "causal() & window(before=3) | global_tokens(2)": (BILLION * 4 - 6) + (2 * BILLION - 3) + 2 * (BILLION - 2) - 5,
    "~causal() | global_tokens(1)": BILLION * (BILLION - 1) // 2 + BILLION,
    "prefix(7)": BILLION * 7,
    "causal() | prefix(7)": BILLION * (BILLION + 1) // 2 + 21,
    "padding([5, 0])": BILLION * 5,
    "causal() & padding([5])": 15 + 5 * (BILLION - 5),
    "blocks(64)": BILLION * 64,
    "chunks(10, before=1)": BILLION * 20 - 100,
    "causal() & blocks(10)": BILLION // 10 * 55,
}


@pytest.mark.parametrize("text", CLOSED)
def test_a_billion_positions_are_counted_without_tensors_of_that_size(text):
    with Effort() as effort:
        assert parse_mask(text).count(BILLION) == CLOSED[text]
    assert effort.largest < 500


BANDS = [
    "causal()",
    "window(before=3, after=1)",
    "prefix(5)",
    "chunks(4, before=1)",
    "chunks(3, None, 1)",
    "padding([7, 30])",
]


@pytest.mark.parametrize("first", BANDS)
@pytest.mark.parametrize("second", ["full()", *BANDS, "global_tokens(6)", "~global_tokens(2)"])
@pytest.mark.parametrize("text", ["{} & {}", "{} | {}", "~({}) & {}", "{} & ~({}) | prefix(2)"])
def test_linear_runs_of_rows_are_counted_exactly(first, second, text, monkeypatch):
    monkeypatch.setattr(counts, "_MANY_ROWS", 12)
    mask = parse_mask(text.format(first, second))
    for queries, keys in [(40, 40), (23, 61), (61, 23)]:
        positions = Positions(queries=3, keys=5) if queries == 23 else None
        dense = mask.dense(queries, keys, positions=positions).expand(mask.batch() or 1, 1, queries, keys)
        assert mask.count(queries, keys, positions=positions) == int(dense.sum())


@pytest.mark.parametrize("text", ["dilated(3)", "blocks(64) & dilated(3)", "strided(5)"])
def test_a_count_that_would_take_gigabytes_is_refused(text):
    with pytest.raises(ConfigError, match=r"counting pairs of 1,000,000,000 positions would take 8,000,000,000 bytes"):
        parse_mask(text).count(BILLION)


def test_windows_in_closed_form_against_loops():
    draw = random.Random(0)
    for _ in range(300):
        before, after = (draw.choice([None, 0, 1, 4]) for _ in range(2))
        rows, columns = (range(first, first + draw.randint(1, 7)) for first in (draw.randint(0, 6), draw.randint(0, 6)))
        low, high = 99 if before is None else before, 99 if after is None else after
        seen = sum(i - low <= j <= i + high for i in rows for j in columns)
        assert counts.count_window((before, after), rows, columns) == seen
