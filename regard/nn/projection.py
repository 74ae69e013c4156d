"""Linear layers that are faster for a single token, as in decoding on a CPU."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.nn.int8 import Int8Weight, int8_linear

FEW_ROWS = 2
LARGE = 1 << 19  # numbers; smaller matrices may be in the cache of a core, where a plain product is faster


def linear(
    x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"] | Int8Weight, bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "*n o"]:
    """torch.nn.functional.linear, but faster for one or two rows in float32 on a CPU without gradients.

    The weight may also be in int8, see `int8_linear`. For one or two rows, most of the time is spent on reading the
    weights. A batched product reads large weights faster than the matrix-vector product that torch would choose:
    multiplying by all matrices of GPT-2 once takes 15 ms instead of 24 ms on one core.
    """
    if isinstance(weight, Int8Weight):
        return int8_linear(x, weight, bias)
    if (
        torch.is_grad_enabled()
        or x.device.type != "cpu"
        or not x.dtype == weight.dtype == torch.float32
        or x.numel() > FEW_ROWS * weight.shape[1]
        or weight.numel() < LARGE
        or not weight.is_contiguous()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
    ):
        return functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    columns = x.reshape(-1, inputs).t().expand(outputs, -1, -1)
    product = torch.bmm(weight[:, None], columns)[:, 0].t().reshape(*x.shape[:-1], outputs)
    return product if bias is None else product + bias


class Linear(nn.Linear):
    """torch.nn.Linear, computed by the function `linear` of this module."""

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        return linear(x, self.weight, self.bias)
