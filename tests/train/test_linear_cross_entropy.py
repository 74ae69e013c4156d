"""The fused loss of a linear layer against float64: values, gradients, ignored targets, large logits."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard.base.errors import ConfigError, DtypeError, ShapeError
from regard.models.gpt import GPT, GPTConfig
from regard.train import linear_cross_entropy as module
from regard.train.linear_cross_entropy import IGNORED, linear_cross_entropy
from tests import tolerance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTH, VOCAB = (3, 101), 24, 331


def make_inputs(dtype: torch.dtype, device: str, magnitude: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden = magnitude * torch.randn(*ROWS, WIDTH)
    targets = torch.randint(0, VOCAB, ROWS)
    targets[0, ::7] = IGNORED
    weight = torch.randn(VOCAB, WIDTH) / WIDTH**0.5
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), targets.to(device)


def by_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden @ weight.T).to(exact).flatten(0, -2)
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def differentiate(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * 0.37, inputs)]  # a factor, as the batch size is


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 300.0])
def test_value_and_gradients_are_those_of_the_logits(
    device: str, dtype: torch.dtype, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 128 rows at a time, so that 303 are in three unequal slices
    monkeypatch.setattr(module, "CPU_BYTES", 1)
    monkeypatch.setattr(module, "GPU_BYTES", 1)
    hidden, weight, targets = make_inputs(dtype, device, magnitude)
    mine = differentiate(linear_cross_entropy(hidden, weight, targets), hidden, weight)
    naive = differentiate(by_logits(hidden, weight, targets), hidden, weight)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = differentiate(by_logits(*exact, targets), *exact)
    for name, a, b, c, factor in zip(("loss", "hidden", "weight"), mine, naive, truth, (2.0, 3.0, 3.0), strict=True):
        assert not tolerance.too_far(a, b, c, factor), name


@pytest.mark.parametrize("device", DEVICES)
def test_ignored_rows_have_no_gradient_and_may_hold_nan(device: str) -> None:
    hidden, weight, targets = make_inputs(torch.float32, device)
    truth = linear_cross_entropy(hidden, weight, targets)
    changed = hidden.detach().clone()
    changed[0, ::7] = 1e4
    other = linear_cross_entropy(changed.requires_grad_(), weight, targets)
    torch.testing.assert_close(other, truth)
    (gradient,) = torch.autograd.grad(other, changed)
    assert not gradient[0, ::7].any()
    assert gradient[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_a_row_that_counts_gives_nan(device: str) -> None:
    hidden, weight, targets = make_inputs(torch.float32, device)
    hidden.data[1, 5, 2] = math.nan
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_ignored_targets_has_loss_and_gradient_0(device: str) -> None:
    hidden, weight, targets = make_inputs(torch.float32, device)
    loss, *gradients = differentiate(
        linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED)), hidden, weight
    )
    assert not loss
    assert not any(each.any() for each in gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_gives_the_gradients_of_an_autocast_linear_layer(device: str) -> None:
    hidden, weight, targets = make_inputs(torch.float32, device)

    def losses() -> tuple[list[Tensor], list[Tensor]]:
        with torch.autocast(device, torch.bfloat16):
            mine = linear_cross_entropy(hidden, weight, targets)
            logits = functional.linear(hidden, weight).float().flatten(0, 1)
            naive = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return differentiate(mine, hidden, weight), differentiate(naive, hidden, weight)

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = differentiate(by_logits(*exact, targets), *exact)
    for a, b, c in zip(*losses(), truth, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert tolerance.error(a, c) <= 2 * tolerance.error(b, c)


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted_are_computed(which: str) -> None:
    hidden, weight, targets = make_inputs(torch.float32, "cpu")
    frozen = weight if which == "hidden" else hidden
    wanted = hidden if which == "hidden" else weight
    truth = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), wanted)[0]
    frozen.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(torch.autograd.grad(loss, wanted)[0], truth)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets), loss)


def test_a_second_derivative_raises_an_error() -> None:
    hidden, weight, targets = make_inputs(torch.float32, "cpu")
    with pytest.raises(ConfigError, match=r"can be differentiated once; for create_graph=True compute the logits"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


def test_invalid_arguments_raise_an_error() -> None:
    hidden, weight, targets = make_inputs(torch.float32, "cpu")
    with pytest.raises(ShapeError, match=r"weight is \(331, 23\) read as \(w d\), but hidden is \(3, 101, 24\)"):
        linear_cross_entropy(hidden, weight[:, 1:], targets)
    with pytest.raises(ShapeError, match=r"targets is \(3, 100\), but hidden is \(3, 101, 24\) .* \(3, 101\)"):
        linear_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(DtypeError, match=r"targets must be int64, not torch.int32; use targets.long\(\)"):
        linear_cross_entropy(hidden, weight, targets.int())
    targets[1, 3] = VOCAB
    with pytest.raises(ShapeError, match=r"targets has values from -100 to 331, but tokens are 0 to 330"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_gets_the_loss_as_its_head_learns_what_it_learns_from_logits(tied: bool) -> None:
    config = GPTConfig(vocab=97, context=13, width=12, depth=1, heads=3, tied=tied, dropout=0.0, attention_dropout=0.0)
    model, tokens, targets = GPT(config), torch.randint(0, 97, (3, 13)), torch.randint(0, 97, (3, 13))
    by_head = model(tokens, head=partial(linear_cross_entropy, targets=targets))
    by_output = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(by_head, by_output)
    weights = list(model.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(by_head, weights), torch.autograd.grad(by_output, weights), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_model_computes_it_in_one_graph_for_all_batches() -> None:
    config = GPTConfig(vocab=97, context=13, width=12, depth=1, heads=3, dropout=0.0, attention_dropout=0.0)
    model = GPT(config)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        tokens, targets = torch.randint(0, 97, (3, 13)), torch.randint(0, 97, (3, 13))
        losses = [each(tokens, head=partial(linear_cross_entropy, targets=targets)) for each in (compiled, model)]
        gradients = [torch.autograd.grad(loss, model.tokens.weight)[0] for loss in losses]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "columns"), [(201, 256), (1, 128), (9001, 9088)])
def test_the_kernel_gives_the_loss_and_gradient_of_each_row(dtype: torch.dtype, vocab: int, columns: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed; it has wheels for Linux only")
    from regard.train.triton_kernels import cross_entropy_and_gradient

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = (5 * torch.randn(7, columns)).to(device, dtype)
    logits[:, vocab:] = math.inf  # padding, which must not be read
    targets = torch.randint(0, vocab, (7,), device=device)
    targets[2] = IGNORED
    exact = logits[:, :vocab].double().requires_grad_()
    truth = functional.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(truth.sum(), exact)
    losses = cross_entropy_and_gradient(logits, targets, vocab, IGNORED, 8.0, True)
    torch.testing.assert_close(losses.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    assert not logits[:, vocab:].any()
    room = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits[:, :vocab].double() / 8, gradient, rtol=room, atol=room / 8)


def test_autocast_leaves_float64_alone() -> None:
    hidden, weight = torch.randn(5, 7, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)
    targets = torch.randint(11, (5,))
    alone = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(hidden, weight, targets) == alone
