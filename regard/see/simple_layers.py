"""Layers of torch and transformers that compute no attention, such as linear layers, norms and activation functions."""

from typing import Any

from torch import nn
from torch.nn.modules import module as module_file

KINDS: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Embedding, nn.Identity, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool2d, nn.AvgPool2d,
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardswish,
)  # fmt: skip
LINEAR, ACTIVATIONS = "transformers.pytorch_utils", "transformers.activations"  # files with simple layers only
_forwards: dict[type[nn.Module], Any] = {kind: kind.forward for kind in KINDS}


def is_simple_layer(module: nn.Module) -> bool:
    """Return whether a call of the module runs only the code of a known simple layer.

    A layer with hooks or with a replaced `forward` is not simple, because these may run any code.
    """
    kind = type(module)
    forward = _forwards.get(kind)
    if forward is None:
        if kind.__module__ not in (LINEAR, ACTIVATIONS):
            return False
        forward = _forwards[kind] = kind.forward
    own = module.__dict__
    if (
        kind.forward is not forward
        or "forward" in own
        or own["_modules"]
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or module_file._global_forward_hooks
        or module_file._global_forward_pre_hooks
    ):
        return False
    # a linear layer whose weight was replaced by a tensor may multiply queries with keys
    is_product = kind is nn.Linear or kind.__module__ == LINEAR
    return not is_product or type(own["_parameters"].get("weight")) is nn.Parameter
