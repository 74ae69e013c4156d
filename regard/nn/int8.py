"""Linear layers with int8 weights, for inference: they need a quarter of the memory of float32.

    small = quantize_int8(model)  # a copy for inference; `model` is unchanged
    small.generate(tokens, max_new_tokens=64)

Weight-only quantization: the weights of each output are rounded to multiples of a scale. The scale is the largest
absolute value of these weights divided by 127. Activations, the inputs of the layers, are not quantized; on a CPU, they
are rounded to bfloat16.
"""

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError

LEVELS = 127  # the largest int8
VECTOR = 16  # torch's int8 kernel reads beyond the end of rows that are no multiple of it
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class Int8Weight:
    """A weight matrix in int8, with one float32 scale for each output."""

    values: Int8[Tensor, "o i"]
    scales: Float[Tensor, "o"]

    @property
    def shape(self) -> torch.Size:
        """The shape (outputs, inputs)."""
        return self.values.shape

    def __getitem__(self, rows: slice) -> "Int8Weight":
        """Return the weights and scales of the outputs with the indices `rows`."""
        return Int8Weight(self.values[rows], self.scales[rows])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "o i"]:
        """Return the weights as floating-point numbers."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def quantize_weight(weight: Float[Tensor, "o i"]) -> Int8Weight:
    """Round a weight matrix to int8. Each weight changes by at most half the scale of its output, which is its row."""
    weight = weight.detach().float()
    if not weight.isfinite().all():
        raise ConfigError("a weight is NaN or infinity, which int8 cannot hold")
    scales = weight.abs().amax(1) / LEVELS
    steps = weight / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return Int8Weight(steps.round().clamp(-LEVELS, LEVELS).to(torch.int8), scales)


def int8_linear(x: Float[Tensor, "*n i"], weight: Int8Weight, bias: Float[Tensor, "o"] | None) -> Float[Tensor, "*n o"]:
    """Return x @ weight.T + bias.

    On a CPU without gradients, torch's int8 kernel reads the int8 weights directly, if the number of input features is
    a multiple of `VECTOR`, the size that this kernel needs. The kernel takes and returns bfloat16; the scales are
    applied afterwards, in float32. In all other cases the weights are converted to the dtype of x first.
    """
    needs_gradients = torch.is_grad_enabled() and x.requires_grad
    if x.device.type != "cpu" or x.shape[-1] % VECTOR or needs_gradients:
        return functional.linear(x, weight.dequantize(x.dtype), bias)
    ones = torch.ones_like(weight.scales, dtype=torch.bfloat16)
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    y = torch.ops.aten._weight_int8pack_mm(rows, weight.values, ones).float() * weight.scales
    y = (y if bias is None else y + bias).to(x.dtype)
    return y.reshape(*x.shape[:-1], len(weight.scales))


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, made from an `nn.Linear` by `quantize_int8`. It cannot be trained."""

    values: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = quantize_weight(layer.weight)
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.bias = layer.bias

    @property
    def weight(self) -> Int8Weight:
        """The weights and their scales."""
        return Int8Weight(self.values, self.scales)

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        return int8_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_int8(model: Layer) -> Layer:
    """Return a copy of a model of regard for inference, in which the linear layers of its blocks have int8 weights.

    Embeddings, norms and the output layer keep their weights: rounding the logits would change the chosen tokens more
    than rounding inside the blocks. The copy cannot be saved or trained, so save the model before you quantize it.

    >>> small = quantize_int8(regard.build("gpt2"))
    >>> small.blocks[0].attention.out
    Int8Linear(in_features=768, out_features=768, bias=True)
    """
    from regard.nn.projection import Linear

    quantized = copy.deepcopy(model).requires_grad_(False)
    found = False
    for name, module in list(quantized.named_modules()):
        for child_name, child in list(module.named_children()):
            # a subclass may compute something else, and the output layer, "head", is outside of the blocks
            if type(child) is Linear and (name or child_name != "head"):
                setattr(module, child_name, Int8Linear(child))
                found = True
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer of regard.nn to quantize; pass a model of regard"
        )
    return quantized.eval()
