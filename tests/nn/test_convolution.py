"""Convolutions with batch norm."""

import pytest
import torch

from regard.nn.convolution import ConvNorm


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_followed_by_batch_norm(stride: int) -> None:
    torch.manual_seed(0)
    layer, x = ConvNorm(3, 7, stride=stride), torch.randn(5, 3, 9, 11)
    out = layer(x)
    assert out.shape == (5, 7, -(-9 // stride), -(-11 // stride))
    assert layer.convolution.bias is None
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(7), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(7), rtol=0, atol=1e-3)
