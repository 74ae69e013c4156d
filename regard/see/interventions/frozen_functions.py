"""Make norms and activation functions linear for gradients: each is a product with a factor treated as a constant."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ACTIVATIONS = ("gelu", "tanh", "relu", "silu", "sigmoid", "softplus", "elu", "leaky_relu")


class FrozenFunctions(TorchFunctionMode):
    """Torch function mode that makes norms and activation functions linear for gradients; outputs do not change.

    A norm multiplies its input by a factor that depends on the input. So does an activation function f, with the factor
    f(x) / x. Inside the mode, autograd treats these factors as constants, so the output is a linear function of each
    vector in the residual stream. The dot product of such a vector and its gradient is then the exact contribution of
    this vector to the output.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if func is functional.layer_norm or name == "layer_norm":
            return _layer_norm(*args, **kwargs)
        if func is functional.rms_norm or name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        out = func(*args, **kwargs)
        if name == "rsqrt":  # rsqrt occurs in norms that are written by hand
            return out.detach()
        if name in ACTIVATIONS and isinstance(out, Tensor) and isinstance(args[0], Tensor):
            x = args[0]
            # at x = 0 the product is f(0), which is zero for all but sigmoid and softplus
            factor = torch.where(x == 0, 0.0, out.detach() / x.detach())
            return x * factor
        return out


def _layer_norm(
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    out = centred / (centred.detach().square().mean(axes, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    square = x.detach().square().mean(axes, keepdim=True)
    out = x / (square + (torch.finfo(x.dtype).eps if eps is None else eps)).sqrt()
    return out if weight is None else out * weight
