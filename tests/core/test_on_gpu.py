"""What is not attention itself gives on a GPU what it gives on the CPU."""

import pytest
import torch
from torch import Tensor

import regard
from regard import (
    DynamicCache,
    SlidingWindowCache,
    StaticCache,
    Stream,
    alibi,
    attend,
    causal,
    channel_attend,
    chunks,
    grid_positions,
    linear_attend,
    padding,
    prefix,
    rotary,
    sinusoidal,
    window,
)
from regard.core.linear import FeatureMap, elu_plus_one, performer, relu, squared_relu

pytestmark = pytest.mark.cuda

B, H, G, N, C, E = 2, 6, 3, 37, 16, 24


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size, dtype=dtype) for size in ((B, H, N, C), (B, G, N, C), (B, G, N, E))]


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def close(gpu: Tensor, cpu: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    return gpu.is_cuda and torch.allclose(gpu.cpu().double(), cpu.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
@pytest.mark.parametrize("features", [elu_plus_one(), relu(), squared_relu(), performer(C, 19)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_agrees_with_the_cpu(features: FeatureMap, form: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    mask = causal() & padding([N, 20])
    cpu = linear_attend(q.double(), k.double(), v.double(), features=features, mask=mask, form=form)
    gpu = linear_attend(*on_gpu(q, k, v), features=features, mask=mask, form=form)
    assert close(gpu.out, cpu.out, dtype)
    assert gpu.state.weighted.is_cuda


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_agrees_with_the_cpu(pairing: str, dtype: torch.dtype) -> None:
    (q, _, _) = inputs(dtype)
    rope = rotary(pairing=pairing, width=8)
    assert close(rope(q.cuda(), 1000), rope(q, 1000), dtype)
    flat = rotary(pairing=pairing, axes=2)
    square = q[:, :, :36]
    assert close(flat(square.cuda(), grid_positions(6, 6).cuda()), flat(square, grid_positions(6, 6)), dtype)
    assert close(sinusoidal(torch.arange(9).cuda(), 10), sinusoidal(9, 10))


def test_channel_attention_agrees_with_the_cpu() -> None:
    q, k, _ = (x.repeat_interleave(H // x.shape[1], 1) for x in inputs())
    assert close(channel_attend(*on_gpu(q, k, k)), channel_attend(q, k, k))


@pytest.mark.parametrize(
    "mask", [causal(), causal() & window(before=5), causal() & window(before=5) | prefix(2) & causal()]
)
def test_caches_agree_with_one_pass(mask: regard.Mask) -> None:
    q, k, v = inputs()
    whole = attend(q, k, v, mask=mask, scores=alibi(H))
    q, k, v = on_gpu(q, k, v)
    for cache in (DynamicCache(), StaticCache(N), SlidingWindowCache(mask)):
        parts, start = [], 0
        for size in (20, 1, 1, 15):
            new = slice(start, start + size)
            held = cache.extend(k[:, :, new], v[:, :, new])
            parts.append(attend(q[:, :, new], held.k, held.v, mask=mask, scores=alibi(H), positions=held.positions))
            start += size
        assert close(torch.cat(parts, 2), whole)


def test_a_stream_with_look_ahead_agrees_with_one_pass() -> None:
    q, k, v = inputs()
    mask = chunks(5, before=1, after=1)
    whole = attend(q, k, v, mask=mask)
    stream = Stream(mask)
    steps = torch.arange(N).split([7, 1, 20, 9])
    parts = [stream.push(*on_gpu(*(x[:, :, new] for x in (q, k, v)))) for new in steps]
    parts.append(stream.finish())
    assert close(torch.cat(parts, 2), whole)


def test_attend_compiles_into_one_graph() -> None:
    q, k, v = on_gpu(*inputs())
    mask = causal() & window(before=5)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask=mask, scores=alibi(H)), fullgraph=True)
    assert close(compiled(q, k, v), attend(q, k, v, mask=mask, scores=alibi(H)).cpu())


@pytest.mark.parametrize("width", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudnn_comes_first_and_gives_the_same(width: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, 65, width, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    for mask in (None, causal()):
        out = attend(q, k, v, mask=mask, kernel="sdpa")
        truth = attend(q.double(), k.double(), v.double(), mask=mask, kernel="reference")
        assert torch.allclose(out.double(), truth, atol=2e-2)
        grads = torch.autograd.grad(out.sum(), [q, k, v])
        wanted = torch.autograd.grad(truth.sum(), [q, k, v])
        assert all(torch.allclose(a.float(), b.float(), atol=6e-2) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (24, 40)], ids=str)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
def test_no_odd_width_or_group_makes_torch_build_all_weights(mask, groups, widths, dtype) -> None:
    n, (c, e) = 4096, widths
    q, k, v = (
        torch.randn(1, heads, n, width, device="cuda", dtype=dtype)
        for heads, width in ((4, c), (groups, c), (groups, e))
    )
    with torch.no_grad():
        attend(q, k, v, mask=mask)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(q, k, v, mask=mask)
        torch.cuda.synchronize()
    weights = 4 * n * n * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < weights / 4


def test_a_call_without_terms_copies_nothing() -> None:
    q, k, v = (torch.randn(1, 4, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = causal() & window(before=255)
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attend(q, k, v, mask=mask, kernel="flex")
            used = torch.cuda.max_memory_allocated() - before
            del out
    assert used < 1.2 * 2 * q.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
def test_ties_among_large_scores_stay_ties_at_every_width(mask, width: int, dtype: torch.dtype) -> None:
    """Scores near 1e5 and more, sums of powers of two: torch's unfused path scales each factor and loses their ties."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 300, width, generator=source).to("cuda", dtype) for _ in range(3))
    q, k = q.sign() * 2.0**8, k.sign() * 2.0**8
    truth = regard.attend(q.double(), k.double(), v.double(), mask=mask, kernel="reference")
    out = regard.attend(q, k, v, mask=mask, kernel="sdpa")
    assert torch.allclose(out.double(), truth, rtol=0, atol=4 * torch.finfo(dtype).eps)


MASKS = {
    "full": lambda: None,
    "causal": causal,
    "window": lambda: causal() & window(before=9),
    "padding": lambda: causal() & padding([200, 31]),
    "padding on the GPU": lambda: padding(torch.tensor([200, 31], device="cuda")),
    "nothing": lambda: ~window(),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [64, 300])
def test_a_repeated_call_gives_the_same_numbers(name: str, dtype: torch.dtype, n: int) -> None:
    q, k, v = (torch.randn(B, 4, n, 32, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    mask = MASKS[name]()
    truth = attend(q.double(), k.double(), v.double(), mask=MASKS[name](), kernel="reference")
    wanted = torch.autograd.grad(truth.square().sum(), (q, k, v))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for _ in range(3):
        with torch.no_grad():
            assert torch.allclose(attend(q, k, v, mask=mask).double(), truth, atol=tolerance)
        out = attend(q, k, v, mask=mask)
        assert torch.allclose(out.double(), truth, atol=tolerance)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.allclose(a, b, atol=3 * tolerance) for a, b in zip(grads, wanted, strict=True))


def test_lengths_that_change_on_the_gpu_are_seen_by_a_repeated_call() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths = torch.tensor([50, 20], device="cuda")
    mask = padding(lengths)
    for _ in range(2):
        attend(q, k, v, mask=mask)
    lengths[0] = 9
    truth = attend(q.double(), k.double(), v.double(), mask=padding([9, 20]), kernel="reference")
    assert torch.allclose(attend(q, k, v, mask=mask).double(), truth, atol=2e-2)


def test_a_graph_captures_calls_with_masks() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    masks = [causal() & window(before=13), causal(), padding(torch.tensor([50, 20], device="cuda"))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # cuDNN is loaded outside of the graph
        attend(q, k, v, mask=causal())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attend(q, k, v, mask=mask) for mask in masks]
    graph.replay()
    torch.cuda.synchronize()
    for mask, out in zip(masks, outs, strict=True):
        truth = attend(q.double(), k.double(), v.double(), mask=mask, kernel="reference")
        assert torch.allclose(out.double(), truth, atol=2e-2)
        assert torch.allclose(attend(q, k, v, mask=mask).double(), truth, atol=2e-2)


@pytest.mark.parametrize(("n", "kernel"), [(200, "eager"), (700, "flex")])
def test_score_terms_in_half_precision_are_not_rounded(n: int, kernel: str) -> None:
    """torch's fused kernels take a bias in the dtype of q; terms that add numbers run other kernels by default."""
    q, k, v = (torch.randn(1, 4, n, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rest = {"mask": causal(), "scores": alibi(slopes=torch.tensor([0.9, 0.3, 0.11, 0.013]))}
    with regard.recording() as names:
        out = attend(q, k, v, **rest)
    assert names == [kernel]
    truth = attend(q.double(), k.double(), v.double(), kernel="reference", **rest)
    assert torch.allclose(out.double(), truth, atol=2e-2)
