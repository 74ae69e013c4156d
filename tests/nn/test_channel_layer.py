"""Attention between channels: the formula, and what it does not depend on."""

import pytest
import torch
from torch import Tensor

from regard.base.errors import ConfigError, ShapeError
from regard.nn.channel_attention import ChannelAttention

B, N, WIDTH, GROUPS = 2, 5, 12, 3


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def layer() -> ChannelAttention:
    torch.manual_seed(2)
    return ChannelAttention(WIDTH, GROUPS).double()


def test_it_is_the_formula():
    one, x = layer(), noise(B, N, WIDTH)
    q, k, v = (x @ one.query_key_value.weight.T + one.query_key_value.bias).split(WIDTH, -1)
    c, groups = WIDTH // GROUPS, []
    for group in range(GROUPS):
        own = slice(group * c, group * c + c)
        weights = (q[..., own].mT @ k[..., own] / c**0.5).softmax(-1)  # (b, c, c): channel by channel
        groups.append(torch.einsum("bxy,bny->bnx", weights, v[..., own]))
    truth = torch.cat(groups, -1) @ one.out.weight.T + one.out.bias
    torch.testing.assert_close(one(x), truth, rtol=1e-12, atol=1e-12)


def test_the_order_of_positions_does_not_matter():
    one, x = layer(), noise(B, N, WIDTH)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(one(x[:, order]), one(x)[:, order], rtol=1e-12, atol=1e-12)


def test_it_compiles_and_exports():
    one, x = layer().float(), noise(B, N, WIDTH).float()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(one, fullgraph=True, backend="aot_eager")(x), one(x))
    torch.testing.assert_close(torch.export.export(one, (x,)).module()(x), one(x))


def test_bad_settings_and_inputs_are_refused():
    with pytest.raises(ConfigError, match="width must be a multiple of heads: width=12, heads=5"):
        ChannelAttention(WIDTH, 5)
    with pytest.raises(ShapeError, match=r"x is \(2, 5, 11\), but is read as \(b n d\) with d=12"):
        layer()(noise(B, N, 11))


def test_names_are_stable():
    wanted = ["query_key_value.weight", "query_key_value.bias", "out.weight", "out.bias"]
    assert list(layer().state_dict()) == wanted
    assert list(ChannelAttention(WIDTH, GROUPS, bias=False).state_dict()) == [wanted[0], *wanted[2:]]
