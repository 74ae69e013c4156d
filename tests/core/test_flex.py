"""flex, as far as a CPU can tell: its block masks against torch's own, its numbers, and how seldom it compiles.

On a CPU flex_attention runs forward only, so its refusals are gone round here. The numbers on a GPU, gradients too, are
held against the truth in `test_truth.py`.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

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
    softcap,
    t5_buckets,
    window,
)
from regard.core.attend import prepare_request
from regard.core.kernels import compiled_flex, flex, recording
from regard.core.kernels.compiled import write_text
from regard.core.kernels.request import Request
from regard.core.masks.expression import parse_mask
from regard.core.masks.forms import FORMS, examples
from regard.core.masks.plan_cache import Memo

B, H, G, C, E = 2, 4, 2, 16, 24


def draw(i: int, j: int, *, b: int = B, c: int = C, e: int = E, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(b, h, n, w, **options) for h, n, w in ((H, i, c), (G, j, c), (G, j, e)))
    return q, k, v


def call(*inputs: Tensor, mask=None, scores=None, beta=None, dropout=0.0, positions=None) -> Request:
    return prepare_request(*inputs, mask, scores, beta, dropout, positions)


def ran(*inputs: Tensor, **rest: Any) -> Tensor:
    """flex as it runs, whatever it would refuse."""
    with torch.no_grad():
        return flex.run(call(*inputs, **rest))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean memory, so that no test lives on what another compiled, and code without the tests' shape checks."""
    monkeypatch.setattr(flex, "_call_flex", inspect.unwrap(flex._call_flex))
    monkeypatch.setattr(flex, "_functions", {})
    monkeypatch.setattr(flex, "_plans", Memo(64))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flex_attention written out by torch itself: slow, exact, and with a log-sum-exp on the CPU too."""
    monkeypatch.setattr(flex, "_get_compiled", lambda structure: flex._call_flex)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        yield


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what the compiler traces, and spares the time to make code of it."""
    counter = CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


FAR = Mask.of("far", lambda i, j: (i - j) > 100)


def labels(n: int) -> Tensor:
    return torch.stack([torch.arange(n) // 50, torch.arange(n) // 70])


MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: causal(),
    "not causal": lambda n: ~causal(),
    "window": lambda n: window(before=30, after=7),
    "half open window": lambda n: window(before=None, after=3),
    "blocks": lambda n: blocks(50),
    "chunks": lambda n: chunks(33, before=1),
    "global tokens": lambda n: causal() & window(before=20) | global_tokens(3),
    "prefix": lambda n: prefix(70) | causal(),
    "dilated": lambda n: dilated(3) & window(before=40),
    "random links": lambda n: random_links(3, seed=2),
    "padding": lambda n: padding([n - 5, n // 3]),
    "padding to nothing": lambda n: padding([0, n]),
    "padding left": lambda n: causal() & padding([n - 5, n // 3], side="left", width=n),
    "documents": lambda n: documents(labels(n)[0]),
    "documents by sequence": lambda n: causal() & documents(labels(n)),
    "predicate": lambda n: FAR,
    "nothing": lambda n: ~full(),
}
CAUTIOUS = {"dilated", "global tokens", "prefix", "padding left", "documents by sequence"}  # may look once too often


def dense_of(asked: Request) -> Tensor:
    """Every pair, (b i j) or (1 i j)."""
    i, j = asked.q.shape[2], asked.k.shape[2]
    dense = asked.mask.dense(i, j, positions=asked.positions)
    return dense[:, 0] if dense.ndim == 4 else dense[None]


def by_torch(asked: Request, size: int) -> Any:
    """torch's own block mask, from asking about every pair."""
    dense = dense_of(asked)
    b, i, j = dense.shape
    return create_block_mask(lambda b, h, q, kv: dense[b, q, kv], b, None, i, j, device="cpu", BLOCK_SIZE=size)


def whole_blocks(block_mask: Any) -> Tensor:
    """Which blocks are taken without asking."""
    count, which = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    listed = torch.arange(which.shape[-1]) < count[..., None]
    return torch.zeros(which.shape, dtype=torch.int).scatter_reduce(-1, which.long(), listed.int(), "amax").bool()


@pytest.mark.parametrize(("i", "j"), [(300, 300), (256, 256), (129, 300), (300, 128)])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_agree_with_those_of_torch(name, i, j):
    if i > j and "documents" in name:
        i = j  # no document has a number before its beginning
    mask = MASKS[name](j)
    asked = call(*draw(i, j), mask=mask)
    ours = flex._get_plan(asked).blocks
    if ours is None:
        assert mask.dense(i, j).all()
        return
    theirs = by_torch(asked, flex.COARSE)
    seen, needed = ours.to_dense().bool(), theirs.to_dense().bool()
    assert seen.shape == needed.shape
    assert (seen | ~needed).all(), "a block with something visible is skipped"
    if name not in CAUTIOUS:
        assert torch.equal(seen, needed), "a block is looked at that holds nothing"
    assert (whole_blocks(ours) | ~whole_blocks(theirs)).all() or name in CAUTIOUS, "a whole block is asked about"
    # beyond the end there is nothing to hide: torch asks about such blocks, and the kernel looks at its bounds anyway
    pairs = torch.nn.functional.pad(dense_of(asked), (0, -j % 128, 0, -i % 128), value=True)
    whole = pairs.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).all(4).all(2)[:, None]
    assert (whole | ~whole_blocks(ours)).all(), "a block is taken whole that hides something"
    assert ours.seq_lengths == theirs.seq_lengths == (i, j)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE


@pytest.mark.parametrize("name", MASKS)
def test_the_predicate_of_a_block_mask_is_the_mask(name):
    mask = MASKS[name](130)
    for positions in (None, Positions(7), Positions(9, torch.randperm(130))):
        i = 20 if positions else 130
        asked = call(*draw(i, 130), mask=mask, positions=positions)
        ours = flex._get_plan(asked).blocks
        dense = mask.dense(i, 130, positions=asked.positions).expand(B, 1, i, 130)
        if ours is None:
            assert dense.all()
            continue
        b, q, kv = torch.arange(B)[:, None, None], torch.arange(i)[:, None], torch.arange(130)
        found = ours.mask_mod(b, torch.tensor(0), q, kv)
        assert torch.equal(found.expand(B, i, 130), dense[:, 0])


def test_fine_blocks_skip_more():
    asked = call(*draw(1024, 1024, dtype=torch.bfloat16, b=1), mask=window(before=10))
    plan = flex._get_plan(asked)
    assert plan.blocks.BLOCK_SIZE == (flex.FINE, flex.FINE)
    theirs = by_torch(asked, flex.FINE)
    assert torch.equal(plan.blocks.to_dense().bool(), theirs.to_dense().bool())
    assert plan.blocks.sparsity() > by_torch(asked, flex.COARSE).sparsity()


SPARSE = {"mask": window(before=10)}
SIZES = {
    "sparse in half precision": ({}, SPARSE, True),
    "float32": ({"dtype": torch.float32}, SPARSE, False),
    "wide heads": ({"c": 136}, SPARSE, False),
    "wide values": ({"e": 136}, SPARSE, False),
    "widest that fit": ({"c": 128, "e": 128}, SPARSE, True),
    "few queries": ({"i": 127}, SPARSE, False),
    "just enough queries": ({"i": 128}, SPARSE, True),
    "half visible": ({}, {"mask": causal()}, False),
    "everything visible": ({}, {}, False),
    "data": ({"b": 2}, {"mask": padding([10, 20])}, False),
}


@pytest.mark.parametrize("name", SIZES)
def test_small_blocks_and_tiles_are_for_what_is_sparse_and_fits_them(name):
    sizes, rest, sparse = SIZES[name]
    sizes = {"i": 1024, "j": 1024, "b": 1, "dtype": torch.bfloat16} | sizes
    plan = flex._get_plan(call(*draw(**sizes), **rest))
    assert ("fwd_BLOCK_M" in plan.options) == sparse
    if plan.blocks is not None:
        assert plan.blocks.BLOCK_SIZE[0] == (flex.FINE if sparse else flex.COARSE)


@pytest.mark.parametrize("learned", ["q", "k", "v", "slopes", "nothing", "nothing, without gradients"])
def test_training_keeps_to_the_blocks_that_have_a_gradient(learned):
    """flex's backward takes blocks of 128 only; the small tiles are used all the same."""
    tensors = dict(zip("qkv", draw(512, 512, b=1, dtype=torch.bfloat16), strict=True)) | {"slopes": torch.rand(H)}
    for name, x in tensors.items():
        x.requires_grad_(name == learned or "without" in learned)
    slopes = tensors.pop("slopes")
    with torch.set_grad_enabled("without" not in learned):
        plan = flex._get_plan(call(*tensors.values(), **SPARSE, scores=alibi(slopes=slopes)))
    assert plan.blocks.BLOCK_SIZE[0] == (flex.FINE if "nothing" in learned else flex.COARSE)
    assert "fwd_BLOCK_M" in plan.options


@pytest.mark.parametrize(("i", "j"), [(256, 384), (256, 300), (300, 256), (130, 130)])
def test_divisible_lengths_are_told_to_the_compiler(i, j):
    plan = flex._get_plan(call(*draw(i, j), mask=causal()))
    assert plan.options["IS_DIVISIBLE"] == (i % 128 == j % 128 == 0)


TERMS: dict[str, Callable[[int, int], Any]] = {
    "alibi": lambda i, j: alibi(slopes=torch.rand(H)),
    "t5": lambda i, j: t5_buckets(torch.randn(12, H), max_distance=50),
    "t5 one way": lambda i, j: t5_buckets(torch.randn(12, H), max_distance=50, bidirectional=False),
    "shaw": lambda i, j: shaw(torch.randn(11, C)),
    "softcap": lambda i, j: softcap(1.5),
    "sink": lambda i, j: sink(torch.randn(H)),
    "added (i j)": lambda i, j: [additive(torch.randn(i, j)), softcap(9.0)],
    "added (b h i j)": lambda i, j: [additive(torch.randn(B, H, i, j)), softcap(9.0)],
    "added (h 1 j)": lambda i, j: [additive(torch.randn(H, 1, j)), softcap(9.0)],
}


@pytest.mark.parametrize(
    "positions", [Positions(0), Positions(31, 3), Positions(31, torch.randperm(130))], ids=["0", "3", "any"]
)
def test_a_single_score_becomes_what_the_terms_make_of_it(positions):
    """As the kernel asks: one score at a time, by index, in its own precision."""
    q, k, v = draw(33, 130)
    terms = [alibi(slopes=torch.rand(H)), additive(torch.randn(H, 33, 1)), softcap(2.0), shaw(torch.randn(11, C))]
    asked = call(q, k, v, scores=terms, positions=positions)
    modify = flex._score_mod(asked.bound_terms(), flex._position_function(positions, q.device))
    whole = torch.zeros(B, H, 33, 130)
    for bound in asked.bound_terms():
        whole = bound(whole, asked.grid())
    for b, h, row, column in ((0, 0, 0, 0), (1, 3, 32, 129), (0, 2, 7, 64), (1, 1, 20, 3)):
        at = (torch.tensor(index) for index in (b, h, row, column))
        one = modify(torch.zeros((), dtype=torch.float64), *at)
        assert one.dtype == torch.float64
        assert one.item() == pytest.approx(whole[b, h, row, column].item(), rel=1e-5)


def assert_true(inputs: tuple[Tensor, Tensor, Tensor], **rest: Any) -> None:
    out = ran(*inputs, **rest)
    truth = attend(*(x.double() for x in inputs), **rest, kernel="reference")
    assert out.dtype == inputs[0].dtype
    assert torch.allclose(out.double(), truth, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", TERMS)
def test_a_term_alone(name, uncompiled):
    assert_true(draw(33, 130), scores=TERMS[name](33, 130))


def test_several_terms_in_order(uncompiled):
    terms = [additive(torch.randn(33, 1)), softcap(1.0), alibi(heads=H), sink(torch.randn(H)), sink(torch.randn(H))]
    assert_true(draw(33, 130), scores=terms, mask=causal())


@pytest.mark.parametrize("name", ["causal", "padding to nothing", "documents by sequence", "random links", "nothing"])
def test_a_mask_with_a_term_and_a_sink(name, uncompiled):
    """Blind rows give zeros beside a sink too, and keys that nobody sees may hold anything."""
    q, k, v = draw(130, 130)
    mask = MASKS[name](130)
    assert_true((q, k, v), mask=mask, scores=[alibi(heads=H), sink(torch.randn(H))])
    unseen = ~mask.dense(130).expand(B, 1, 130, 130).any(2)[..., None]
    dirty = (q, k.masked_fill(unseen, torch.nan), v.masked_fill(unseen, torch.inf))
    assert torch.equal(ran(*dirty, mask=mask), ran(q, k, v, mask=mask))


@pytest.mark.parametrize(
    "positions",
    [
        Positions(0),
        Positions(31),
        Positions(140, 3),
        Positions(31, torch.randperm(130)),
        Positions(200, torch.arange(130) * 2),
    ],
    ids=["both at 0", "queries ahead", "both ahead", "any order", "gaps"],
)
def test_positions_go_where_the_call_stands(positions, uncompiled):
    mask = causal() & window(before=40) | global_tokens(3)
    assert_true(draw(33, 130), mask=mask, scores=[alibi(heads=H), shaw(torch.randn(11, C))], positions=positions)


@pytest.mark.parametrize("beta", [0.0, 0.5, -0.3])
def test_beta_is_taken_as_it_is(beta, uncompiled):
    assert_true(draw(33, 130), mask=causal(), scores=shaw(torch.randn(11, C)), beta=beta)


def test_half_precision_sinks_leave_the_dtype(uncompiled):
    inputs = [x.bfloat16() for x in draw(33, 130)]
    logits = torch.randn(H)
    out = ran(*inputs, scores=sink(logits))
    truth = attend(*(x.double() for x in inputs), scores=sink(logits.double()), kernel="reference")
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), truth, atol=0.03)


def test_compiled_code_for_a_window_serves_other_lengths():
    """The real compiler, once for one length and once for all others."""
    for n in (130, 300, 450):
        assert_true(draw(n, n), mask=causal() & window(before=20))


def test_compiled_code_with_data_and_a_term():
    assert_true(
        draw(129, 300), mask=causal() & documents(labels(300)), scores=t5_buckets(torch.randn(12, H), max_distance=50)
    )


LENGTHS = (130, 300, 450, 256, 384)  # three that 128 does not divide and two that it does


@pytest.mark.parametrize("name", ["window", "padding left", "predicate"])
def test_only_the_first_two_lengths_compile(name, compilations):
    for n in LENGTHS:
        ran(*draw(n, n, c=4, e=4), mask=MASKS[name](n))
    assert compilations.frame_count <= 4
    assert len(flex._functions) <= 2


@pytest.mark.parametrize("name", ["t5", "sink", "added (h 1 j)"])
def test_only_the_first_two_lengths_compile_with_a_term(name, compilations):
    for n in LENGTHS:
        ran(*draw(n, n), mask=causal(), scores=TERMS[name](n, n))
    assert compilations.frame_count <= 4
    assert len(flex._functions) <= 2


def test_only_the_first_two_batches_compile(compilations):
    for b in (2, 3, 5, 7):
        ran(*draw(300, 300, b=b), mask=causal())
    assert compilations.frame_count <= 2


def test_a_step_of_a_cache_compiles_nothing_anew(compilations):
    for step in range(6):
        ran(*draw(1, 300), mask=causal(), positions=Positions(100 + step))
    assert compilations.frame_count == 1
    for step in range(6):
        ran(*draw(1, 300), mask=causal(), positions=Positions(100 + step, torch.arange(300)))
    assert compilations.frame_count == 2


def test_new_data_compiles_nothing_anew(compilations):
    for shift in range(5):
        ran(*draw(300, 300), mask=causal() & documents(labels(300) + shift), scores=alibi(slopes=torch.rand(H)))
        ran(*draw(300, 300), mask=causal() & documents(labels(300) + shift), scores=alibi(slopes=torch.rand(H)))
    assert compilations.frame_count == 1


def test_another_temperature_does_not_use_up_the_compiler():
    """A schedule of beta over a training run is more values than the compiler would make code for."""
    inputs = draw(130, 130)
    with torch._dynamo.config.patch(recompile_limit=2):
        for beta in (0.1, 0.2, 0.3, 0.4):
            assert_true(inputs, mask=causal(), beta=beta)


def test_another_structure_has_code_of_its_own(compilations):
    """The compiler gives up on a function after a few recompilations; no mask may use up another's."""
    for before in range(9):
        ran(*draw(130, 130), mask=window(before=before))
    assert compilations.frame_count == 9
    assert len(flex._functions) == 9
    assert len({function.__name__ for function in flex._functions.values()}) == 9


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    calls: list[Request] = []
    original = flex._build_plan

    def noted(asked: Request, training: bool) -> flex.BlockMaskPlan:
        calls.append(asked)
        return original(asked, training)

    monkeypatch.setattr(flex, "_build_plan", noted)
    return calls


def test_a_plan_is_remembered(planned):
    ids = labels(130)
    for _ in range(2):
        flex._get_plan(call(*draw(130, 130), mask=causal() & documents(ids)))
    assert len(planned) == 1
    ids[:, 60:] += 1
    flex._get_plan(call(*draw(130, 130), mask=causal() & documents(ids)))
    assert len(planned) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"mask": window(before=11)},
        {"positions": Positions(1)},
        {"scores": softcap(2.0)},
        {"i": 129},
        {"j": 131},
        {"b": 1},
        {"c": 32},
        {"e": 32},
        {"dtype": torch.bfloat16},
        {"requires_grad": True},
    ],
    ids=str,
)
def test_a_plan_is_for_calls_of_one_kind(other, planned):
    sizes = {"i": 130, "j": 130}
    own = {name: other[name] for name in other if name not in ("mask", "positions", "scores")}
    rest = {name: other[name] for name in other if name in ("mask", "positions", "scores")}
    flex._get_plan(call(*draw(**sizes), **SPARSE))
    flex._get_plan(call(*draw(**sizes | own), **SPARSE | rest))
    assert len(planned) == 2


def test_positions_of_single_keys_are_planned_for_each_time(planned):
    for _ in range(2):
        flex._get_plan(call(*draw(5, 130), mask=causal(), positions=Positions(9, torch.arange(130))))
    assert len(planned) == 2


REFUSALS = {
    "on a GPU": ({}, {}, []),
    "float64": ({"dtype": torch.float64}, {}, ["it computes in float32 at most, and q is float64"]),
    "dropout": ({}, {"dropout": 0.1}, ["it has no dropout"]),
    "hard": ({}, {"beta": torch.inf}, ["beta=inf is hard attention, and it knows only softmax"]),
    "matrix": (
        {},
        {"mask": causal() & torch.ones(130, 130, dtype=torch.bool)},
        ["a boolean matrix has no blocks that can be skipped; write the rule with regard's masks"],
    ),
    "empty": ({"i": 0}, {}, ["it does not take empty tensors"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_refuses(name):
    sizes, rest, reasons = REFUSALS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = draw(**{"i": 130, "j": 130, "dtype": torch.bfloat16, "device": "cuda"} | sizes)
        assert flex.refusals(call(*inputs, **rest)) == reasons


@pytest.mark.parametrize(("c", "e"), [(15, 16), (16, 8)])
def test_it_refuses_heads_narrower_than_its_tiles(c, e):
    """flex's code for GPUs multiplies tiles of at least 16 numbers and raises on fewer."""
    with FakeTensorMode():
        inputs = draw(130, 130, c=c, e=e, dtype=torch.bfloat16, device="cuda")
    reasons = flex.refusals(call(*inputs))
    assert len(reasons) == 1
    assert "16" in reasons[0]


def test_it_refuses_a_cpu_and_all_else_at_once():
    asked = call(*draw(0, 130, dtype=torch.float64), dropout=0.1, beta=torch.inf)
    assert flex.refusals(asked) == [
        "it needs a GPU, but q is on cpu",
        "it computes in float32 at most, and q is float64",
        "it has no dropout",
        "beta=inf is hard attention, and it knows only softmax",
        "it does not take empty tensors",
    ]


def test_it_refuses_inside_transforms_and_the_compiler(monkeypatch):
    reasons = []

    q, k, v = draw(130, 130)

    def look(q: Tensor) -> Tensor:
        reasons.extend(flex.refusals(call(q, k, v)))
        return q.sum()

    torch.func.vmap(look)(q[None])
    assert "it has no rule for torch.func transforms, forward-mode and second derivatives" in reasons
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for rest, refused in (
        ({}, False),
        ({"mask": FAR & causal()}, True),
        ({"mask": causal(), "positions": Positions(9, torch.arange(130))}, True),
    ):
        assert (compiled_flex.LIMITS in flex.refusals(call(*draw(130, 130), **rest))) == refused, rest


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code takes flex on the CPU too, with gradients, where torch writes it out."""
    monkeypatch.setattr(flex, "refusals", lambda request: [])
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *inputs: None)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
        yield
    torch._dynamo.reset()


COMPILED: dict[str, Callable[[int], dict[str, Any]]] = {
    "window": lambda n: {"mask": causal() & window(before=30)},
    "global": lambda n: {"mask": causal() & window(before=30) | global_tokens(3)},
    "hidden rows and keys": lambda n: {"mask": ~causal() & window(before=None, after=9)},
    "nothing": lambda n: {"mask": ~full()},
    "padding": lambda n: {"mask": causal() & padding([n - 5, n // 3])},
    "documents": lambda n: {"mask": causal() & documents(labels(n))},
    "softcap of all": lambda n: {"scores": softcap(3.0)},
    "alibi and sink": lambda n: {"mask": causal(), "scores": [alibi(heads=H), sink(torch.ones(H))]},
    "t5": lambda n: {"mask": causal(), "scores": t5_buckets(torch.linspace(-1, 1, 8 * H).view(8, H), max_distance=9)},
    "shaw": lambda n: {"mask": causal(), "scores": shaw(torch.linspace(-1, 1, 9 * C).view(9, C))},
    "added and cap": lambda n: {"mask": causal(), "scores": [torch.linspace(-1, 1, n)[:, None], softcap(2.0)]},
    "beta": lambda n: {"mask": causal(), "beta": 0.7},
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_runs_it_with_gradients_at_all_lengths(case, dynamic, traceable):
    counter = CompileCounter()
    run = lambda inputs, rest: attend(*inputs, kernel="flex", **rest)  # noqa: E731
    fast = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for n in (256, 384, 203, 301):
        rest = COMPILED[case](n)
        inputs = [x.requires_grad_() for x in draw(n, n)]
        with recording() as names:
            out = fast(inputs, rest)
        assert names == ["flex"]
        expected = attend(*inputs, kernel="eager", **rest)
        assert torch.allclose(out, expected, atol=2e-6, rtol=2e-6)
        upstream = torch.randn_like(out)
        grads = (torch.autograd.grad(x, inputs, upstream) for x in (out, expected))
        for own, other in zip(*grads, strict=True):
            assert torch.allclose(own, other, atol=1e-5, rtol=1e-5)
    # the first length by itself, then lengths that are multiples of 128, then all others
    assert counter.frame_count <= (2 if dynamic else 3)


def test_compiled_code_sees_data_that_change(traceable):
    inputs, lengths = draw(331, 331), torch.tensor([300, 20])
    fast = torch.compile(lambda *x: attend(*x[:3], mask=causal() & padding(x[3]), kernel="flex"), backend="eager")
    with torch.no_grad():
        fast(*inputs, lengths)
        lengths[0] = 9
        expected = attend(*inputs, mask=causal() & padding([9, 20]), kernel="eager")
        assert torch.allclose(fast(*inputs, lengths), expected, atol=2e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_hidden_keys_and_rows_may_hold_nan_in_compiled_code(dynamic, traceable):
    q, k, v = draw(150, 150)
    k[:, :, 141:], v[:, :, 141:] = torch.nan, torch.nan
    q[:, :, :7] = torch.nan
    mask = ~window(before=6, after=None) & padding([141, 20])
    fast = torch.compile(lambda *x: attend(*x, mask=mask, kernel="flex"), dynamic=dynamic, backend="eager")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fast(*leaves)
    assert torch.allclose(out, attend(*leaves, mask=mask, kernel="eager"), atol=2e-6)
    assert not out.isnan().any()
    assert not any(x.isnan().any() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(
    ("mask", "positions", "may"),
    [
        (full(), None, False),
        (causal(), None, False),
        (causal(), Positions(20), False),
        (causal(), Positions(5), True),
        (causal() & window(before=3), None, False),
        (causal() & window(before=3), Positions(20), True),
        (causal() & (window(before=3) | global_tokens(2)), None, False),
        (chunks(7, before=1) & dilated(3), None, False),
        (documents(torch.arange(90) // 4), None, False),
        (causal() & padding([3, 9]), None, True),
        (~causal(), None, True),
        (window(before=3) | ~causal(), None, False),
    ],
    ids=str,
)
def test_masks_that_hide_no_row_and_no_key_are_recognised(mask, positions, may):
    """A wrong no would let NaN of hidden keys through; a wrong yes only costs time."""
    asked = call(*draw(70, 90 if positions else 70), mask=mask, positions=positions)
    assert compiled_flex.may_hide_rows(asked) == may


@pytest.mark.parametrize("form", FORMS)
def test_no_mask_that_hides_a_row_or_a_key_is_taken_for_one_that_does_not(form):
    n = 45
    for text in examples(form, n):
        for mask in (parse_mask(f"{text}{rest}") for rest in ("", " & causal()", " | causal()", " & ~causal()")):
            for i in (n, 20):
                asked = call(*draw(i, n, b=mask.batch() or B), mask=mask)
                dense = mask.dense(i, n)
                hides = not (dense.any(-1).all() and dense.any(-2).all())
                assert compiled_flex.may_hide_rows(asked) or not hides, (mask, i)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "predicate"])
@pytest.mark.parametrize("size", [64, 128])
def test_lists_for_compiled_code_are_those_of_torch(name, size):
    """Of key blocks and, for the backward pass, of query blocks; with the strides that compiled code expects."""
    n = 300
    asked = call(*draw(n, n), mask=MASKS[name](n))
    mask = asked.mask
    state = mask.block_table(n, n, size).state
    peer = flex.block_mask(state if state.ndim == 3 else state[None], lambda b, h, i, j: i >= j, n, n, size)
    operator = torch.ops.regard.block_lists_of_data if mask.tensors() else torch.ops.regard.block_lists
    settings = (write_text(mask), 0, 0, n, n, mask.batch() or 1, size, True, True)
    arguments = (torch.zeros(1, 1, 1, 1), list(mask.tensors()), *settings)
    torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
    *lists, unseen, blind = operator(*arguments)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    for count, which, own_count, own_which in zip(
        *(names[x::2] for x in (0, 1)), *(lists[x::2] for x in (0, 1)), strict=True
    ):
        expected = getattr(peer, count)
        assert torch.equal(own_count, expected.expand_as(own_count))
        listed = torch.arange(own_which.shape[-1]) < own_count[..., None]
        assert torch.equal(own_which[listed], getattr(peer, which).expand_as(own_which)[listed])
    dense = dense_of(asked)
    assert torch.equal(unseen[:, 0, :, 0], ~dense.any(-2))
    assert torch.equal(blind[:, 0, :, 0], ~dense.any(-1))
