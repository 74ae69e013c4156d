"""Gradients at large scores, wherever a kernel could be asked for them."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import additive, alibi, attend, causal, sink, softcap, window
from regard.base.errors import KernelRefusedError
from regard.core.attend import prepare_request
from regard.core.kernels import flex
from regard.core.kernels.gradients import (
    keep_traced_layout,
    poison_gradient,
    poison_input_gradients,
    score_bound,
    with_strides,
)
from regard.core.masks.plan_cache import Memo

LARGE = 1e6  # of beta: fused kernels have lost all digits of the weights


def draw(n: int = 70, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    source = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, 16, generator=source).to(device, dtype).requires_grad_() for _ in range(3)]


def test_an_added_row_of_large_numbers_has_the_gradient_of_a_mean():
    added = torch.zeros(70, 70)
    added[3] = -1e9
    for kernel in (None, "sdpa", "eager", "reference"):
        q, k, v = draw()
        attend(q, k, v, scores=added, kernel=kernel)[:, :, 3].sum().backward()
        assert torch.allclose(v.grad.sum(2), torch.ones(1, 2, 16), atol=1e-5)


def test_left_padding_by_the_smallest_number_is_that_of_a_mask():
    """As Hugging Face builds it: rows of padding see nothing but the smallest number."""
    smallest, hidden = torch.finfo(torch.float32).min, 30
    added = torch.zeros(70, 70).masked_fill(~torch.ones(70, 70).tril().bool(), smallest)
    added[:, :hidden] = smallest
    q, k, v = draw()
    attend(q, k, v, scores=added)[:, :, hidden:].square().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    q, k, v = draw()
    visible = torch.ones(70, 70).tril().bool() & (torch.arange(70) >= hidden)
    attend(q, k, v, mask=visible, kernel="reference")[:, :, hidden:].square().sum().backward()
    for own, other in zip(grads, (x.grad for x in (q, k, v)), strict=True):
        assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_have_the_same_gradients(reentrant):
    x, y = draw(), draw()
    checkpoint(lambda *x: attend(*x, beta=LARGE, mask=causal()), *x, use_reentrant=reentrant).sum().backward()
    attend(*y, beta=LARGE, mask=causal(), kernel="eager").sum().backward()
    for own, other in zip(x, y, strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
@pytest.mark.parametrize("beta", [0.3, 60.0, 1e3])
def test_second_derivatives(beta, kernel):
    def penalty(kernel: str | None) -> tuple[Tensor, ...]:
        x = draw(70, torch.float64)
        out = attend(*x, beta=beta, mask=causal() & window(before=9), scores=sink(torch.zeros(2)), kernel=kernel)
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(out.sum() + sum(g.square().sum() for g in first), x)

    for own, other in zip(penalty(kernel), penalty("eager"), strict=True):
        assert torch.allclose(own, other, rtol=1e-8, atol=1e-8 * other.abs().max().item())


@pytest.mark.parametrize("kernel", ["sdpa", "blocked", "eager"])
@pytest.mark.parametrize("beta", [0.3, LARGE])
@pytest.mark.parametrize("inner", [(0,), (1, 2), (0, 1, 2), (3,), (0, 3)], ids=str)
def test_gradients_outside_of_a_transform_of_torch_func(inner, beta, kernel):
    """torch.func.grad of some inputs and, by autograd, gradients of its results, whichever inputs these depend on."""
    found = []
    for own in (kernel, "reference"):
        x = [*draw(70, torch.float64), torch.linspace(0.1, 1.0, 2, dtype=torch.float64).requires_grad_()]

        def loss(*some: Tensor, x: list[Tensor] = x, own: str = own) -> Tensor:
            q, k, v, slopes = (some[inner.index(n)] if n in inner else each for n, each in enumerate(x))
            return attend(q, k, v, mask=window(before=9), scores=alibi(slopes=slopes), beta=beta, kernel=own).sum()

        gradients, value = torch.func.grad_and_value(loss, tuple(range(len(inner))))(*(x[n] for n in inner))
        found.append([*gradients, *torch.autograd.grad(value + sum(y.square().sum() for y in gradients), x)])
    for own, other in zip(*found, strict=True):
        assert torch.allclose(own, other, rtol=1e-8, atol=1e-10 * other.abs().max().item())


@pytest.mark.parametrize("beta", [0.3, LARGE])
def test_jacobians_by_torch_func(beta):
    q, k, v = (x.detach() for x in draw(5))
    found = [torch.func.jacrev(lambda q, x=x: attend(q, k, v, beta=beta, kernel=x))(q) for x in (None, "eager")]
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)
    vmapped = torch.func.vmap(torch.func.vjp(lambda q: attend(q, k, v, beta=beta), q)[1])(
        torch.eye(5 * 32)[:7].view(7, *q.shape)
    )
    assert torch.allclose(vmapped[0], found[1].view(-1, *q.shape)[:7], rtol=1e-4, atol=1e-5)


def test_terms_that_are_learned_outside_of_a_vjp_at_large_scores():
    q, k, v = (x.detach() for x in draw())
    slopes = torch.rand(2, requires_grad=True)
    found = []
    for kernel in (None, "eager"):
        run = lambda *x, kernel=kernel: attend(*x, beta=LARGE, scores=alibi(slopes=slopes), kernel=kernel)  # noqa: E731
        out, pull = torch.func.vjp(run, q, k, v)
        found.append(pull(torch.ones_like(out)))
    for own, other in zip(*found, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-4)


def test_second_derivatives_where_only_one_input_needs_a_gradient():
    q, k, v = draw(9, torch.float64)
    q, k = q.detach(), k.detach()
    (first,) = torch.autograd.grad(attend(q, k, v, beta=1e3).square().sum(), v, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), v)
    (other,) = torch.autograd.grad(attend(q, k, v, beta=1e3, kernel="eager").square().sum(), v, create_graph=True)
    assert torch.allclose(second, torch.autograd.grad(other.sum(), v)[0])


def test_a_retained_graph_gives_the_same_gradients_again():
    x = draw()
    out = attend(*x, beta=LARGE, mask=window(before=9))
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    for own, other in zip(first, torch.autograd.grad(out.sum(), x), strict=True):
        assert torch.equal(own, other)


def gradients_in(setting: str, loss: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a loss as plain, compiled or transformed code computes them."""
    torch._dynamo.reset()
    own = torch.func.grad(loss, (0, 1, 2))
    if setting == "func":
        return own(*(x.detach() for x in inputs))
    if setting == "compiled func":
        return torch.compile(own, fullgraph=True, backend="aot_eager")(*(x.detach() for x in inputs))
    run = torch.compile(loss, fullgraph=True, backend=setting) if setting != "eager" else loss
    return torch.autograd.grad(run(*inputs), inputs)


@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager", "inductor", "compiled func"])
@pytest.mark.parametrize("beta", [0.25, 30.0, 1e3, LARGE])
@pytest.mark.parametrize("kind", ["causal", "window and alibi"])
def test_keys_that_share_a_component_lose_no_digits(setting, beta, kind):
    """The gradient of q is a sum over keys in which the shared component cancels."""
    x = draw()
    x[1] = (x[1].detach() + 100 * torch.ones(16)).requires_grad_()
    rest = {"mask": causal()} if kind == "causal" else {"mask": window(before=9), "scores": alibi(heads=2)}

    def loss(q: Tensor, k: Tensor, v: Tensor, kernel: str | None = None) -> Tensor:
        return attend(q, k, v, beta=beta, kernel=kernel, **rest).square().sum()

    own = gradients_in(setting, loss, x)
    truth = torch.autograd.grad(loss(*(y.double() for y in x), kernel="reference"), x)
    naive = torch.autograd.grad(loss(*x, kernel="eager"), x)
    for name, one, other, exact in zip("qkv", own, naive, truth, strict=True):
        scale = exact.abs().max().item()
        off = (one - exact).abs().max().item()
        assert off <= 3 * (other - exact).abs().max().item() + 2e-6 * max(scale, 1.0), (
            f"{name}: {off:.1e} of {scale:.1e}"
        )


def test_the_compiled_operators_keep_what_torch_asks_of_them():
    q, k, v = (x.detach().requires_grad_() for x in draw(9))
    added = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    for arguments in ((q, k, v, None, True, 0.3), (q.mT.contiguous().mT, k, v, added, False, -0.4)):
        torch.library.opcheck(torch.ops.regard.cpu_attention, arguments)
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(torch.ops.regard.cpu_attention_inference, plain)


def test_compiled_transforms_have_the_gradients_of_plain_ones():
    q, k, v = (torch.stack([x.detach(), -x.detach()]) for x in draw(9))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=causal()).square().sum()

    def slope(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(lambda q: attend(q, k, v), (q,), (k,))[1]

    for transformed in (torch.vmap(torch.func.grad(loss)), torch.vmap(loss), torch.vmap(slope)):
        fast = torch.compile(transformed, fullgraph=True, backend="aot_eager")
        assert torch.allclose(fast(q, k, v), transformed(q, k, v), atol=1e-4)


def test_a_gradient_of_flex_is_replaced_after_the_factor_of_the_sink(monkeypatch):
    """The factor depends on the log-sum-exp, so the guard has to be behind it; `TestOnAGPU` has the numbers."""
    guarded = []

    class Guard:
        def __init__(self, attention: object, refusal: str = "") -> None: ...

        def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return inputs

        def leave(self, out: Tensor, largest: Tensor) -> Tensor:
            guarded.append(out)
            return out

    monkeypatch.setattr(flex, "GradientGuard", Guard)
    monkeypatch.setattr(flex, "_get_compiled", lambda structure: flex._call_flex)
    monkeypatch.setattr(flex, "_needs_gradient", lambda request: True)
    monkeypatch.setattr(flex, "_plans", Memo(4))
    q, k, v = (x.detach() for x in draw())
    request = prepare_request(q, k, v, causal(), sink(torch.tensor([3.0, -2.0])), 9.0, 0.0, None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        out = flex.run(request)
    assert torch.allclose(
        out, attend(q, k, v, mask=causal(), scores=request.terms, beta=9.0, kernel="eager"), atol=1e-5
    )
    assert torch.equal(guarded[0], out)


def test_a_learned_bias_is_exact_at_large_scores_too():
    added = torch.randn(70, 70, requires_grad=True)
    grads = {}
    for kernel in ("sdpa", "reference"):
        x = draw()
        out = attend(*x, beta=LARGE, scores=additive(added), kernel=kernel)
        grads[kernel] = torch.autograd.grad(out.square().sum(), (*x, added))
    for own, other in zip(*grads.values(), strict=True):
        assert torch.allclose(own, other, atol=1e-5)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers with other strides."""
    return {
        "contiguous": x,
        "heads inside": x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a larger tensor": torch.cat([x, x], 1)[:, : x.shape[1]],
        "expanded": x[:, :, :1, :1].expand(x.shape),
    }


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, window(before=20)], ids=str)
def test_strides_of_the_incoming_gradient_change_nothing(device, dtype, mask):
    """On a GPU, torch reuses cuDNN's backward plan for a gradient of other strides."""
    grad = torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for kernel in ("sdpa",) if mask is None else ("sdpa", "blocked"):
        for name, own in layouts(grad).items():
            x = draw(256, dtype, device)
            try:
                found = torch.autograd.grad(attend(*x, mask=mask, kernel=kernel), x, own)
            except KernelRefusedError:
                continue  # float32 on a GPU
            truth = torch.autograd.grad(
                attend(*(y.double() for y in x), mask=mask, kernel="reference"), x, own.double()
            )
            for one, other in zip(found, truth, strict=True):
                assert torch.allclose(one.double(), other.double(), rtol=0.03, atol=0.03), f"{kernel}, {name}"


@pytest.mark.cuda
class TestOnAGPU:
    def test_a_graph_has_nan_for_wrong_gradients(self):
        for beta, wrong in ((0.25, False), (LARGE, True)):
            x = draw(512, torch.bfloat16, "cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    attend(*x, beta=beta, kernel="sdpa").sum().backward()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            for y in x:
                y.grad = None
            with torch.cuda.graph(graph):
                attend(*x, beta=beta, kernel="sdpa").sum().backward()
            graph.replay()
            torch.cuda.synchronize()
            assert bool(x[2].grad.isnan().any()) == wrong

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_flex_with_a_sink_at_large_scores(self, dtype):
        grads = []
        for kernel in ("flex", "eager"):
            x = draw(300, dtype, "cuda")
            term = sink(torch.tensor([1e6, -1e6], device="cuda"))
            attend(*x, beta=LARGE, mask=causal(), scores=term, kernel=kernel).square().sum().backward()
            grads.append([y.grad for y in x])
        for own, other in zip(*grads, strict=True):
            assert torch.allclose(own, other, rtol=2e-2, atol=2e-2)

    def test_dropout_at_large_scores_is_refused_in_the_backward_pass(self):
        x = draw(512, torch.bfloat16, "cuda")
        out = attend(*x, beta=LARGE, dropout=0.3, kernel="sdpa")
        with pytest.raises(RuntimeError, match="dropout draws its own weights; use attend"):
            out.sum().backward()

    @pytest.mark.parametrize("kernel", ["sdpa", "flex"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_long_sequences_of_large_scores(self, kernel, dtype):
        x, y = draw(1500, dtype, "cuda"), draw(1500, dtype, "cuda")
        mask = causal() & window(before=200)
        attend(*x, beta=LARGE, mask=mask, kernel=kernel).sum().backward()
        attend(*y, beta=LARGE, mask=mask, kernel="eager").sum().backward()
        for own, other in zip(x, y, strict=True):
            assert torch.allclose(own.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_poisoned_gradients_are_nan_and_others_are_unchanged():
    x = torch.randn(2, 3, 5).mT.requires_grad_()
    for wrong in (False, True):
        out = poison_gradient(x * 2, torch.tensor(wrong))
        assert torch.equal(out, x * 2)
        (found,) = torch.autograd.grad(out, x, torch.ones_like(out).contiguous())
        assert found.isnan().all() if wrong else found.eq(2).all()


@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager"])
@pytest.mark.parametrize("wrong", [False, True])
def test_poisoned_inputs_have_gradients_of_nan_and_others_are_unchanged(setting, wrong):
    inputs = tuple(torch.randn(2, 3, requires_grad=True) for _ in range(3))

    def loss(*x):
        a, b, c = poison_input_gradients(*x, torch.tensor(wrong))
        return (a * 2 + b * 3 + c * 4).sum()

    if setting == "func":
        found = torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in inputs))
    else:
        run = loss if setting == "eager" else torch.compile(loss, backend=setting, fullgraph=True)
        found = torch.autograd.grad(run(*inputs), inputs)
    for factor, own in enumerate(found, 2):
        assert own.isnan().all() if wrong else own.eq(factor).all()


@pytest.mark.parametrize("setting", ["eager", "func", "aot_eager"])
def test_a_traced_gradient_gets_the_strides_of_its_output(setting):
    x = torch.randn(2, 3, 5)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(y):
            return y.mT.contiguous().mT

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.stride())
            return grad

    def loss(y):
        return (keep_traced_layout(Look.apply(y)) * torch.arange(5.0)).sum()

    if setting == "func":
        found = torch.func.grad(loss)(x)
    else:
        run = loss if setting == "eager" else torch.compile(loss, backend=setting)
        found = torch.autograd.grad(run(x.requires_grad_()), x)[0]
    assert torch.equal(found, torch.arange(5.0).expand(2, 3, 5))
    if setting != "aot_eager":  # whose backward pass is traced with other tensors
        assert seen == [(15, 1, 3)]


def test_a_gradient_gets_the_strides_that_a_kernel_needs():
    x = torch.randn(2, 3, 5)
    strides = x.mT.contiguous().mT.stride()
    assert with_strides(x, x.stride()) is x
    assert with_strides(x, strides).stride() == strides
    assert torch.equal(with_strides(x, strides), x)


@pytest.mark.parametrize("beta", [0.3, -40.0])
def test_no_score_is_above_the_bound(beta):
    q, k, _ = draw()
    scores = (beta * q @ k.mT).abs().amax()
    assert scores <= score_bound(q, k, beta) < 10 * scores


@pytest.mark.parametrize("kernel", ["eager", "reference"])
def test_what_is_added_after_a_soft_cap_is_centred_by_row(kernel):
    added = torch.zeros(70, 70)
    added[3] = -1e9
    found = []
    for values in (added, torch.zeros(70, 70)):
        x = draw()
        out = attend(*x, scores=[softcap(5.0), values], kernel=kernel)
        found.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for own, other in zip(*found, strict=True):
        assert torch.allclose(own, other, atol=1e-5)
