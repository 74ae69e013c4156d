"""The feed-forward network of a Transformer block."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.registry import Registry
from regard.base.validation import check_integer
from regard.nn.attention import check_probability
from regard.nn.projection import Linear

ACTIVATIONS: Registry[Callable[[Tensor], Tensor]] = Registry("activation")
ACTIVATIONS.add("relu")(torch.relu)
ACTIVATIONS.add("gelu")(functional.gelu)
ACTIVATIONS.add("gelu-tanh")(partial(functional.gelu, approximate="tanh"))  # the GELU with which GPT-2 was trained
ACTIVATIONS.add("silu")(functional.silu)
ACTIVATIONS.add("tanh")(torch.tanh)

GATED = "gated-"


def check_activation(name: str) -> None:
    """Check that an activation of this name exists, with or without "gated-", else raise UnknownNameError."""
    ACTIVATIONS[name.removeprefix(GATED)]


class FeedForward(nn.Module):
    """A feed-forward network (MLP): down(f(up(x))), or down(f(gate(x)) * up(x)) for a gated activation f.

    `up`, `gate` and `down` are linear layers.

    width       model width
    hidden      number of hidden entries, the output of `up`; None is 4 * width
    activation  a name in `regard.nn.feedforward.ACTIVATIONS`, such as "gelu", or such a name after "gated-":
                "gated-silu" is SwiGLU. Shazeer 2020, arXiv:2002.05202
    bias        whether the linear layers have a bias
    dropout     dropout probability of the hidden entries, in training only

    >>> FeedForward(32, 64)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_integer("width", width, 1)
        hidden = 4 * width if hidden is None else check_integer("hidden", hidden, 1)
        check_probability("dropout", dropout)
        self.activation = ACTIVATIONS[activation.removeprefix(GATED)]
        self.gate = Linear(width, hidden, bias=bias) if activation.startswith(GATED) else None
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.dropout = dropout

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        if self.dropout:
            hidden = functional.dropout(hidden, self.dropout, self.training)
        return self.down(hidden)
