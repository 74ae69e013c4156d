"""Outputs and gradients of every kernel at every magnitude of scores, from 1e-3 to 1e12.

The truth is float64; for float64 itself it is the extended precision of numpy's long double. A result may be twice
(gradients: three times) as far from it as the naive method in the same dtype, and one ulp farther (16 in float64).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import (
    Mask,
    additive,
    alibi,
    attend,
    causal,
    full,
    padding,
    shaw,
    sink,
    softcap,
    t5_buckets,
    window,
)
from regard.base.errors import KernelRefusedError
from regard.core.scores import t5_bucket
from tests.kernels import CPU_KERNELS
from tests.tolerance import GRADIENT, OUTPUT, ULPS_OF_FLOAT64, error, ulp

B, H, G, N, J = 1, 4, 2, 133, 197
INEXACT = [name for name in CPU_KERNELS if name != "reference"]  # the reference computes in float64
WIDTHS = {"cpu": (19, 13), "cuda": (24, 40)}  # c and e; a GPU's fused kernels take no odd ones
REACH = 20  # of t5_buckets
SIZES = (1e-3, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e6, 1e9, 1e12)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS: dict[str, Callable[[], Mask]] = {
    "full": full,
    "causal": causal,
    "window": lambda: causal() & window(before=9),
    "padding": lambda: padding([J - 7]) & window(before=20, after=20),
}


@dataclass(frozen=True)
class Case:
    """q, k and v, what is added to their scores, beta and the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: str
    beta: float | None = None
    added: Tensor | None = None  # float32 unless q is float64
    slopes: Tensor | None = None
    sink: Tensor | None = None
    buckets: Tensor | None = None  # a table of t5_buckets
    relative: Tensor | None = None  # keys of shaw
    cap: float | None = None

    def visible(self) -> Tensor:
        return MASKS[self.mask]().dense(N, J).expand(B, 1, N, J)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(*shape: int, seed: int) -> Tensor:
    """Numbers of both signs whose magnitudes run from 1e-3 to 1e12."""
    source = torch.Generator().manual_seed(seed)
    exponent = torch.rand(shape, generator=source, dtype=torch.float64) * 15 - 3
    return 10.0**exponent * normal(*shape, seed=seed + 1).sign()


def by_dot_product(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    """q and k share the factor, so that half precision holds them."""
    most = 1e2 if dtype == torch.float16 else 1e12
    own = min(size, most) ** 0.5
    q, k, v = normal(B, H, N, c, seed=1) * own, normal(B, G, J, c, seed=2) * own, normal(B, G, J, e, seed=3)
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, beta=c**-0.5 * size / own**2)


def by_beta(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    q, k, v = normal(B, H, N, c, seed=4), normal(B, G, J, c, seed=5), normal(B, G, J, e, seed=6)
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, beta=size * c**-0.5)


def by_what_is_added(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    """Rows that are large throughout, of both signs, and rows in which one number is large."""
    q, k, v = normal(B, H, N, c, seed=7), normal(B, G, J, c, seed=8), normal(B, G, J, e, seed=9)
    added = normal(1, N, J, seed=10)
    added[:, ::3] = -size
    added[:, 1::6] += size
    added[:, 4::6, 5::7] = -size
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, added=added.to(wide))


def by_terms(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    q, k, v = normal(B, H, N, c, seed=11), normal(B, G, J, c, seed=12), normal(B, G, J, e, seed=13)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slopes, logits = torch.tensor([0.5, 0.1, 2.0, 1.0]) * size, torch.tensor([0.0, 1.0, -1.0, 0.3]) * size
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, slopes=slopes.to(wide), sink=logits.to(wide))


def by_t5(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    q, k, v = normal(B, H, N, c, seed=21), normal(B, G, J, c, seed=22), normal(B, G, J, e, seed=23)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = normal(8, H, seed=24) - size * torch.tensor([1.0, 0.0, 1.0, 0.3])  # rows that are large throughout
    table[2::3] = -size
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, buckets=table.to(wide))


def by_shaw(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    most = 1e3 if dtype == torch.float16 else 1e12
    q, k, v = normal(B, H, N, c, seed=25), normal(B, G, J, c, seed=26), normal(B, G, J, e, seed=27)
    keys = normal(9, c, seed=28) * min(size, most)
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, relative=keys.to(dtype))


def by_softcap(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    return replace(by_dot_product(dtype, size, mask, c, e), cap=30.0)


def mixed(dtype: torch.dtype, size: float, mask: str, c: int, e: int) -> Case:
    """Every magnitude up to the size in one row: in what is added, and for wide dtypes in k too."""
    q, k, v = normal(B, H, N, c, seed=14), normal(B, G, J, c, seed=15), normal(B, G, J, e, seed=16)
    if dtype in (torch.float64, torch.float32):
        k = k * spread(B, G, J, 1, seed=17).abs().clamp(max=size)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    added = spread(N, J, seed=18).clamp(-size, size)
    added[::5] = normal(len(added[::5]), J, seed=19)  # else one key would have all the weight in every row
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), mask, added=added.to(wide))


SOURCES = {
    f.__name__: f for f in (by_dot_product, by_beta, by_what_is_added, by_terms, mixed, by_t5, by_shaw, by_softcap)
}
NO_LONG_DOUBLE = ("by_shaw", "by_softcap")  # their gradients are not written out below


def bias(case: Case, exact: torch.dtype) -> Tensor:
    """What is added to q . k, with the sink as one more column and the largest visible number of a row at 0."""
    total = torch.zeros(B, H, N, J, dtype=torch.float64)
    if case.added is not None:
        total = total + case.added.double()
    if case.slopes is not None:
        row, column = torch.arange(J - N, J)[:, None], torch.arange(J)[None]
        total = total - case.slopes.double()[:, None, None] * (row - column).abs()
    if case.buckets is not None:
        bucket = t5_bucket(torch.arange(J)[None] - torch.arange(J - N, J)[:, None], len(case.buckets), REACH, True)
        total = total + case.buckets.double()[bucket].permute(2, 0, 1)
    total = total.masked_fill(~case.visible(), -math.inf)
    if case.sink is not None:
        total = torch.cat([total, case.sink.double()[:, None, None].expand(B, H, N, 1)], -1)
    top = total.amax(-1, keepdim=True)
    return (total - top.masked_fill(top.isneginf(), 0)).to(exact)


def naive(case: Case, exact: torch.dtype, turn: int = 0, device: str = "cpu") -> list[Tensor]:
    """The output and the gradients of q, k and v as a textbook computes them."""
    q, k, v = (x.detach().to(device, exact).requires_grad_() for x in (case.q, case.k, case.v))
    beta = case.q.shape[-1] ** -0.5 if case.beta is None else case.beta
    turned = (q * beta if turn % 2 else q).roll(turn, -1), k.roll(turn, -1)
    scores = turned[0] @ turned[1].repeat_interleave(H // G, 1).mT * (1.0 if turn % 2 else beta)
    if case.relative is not None:
        reach, distance = len(case.relative) // 2, torch.arange(J)[None] - torch.arange(J - N, J)[:, None]
        own = turned[0] @ case.relative.to(device, exact).roll(turn, -1).T * (1.0 if turn % 2 else beta)
        where = (distance.clamp(-reach, reach) + reach).to(device).expand(B, H, N, J)
        scores = scores + own.gather(-1, where)
    if case.cap is not None:
        scores = torch.tanh(scores / case.cap) * case.cap
    added = bias(case, exact).to(device)
    scores = torch.nn.functional.pad(scores, (0, added.shape[-1] - J)) + added
    blind = scores.isneginf().all(-1, keepdim=True)
    weights = torch.where(blind, 0, scores).softmax(-1)[..., :J]
    out = torch.where(blind, 0, weights @ v.repeat_interleave(H // G, 1))
    grads = torch.autograd.grad(out, (q, k, v), upstream(case).to(device, exact))
    return [x.detach().cpu() for x in (out, *grads)]


def upstream(case: Case) -> Tensor:
    return normal(B, H, N, case.v.shape[-1], seed=99).to(case.q.dtype)


def extended(case: Case) -> list[Tensor]:
    """The same in long double, with the gradients written out."""
    q, k, v, g = (x.detach().double().numpy().astype(np.longdouble) for x in (case.q, case.k, case.v, upstream(case)))
    k, v = (np.repeat(x, H // G, 1) for x in (k, v))
    beta = np.longdouble(case.q.shape[-1] ** -0.5 if case.beta is None else case.beta)
    scores = np.einsum("bhic,bhjc->bhij", q, k) * beta
    added = bias(case, torch.float64).numpy().astype(np.longdouble)
    scores = np.concatenate([scores, np.zeros((*scores.shape[:-1], added.shape[-1] - J), np.longdouble)], -1) + added
    top = scores.max(-1, keepdims=True)
    blind = np.isneginf(top)
    with np.errstate(invalid="ignore", under="ignore"):
        weights = np.exp(np.where(blind, 0, scores - np.where(blind, 0, top)))
        weights = np.where(blind, 0, weights / weights.sum(-1, keepdims=True))[..., :J]
        out = np.einsum("bhij,bhje->bhie", weights, v)
        of_weights = np.einsum("bhie,bhje->bhij", g, v)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
        of_q = np.einsum("bhij,bhjc->bhic", of_scores, k) * beta
        of_k, of_v = np.einsum("bhij,bhic->bhjc", of_scores, q) * beta, np.einsum("bhij,bhie->bhje", weights, g)
    grouped = [x.reshape(B, G, H // G, J, -1).sum(2) for x in (of_k, of_v)]
    return [torch.from_numpy(x.astype(np.float64)) for x in (out, of_q, *grouped)]


def results(case: Case, kernel: str | None, device: str, setting: str = "eager") -> list[Tensor]:
    """The output and the gradients of q, k and v, in plain, compiled or transformed code."""
    q, k, v = (x.detach().clone().to(device).requires_grad_() for x in (case.q, case.k, case.v))
    terms = [additive(case.added.to(device))] if case.added is not None else []
    terms += [alibi(slopes=case.slopes)] if case.slopes is not None else []
    terms += [sink(case.sink)] if case.sink is not None else []
    terms += [t5_buckets(case.buckets.to(device), max_distance=REACH)] if case.buckets is not None else []
    terms += [shaw(case.relative.to(device))] if case.relative is not None else []
    terms += [softcap(case.cap)] if case.cap is not None else []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=MASKS[case.mask](), scores=terms or None, beta=case.beta, kernel=kernel)

    if setting == "func":
        out, pull = torch.func.vjp(run, *(x.detach() for x in (q, k, v)))
        return [x.detach().cpu() for x in (out, *pull(upstream(case).to(device)))]
    if setting != "eager":
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend=setting)
    out = run(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), upstream(case).to(device))
    return [x.detach().cpu() for x in (out, *grads)]


def cases() -> Iterator[tuple[str, torch.dtype, str]]:
    """Each source in each dtype with one mask of its own, and in float32 with all of them."""
    for number, (source, dtype) in enumerate(itertools.product(SOURCES, DTYPES)):
        if dtype == torch.float64 and source in NO_LONG_DOUBLE:
            continue
        for own in MASKS if dtype == torch.float32 else [list(MASKS)[number % len(MASKS)]]:
            yield source, dtype, own


def hold(
    source: str,
    dtype: torch.dtype,
    mask: str,
    device: str,
    kernels: tuple[str | None, ...],
    sizes: tuple[float, ...] = SIZES,
    setting: str = "eager",
) -> None:
    served = 0
    ordinary = 1e3 if source == "by_terms" else 1e5  # slopes times distances are up to 40 times the size
    for size in sizes:
        case = SOURCES[source](dtype, size, mask, *WIDTHS[device])
        truth = extended(case) if dtype == torch.float64 else naive(case, torch.float64)
        # half precision: what is right but for the rounding of the result
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tries = [naive(case, wide, turn, where) for turn in range(4) for where in {"cpu", device}]
        for kernel in kernels:
            if device == "cuda" and dtype.itemsize == 2 and source == "by_shaw" and kernel in ("sdpa", "blocked"):
                continue  # they take a bias in the dtype of q there; by default other kernels run
            try:
                own = results(case, kernel, device, setting)
            except KernelRefusedError:
                continue
            served += 1
            for name, which in (("the output", 0), ("dq", 1), ("dk", 2), ("dv", 3)):
                worst = max((y[which].to(dtype) for y in tries), key=lambda y, which=which: error(y, truth[which]))
                if which and device == "cuda" and dtype.itemsize == 2 and size > ordinary and own[which].isnan().any():
                    continue  # at an ordinary beta, gradients in half precision are NaN there instead of wrong
                factor, ulps = GRADIENT if which else OUTPUT, ULPS_OF_FLOAT64 if dtype == torch.float64 else 1
                off = error(own[which], truth[which])
                most = factor * error(worst, truth[which]) + ulps * ulp(truth[which], dtype)
                assert off <= most, (
                    f"{name} of {kernel or 'the chosen kernel'} at size {size:.0e} is off by {off:.1e}, not {most:.1e}"
                )
    assert served >= min(2, len(kernels)) * len(sizes)


@pytest.mark.parametrize(("source", "dtype", "mask"), list(cases()), ids=str)
def test_every_kernel_is_as_exact_as_the_naive_method(source, dtype, mask):
    hold(source, dtype, mask, "cpu", (None, *INEXACT))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_torch_func_are_as_exact(source, dtype):
    hold(source, dtype, "window", "cpu", (None, "eager"), setting="func")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_compiled_code_are_as_exact(source, dtype):
    hold(source, dtype, "causal", "cpu", (None,), (1e2, 1e4, 1e9), "aot_eager")


@pytest.mark.cuda
@pytest.mark.parametrize(("source", "dtype", "mask"), list(cases()), ids=str)
def test_every_kernel_of_a_gpu_is_as_exact_as_the_naive_method(source, dtype, mask):
    # flex compiles each of these for seconds; in float32 its exp2 makes outputs of scores near 100 less exact
    flex = source in ("by_beta", "by_terms") and dtype.itemsize == 2
    hold(source, dtype, mask, "cuda", (None, *INEXACT, *(["flex"] if flex else [])))


def test_the_long_double_truth_is_that_of_float64_at_ordinary_scores():
    case = by_beta(torch.float64, 1.0, "window", 19, 13)
    for long, double in zip(extended(case), naive(case, torch.float64), strict=True):
        assert torch.allclose(long, double, rtol=1e-12, atol=1e-14)
