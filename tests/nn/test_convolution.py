"""Convolutions with a batch norm."""

import copy

import pytest
import torch
from torch import nn

from regard.nn.convolution import ConvNorm, run_blocks_with_batch_norm


def test_outputs_are_normalised_over_the_batch() -> None:
    layer = ConvNorm(3, 5)
    out = layer(torch.randn(7, 3, 9, 11))
    assert out.shape == (7, 5, 9, 11)
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.var((0, 2, 3), correction=0), torch.ones(5), rtol=0, atol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_is_counted_once_also_if_it_is_computed_twice(recompute: bool) -> None:
    blocks = nn.ModuleList([ConvNorm(3, 4), ConvNorm(4, 5, stride=2)])
    plain, x = copy.deepcopy(blocks), torch.randn(6, 3, 7, 5)
    for _ in range(3):
        run_blocks_with_batch_norm(blocks, x, recompute=recompute).square().sum().backward()
        plain[1](plain[0](x)).square().sum().backward()
    assert blocks[0].norm.num_batches_tracked == 3
    for (name, actual), expected in zip(blocks.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(actual, expected), name
    for (name, actual), expected in zip(blocks.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), name


def test_what_is_recomputed_is_not_kept() -> None:
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        kept[recompute] = 0

        def count(x: torch.Tensor, recompute: bool = recompute) -> torch.Tensor:
            kept[recompute] += x.numel()
            return x

        blocks = nn.ModuleList([ConvNorm(3, 16) if n == 0 else ConvNorm(16, 16) for n in range(4)])
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            run_blocks_with_batch_norm(blocks, torch.randn(2, 3, 9, 9, requires_grad=True), recompute=recompute)
    assert kept[True] < kept[False] / 2
