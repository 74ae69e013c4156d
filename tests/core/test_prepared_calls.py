"""Calls whose kernel and plan are remembered: the second call gives what the first one gave."""

import gc
import math
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import (
    Mask,
    attend,
    causal,
    chunks,
    dilated,
    documents,
    global_tokens,
    key_padding,
    padding,
    recording,
    window,
)
from regard.base.errors import RegardError
from regard.core import kernels
from regard.core.kernels import sdpa
from regard.core.kernels.prepared import PreparedCalls

B, H, G, C, E = 2, 6, 3, 7, 5
N = 331  # several blocks
MASKS = {
    "window": lambda: window(before=3, after=2),
    "causal window": lambda: causal() & window(before=9),
    "global": lambda: causal() & window(before=9) | global_tokens(2),
    "dilated": lambda: causal() & dilated(5),
    "chunks": lambda: chunks(16, before=1),
    "nothing": lambda: ~window(),
    "documents": lambda: documents(torch.stack([torch.arange(N) // 40, torch.arange(N) // 90])),
    "padding": lambda: causal() & padding([N - 9, 20]),
    "key_padding": lambda: key_padding(torch.arange(N) >= torch.tensor([[3], [N]])),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_prepared", PreparedCalls(16))


def draw(n: int = N, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = (B, H, n, C), (B, G, n, C), (B, G, n, E)
    return [torch.randn(shape, generator=source).to(dtype).requires_grad_() for shape in shapes]


def results(inputs: list[Tensor], mask: Mask, **rest: float) -> list[Tensor]:
    out = attend(*inputs, mask=mask, **rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_remembered_call_gives_the_same_numbers(name, dtype, monkeypatch):
    inputs = draw(dtype=dtype)
    monkeypatch.setattr(kernels, "run_prepared", lambda *x: None)
    expected = results(inputs, MASKS[name]())
    monkeypatch.undo()
    results(inputs, MASKS[name]())
    results(inputs, MASKS[name]())
    # nothing is prepared again
    monkeypatch.setattr("regard.core.attend.prepare_request", lambda *x: pytest.fail("the call was not remembered"))
    for own, other in zip(results(inputs, MASKS[name]()), expected, strict=True):
        assert torch.equal(own, other)
    with torch.no_grad():
        assert torch.allclose(
            attend(*inputs, mask=MASKS[name]()), expected[0], atol=1e-6 if dtype.itemsize == 4 else 0.02
        )


@pytest.mark.parametrize("beta", [0.3, 1e7, 0.0, -0.4, 2, math.inf])
@pytest.mark.parametrize("name", ["causal window", "padding"])
def test_each_call_has_its_own_beta(name, beta):
    inputs = draw(61 if name != "padding" else N)
    for _ in range(2):
        attend(*inputs, mask=MASKS[name]())
    exact = attend(*(x.double() for x in inputs), mask=MASKS[name](), beta=beta, kernel="reference")
    assert torch.allclose(attend(*inputs, mask=MASKS[name](), beta=beta), exact.float(), atol=2e-4)


def test_data_that_change_are_seen_and_other_sizes_too():
    lengths = torch.tensor([50, 20])
    inputs = draw(61)
    for _ in range(2):
        attend(*inputs, mask=padding(lengths))
    lengths[0] = 9
    out = attend(*inputs, mask=padding(lengths))
    assert torch.allclose(out, attend(*inputs, mask=padding([9, 20]), kernel="eager"), atol=1e-6)
    with pytest.raises(RegardError, match="2 lengths, but q has b=1"):
        attend(*(x[:1] for x in inputs), mask=padding(lengths))
    shorter = [inputs[0][:, :, 50:], *inputs[1:]]
    expected = attend(*shorter, mask=padding([9, 20]), kernel="eager")
    assert torch.allclose(attend(*shorter, mask=padding(lengths)), expected, atol=1e-6)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [23, 61, N])
def test_hidden_numbers_reach_nothing_in_a_remembered_call(number, n):
    mask = causal() & padding([n - 9, 12])
    clean = draw(n)
    expected = results(clean, mask)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty[1:]:
        x[0, :, n - 9 :], x[1, :, 12:] = number, number
    dirty = [x.requires_grad_() for x in dirty]
    for _ in range(3):
        for own, other in zip(results(dirty, mask), expected, strict=True):
            assert torch.equal(own, other)


def test_a_visible_nan_gives_nan_in_a_remembered_call():
    inputs = draw(61)
    mask = causal() & window(before=9)
    for _ in range(2):
        attend(*inputs, mask=mask)
    inputs[1].data[0, 0, 30, 0] = math.nan
    out = attend(*inputs, mask=mask)
    assert out[0, :2, 30:40].isnan().all()
    assert out[0, :2, :30].isfinite().all()
    assert out[0, :2, 40:].isfinite().all()


def test_it_is_recorded_and_holds_no_inputs():
    q, k, v = (x.detach() for x in draw())
    mask = causal() & window(before=9)
    for _ in range(3):
        attend(q, k, v, mask=mask)
    with recording() as ran:
        attend(q, k, v, mask=mask)
    assert ran == ["blocked"]
    gone = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    gc.collect()
    assert not any(ref() for ref in gone)


def test_functions_and_matrices_are_not_remembered():
    inputs = draw(61)
    limit = [3]
    mask = Mask.of("limit", lambda i, j: j < limit[0])
    attend(*inputs, mask=mask)
    limit[0] = 30
    expected = attend(*inputs, mask=mask, kernel="eager")
    assert torch.allclose(attend(*inputs, mask=mask), expected, atol=1e-6)
    attend(*inputs, mask=causal() & torch.ones(61, 61, dtype=torch.bool))
    assert not kernels._prepared._by_key._kept


def test_a_large_dense_mask_is_not_remembered(monkeypatch):
    monkeypatch.setattr(sdpa, "MOST_PREPARED", 60 * 61)
    attend(*draw(61), mask=causal() & window(before=50))
    assert not kernels._prepared._by_key._kept


@pytest.mark.parametrize("kernel", [None, "eager", "sdpa", "blocked"])
def test_a_mask_that_hides_everything_gives_zero_gradients_of_q_k_and_v(kernel):
    inputs = draw()
    for _ in range(3):
        out = attend(*inputs, mask=causal() & ~causal(), kernel=kernel)
        assert not out.any()
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", [None, "sdpa", "blocked"])
def test_a_call_in_inference_mode_leaves_later_training_calls_alone(name: str, kernel: str | None) -> None:
    q, k, v = torch.randn(3, B, 2, N, C)
    mask = MASKS[name]()
    with torch.inference_mode():
        attend(q, k, v, mask=mask, kernel=kernel)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*learned, mask=mask, kernel=kernel)
    expected = attend(*learned, mask=mask, kernel="eager")
    for own, right in zip(
        torch.autograd.grad(out.sum(), learned), torch.autograd.grad(expected.sum(), learned), strict=True
    ):
        torch.testing.assert_close(own, right, atol=1e-4, rtol=1e-4)


def test_a_mask_whose_tensor_is_transposed_in_place_is_prepared_again() -> None:
    torch.manual_seed(5)
    ids = torch.randint(0, 3, (12, 12))
    q, k, v = torch.randn(3, 12, 2, 12, 8)
    mask = documents(ids)
    attend(q, k, v, mask=mask)
    attend(q, k, v, mask=mask)
    ids.t_()
    torch.testing.assert_close(attend(q, k, v, mask=mask), attend(q, k, v, mask=mask, kernel="eager"))


@pytest.mark.parametrize("recorded", [False, True])
def test_activation_checkpointing_takes_the_first_call_with_a_mask(recorded: bool) -> None:
    q = torch.randn(2, 3, 7, 8, requires_grad=True)
    mask = padding(torch.tensor([5, 7]))
    with recording() if recorded else nullcontext():
        out = checkpoint(partial(attend, mask=mask), q, q, q, use_reentrant=False)
    out.sum().backward()
    expected = torch.autograd.grad(attend(q, q, q, mask=mask).sum(), q)[0]
    torch.testing.assert_close(q.grad, expected)
