"""Convolutions with batch norm, for the image baselines."""

import math

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.init import Initializers, constant, fan_in

# initial values of a network of `ConvNorm` with a linear head
INITIALIZERS: Initializers = {
    "*.convolution.weight": fan_in(math.sqrt(2)),
    "*norm.weight": constant(1.0),
    "*.running_var": constant(1.0),
    "*.running_mean": constant(0.0),
    "*.num_batches_tracked": constant(0.0),
    "*.bias": constant(0.0),
    "head.weight": fan_in(),
}


class ConvNorm(nn.Module):
    """A 3 x 3 convolution followed by batch norm. Ioffe and Szegedy 2015, arXiv:1502.03167.

    old, new  numbers of input and output channels (in_channels, out_channels)
    """

    def __init__(self, old: int, new: int, *, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(old, new, 3, stride=stride, padding=1, bias=False)  # the norm has a bias
        self.norm = nn.BatchNorm2d(new)

    def forward(self, x: Float[Tensor, "b m y x"]) -> Float[Tensor, "b d rows columns"]:
        return self.norm(self.convolution(x))
