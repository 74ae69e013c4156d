"""The choice between kernels, what `explain` tells of it, and that each kernel does the work it claims."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import (
    Mask,
    Positions,
    additive,
    alibi,
    attend,
    causal,
    chunks,
    dilated,
    documents,
    explain,
    full,
    global_tokens,
    padding,
    prefix,
    random_links,
    recording,
    shaw,
    sink,
    softcap,
    window,
)
from regard.base.errors import ConfigError, KernelRefusedError, ShapeError
from regard.core import kernels
from regard.core.attend import prepare_request
from regard.core.kernels import KERNELS, blocked, cpu_flash, eager, flex, sdpa
from regard.core.kernels.request import Request, in_unsupported_transform, sum_terms
from regard.core.masks import as_mask
from regard.core.masks.plan_cache import Memo

B, H, G, I, J, C, E = 2, 6, 3, 7, 11, 5, 9  # noqa: E741 (the letters of the legend)


def draw(i: int = I, j: int = J, *, b: int = B, c: int = C, e: int = E, **options: object) -> tuple[Tensor, ...]:
    return tuple(torch.randn(b, h, n, w, **options) for h, n, w in ((H, i, c), (G, j, c), (G, j, e)))


def settled(*inputs: Tensor, mask=None, scores=None, beta=None, dropout=0.0, positions=None) -> Request:
    return prepare_request(*inputs, mask, scores, beta, dropout, positions)


def on_gpu(i: int, j: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> tuple[Tensor, ...]:
    """Tensors that say they lie on a GPU and hold nothing."""
    with FakeTensorMode():
        return draw(i, j, dtype=dtype, device="cuda", **sizes)


LONG = {"i": 2048, "j": 2048, "b": 1}
CHOICES = {
    "full": ({}, {}, "sdpa"),
    "causal": ({}, {"mask": causal()}, "sdpa"),
    "long and causal": (LONG, {"mask": causal()}, "sdpa"),
    "short window": ({}, {"mask": causal() & window(before=3)}, "sdpa"),
    "long window": (LONG, {"mask": causal() & window(before=63)}, "blocked"),
    "long chunks": (LONG, {"mask": chunks(64, before=1)}, "blocked"),
    "long window with slopes": (LONG, {"mask": window(before=63), "scores": alibi(heads=H)}, "blocked"),
    "long window with a sink": (LONG, {"mask": window(before=63), "scores": sink(torch.zeros(H))}, "blocked"),
    "long window with dropout": (LONG, {"mask": window(before=63), "dropout": 0.1}, "blocked"),
    "long and half hidden": (LONG, {"mask": causal() | prefix(3)}, "blocked"),
    "long and nearly full": (LONG, {"mask": ~window(before=3)}, "sdpa"),
    "matrix": ({}, {"mask": torch.ones(I, J, dtype=torch.bool)}, "sdpa"),
    "slopes": ({}, {"scores": alibi(heads=H)}, "sdpa"),
    "dropout": ({}, {"dropout": 0.2}, "sdpa"),
    "softcap": ({}, {"scores": softcap(3.0)}, "eager"),
    "window with a cap": ({"i": 257, "j": 257}, {"mask": window(before=63), "scores": softcap(3.0)}, "eager"),
    "hard": ({}, {"beta": math.inf, "mask": causal()}, "eager"),
    "mean": ({}, {"beta": 0.0, "mask": causal()}, "sdpa"),
    "no keys": ({"j": 0}, {}, "sdpa"),
    "no queries": ({"i": 0}, {"mask": causal() & window(before=3)}, "sdpa"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_the_fastest_that_can(name):
    sizes, rest, expected = CHOICES[name]
    inputs = draw(**sizes)
    assert kernels.choose_kernel(settled(*inputs, **rest)) == expected
    with recording() as ran:
        attend(*inputs, **rest)
    assert ran == [expected]
    explained = explain(*inputs, **rest)
    assert explained.chosen == expected
    able = {answer.kernel: answer.work for answer in explained.answers if answer.able}
    if expected != "eager":
        assert able[expected] == min(able.values())


ON_A_GPU = {
    "full": ({"mask": None}, "sdpa"),
    "causal": ({"mask": causal()}, "sdpa"),
    "long window": ({"mask": causal() & window(before=63)}, "flex"),
    "padding": ({"mask": padding([500, 2048])}, "flex"),
    "softcap": ({"scores": softcap(3.0)}, "flex"),
    "hard": ({"beta": math.inf}, "eager"),
    "dropout": ({"mask": window(before=63), "dropout": 0.1}, "blocked"),
    "matrix": ({"mask": torch.ones(2048, 2048, dtype=torch.bool)}, "sdpa"),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_choice_on_a_gpu(name):
    rest, expected = ON_A_GPU[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = draw(2048, 2048, dtype=torch.bfloat16, device="cuda", c=64, e=64)
        assert kernels.choose_kernel(settled(*inputs, **rest)) == expected


def test_a_short_call_on_a_gpu_is_not_worth_a_compiled_kernel():
    assert kernels.choose_kernel(settled(*on_gpu(128, 128, c=64, e=64), mask=window(before=5))) == "sdpa"
    assert kernels.choose_kernel(settled(*on_gpu(1024, 1024, c=64, e=64), mask=window(before=5))) == "flex"


def test_inside_vmap_the_kernel_is_one_that_has_a_rule_for_it():
    inputs = [x[None] for x in draw()]
    with recording() as ran:
        torch.func.vmap(attend)(*inputs)
        torch.func.jacrev(lambda q: attend(q, *draw()[1:], kernel="eager").sum())(inputs[0][0])
    assert ran == ["eager", "eager"]
    with pytest.raises(KernelRefusedError, match="torch's fused attention has no rule for vmap"):
        torch.func.vmap(lambda *x: attend(*x, kernel="sdpa"))(*inputs)


def test_transforms_are_told_apart():
    told = []

    def look(x: Tensor) -> Tensor:
        told.append(in_unsupported_transform(x.device))
        return x.sum()

    look(torch.ones(3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    torch.func.grad(lambda x: torch.func.grad(look)(x).sum())(torch.ones(3))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(3))
    assert told == [False, False, True, True, True, True]


@pytest.mark.parametrize("name", ["flex", "sdpa", "blocked"])
def test_a_kernel_asked_by_name_gives_all_its_reasons(name):
    inputs = draw(dtype=torch.float64, c=16, e=24)
    rest = {"mask": torch.ones(H, I, J, dtype=torch.bool), "scores": [softcap(2.0), alibi(heads=H)], "beta": math.inf}
    if name == "flex":
        rest = {"mask": rest["mask"], "beta": math.inf, "dropout": 0.5}
    expected = {
        "flex": [
            "it needs a GPU, but q is on cpu",
            "it computes in float32 at most, and q is float64",
            "it has no dropout",
            "beta=inf is hard attention, and it knows only softmax",
            "a boolean matrix has no blocks that can be skipped; write the rule with regard's masks",
        ],
        "sdpa": [
            "beta=inf is hard attention, and the fused kernels know only softmax",
            "softcap does more than add to the scores, which is all the fused kernels allow",
        ],
        "blocked": [
            "beta=inf is hard attention, and the fused kernels know only softmax",
            "softcap does more than add to the scores, which is all the fused kernels allow",
            "a boolean matrix has no blocks that can be skipped; write the rule with regard's masks",
        ],
    }[name]
    with pytest.raises(KernelRefusedError) as caught:
        attend(*inputs, **rest, kernel=name)
    assert caught.value.kernel == name
    assert caught.value.reasons == expected
    text = str(caught.value)
    assert text.startswith(f"kernel '{name}' refuses this call:\n  - {expected[0]}\n")
    answer = next(answer for answer in explain(*inputs, **rest).answers if answer.kernel == name)
    assert (answer.reasons, answer.able, answer.work, answer.memory) == (tuple(expected), False, math.inf, 0)


def test_a_call_that_nobody_serves_is_refused_by_all():
    with pytest.raises(KernelRefusedError) as caught:
        attend(*draw(), beta=math.inf, scores=[alibi(heads=H), softcap(2.0)])
    assert caught.value.kernel is None
    assert caught.value.reasons == [
        "at beta=inf only the largest q . k counts, so alibi, softcap would be lost; drop the terms"
    ]
    assert str(caught.value).startswith("no kernel can serve this call:\n  - at beta=inf")


def test_a_kernel_goes_by_its_name():
    with pytest.raises(ConfigError, match="kernel must be a name such as 'sdpa'"):
        attend(*draw(), kernel=sdpa)


VISIBLE = {
    "none": lambda: None,
    "causal": causal,
    "window and global": lambda: causal() & window(before=2) | global_tokens(2),
    "padding": lambda: padding([3, 9]),
    "causal padding": lambda: causal() & padding([3, 9], side="left", width=J),
    "documents": lambda: documents(torch.arange(J) // 4),
    "documents by sequence": lambda: documents(torch.arange(2 * J).view(2, J) // 3),
    "documents and padding": lambda: documents(torch.arange(J) // 4) & padding([3, 9]),
    "random links": lambda: random_links(3, seed=1),
    "predicate": lambda: Mask.of("thirds", lambda i, j: (i + j) % 3 == 0),
    "nothing": lambda: ~full(),
    "matrix": lambda: torch.rand(I, J) > 0.4,
    "matrix by head": lambda: torch.rand(H, I, J) > 0.4,
    "matrix by sequence": lambda: torch.rand(B, 1, I, J) > 0.4,
    "matrix by both": lambda: torch.rand(B, H, I, J) > 0.4,
    "matrix by head and padding": lambda: padding([3, 9]) & (torch.rand(H, I, J) > 0.4),
}


@pytest.mark.parametrize("name", VISIBLE)
def test_visible_pairs_are_counted_over_all_sequences_and_heads(name):
    """V = 1 at one key and q = 0 show what is visible: the count is that of weights which are not zero."""
    mask = VISIBLE[name]()
    q, k, _ = draw()
    explained = explain(q, k, torch.zeros(B, G, J, E), mask=mask)
    weights = attend(0 * q, k, torch.eye(J).expand(B, G, J, J), mask=mask, kernel="eager")
    assert explained.visible == (weights > 0).sum()
    assert explained.pairs == B * H * I * J


def test_visible_pairs_go_by_places():
    inputs = draw()
    for positions in (Positions(2), Positions(30, 3), Positions(4, torch.tensor([4, 0, 8, 30, 2, 1, 5, 3, 7, 6, 9]))):
        weights = attend(0 * inputs[0], inputs[1], torch.eye(J).expand(B, G, J, J), mask=causal(), positions=positions)
        assert explain(*inputs, mask=causal(), positions=positions).visible == (weights > 0).sum()


def test_memory_is_told_in_bytes():
    """Each estimate by its own reckoning, in float32 and in half precision."""
    i, j = 65, 129
    mask = window(before=9)
    tables = mask.block_table(i, j, 64)
    touched = tables.visited
    assert touched == 4
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)):
        inputs = draw(i, j, dtype=dtype)
        pairs = B * H * i * j
        masked, plain, added = (
            {answer.kernel: answer.memory for answer in explain(*inputs, **rest).answers}
            for rest in ({"mask": mask}, {}, {"mask": mask, "scores": alibi(heads=H)})
        )
        for answers in (masked, plain, added):
            assert answers["eager"] == 9 * pairs * max(4, size) // 2  # four steps in float32 at least, and booleans
            assert answers["reference"] == 9 * pairs * 8 // 2
        assert plain["sdpa"] == 4 * B * H * i  # a log-sum-exp for each row
        assert masked["sdpa"] == i * j * (1 + size)  # one matrix for all, boolean and as torch adds it
        assert added["sdpa"] == 2 * B * H * i * (j + 1) * size  # the terms, and once more with the mask
        assert masked["blocked"] == B * H * touched * 64 * (C + E) * size + touched * 64 * 64
        assert added["blocked"] == masked["blocked"] + B * H * touched * 64 * 64 * size


def test_memory_of_a_dense_mask_counts_what_the_mask_tells_apart():
    inputs = draw()
    for shape in ((I, J), (H, I, J), (B, 1, I, J), (B, H, I, J)):
        mask = torch.ones(shape, dtype=torch.bool)
        assert sdpa.memory(settled(*inputs, mask=mask)) == mask.numel() * (1 + 4), shape


def test_memory_of_flex_is_a_number_a_row_and_a_list_of_blocks():
    call = settled(*on_gpu(130, 257, c=64, e=64), mask=window(before=9))
    assert flex.memory(call) == 4 * B * H * 130 + 16 * 3 * 5


def test_work_is_what_is_computed_weighted_by_its_time():
    inputs = draw(200, 200, b=1)
    pairs = H * 200 * 200
    for rest, expected in (
        ({}, {"sdpa": pairs, "eager": 4 * pairs, "reference": 100 * pairs}),
        ({"mask": causal()}, {"sdpa": 0.6 * pairs, "eager": 4 * pairs, "blocked": 1.5 * H * 10 * 64 * 64 + 2e5}),
        ({"mask": window(before=3)}, {"sdpa": 1.3 * pairs, "blocked": 1.5 * H * 7 * 64 * 64 + 2e5}),
    ):
        work = {answer.kernel: answer.work for answer in explain(*inputs, **rest).answers}
        for name, amount in expected.items():
            assert work[name] == pytest.approx(amount), name


def test_work_where_the_data_lies_on_a_gpu_asks_for_no_data():
    """Reading lengths back would make the host wait; half the blocks are taken to be visible, or all."""
    mask = padding([100, 256])
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = draw(256, 256, dtype=torch.bfloat16, device="cuda", c=64, e=64)
        call = settled(*inputs, mask=mask)
        pairs = B * H * 256 * 256
        assert blocked.work(call) == 2 * pairs
        assert flex.work(call) == pytest.approx(1.1 * 0.5 * pairs + 2e6)


def test_an_explanation_reads_as_a_table():
    explained = explain(*draw(256, 256, c=16, e=24), mask=causal() & window(before=3), scores=softcap(2), dropout=0.25)
    # a kernel that is added has a line of its own, and may be chosen instead of eager
    few = tuple(each for each in explained.answers if each.kernel in ("flex", "sdpa", "blocked", "eager", "reference"))
    assert str(replace(explained, chosen="eager", answers=few)) == "\n".join(
        [
            "b=2 h=6 g=3 i=256 j=256 c=16 e=24, torch.float32 on cpu, beta=0.25",
            "mask causal() & window(before=3): 12,216 of 786,432 pairs visible (1.6%)",
            "   flex       refuses: it needs a GPU, but q is on cpu; it has no dropout",
            "   sdpa       refuses: softcap does more than add to the scores, which is all the fused kernels allow",
            "   blocked    refuses: softcap does more than add to the scores, which is all the fused kernels allow",
            "-> eager      runs: work 3.15e+06 entries, memory 13.5 MiB",
            "   reference  could run: work 7.86e+07 entries, memory 27.0 MiB",
        ]
    )


def test_an_explanation_of_a_call_that_nobody_serves_marks_nobody():
    explained = explain(*draw(), beta=math.inf, scores=alibi(heads=H))
    assert explained.chosen is None
    assert not any(answer.able for answer in explained.answers)
    assert "->" not in str(explained)


def test_an_explanation_of_nothing_has_no_share():
    assert "mask full(): 0 of 0 pairs visible (0.0%)" in str(explain(*draw(i=0)))


def test_every_kernel_says_what_it_is():
    assert list(KERNELS)[-1] == "reference", "give a new kernel a RANK below that of reference"
    ranks = [KERNELS[name].RANK for name in KERNELS]
    assert len(set(ranks)) == len(ranks), f"two kernels have the same RANK: {ranks}"
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert not [name for name in KERNELS if f"| `{name}` |" not in page], "add it to the table in docs/kernels.md"
    assert list(KERNELS) == sorted(KERNELS, key=lambda name: KERNELS[name].RANK)
    assert all(KERNELS[name].SUMMARY for name in KERNELS)
    assert {answer.kernel: answer.summary for answer in explain(*draw()).answers} == {
        name: KERNELS[name].SUMMARY for name in KERNELS
    }
    assert len({KERNELS[name].SUMMARY for name in KERNELS}) == 5


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 42, "12288.0 GiB"),
    ],
)
def test_bytes_are_written_for_people(size, text):
    assert kernels.format_bytes(size) == text


def test_a_recording_names_what_ran_in_order():
    with recording() as ran:
        attend(*draw())
        attend(*draw(), kernel="eager")
        attend(*draw(), mask=window(before=2), kernel="blocked")
    assert ran == ["sdpa", "eager", "blocked"]
    attend(*draw())
    assert ran == ["sdpa", "eager", "blocked"]


def test_recordings_nest_and_each_ends_by_itself():
    with recording() as outer:
        attend(*draw(), kernel="eager")
        with recording() as inner:
            attend(*draw(), kernel="reference")
        attend(*draw(), kernel="sdpa")
    assert outer == ["eager", "reference", "sdpa"]
    assert inner == ["reference"]
    with recording() as one, recording() as two:
        attend(*draw())
    assert one == two == ["sdpa"]
    assert one is not two


def test_a_recording_ends_after_an_error_too():
    def both() -> None:
        attend(*draw(), kernel="eager")
        attend(*draw(), kernel="blocked")

    with pytest.raises(KernelRefusedError), recording() as ran:
        both()
    assert ran == ["eager"]
    attend(*draw())
    assert ran == ["eager"]
    assert kernels._observers.get() == ()


def test_explaining_is_not_running():
    with recording() as ran:
        explain(*draw())
    assert ran == []


class Fused:
    """Stands before torch's kernel for the CPU and keeps what it is handed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, ...]] = []
        monkeypatch.setattr(cpu_flash, "scaled_dot_product_attention", self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
        self.calls.append((q, k, v))
        return scaled_dot_product_attention(q, k, v, *rest, **options)

    def pairs(self) -> int:
        total = sum(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] for q, k, _ in self.calls)
        self.calls.clear()
        return total


SPARSE = {
    "window": window(before=100),
    "causal window": causal() & window(before=100),
    "both sides": window(before=30, after=80),
    "chunks": chunks(96, before=1),
    "global and local": causal() & window(before=100) | global_tokens(5),
    "dilated window": window(before=200) & dilated(4),
}


@pytest.mark.parametrize("name", SPARSE)
def test_blocked_does_work_that_grows_with_the_length_alone(name, monkeypatch):
    fused = Fused(monkeypatch)
    pairs = {}
    for n in (1024, 2048, 4096):
        q, k, v = draw(n, n, b=1, c=4, e=4)
        attend(q, k, v, mask=SPARSE[name], kernel="blocked")
        pairs[n] = fused.pairs()
        work = blocked.work(settled(q, k, v, mask=SPARSE[name]))
        assert work == pytest.approx(1.5 * pairs[n] + 2e5), "explain does not tell the work that is done"
    assert pairs[4096] / pairs[2048] == pytest.approx(2, rel=0.05)
    assert pairs[2048] / pairs[1024] == pytest.approx(2, rel=0.1)
    assert pairs[4096] < 0.2 * H * 4096**2


def test_blocked_looks_at_no_block_that_holds_nothing(monkeypatch):
    fused = Fused(monkeypatch)
    n = 1000
    for mask in (causal(), padding([130, 70]), documents(torch.arange(n) // 200), blocked_holes()):
        attend(*draw(n, n, c=4, e=4), mask=mask, kernel="blocked")
        dense = torch.nn.functional.pad(mask.dense(n).expand(B, 1, n, n), (0, 24, 0, 24)).view(B, 16, 64, 16, 64)
        touched = dense.any(4).any(2).any(0).sum().item()
        assert fused.pairs() == B * H * touched * 64 * 64


def blocked_holes() -> Mask:
    """Every third block of keys, for every query."""
    return Mask.of("thirds", lambda i, j: (j // 64 % 3 == 0) & (i >= 0))


def test_blocked_reads_windows_in_place(monkeypatch):
    """Keys of a run that moves along with the queries are a view of those handed in: nothing is copied."""
    fused = Fused(monkeypatch)
    q, k, v = draw(1024, 1024, c=8, e=8)
    attend(q, k, v, mask=window(before=64), kernel="blocked")
    whole = max(fused.calls, key=lambda call: call[0].shape[0])
    assert whole[0].shape == (15, B * H, 64, 8)
    assert whole[1].shape == (15, B * G, 128, 8)
    for name, handed, used in zip("qkv", (q, k, v), whole, strict=True):
        assert used.untyped_storage().data_ptr() == handed.untyped_storage().data_ptr(), f"{name} was copied"
    assert len(fused.calls) == 2  # the first block sees one block of keys, all others two


def test_blocked_copies_where_keys_lie_apart(monkeypatch):
    fused = Fused(monkeypatch)
    q, k, v = draw(512, 512, c=8, e=8)
    attend(q, k, v, mask=blocked_holes(), kernel="blocked")
    assert all(used[1].untyped_storage().data_ptr() != k.untyped_storage().data_ptr() for used in fused.calls)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Mask]:
    """The masks for which blocked works out a plan, from a clean memory on."""
    masks: list[Mask] = []
    original = blocked._build_plan

    def noted(mask: Mask, *rest: object) -> blocked.GatherPlan:
        masks.append(mask)
        return original(mask, *rest)

    monkeypatch.setattr(blocked, "_build_plan", noted)
    monkeypatch.setattr(blocked, "_plans", Memo(16))
    return masks


def test_a_plan_is_remembered(planned):
    for _ in range(3):
        attend(*draw(), mask=causal() & window(before=3), kernel="blocked")  # an equal mask, made anew each time
    assert len(planned) == 1
    attend(*draw(), mask=causal() & window(before=4), kernel="blocked")
    attend(*draw(j=J + 1), mask=causal() & window(before=3), kernel="blocked")
    attend(*draw(), mask=causal() & window(before=3), kernel="blocked", positions=Positions(2))
    assert len(planned) == 4


def test_a_plan_for_data_is_remembered_while_the_data_stays(planned):
    ids = torch.arange(J) // 4
    inputs = draw()
    before = attend(*inputs, mask=documents(ids), kernel="blocked")
    again = attend(*inputs, mask=documents(ids), kernel="blocked")
    assert len(planned) == 1
    assert torch.equal(before, again)
    ids[5:] = 9  # in place
    after = attend(*inputs, mask=documents(ids), kernel="blocked")
    assert len(planned) == 2
    assert not torch.equal(before, after)
    assert torch.allclose(after, attend(*inputs, mask=documents(ids), kernel="eager"), atol=1e-6)
    attend(*inputs, mask=documents(ids.clone()), kernel="blocked")
    assert len(planned) == 2, "equal contents share a plan"


@pytest.mark.parametrize("kind", [sink, lambda values: alibi(slopes=values)], ids=["sink", "alibi"])
def test_constant_score_terms_are_evaluated_once_while_they_stay(planned, monkeypatch, kind):
    evaluated = []
    monkeypatch.setattr(blocked, "sum_terms", lambda *rest: evaluated.append(rest) or sum_terms(*rest))
    values, mask, inputs = torch.linspace(0.1, 0.7, H), causal() & window(before=3), draw()

    def call(dtype: torch.dtype = torch.float32) -> Tensor:
        out = attend(*(x.to(dtype) for x in inputs), mask=mask, scores=kind(values), kernel="blocked")
        expected = attend(*(x.to(dtype) for x in inputs), mask=mask, scores=kind(values), kernel="eager")
        assert torch.allclose(out, expected, atol=1e-6)
        return out

    with torch.inference_mode():
        call()  # such tensors cannot be saved for a backward pass
    before = len(evaluated)
    call()
    assert len(evaluated) == 2 * before
    inputs = tuple(x.requires_grad_() for x in inputs)
    call().sum().backward()
    assert len(evaluated) == 2 * before
    values += 1  # in place
    call()
    assert len(evaluated) == 3 * before
    call(torch.float64)
    assert len(evaluated) == 4 * before
    values.requires_grad_()
    call().sum().backward()
    assert values.grad is not None
    assert len(evaluated) == 5 * before
    values.requires_grad_(False)
    monkeypatch.setattr(blocked, "_KEEP_TERMS", B * H * 64 * 64 - 1)  # one pair of blocks
    values += 1
    call()
    call()
    assert len(evaluated) == 7 * before
    assert len(planned) == 1


def test_data_made_in_inference_mode_is_planned_for_each_time(planned):
    """Such a tensor counts no versions, so a change would go unseen."""
    with torch.inference_mode():
        lengths = torch.tensor([3, 9])
        inputs = draw()
        first = attend(*inputs, mask=padding(lengths), kernel="blocked")
        lengths += 1
        second = attend(*inputs, mask=padding(lengths), kernel="blocked")
    assert len(planned) == 2
    assert not torch.equal(first, second)


def test_positions_of_single_keys_are_planned_for_each_time(planned):
    for _ in range(2):
        attend(*draw(), mask=causal(), kernel="blocked", positions=Positions(4, torch.arange(J)))
    assert len(planned) == 2


def test_only_so_many_plans_are_kept(planned):
    for _ in range(2):
        for before in range(17):
            attend(*draw(40, 40, b=1), mask=window(before=before), kernel="blocked")
    assert len(planned) == 34
    attend(*draw(40, 40, b=1), mask=window(before=16), kernel="blocked")
    assert len(planned) == 34


def test_a_plan_too_large_is_not_kept(planned, monkeypatch):
    monkeypatch.setattr(blocked, "_KEEP", 64 * 64)
    for _ in range(2):
        attend(*draw(), mask=causal(), kernel="blocked")  # one pair of blocks
        attend(*draw(65, 65), mask=causal(), kernel="blocked")  # three
    assert len(planned) == 3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sdpa_is_bitwise_that_of_torch_where_nothing_is_asked_beyond_it(dtype, is_causal):
    q, k, v = draw(J, J, e=C, dtype=dtype)
    mask = causal() if is_causal else None
    out = attend(q, k, v, mask=mask, kernel="sdpa")
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True))
    out = attend(q, k, v, mask=mask, beta=0.3, kernel="sdpa")
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True))
    one = k[:, :, :1]
    assert torch.equal(attend(q, one, one), scaled_dot_product_attention(q, one, one, enable_gqa=True))


def test_sdpa_hands_a_matrix_over_as_it_is():
    q, k, v = draw(e=C)
    visible = torch.rand(B, H, I, J) > 0.3
    visible[..., 0] = True
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    assert torch.equal(attend(q, k, v, mask=visible, kernel="sdpa"), expected)


def test_sdpa_drops_as_torch_does():
    q, k, v = draw(e=C)
    outs = []
    for run in (
        lambda: attend(q, k, v, dropout=0.4, kernel="sdpa"),
        lambda: scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True),
    ):
        torch.manual_seed(3)
        outs.append(run())
    assert torch.allclose(*outs, atol=1e-6)


class Operations(TorchDispatchMode):
    """The names of the operations that torch runs inside, and the size of the largest tensor that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        out = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


@pytest.mark.parametrize(("c", "e"), [(5, 9), (9, 5), (5, 5)])
@pytest.mark.parametrize("rest", [{}, {"mask": causal()}, {"mask": window(before=2), "scores": alibi(heads=H)}])
def test_other_widths_of_v_keep_the_fused_kernel_on_the_cpu(c, e, rest, monkeypatch):
    fused = Fused(monkeypatch)
    with Operations() as ran:
        out = attend(*draw(J, J, c=c, e=e), **rest, kernel="sdpa")
    assert out.shape == (B, H, J, e)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran.names
    assert not any("math" in name or "softmax" in name for name in ran.names)
    assert {x.shape[-1] for x in fused.calls[0]} == {max(c, e)}


def test_other_widths_of_v_are_not_padded_on_a_gpu(monkeypatch):
    """There the fused kernels take two widths; and the order is cuDNN first on Hopper alone."""
    seen = []

    def noted(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
        seen.append((q.shape[-1], v.shape[-1], torch._C._get_sdp_priority_order()[0]))
        return torch.zeros(*q.shape[:3], v.shape[3])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", noted)
    inputs = on_gpu(I, J, c=64, e=32)
    usual = torch._C._get_sdp_priority_order()[0]
    for hopper in (True, False):
        monkeypatch.setattr(sdpa, "_is_hopper", lambda device, hopper=hopper: hopper)
        assert sdpa.fused_attention(*inputs, 0.1, 0.0).shape == (B, H, I, 32)
    assert seen == [(64, 32, SDPBackend.CUDNN_ATTENTION.value), (64, 32, usual)]
    assert usual != SDPBackend.CUDNN_ATTENTION.value


@pytest.mark.parametrize(("capability", "is_hopper"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_hopper_is_told_by_its_capability(capability, is_hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sdpa._compute_capability.cache_clear()
    try:
        assert sdpa._is_hopper(0) == is_hopper
    finally:
        sdpa._compute_capability.cache_clear()


@pytest.mark.parametrize("compiling", [False, True])
def test_cudnn_is_first_inside_and_the_order_is_set_back(compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    before = torch._C._get_sdp_priority_order()
    wanted = [backend.value for backend in sdpa._HOPPER_ORDER]
    assert wanted[0] == SDPBackend.CUDNN_ATTENTION.value
    assert before[: len(wanted)] != wanted
    monkeypatch.setattr(sdpa, "_is_hopper", lambda device: True)
    orders = []

    def noted(*rest: object, **options: object) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order()[: len(wanted)])
        if len(orders) == 2:
            raise ZeroDivisionError
        return torch.zeros(1)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", noted)
    inputs = on_gpu(I, J)
    sdpa._cudnn_first(*inputs, None, 0.0, False, 0.1)
    assert torch._C._get_sdp_priority_order() == before
    with pytest.raises(ZeroDivisionError):
        sdpa._cudnn_first(*inputs, None, 0.0, False, 0.1)
    assert torch._C._get_sdp_priority_order() == before
    assert orders == [wanted, wanted]


def test_eager_repeats_no_keys():
    """Query heads that share a key head are stacked as rows, so the largest tensor is the matrix of scores."""
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    q, k, v = draw(3, 7, c=50, e=50)
    with Largest():
        eager.run(settled(q, k, v))
    assert largest <= max(B * H * 3 * 50, B * G * 7 * 50)
    assert largest < B * H * 7 * 50


def test_the_names_of_the_package_are_those_of_the_kernels():
    assert regard.recording is recording
    assert issubclass(KernelRefusedError, RuntimeError)


def test_a_last_axis_with_gaps_stays_fused():
    """torch leaves its fused kernels for such inputs, and takes the whole matrix instead."""
    q, k, v = (x.mT.contiguous().mT for x in draw(300, 300))
    assert q.stride(-1) != 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = attend(q, k, v, kernel="sdpa")
    names = {event.name for event in seen.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert torch.allclose(out, attend(*(x.contiguous() for x in (q, k, v)), kernel="sdpa"), atol=1e-6)


@pytest.mark.parametrize("beta", [1e20, -1e38, 1e300])
def test_a_beta_beyond_floats_is_served_by_the_kernel_that_centres_scores(beta):
    inputs = draw(7, 9)
    with recording() as ran:
        out = attend(*inputs, mask=causal(), beta=beta)
    assert ran == ["eager"]
    truth = attend(*(x.double() for x in inputs), mask=causal(), beta=beta, kernel="reference")
    assert torch.allclose(out.double(), truth, atol=1e-5)
    with pytest.raises(KernelRefusedError, match="out of the range of floats"):
        attend(*inputs, mask=causal(), beta=beta, kernel="sdpa")


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, 9), (7, 1), (2, 1, 7, 1), (1, 1)])
def test_a_boolean_tensor_broadcasts(shape):
    q, k, v = draw(7, 9, b=2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    whole = mask.expand(*mask.shape[:-2], 7, 9)
    assert torch.allclose(attend(q, k, v, mask=mask), attend(q, k, v, mask=whole.clone()), atol=1e-6)
    assert as_mask(mask).count(7, 9) == int(whole.sum())
    assert torch.equal(as_mask(mask).block_table(7, 9, 2).state, as_mask(whole.clone()).block_table(7, 9, 2).state)


def test_a_rule_may_answer_with_one_number():
    q, k, v = draw(7, 9)
    for kernel in ("eager", "sdpa", "reference"):
        out = attend(q, k, v, mask=Mask.of("everything", lambda i, j: torch.tensor(True)), kernel=kernel)
        assert torch.allclose(out, attend(q, k, v, kernel=kernel), atol=1e-6)


def test_a_recording_does_not_hold_the_calls_of_other_threads():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    seen: list[list[str]] = []

    def work() -> None:
        attend(q, k, v, kernel="eager")
        with recording() as own:
            attend(q, k, v, kernel="reference")
        seen.append(own)

    with recording() as names:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        attend(q, k, v)
    assert (names, seen) == (["sdpa"], [["reference"]])


OFFSETS = torch.tensor([2, 6])
RAGGED = [causal(), window(before=2), causal() & documents([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]), ~causal()]
SHAW = shaw(torch.linspace(-1, 1, 5 * C).view(5, C))


@pytest.mark.parametrize("kernel", [None, "eager", "sdpa", "blocked", "reference"])
@pytest.mark.parametrize("term", [None, alibi(heads=H), SHAW, softcap(2.0)], ids=str)
@pytest.mark.parametrize("mask", RAGGED, ids=str)
def test_query_offsets_of_each_sequence(mask, term, kernel):
    """Sequences of different lengths decode together, as each would alone."""
    q, k, v = draw()
    if kernel in ("sdpa", "blocked") and term is not None and not term.additive:
        pytest.skip("softcap does more than add")
    q = q[:, :, :3]
    rest = {"mask": mask, "scores": term, "kernel": kernel}
    out = attend(q, k, v, positions=Positions(queries=1, offsets=OFFSETS), **rest)
    for each, offset in enumerate(OFFSETS.tolist()):
        alone = attend(*(x[each : each + 1] for x in (q, k, v)), positions=Positions(queries=1 + offset), **rest)
        assert torch.allclose(out[each : each + 1], alone, atol=1e-6)
    explained = explain(q, k, v, mask=mask, positions=Positions(queries=1, offsets=OFFSETS))
    counts = [mask.count(3, J, positions=Positions(1 + offset)) for offset in OFFSETS.tolist()]
    assert explained.visible == sum(counts) * H


LONG_RAGGED = torch.tensor([0, 350, 1000, 350, 1500])


@pytest.mark.parametrize("term", [None, alibi(heads=2), sink(torch.tensor([0.5, -1.0]))], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        causal() & window(before=150),
        causal() & window(before=150) & padding([500, 850, 1250, 845, 2000]),
        causal() & chunks(128, before=1) | global_tokens(3),
        causal() & documents(torch.arange(2048) // 150),
    ],
    ids=str,
)
def test_long_sequences_with_offsets_skip_hidden_blocks(mask, term):
    """Each sequence equals a call of its own, with gradients, and no tensor holds all pairs."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, n, 16, generator=source).requires_grad_() for n in (500, 2048, 2048))
    grad = torch.randn(q.shape, generator=source)
    positions = Positions(queries=0, offsets=LONG_RAGGED)
    with Operations() as ran, recording() as names:
        out = attend(q, k, v, mask=mask, scores=term, positions=positions)
    assert names == ["blocked"]
    assert ran.largest < 500 * 2048
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for each, offset in enumerate(LONG_RAGGED.tolist()):
        inputs = [x[each : each + 1].detach().requires_grad_() for x in (q, k, v)]
        alone = attend(
            *inputs,
            mask=mask.of_sequences(torch.tensor([each])),
            scores=term,
            positions=Positions(offset),
            kernel="eager",
        )
        assert torch.allclose(out[each : each + 1], alone, atol=2e-6)
        for own, other in zip(grads, torch.autograd.grad(alone, inputs, grad[each : each + 1]), strict=True):
            assert torch.allclose(own[each : each + 1], other, atol=1e-5)


def test_a_matrix_for_each_sequence_is_not_split_by_offsets():
    added = additive(torch.zeros(B, 1, I, J))
    with pytest.raises(KernelRefusedError, match="may differ between sequences, and these have offsets of their own"):
        attend(*draw(), mask=causal(), scores=added, positions=Positions(0, offsets=OFFSETS), kernel="blocked")
    assert explain(*draw(), mask=causal(), scores=added, positions=Positions(0, offsets=OFFSETS)).chosen == "sdpa"


def test_a_step_of_generation_with_offsets_needs_no_block_tables(monkeypatch):
    monkeypatch.setattr("regard.core.kernels.blocked.sparsest_table", lambda *x, **y: pytest.fail("a table was built"))
    q, k, v = draw(i=1, j=400)
    attend(q, k, v, mask=window(before=5), positions=Positions(0, offsets=torch.tensor([300, 399])))


@pytest.mark.parametrize(
    ("offsets", "error", "words"),
    [
        ([1, 2], ConfigError, r"Positions.offsets takes a row of whole numbers, one for each sequence, not \[1, 2\]"),
        (torch.ones(2), ConfigError, r"not torch.float32 of shape \(2,\)"),
        (torch.ones(1, 2, dtype=torch.long), ConfigError, r"not torch.int64 of shape \(1, 2\)"),
        (torch.tensor([1, 2, 3]), ShapeError, r"positions.offsets is \(3,\), but q has b=2"),
    ],
)
def test_offsets_of_another_kind_are_refused(offsets, error, words):
    with pytest.raises(error, match=words):
        attend(*draw(), mask=causal(), positions=Positions(0, offsets=offsets))


def test_no_block_table_holds_offsets():
    with pytest.raises(ConfigError, match="a block table is one for all sequences"):
        causal().block_table(3, 5, positions=Positions(0, offsets=OFFSETS))
