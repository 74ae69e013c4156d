"""The feed-forward part: its formula, plain and gated."""

import math

import pytest
import torch

from regard.base.errors import ConfigError, UnknownNameError
from regard.nn.feedforward import ACTIVATIONS, FeedForward

BY_HAND = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu-tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def test_every_activation_is_known_by_hand():
    assert set(ACTIVATIONS) == set(BY_HAND)


@pytest.mark.parametrize("activation", BY_HAND)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_formula(activation, gated, bias):
    torch.manual_seed(1)
    part = FeedForward(3, 7, activation=("gated-" if gated else "") + activation, bias=bias).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64) * 2
    if gated:
        hidden = part.gate(x).detach().apply_(BY_HAND[activation]) * part.up(x)
    else:
        hidden = part.up(x).detach().apply_(BY_HAND[activation])
    torch.testing.assert_close(part(x), part.down(hidden), rtol=1e-12, atol=1e-12)
    assert ("gate.weight" in part.state_dict()) == gated
    assert ("down.bias" in part.state_dict()) == bias


def test_every_token_is_treated_by_itself():
    part, x = FeedForward(3, 7), torch.randn(2, 5, 3)
    torch.testing.assert_close(part(x)[:, 2:3], part(x[:, 2:3]))


def test_dropout_acts_in_training_only():
    part, x = FeedForward(3, 70, dropout=0.5), torch.randn(2, 5, 3)
    assert not torch.equal(part(x), part(x))
    part.eval()
    assert torch.equal(part(x), part(x))


@pytest.mark.parametrize("activation", ["gelu", "gated-silu"])
def test_it_compiles_and_exports(activation):
    part, x = FeedForward(3, 7, activation=activation), torch.randn(2, 5, 3)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(part, fullgraph=True, backend="aot_eager")(x), part(x))
    torch.testing.assert_close(torch.export.export(part, (x,)).module()(x), part(x))


def test_bad_settings_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown activation 'sillu'; did you mean 'silu'\?"):
        FeedForward(3, 7, activation="gated-sillu")
    with pytest.raises(ConfigError, match="hidden is 0, but must be at least 1"):
        FeedForward(3, 0)
    with pytest.raises(ConfigError, match="dropout is a share"):
        FeedForward(3, 7, dropout=1.0)
