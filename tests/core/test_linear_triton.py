"""The Triton kernels of linear attention against float64: compiled on a GPU, by Triton's interpreter on a CPU."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.base.errors import ConfigError, KernelRefusedError
from regard.core import linear_triton
from regard.core.linear import (
    Elementwise,
    FeatureMap,
    LinearResult,
    LinearState,
    elu_plus_one,
    linear_attend,
    performer,
    relu,
    squared_relu,
)
from regard.core.masks import causal, full, padding
from tests.tolerance import GRADIENT, OUTPUT, too_far

pytest.importorskip("triton", reason="triton is not installed; it has wheels for Linux only")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
choose_length = linear_triton.choose_length  # tests replace it
Sizes = tuple[int, int, int, int, int, int]
SIZES: Sizes = (1, 2, 1, 45, 5, 19)  # b, h, g, n, c, e: three chunks of 16 in two segments, the last one incomplete
NAMES = ["out", "weighted", "total", *(f"gradient of {name}" for name in ("q", "k", "v", "weighted", "total"))]
FACTORS = [OUTPUT] * 3 + [GRADIENT] * 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: chunks of 16 tokens in segments of 32, and no refusal because of the device."""
    if DEVICE == "cpu":
        usual = linear_triton.refusals
        monkeypatch.setattr(linear_triton, "refusals", lambda *x: [y for y in usual(*x) if "needs a GPU" not in y])
        monkeypatch.setattr(linear_triton, "choose_tile", lambda *_: linear_triton.Tile(16, 4, 1))
        monkeypatch.setattr(linear_triton, "NARROWEST", 16)
        monkeypatch.setattr(linear_triton, "choose_length", lambda n, heads: 32)


def draw(sizes: Sizes, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    b, h, g, n, c, e = sizes
    source = torch.Generator().manual_seed(3)
    shapes = (b, h, n, c), (b, g, n, c), (b, g, n, e)
    return [(torch.randn(shape, generator=source) * scale).to(dtype).to(DEVICE) for shape in shapes]


def naive(features: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None) -> LinearResult:
    """The quadratic definition, in the precision of its inputs."""
    phi_q, phi_k, v = features(q), *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (features(k), v))
    weights = (phi_q @ phi_k.mT).tril()
    found, mass, weighted, total = weights @ v, weights.sum(-1), phi_k.mT @ v, phi_k.sum(2)
    if state is not None:
        past = state.weighted.to(q.dtype), state.total.to(q.dtype)
        found, mass = found + phi_q @ past[0], mass + (phi_q @ past[1][..., None])[..., 0]
        weighted, total = weighted + past[0], total + past[1]
    mass = mass[..., None]
    out = torch.where(mass == 0, 0, found / torch.where(mass == 0, 1, mass))
    return LinearResult(out, LinearState(weighted, total, total, q.shape[2], features))


def with_gradients(
    run: Callable[[Tensor, Tensor, Tensor, LinearState | None], LinearResult],
    inputs: list[Tensor],
    past: LinearState | None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Outputs, sums and the gradients of all inputs; after a state, its sums and those of the result have some too.

    dtype  to which inputs and sums are converted first
    """
    leaves = [*inputs, *(() if past is None else (past.weighted, past.total))]
    leaves = [x.detach().to(x.dtype if dtype is None else dtype).requires_grad_() for x in leaves]
    state = None if past is None else LinearState(leaves[3], leaves[4], past.peak, past.length, past.features)
    result = run(*leaves[:3], state)
    outs = [result.out, result.state.weighted, result.state.total]
    source = torch.Generator().manual_seed(5)
    upstream = [torch.randn(x.shape, generator=source).to(x) for x in outs]
    used = 1 if past is None else 3
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs[:used], leaves, upstream[:used])]


def assert_close_to_truth(
    inputs: list[Tensor], features: FeatureMap, past: LinearState | None = None, **rest: object
) -> None:
    """Compare a causal call of the Triton kernels with float64 by the rule of `tests.tolerance`."""
    with regard.recording() as names:
        run = lambda q, k, v, s: linear_attend(  # noqa: E731
            q, k, v, features=features, mask=causal(), state=s, kernel="triton", **rest
        )
        actual = with_gradients(run, inputs, past)
    assert names == ["triton"]
    definition = lambda *x: naive(features, *x)  # noqa: E731
    same = with_gradients(definition, inputs, past, inputs[0].dtype)
    truth = with_gradients(definition, inputs, past, torch.float64)
    for name, factor, *found in zip(NAMES, FACTORS, actual, same, truth, strict=False):
        assert found[0].dtype == (torch.float32 if "weighted" in name or "total" in name else inputs[0].dtype), name
        wrong = too_far(found[0], found[1].to(found[0].dtype), found[2], factor)
        assert not wrong, f"{name}: {wrong}"


def make_state(features: FeatureMap, sizes: Sizes, scale: float = 1.0) -> LinearState:
    inputs = draw(sizes, torch.float32, scale)
    return linear_attend(*inputs, features=features, mask=causal(), kernel="torch").state


CASES = [
    (elu_plus_one(), torch.float32, SIZES, 1.0),
    (elu_plus_one(), torch.float32, (1, 1, 1, 17, 16, 16), 1e-3),
    (relu(), torch.float32, (1, 2, 1, 33, 16, 3), 1.0),
    (squared_relu(), torch.float16, (1, 1, 1, 20, 17, 16), 1.0),
    # the interpreter has no products of bfloat16, and long inputs take it minutes
    *(
        pytest.param(*case, marks=pytest.mark.cuda)
        for case in (
            (elu_plus_one(), torch.bfloat16, (1, 2, 1, 3001, 64, 64), 1e-3),
            (relu(), torch.bfloat16, (2, 4, 2, 1000, 24, 40), 1.0),
            (squared_relu(), torch.bfloat16, (1, 2, 2, 300, 128, 100), 5.0),
            (elu_plus_one(), torch.float16, (2, 4, 2, 1000, 24, 40), 1.0),
            (elu_plus_one(), torch.float32, (1, 2, 1, 3001, 64, 64), 1.0),
        )
    ),
]


@pytest.mark.parametrize(("features", "dtype", "sizes", "scale"), CASES, ids=str)
def test_outputs_sums_and_gradients_are_near_the_truth(
    features: FeatureMap, dtype: torch.dtype, sizes: Sizes, scale: float
) -> None:
    assert_close_to_truth(draw(sizes, dtype, scale), features)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.cuda)], ids=str)
def test_a_state_continues_and_has_gradients(dtype: torch.dtype) -> None:
    past = make_state(relu(), (1, 2, 1, 11, 5, 19))
    assert_close_to_truth(draw(SIZES, dtype), relu(), past)


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("continued", [False, True])
def test_features_that_are_logarithms_are_near_the_truth(continued: bool, scale: float) -> None:
    features, (q, k, v) = performer(5, 13), draw(SIZES, torch.float32, scale)
    past = make_state(features, (1, 2, 1, 11, 5, 19), scale) if continued else None

    def run(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        call = lambda q, k, v, state: linear_attend(  # noqa: E731
            q, k, v, features=features, mask=causal(), state=state, kernel=kernel
        )
        return with_gradients(call, [q, k, v], past, dtype)

    results = run("triton", torch.float32), run("torch", torch.float32), run("torch", torch.float64)
    for name, factor, *found in zip(NAMES, FACTORS, *results, strict=False):
        wrong = too_far(*found, factor)
        assert not wrong, f"{name}: {wrong}"


def test_a_row_with_one_visible_key_gets_its_value_however_far_apart_they_point() -> None:
    q, k, v = draw((1, 2, 2, 20, 5, 7), torch.float32, 60.0)
    q[:, :, 0] = -k[:, :, 0]  # features of one vanish where those of the other peak
    out = linear_attend(q, k, v, features=performer(5, 13), mask=causal(), kernel="triton").out
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    assert out.isfinite().all()


def test_large_magnitudes_neither_overflow_nor_vanish() -> None:
    # features of exp(-80), whose products are below the range of float32
    x = torch.full((1, 1, 35, 16), -80.0, device=DEVICE)
    v = torch.randn(1, 1, 35, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = linear_attend(x, x, v, mask=causal(), kernel="triton").out
    mean = v.double().cumsum(2) / torch.arange(1, 36, device=DEVICE)[:, None]
    assert (out - mean).abs().max() < 1e-5
    # sums beyond the range of float16
    q, k, v = draw((1, 1, 1, 35, 16, 16), torch.float16, 30.0)
    inputs = [x.double() for x in (q, k, v)]
    out = linear_attend(q, k, v, features=squared_relu(), mask=causal(), kernel="triton").out
    truth = naive(squared_relu(), *inputs, None).out
    assert (out - truth).abs().max() < 2e-3 * truth.abs().max()


class Doubled(FeatureMap):
    """A feature map that the kernels do not know, with another number of features."""

    def size(self, c: int) -> int:
        return 2 * c

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat((x.relu(), (-x).relu()), -1)


def test_other_feature_maps_pass_their_features() -> None:
    inputs = draw((1, 2, 1, 37, 5, 7), torch.float32)
    assert_close_to_truth(inputs, Doubled())
    # the name alone does not make a known map
    assert_close_to_truth(inputs, Elementwise("relu", lambda x: x.sigmoid()))


@pytest.mark.parametrize("features", [elu_plus_one(), performer(5, 13)], ids=["elu_plus_one", "performer"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padded_keys_reach_nothing(poison: float, features: FeatureMap) -> None:
    sizes = 2, 1, 1, 37, 5, 7
    q, k, v = draw(sizes, torch.float32)
    hidden = (torch.arange(37) >= torch.tensor([20, 37])[:, None])[:, None, :, None].to(DEVICE)
    mask = causal() & padding([20, 37])

    def run(kernel: str, k: Tensor, v: Tensor) -> list[Tensor]:
        call = lambda q, k, v, _: linear_attend(q, k, v, features=features, mask=mask, kernel=kernel)  # noqa: E731
        return with_gradients(call, [q, k, v], None)

    expected = run("torch", k, v)
    actual = run("triton", k.masked_fill(hidden, poison), v.masked_fill(hidden, poison))
    for name, one, other in zip(NAMES, expected, actual, strict=False):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5, msg=name)


def test_visible_nan_gives_nan() -> None:
    q, k, v = draw((1, 2, 2, 75, 5, 7), torch.float32)
    k[0, 1, 70, 2] = math.nan
    v[0, 0, 70, 3] = math.nan
    q[0, 0, 5, 1] = math.nan
    out = linear_attend(q, k, v, mask=causal(), kernel="triton").out
    assert out[0, 0, 5].isnan().all()
    assert out[0, 0, 70:, 3].isnan().all()
    assert out[0, 1, 70:].isnan().all()
    rest = torch.arange(64) != 5  # a chunk has at most 64 keys
    assert out[0, :, :64][:, rest].isfinite().all()


def test_a_query_that_shares_no_feature_gives_zeros_and_zero_gradients() -> None:
    q, k, v = draw((1, 2, 2, 37, 5, 7), torch.float32)
    q[:, 1], k[:, 0] = -q[:, 1].abs(), -k[:, 0].abs()
    run = lambda q, k, v, _: linear_attend(q, k, v, features=relu(), mask=causal(), kernel="triton")  # noqa: E731
    for x in (
        found for name, found in zip(NAMES, with_gradients(run, [q, k, v], None), strict=False) if name != "total"
    ):
        assert x.isfinite().all()
    out, _, _, of_q, of_k, _ = with_gradients(run, [q, k, v], None)
    assert not out.any()
    assert not of_q.any()
    assert not of_k.any()


def test_later_keys_and_values_change_no_earlier_row_by_a_bit() -> None:
    q, k, v = draw((1, 1, 1, 45, 5, 7), torch.float32)
    later = [torch.cat((x[:, :, :20], 30 * x[:, :, 20:].flip(2)), 2) for x in (k, v)]
    one, other = (linear_attend(q, *x, mask=causal(), kernel="triton").out for x in ((k, v), later))
    assert torch.equal(one[:, :, :20], other[:, :, :20])
    assert not torch.equal(one[:, :, 20:], other[:, :, 20:])


@pytest.mark.parametrize("features", [elu_plus_one(), performer(5, 13)], ids=["elu_plus_one", "performer"])
def test_second_derivatives_are_those_of_the_operations_of_torch(features: FeatureMap) -> None:
    seconds = []
    for kernel in ("triton", "torch"):
        q, k, v = (x.requires_grad_() for x in draw((1, 2, 1, 21, 5, 7), torch.float32))
        past = make_state(features, (1, 2, 1, 9, 5, 7))
        out = linear_attend(q, k, v, features=features, mask=causal(), state=past, kernel=kernel).out
        (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad(slope.square().sum(), (q, k, v)))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "dynamic"), [(elu_plus_one(), False), (relu(), True), (performer(5, 13), True)], ids=str
)
def test_compiled_code_runs_the_same_kernels(features: FeatureMap, dynamic: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, past: LinearState | None) -> LinearResult:
        return linear_attend(q, k, v, features=features, mask=causal(), state=past, kernel="triton")

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs, past = draw((1, 2, 1, 21, 5, 7), torch.float32), make_state(features, (1, 2, 1, 9, 5, 7))
    expected = with_gradients(run, inputs, past)
    with regard.recording() as names:
        found = with_gradients(compiled, inputs, past)
    assert names == ["triton"]
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert torch.equal(one, other), name


def test_float32_runs_triton_only_where_it_is_named() -> None:
    x = torch.randn(1, 2, 9, 6, device=DEVICE)
    with regard.recording() as names:
        linear_attend(x, x, x, mask=causal())
        linear_attend(x, x, x, mask=causal(), kernel="triton")
    assert names == ["triton"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_runs_triton_by_itself(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 70, 6, device=DEVICE, dtype=dtype)
    with regard.recording() as names:
        linear_attend(x, x, x, mask=causal())
    assert names == ["triton"]


def test_views_and_transposed_layouts_are_read_in_place() -> None:
    q, k, v = draw((1, 2, 2, 37, 5, 7), torch.float32)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    one, other = (linear_attend(*x, mask=causal(), kernel="triton").out for x in ((q, k, v), strided))
    assert torch.equal(one, other)


REFUSALS: dict[str, Callable[[Tensor], object]] = {
    "its sums are float32, but q is torch.float64": lambda x: linear_attend(
        *[x.double()] * 3, mask=causal(), kernel="triton"
    ),
    "the mask is not causal": lambda x: linear_attend(x, x, x, mask=full(), kernel="triton"),
    "it computes the chunked form, but form='recurrent'": lambda x: linear_attend(
        x, x, x, mask=causal(), form="recurrent", kernel="triton"
    ),
    "it chooses its own chunks, but chunk=8": lambda x: linear_attend(x, x, x, mask=causal(), chunk=8, kernel="triton"),
    "at most 128 features and columns of v, but this call has 130 and 6": lambda x: linear_attend(
        x.repeat(1, 1, 1, 22)[..., :130], x.repeat(1, 1, 1, 22)[..., :130], x, mask=causal(), kernel="triton"
    ),
    "torch.func transforms": lambda x: torch.vmap(lambda y: linear_attend(y, y, y, mask=causal(), kernel="triton").out)(
        x[None]
    ),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_call_that_the_kernels_cannot_compute_is_refused_with_the_reason(text: str) -> None:
    x = torch.randn(1, 2, 9, 6, device=DEVICE)
    with pytest.raises(KernelRefusedError, match=f"(?s)kernel 'triton' refuses.*{text}.*kernel=None would run 'torch'"):
        REFUSALS[text](x)


def test_a_cpu_runs_the_operations_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(1, 2, 9, 6)
    with regard.recording() as names:
        out = linear_attend(x, x, x, mask=causal()).out
    assert names == []
    assert torch.equal(out, linear_attend(x, x, x, mask=causal(), kernel="torch").out)
    with pytest.raises(KernelRefusedError, match="it needs a GPU, but q is on cpu"):
        linear_attend(x, x, x, mask=causal(), kernel="triton")
    with pytest.raises(
        ConfigError, match=r"^kernel must be one of 'triton', 'torch', or None to choose one, not 'fla'$"
    ):
        linear_attend(x, x, x, mask=causal(), kernel="fla")


@pytest.mark.parametrize(
    ("n", "heads", "length"), [(64, 1, 64), (16384, 16, 256), (131072, 16, 2048), (1 << 22, 16, 4096)]
)
def test_segments_are_longer_where_there_are_enough_of_them(n: int, heads: int, length: int) -> None:
    assert choose_length(n, heads) == length
