"""Caches and streams: one pass, every split through a cache and every chunking of a stream give the same numbers.

Every split is covered without trying all 2^(n - 1) of them. By induction: the state after s positions does not depend
on how s was reached. It is called the canonical state of s, and it is what one extension by s positions makes of an
empty cache. Suppose that every way to s' leads to the canonical state of s', for every s' < s. A way to s ends with a
step of s - s' positions from some s', so from the canonical state of s'; that this step leads to the canonical state of
s is checked bit for bit. What a step gives out depends on the state it starts from and on its input alone, so the
n (n + 1) / 2 steps from canonical states are all the steps there are, and each of them has to give the rows of the one
pass.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor

from regard import (
    DynamicCache,
    Mask,
    Positions,
    SlidingWindowCache,
    StaticCache,
    Stream,
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
    recording,
    rotary,
    shaw,
    sink,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import CacheError, ConfigError, RegardError, ShapeError
from regard.core.absolute_positions import key_positions
from regard.core.cache import Cache, CachedKeysValues
from regard.core.masks import as_mask
from tests.tolerance import GRADIENT, OUTPUT, too_far

N = 13
B, H, G, C, E = 2, 6, 3, 5, 7
TURN = rotary(width=4)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = ((B, H, n, C), (B, G, n, C), (B, G, n, E))
    return noise(*q, seed=1, dtype=dtype), noise(*k, seed=2, dtype=dtype), noise(*v, seed=3, dtype=dtype)


def terms(dtype: torch.dtype) -> dict[str, object]:
    several = {
        "alibi": alibi(heads=H),
        "t5 buckets": t5_buckets(noise(8, H, seed=4, dtype=dtype), max_distance=9),
        "shaw": shaw(noise(7, C, seed=5, dtype=dtype)),
        "sink": sink(noise(H, seed=6, dtype=dtype)),
        "a cap": softcap(1.5),
    }
    return {"no term": None, **several, "all of them": list(several.values())}


TERMS = {dtype: terms(dtype) for dtype in (torch.float32, torch.float64)}
TERM_NAMES = list(TERMS[torch.float64])

IDS = torch.tensor([4, 4, 4, 1, 1, 1, 1, 4, 4, 7, 7, 7, 0])
PAST = {  # a row sees no later key, so a cache can serve it
    "causal": causal(),
    "window": causal() & window(before=4),
    "window of one": window(),
    "chunks with look-back": causal() & chunks(4, before=1),
    "attention sinks": causal() & (window(before=3) | prefix(2)),
    "padding": padding([13, 7]) & causal(),
    "padding on the left": causal() & padding([10, 5], side="left", width=11),
    "documents": documents(IDS) & causal(),
    "documents of a batch in a window": documents(torch.stack([IDS, IDS.flip(0)])) & causal() & window(before=5),
    "dilated": dilated(3) & causal() & window(before=7),
    "random links": random_links(3, seed=2),
    "random links and a window": random_links(2) | window(before=1),
    "global tokens": global_tokens(2) & causal() | window(before=1),
    "all but the nearest": causal() & ~window(before=2),
    "a rule of one's own": Mask.of("even distance", lambda i, j: (j <= i) & ((i - j) % 2 == 0)),
}
AHEAD = {  # a row waits for later keys, so only a stream can serve it
    "window both ways": window(before=4, after=3),
    "window after": window(after=2),
    "all before, two after": window(before=None, after=2),
    "own chunk": blocks(4),
    "chunks with look-back, within the chunk": chunks(4, before=1),
    "chunks with look-ahead": chunks(3, before=1, after=1),
    "a prefix seen from before": causal() & window(before=3) | prefix(2),
    "causal or own block": causal() | blocks(5),
    "global tokens both ways": global_tokens(1) | window(before=2, after=1),
    "everything": full(),
    "padding both ways": padding([13, 7]),
    "documents both ways": documents(IDS),
    "dilated both ways": dilated(3),
}


@pytest.fixture
def unchecked(monkeypatch):
    """Annotations are not checked: thousands of calls of the shapes that other tests here have checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def by_turns(masks: dict[str, Mask]) -> list[tuple[str, str]]:
    """Each mask with one of the terms, so that all of both have their turn."""
    return [(mask, term) for mask, term in zip(masks, TERM_NAMES * len(masks), strict=False)]


@dataclass(frozen=True)
class Pass:
    """One pass over n positions: what every split has to give again."""

    mask: Mask
    named: str = "no term"
    turned: bool = False
    n: int = N
    dtype: torch.dtype = torch.float64

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return draw(self.n, self.dtype)

    @property
    def term(self) -> object:
        return TERMS[self.dtype][self.named]

    @cached_property
    def truth(self) -> Tensor:
        return self._whole("reference", torch.float64)

    @cached_property
    def naive(self) -> Tensor:
        return self._whole("eager", self.dtype)

    def _whole(self, kernel: str, dtype: torch.dtype) -> Tensor:
        q, k, v = self.inputs
        q, k = (TURN(q), TURN(k)) if self.turned else (q, k)
        return attend(q.to(dtype), k.to(dtype), v.to(dtype), mask=self.mask, scores=self.term, kernel=kernel)

    def extend(self, cache: Cache, start: int, stop: int) -> CachedKeysValues:
        return cache.extend(*(x[:, :, start:stop] for x in self.inputs[1:]))

    def attend(self, held: CachedKeysValues, start: int, stop: int) -> Tensor:
        """The rows of one step, turned to where the cache says that they stand."""
        q, (k, v, positions) = self.inputs[0][:, :, start:stop], held
        if self.turned:
            q, k = TURN(q, positions.queries), TURN(k, key_positions(positions, k.shape[2], None))
        return attend(q, k, v, mask=self.mask, scores=self.term, positions=positions)

    def push(self, stream: Stream, start: int, stop: int) -> Tensor:
        q, k, v = (x[:, :, start:stop] for x in self.inputs)
        if self.turned:
            q, k = TURN(q, stream.received), TURN(k, stream.received)
        return stream.push(q, k, v)

    def wrong(self, steps: list[tuple[int, Tensor]]) -> str:
        """What is wrong with rows given out, each piece with the position it starts at."""
        rows = torch.cat([torch.arange(start, start + out.shape[2]) for start, out in steps])
        actual = torch.cat([out for _, out in steps], 2)
        return too_far(actual, self.naive[:, :, rows], self.truth[:, :, rows], OUTPUT)


def fork(state: Cache | Stream) -> Cache | Stream:
    """A copy whose tensors are its own."""
    other = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, tuple):
            setattr(other, name, tuple(x.clone() for x in value))
    return other


def same_state(one: Cache | Stream, other: Cache | Stream) -> bool:
    """Bit for bit, everything that either of them holds."""

    def same(a: object, b: object) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return a is b or (type(a) is type(b) and not isinstance(a, Tensor | tuple) and a == b)

    return vars(one).keys() == vars(other).keys() and all(same(x, vars(other)[name]) for name, x in vars(one).items())


def canonical(make: Callable[[], Cache], whole: Pass) -> list[Cache]:
    """The states after 0, 1, .. n positions, each reached by one extension."""
    states = [make() for _ in range(whole.n + 1)]
    for stop, state in enumerate(states[1:], 1):
        whole.extend(state, 0, stop)
    return states


CACHES = {
    "growing": lambda mask: DynamicCache(),
    "static": lambda mask: StaticCache(N),
    "static with room": lambda mask: StaticCache(N + 6),
    "rolling": SlidingWindowCache,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "mask"), [(kind, "causal") for kind in CACHES if kind != "rolling"] + [("rolling", mask) for mask in PAST]
)
def test_the_state_of_a_cache_does_not_depend_on_how_it_was_reached(kind, mask):
    whole = Pass(PAST[mask])
    states = canonical(lambda: CACHES[kind](whole.mask), whole)
    for start in range(N):
        for stop in range(start + 1, N + 1):
            step = fork(states[start])
            whole.extend(step, start, stop)
            assert same_state(step, states[stop]), f"{start} positions and {stop - start} more"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", CACHES)
def test_an_empty_step_leaves_a_cache_as_it_was(kind):
    whole = Pass(PAST["attention sinks"])
    states = canonical(lambda: CACHES[kind](whole.mask), whole)
    for start in range(1, N + 1):
        step = fork(states[start])
        assert whole.extend(step, start, start).k.shape[2] > 0
        assert same_state(step, states[start])
    for stop in range(1, N + 1):
        begun_with_nothing = CACHES[kind](whole.mask)
        held = whole.extend(begun_with_nothing, 0, 0)
        assert (held.k.shape, held.v.shape, held.positions) == ((B, G, 0, C), (B, G, 0, E), Positions(0, 0))
        whole.extend(begun_with_nothing, 0, stop)
        assert same_state(begun_with_nothing, states[stop])


SPLITS = [
    *(("rolling", mask, term, False) for mask, term in by_turns(PAST)),
    *(("rolling", mask, "no term", True) for mask in ("window", "attention sinks")),
    ("growing", "causal", "all of them", False),
    ("growing", "causal", "no term", True),
    ("growing", "padding on the left", "no term", False),
    ("growing", "random links and a window", "alibi", False),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "mask", "term", "turned"), SPLITS)
def test_every_split_through_a_cache_gives_the_rows_of_one_pass(kind, mask, term, turned):
    whole = Pass(PAST[mask], term, turned)
    states = canonical(lambda: CACHES[kind](whole.mask), whole)
    steps = []
    for start in range(N):
        for stop in range(start + 1, N + 1):
            held = whole.extend(fork(states[start]), start, stop)
            steps.append((start, whole.attend(held, start, stop)))
    assert len(steps) == N * (N + 1) // 2
    assert not whole.wrong(steps)


@pytest.mark.parametrize("kind", ["growing", "static", "static with room"])
def test_a_cache_that_keeps_everything_hands_it_out_as_it_came(kind):
    """So what holds for one of them holds for the others: they hand out the same numbers and places."""
    whole = Pass(causal())
    _, k, v = whole.inputs
    states = canonical(lambda: CACHES[kind](causal()), whole)
    for start in range(N):
        for stop in range(start, N + 1):
            held = whole.extend(fork(states[start]), start, stop)
            assert torch.equal(held.k, k[:, :, :stop])
            assert torch.equal(held.v, v[:, :, :stop])
            assert held.positions == Positions(start, 0)


def stands(positions: Positions, j: int) -> list[int]:
    return key_positions(positions, j, None).tolist()


@pytest.mark.parametrize("mask", PAST)
def test_a_rolling_cache_hands_out_keys_with_their_positions(mask):
    whole = Pass(PAST[mask])
    _, k, v = whole.inputs
    states = canonical(lambda: SlidingWindowCache(whole.mask), whole)
    for start in range(N):
        held = whole.extend(fork(states[start]), start, start + 1)
        at = stands(held.positions, held.k.shape[2])
        assert torch.equal(held.k, k[:, :, at])
        assert torch.equal(held.v, v[:, :, at])
        assert at == sorted(set(at))
        assert at[-1] == held.positions.queries == start


KEPT = {  # how many positions a rolling cache keeps after s
    "everything": (causal(), lambda s: s),
    "the window before": (causal() & window(before=4), lambda s: min(s, 4)),
    "nothing but the step": (window(), lambda s: 0),
    "what comes after is no window of the past": (window(before=0, after=3), lambda s: 0),
    "chunks looked back to": (chunks(4, before=1) & causal(), lambda s: s - max(0, s // 4 - 1) * 4),
    "its own chunk": (blocks(7), lambda s: s % 7),
    "chunks with no limit": (causal() & chunks(4, before=None), lambda s: s),
    "sinks and a window": (causal() & (window(before=3) | prefix(2)), lambda s: min(s, 5)),
    "global tokens and a window": (causal() & (window(before=3) | global_tokens(2)), lambda s: min(s, 5)),
    "a prefix alone": (prefix(5), lambda s: min(s, 5)),
    "the smaller of two windows": (causal() & window(before=9) & window(before=3), lambda s: min(s, 3)),
    "the larger of two windows": (causal() & (window(before=9) | window(before=3)), lambda s: min(s, 9)),
    "a dilated window": (dilated(3) & causal() & window(before=7), lambda s: min(s, 7)),
    "what the future alone may see": (~causal(), lambda s: 0),
    "what is seen much later": (causal() & ~window(before=99), lambda s: s),
    "what any draw may reach": (random_links(2), lambda s: s),
    "random links in a window": (random_links(2) & window(before=6), lambda s: min(s, 6)),
    "what a rule of one's own may want": (Mask.of("x", torch.eq), lambda s: s),
    "nothing at all": (~full(), lambda s: 0),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", KEPT)
def test_a_rolling_cache_keeps_only_what_may_still_be_seen(name):
    mask, kept = KEPT[name]
    for step in (1, 3, 11):
        cache = SlidingWindowCache(mask)
        for stop in range(step, 50, step):
            cache.extend(torch.zeros(1, 1, step, 2), torch.zeros(1, 1, step, 3))
            assert [x.shape[2] for x in cache.tensors()] == [kept(stop)] * 2
            assert cache.nbytes == kept(stop) * (2 + 3) * 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (causal() & window(before=4), 4),
        (causal() & (window(before=4) | prefix(3)), 7),
        (causal() & chunks(5, before=2), 14),
        (dilated(3) & window(before=9), 9),
        (global_tokens(2) & causal() | window(before=2), 4),
    ],
    ids=repr,
)
def test_a_rolling_cache_stays_small_over_a_thousand_steps(mask, most):
    cache, largest = SlidingWindowCache(mask), 0
    for step in range(1000):
        held = cache.extend(torch.full((1, 1, 1, 1), float(step)), torch.zeros(1, 1, 1, 1))
        largest = max(largest, held.k.shape[2])
        assert held.k.flatten().tolist() == stands(held.positions, held.k.shape[2])
    assert cache.length == 1000
    assert largest == most + 1


def test_a_run_of_positions_is_told_by_its_first():
    cache = SlidingWindowCache(causal() & window(before=2))
    for step in range(5):
        held = cache.extend(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        assert held.positions == Positions(step, max(0, step - 2))


def test_positions_with_a_gap_are_listed():
    cache = SlidingWindowCache(causal() & (window(before=2) | prefix(1)))
    cache.extend(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
    positions = cache.extend(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)).positions
    assert (positions.queries, positions.keys.tolist()) == (5, [0, 3, 4, 5, 6])


CHUNKINGS = [
    *((mask, term, False) for mask, term in by_turns(AHEAD | PAST)),
    *((mask, "no term", True) for mask in ("attention sinks", "window both ways")),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("mask", "term", "turned"), CHUNKINGS)
def test_every_chunking_of_a_stream_gives_the_rows_of_one_pass(mask, term, turned):
    whole = Pass((PAST | AHEAD)[mask], term, turned)
    states, steps = [Stream(whole.mask, scores=whole.term)], []
    for stop in range(1, N + 1):
        states.append(Stream(whole.mask, scores=whole.term))
        steps.append((0, whole.push(states[stop], 0, stop)))
    for start in range(1, N):
        for stop in range(start + 1, N + 1):
            step = fork(states[start])
            steps.append((states[start].returned, whole.push(step, start, stop)))
            assert same_state(step, states[stop]), f"{start} positions and {stop - start} more"
    assert len(steps) == N * (N + 1) // 2
    end = fork(states[N])
    steps.append((end.returned, end.finish()))
    assert end.returned == end.received == N
    assert not whole.wrong(steps)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mask", AHEAD)
def test_a_stream_may_end_anywhere(mask):
    """What is still waiting then sees the keys there are: the rows of a pass over so many positions."""
    for n in range(1, N + 1):
        whole = Pass(AHEAD[mask], n=n)
        stream = Stream(whole.mask)
        steps = [(0, whole.push(stream, 0, n // 2)), (stream.returned, whole.push(stream, n // 2, n))]
        steps.append((stream.returned, stream.finish()))
        assert sum(out.shape[2] for _, out in steps) == n
        assert not whole.wrong(steps)


def test_an_empty_push_leaves_a_stream_as_it_was():
    whole = Pass(AHEAD["window both ways"])
    begun_with_nothing = Stream(whole.mask)
    assert whole.push(begun_with_nothing, 0, 0).shape == (B, H, 0, E)
    assert fork(begun_with_nothing).finish().shape == (B, H, 0, E)
    for stop in range(1, N + 1):
        stream, other = Stream(whole.mask), fork(begun_with_nothing)
        whole.push(stream, 0, stop)
        whole.push(other, 0, stop)
        assert same_state(stream, other)
        assert whole.push(other, stop, stop).shape == (B, H, 0, E)
        assert same_state(stream, other)


SOONEST = {**{name: mask for name, mask in PAST.items() if not mask.tensors() and not mask.opaque()}, **AHEAD}
for _name in ("padding both ways", "documents both ways"):
    del SOONEST[_name]  # what data will say of later keys is not known, so rows wait


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SOONEST)
def test_rows_leave_a_stream_as_soon_as_no_later_key_can_be_seen(name):
    """The delay is the look-ahead and nothing more, in pushes of any size."""
    mask, far = SOONEST[name], 60
    later = mask.dense(far)
    for size in (1, 3, 5):
        stream, given = Stream(mask), 0
        for received in range(size, 31, size):
            waits = [bool(later[row, received:].any()) for row in range(received)]
            complete = waits.index(True) if True in waits else received
            out = stream.push(*(torch.zeros(1, 1, size, 2) for _ in "qkv"))
            assert out.shape[2] == complete - given
            given = complete
            assert (stream.received, stream.returned) == (received, given)


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (causal(), [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (window(before=2, after=2), [0, 0, 1, 1, 1, 1, 1, 1, 1]),
        (blocks(3), [0, 0, 3, 0, 0, 3, 0, 0, 3]),
        (chunks(2, before=1, after=1), [0, 0, 0, 2, 0, 2, 0, 2, 0]),
        (causal() | prefix(3), [0, 0, 3, 1, 1, 1, 1, 1, 1]),
        (full(), [0] * 9),
        (padding([5]), [0] * 9),
        (padding([5]) & causal(), [1] * 9),
    ],
    ids=repr,
)
def test_a_push_gives_exactly_the_rows_that_are_complete(mask, rows):
    stream = Stream(mask)
    given = [stream.push(*(torch.zeros(1, 1, 1, 2) for _ in "qkv")).shape[2] for _ in range(9)]
    assert given == rows
    assert stream.finish().shape[2] == 9 - sum(rows)


def test_what_no_later_row_can_see_is_forgotten_by_a_stream():
    stream = Stream(window(before=4, after=3) | prefix(2))
    for _ in range(100):
        stream.push(torch.zeros(1, 2, 3, 5), torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 7))
    k, v, q = stream.tensors()
    assert (q.shape, k.shape, v.shape) == ((1, 2, 3, 5), (1, 1, 2 + 4 + 3, 5), (1, 1, 2 + 4 + 3, 7))
    assert stream.received - stream.returned == 3


def test_a_stream_holds_nothing_before_the_first_push():
    assert Stream(causal()).tensors() == ()


def test_a_finished_stream_has_no_more_to_give():
    stream = Stream(window(after=2))
    stream.push(*(torch.zeros(1, 1, 5, 2) for _ in "qkv"))
    assert stream.finish().shape[2] == 2
    assert stream.finish().shape[2] == 0


def test_a_stream_uses_its_kernel_and_beta():
    whole = Pass(window(before=2, after=1))
    stream = Stream(whole.mask, beta=0.3, kernel="reference")
    with recording() as kernels:
        out = torch.cat([whole.push(stream, 0, 9), whole.push(stream, 9, N), stream.finish()], 2)
    assert set(kernels) == {"reference"}
    expected = attend(*whole.inputs, mask=whole.mask, beta=0.3, kernel="reference")
    assert not too_far(out, expected, expected, OUTPUT)
    assert too_far(out, whole.naive, whole.truth, OUTPUT)


sides = st.integers(0, 9)
rules = st.one_of(
    st.builds(window, sides, sides),
    st.builds(chunks, st.integers(1, 6), st.integers(0, 3), st.integers(0, 1)),
    st.builds(dilated, st.integers(1, 5)),
    st.builds(prefix, st.integers(0, 5)),
    st.builds(global_tokens, st.integers(0, 3)),
    st.builds(random_links, st.integers(1, 4)),
    st.builds(lambda a, b: padding([a, b]), st.integers(0, 60), st.integers(0, 60)),
    st.builds(lambda size: documents(torch.arange(60) // size), st.integers(1, 20)),
)
masks = st.recursive(
    rules,
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=4,
)
splits = st.lists(st.integers(0, 13), min_size=3, max_size=9).filter(lambda sizes: N < sum(sizes) <= 60)
at_random = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@at_random
@given(masks, splits, st.sampled_from(TERM_NAMES), st.sampled_from(["growing", "static", "rolling"]))
def test_longer_splits_through_a_cache_give_the_rows_of_one_pass(mask, split, term, kind):
    whole = Pass(causal() & mask, term, n=sum(split), dtype=torch.float32)
    cache = {
        "growing": DynamicCache,
        "static": lambda: StaticCache(60),
        "rolling": lambda: SlidingWindowCache(whole.mask),
    }[kind]()
    steps, start = [], 0
    for size in split:
        held = whole.extend(cache, start, start + size)
        steps.append((start, whole.attend(held, start, start + size)))
        start += size
    assert cache.length == whole.n
    assert not whole.wrong(steps)


@at_random
@given(masks, splits, st.sampled_from(TERM_NAMES), st.booleans())
def test_longer_chunkings_of_a_stream_give_the_rows_of_one_pass(mask, split, term, looks_back_only):
    mask = causal() & mask if looks_back_only else mask
    whole = Pass(mask, term, n=sum(split), dtype=torch.float32)
    stream, steps, start = Stream(mask, scores=whole.term), [], 0
    for size in split:
        given = stream.returned
        steps.append((given, whole.push(stream, start, start + size)))
        start += size
    given = stream.returned
    steps.append((given, stream.finish()))
    assert stream.returned == whole.n
    assert not whole.wrong(steps)


@pytest.mark.parametrize("kind", ["growing", "rolling"])
@pytest.mark.parametrize("mask", ["causal", "attention sinks", "padding on the left", "dilated"])
def test_gradients_flow_through_a_cache_as_through_one_pass(kind, mask):
    whole = Pass(PAST[mask], "shaw", dtype=torch.float32)
    upstream = noise(B, H, N, E, seed=9)

    def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, upstream.to(out.dtype))

    def one_pass(dtype: torch.dtype, kernel: str) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in whole.inputs)
        return gradients(attend(q, k, v, mask=whole.mask, scores=whole.term, kernel=kernel), (q, k, v))

    truth, naive = one_pass(torch.float64, "reference"), one_pass(torch.float32, "eager")
    for split in ((4, 1, 6, 2), (1,) * N, (N,)):
        q, k, v = (x.detach().clone().requires_grad_() for x in whole.inputs)
        cache, start, rows = CACHES[kind](whole.mask), 0, []
        for size in split:
            piece = slice(start, start + size)
            held = cache.extend(k[:, :, piece], v[:, :, piece])
            out = attend(q[:, :, piece], held.k, held.v, mask=whole.mask, scores=whole.term, positions=held.positions)
            rows.append(out)
            start += size
        actual = gradients(torch.cat(rows, 2), (q, k, v))
        for name, *three in zip("qkv", actual, naive, truth, strict=True):
            assert not too_far(*three, GRADIENT), name


def test_gradients_flow_through_a_stream_as_through_one_pass():
    whole = Pass(AHEAD["window both ways"])
    upstream = noise(B, H, N, E, seed=9)
    results = []
    for split in ((4, 0, 5, 4), None):
        q, k, v = (x.clone().requires_grad_() for x in whole.inputs)
        if split is None:
            out = attend(q, k, v, mask=whole.mask, kernel="reference")
        else:
            stream, pieces = Stream(whole.mask), zip(*(x.split(split, 2) for x in (q, k, v)), strict=True)
            out = torch.cat([*(stream.push(*piece) for piece in pieces), stream.finish()], 2)
        results.append(torch.autograd.grad(out, (q, k, v), upstream))
    for name, actual, truth in zip("qkv", *results, strict=True):
        assert not too_far(actual, truth, truth, GRADIENT), name


def keys(n: int = 3, *, b: int = B, g: int = G, c: int = C, dtype: torch.dtype = torch.float32, device="cpu") -> Tensor:
    return torch.zeros(b, g, n, c, dtype=dtype, device=device)


def test_a_static_cache_that_is_full_says_what_would_fit():
    cache = StaticCache(7)
    cache.extend(keys(5), keys(5, c=E))
    with pytest.raises(CacheError) as full:
        cache.extend(keys(3), keys(3, c=E))
    assert str(full.value) == (
        "the cache has room for 7 positions and holds 5, so 3 more do not fit; make it StaticCache(8) or larger, "
        "or use DynamicCache()"
    )
    assert cache.length == 5
    assert cache.extend(keys(2), keys(2, c=E)).positions == Positions(5)


@pytest.mark.parametrize("capacity", [0, -3, 2.5, None])
def test_a_static_cache_needs_room(capacity):
    with pytest.raises(ConfigError, match="capacity"):
        StaticCache(capacity)


def test_a_static_cache_keeps_no_gradient_and_says_so():
    for k, v in ((keys().requires_grad_(), keys(c=E)), (keys(), keys(c=E).requires_grad_())):
        cache = StaticCache(7)
        with pytest.raises(
            CacheError, match=r"StaticCache is written in place.*DynamicCache\(\), or generate under torch.no_grad"
        ):
            cache.extend(k, v)
        assert cache.length == 0
        assert cache.tensors() == ()
        with torch.no_grad():
            assert cache.extend(k, v).k.shape[2] == 3


def test_a_static_cache_takes_its_room_once():
    cache = StaticCache(7)
    cache.extend(keys(2), keys(2, c=E))
    room = [x.data_ptr() for x in cache.tensors()]
    for _ in range(5):
        held = cache.extend(keys(1), keys(1, c=E))
        assert [x.data_ptr() for x in (held.k, held.v)] == [x.data_ptr() for x in cache.tensors()] == room


CHANGES = {
    "width": {"c": C + 1},
    "batch": {"b": B + 1},
    "heads": {"g": G + 1},
    "dtype": {"dtype": torch.float64},
    "device": {"device": "meta"},
}
ALL_CACHES = {
    "growing": DynamicCache,
    "static": lambda: StaticCache(11),
    "rolling": lambda: SlidingWindowCache(causal()),
}


@pytest.mark.parametrize("kind", ALL_CACHES)
@pytest.mark.parametrize("change", CHANGES)
def test_keys_that_do_not_continue_the_cache_are_refused(kind, change):
    cache = ALL_CACHES[kind]()
    cache.extend(keys(), keys(c=E))
    other = keys(2, **CHANGES[change])
    before = fork(cache)
    with pytest.raises(CacheError) as refused:
        cache.extend(other, keys(2, c=E))
    assert str(refused.value).startswith(
        f"k is {tuple(other.shape)} read as (b g n c), {other.dtype} on {other.device}, does not continue the cache, "
        f"which holds (2, 3, "
    )
    assert str(refused.value).endswith("torch.float32 on cpu; only the number of positions may change")
    assert same_state(cache, before)
    with pytest.raises(CacheError, match=r"v is .* does not continue the cache"):
        cache.extend(keys(2), keys(2, **{"c": E} | CHANGES[change]))
    assert same_state(cache, before)


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_keys_and_values_come_in_pairs(kind):
    cache = ALL_CACHES[kind]()
    with pytest.raises(CacheError) as odd:
        cache.extend(keys(3), keys(4, c=E))
    assert str(odd.value) == "v is (2, 3, 4, 7) read as (b g n e), but k has n=3 (positions); k and v come in pairs"
    assert cache.length == 0


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_keys_and_values_are_of_the_same_sequences_and_heads(kind):
    for other in ({"b": B + 1}, {"g": G + 1}):
        cache = ALL_CACHES[kind]()
        with pytest.raises(CacheError, match="k and v come in pairs"):
            cache.extend(keys(3), keys(3, c=E, **other))
        assert cache.length == 0


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_a_cache_takes_heads(kind):
    cache = ALL_CACHES[kind]()
    for k, v, name in ((keys()[0], keys(c=E), "k"), (keys(), keys(c=E)[0], "v")):
        with pytest.raises(ShapeError, match=f"{name} has 3 axes"):
            cache.extend(k, v)
    assert cache.length == 0


@pytest.mark.parametrize("make", [SlidingWindowCache, Stream])
@pytest.mark.parametrize("mask", [None, "causal", torch.ones(3, 3, dtype=torch.bool)])
def test_what_is_to_be_kept_is_said_by_a_mask(make, mask):
    with pytest.raises(ConfigError, match="a mask such as"):
        make(mask)


def test_a_stream_takes_a_query_with_each_key():
    stream = Stream(causal())
    with pytest.raises(CacheError) as odd:
        stream.push(keys(3, g=H), keys(4), keys(4, c=E))
    assert str(odd.value) == "a stream takes a query with each key, but q has n=3 and k n=4 (positions)"
    with pytest.raises(CacheError, match="k and v come in pairs"):
        stream.push(keys(3, g=H), keys(3), keys(4, c=E))
    assert (stream.received, stream.tensors()) == (0, ())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_does_not_continue_a_stream_is_refused_and_changes_nothing(which, change):
    stream = Stream(window(before=3, after=2))
    good = {"q": keys(g=H), "k": keys(), "v": keys(c=E)}
    stream.push(*good.values())
    before = fork(stream)
    usual = {"q": {"g": H}, "k": {}, "v": {"c": E}}[which]
    unusual = {"width": {"c": 9}, "heads": {"g": 12}}.get(change, CHANGES[change])
    with pytest.raises(RegardError):
        stream.push(*(good | {which: keys(**usual | unusual)}).values())
    assert same_state(stream, before)
    assert stream.push(*good.values()).shape == (B, H, 3, E)


def test_a_first_push_that_is_refused_changes_nothing():
    stream = Stream(causal())
    for wrong in ({"g": H, "c": C + 1}, {"g": H + 1}, {"g": H, "b": B + 1}, {"g": H, "dtype": torch.float64}):
        with pytest.raises(RegardError):
            stream.push(keys(**wrong), keys(), keys(c=E))
        assert (stream.received, stream.returned, stream.tensors()) == (0, 0, ())
    assert stream.push(keys(g=H), keys(), keys(c=E)).shape == (B, H, 3, E)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stream(padding([3, 4, 5]) & causal()),
        lambda: Stream(documents([0, 0]) & causal()),
        lambda: Stream(causal(), scores=alibi(heads=H + 1)),
        lambda: Stream(causal(), scores=softcap(2.0), kernel="sdpa"),
    ],
    ids=["a mask for another batch", "a mask for fewer positions", "a term for other heads", "a kernel that cannot"],
)
def test_what_attention_refuses_is_not_taken_in(make):
    stream = make()
    with pytest.raises(RegardError):
        stream.push(keys(g=H), keys(), keys(c=E))
    assert (stream.received, stream.returned, stream.tensors()) == (0, 0, ())


@pytest.mark.parametrize("make", [SlidingWindowCache, Stream])
def test_a_boolean_matrix_cannot_roll_on(make):
    data = torch.ones(3, 3, dtype=torch.bool)
    for mask in (as_mask(data), causal() & data, ~(causal() | data)):
        with pytest.raises(ConfigError) as fixed:
            make(mask)
        text = "a boolean matrix has fixed rows, columns or heads; write the rule with regard's masks"
        assert str(fixed.value) == text


def test_added_scores_cannot_stream():
    values = torch.zeros(3, 3)
    for scores in (values, additive(values), [alibi(heads=H), values]):
        with pytest.raises(ConfigError) as fixed:
            Stream(causal(), scores=scores)
        text = "a stream has no fixed rows and columns to add a tensor to; use a term such as alibi"
        assert str(fixed.value) == text


def test_a_stream_into_which_nothing_was_pushed_cannot_finish():
    with pytest.raises(CacheError) as empty:
        Stream(causal()).finish()
    assert str(empty.value) == "nothing was pushed into this stream, so there is nothing to finish"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_cache_is_what_it_holds(dtype):
    size = dtype.itemsize
    for kind, positions in (("growing", 3 + 2), ("static", 11), ("rolling", 3 + 2)):
        cache = ALL_CACHES[kind]()
        assert cache.nbytes == 0
        for n in (3, 2):
            cache.extend(keys(n, dtype=dtype), keys(n, c=E, dtype=dtype))
        assert cache.nbytes == B * G * positions * (C + E) * size
        assert cache.length == 5


def test_a_static_cache_holds_whole_copies_of_what_it_was_given():
    """What is written into it later, or done to the inputs, changes nothing that was handed out."""
    cache, k = StaticCache(5), torch.ones(1, 1, 2, 3)
    first = cache.extend(k, k)
    k.fill_(9)
    cache.extend(2 * torch.ones(1, 1, 2, 3), k)
    assert first.k.flatten().tolist() == [1.0] * 6
    assert cache.extend(k[:, :, :0], k[:, :, :0]).k[0, 0, :, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_sequences_go_on_from_what_others_held(kind):
    """Beams branch and sequences end: the rows of a cache are picked, doubled and dropped."""
    q, k, v = draw(7)
    rows = torch.tensor([1, 1, 0])
    with torch.no_grad():
        cache = ALL_CACHES[kind]()
        cache.extend(k[:, :, :5], v[:, :, :5])
        cache.reorder(rows)
        keys_held, values_held, positions = cache.extend(k[rows, :, 5:], v[rows, :, 5:])
        out = attend(q[rows, :, 5:], keys_held, values_held, mask=causal(), positions=positions)
        expected = attend(q, k, v, mask=causal())[rows, :, 5:]
    assert torch.allclose(out, expected)
    assert cache.length == 7


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_an_empty_cache_can_be_reordered(kind):
    cache = ALL_CACHES[kind]()
    cache.reorder(torch.tensor([0]))
    assert cache.length == 0


def test_nothing_follows_the_end_of_a_stream():
    q, k, v = draw(6)
    stream = Stream(window(before=1, after=1))
    stream.push(q, k, v)
    stream.finish()
    with pytest.raises(CacheError, match="this stream is finished"):
        stream.push(q, k, v)


@pytest.mark.parametrize("kind", ALL_CACHES)
def test_a_cache_keeps_its_own_numbers(kind):
    """The buffers of a projection may be written over before the next step."""
    cache = ALL_CACHES[kind]()
    first, second = keys(), keys(c=E)
    with torch.no_grad():
        cache.extend(first, second)
        before = [x.clone() for x in cache.tensors()]
        first.fill_(7)
        second.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.tensors(), strict=True))
