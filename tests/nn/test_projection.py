"""Linear layers: one or two rows are multiplied by another method, with the result of any other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard.nn import projection
from regard.nn.projection import Linear, linear


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the batched products."""
    shapes: list[tuple[int, ...]] = []
    multiply = torch.bmm

    def recorded(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((*a.shape, *b.shape))
        return multiply(a, b)

    monkeypatch.setattr(torch, "bmm", recorded)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "batched"), [((701,), True), ((1, 1, 701), True), ((2, 1, 701), True), ((3, 701), False)]
)
def test_few_rows_give_the_numbers_of_torch(
    shape: tuple[int, ...], batched: bool, bias: bool, products: list[tuple[int, ...]]
) -> None:
    draws = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draws), torch.randn(749, 701, generator=draws)
    shift = torch.randn(749, generator=draws) if bias else None
    with torch.no_grad():
        out, plain = linear(x, weight, shift), functional.linear(x, weight, shift)
    exact = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert out.shape == plain.shape
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
    assert bool(products) == batched


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x, weight.t().contiguous().t()),
        lambda x, weight: (x, weight[:5]),
        lambda x, weight: (x.double(), weight.double()),
        lambda x, weight: (x.to("meta"), weight.to("meta")),
    ],
    ids=["not contiguous", "small", "float64", "meta"],
)
def test_other_cases_are_left_to_torch(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], products: list[tuple[int, ...]]
) -> None:
    x, weight = change(torch.ones(1, 701), torch.ones(749, 701))
    with torch.no_grad():
        assert linear(x, weight).shape == (1, len(weight))
    assert not products


def test_with_gradients_or_autocast_torch_computes(products: list[tuple[int, ...]]) -> None:
    layer, x = Linear(701, 749), torch.ones(1, 701)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not products
    assert layer.weight.numel() >= projection.LARGE
