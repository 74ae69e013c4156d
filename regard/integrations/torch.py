"""Replace torch.nn.MultiheadAttention inside a model by `regard.nn.MultiheadAttention`, or undo the replacement."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree

from regard.base.errors import ConfigError
from regard.nn.multihead_attention import MultiheadAttention

_ORIGINAL = "_replaced_by_regard"  # the layer of torch, kept for `restore`


@dataclass(frozen=True)
class Replacement:
    """The report of `replace`: replaced modules, modules not replaced, and the largest change of the output.
    >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> replace(layer, example=(torch.zeros(1, 5, 16),)).replaced
    ('self_attn',)
    """

    replaced: tuple[str, ...]  # names of the modules
    max_difference: float | None  # largest change of an output for the example; None without an example
    left_out: dict[str, str] = field(default_factory=dict)  # name of a module -> why it stays

    def __str__(self) -> str:
        plural = "" if len(self.replaced) == 1 else "s"
        names = f": {', '.join(self.replaced)}" if self.replaced else ""
        lines = [f"replaced {len(self.replaced)} module{plural}{names}"]
        if self.max_difference is not None:
            lines.append(f"largest difference of the outputs: {self.max_difference:.2g}")
        lines += [f"left out {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)


def replace(model: nn.Module, *, example: tuple[Any, ...] | None = None) -> Replacement:
    """Replace every torch.nn.MultiheadAttention in a model by a `regard.nn.MultiheadAttention`, in place.

    Modules inside encoder and decoder layers are replaced too. Parameters and hooks are shared, so optimizers, state
    dicts and hook handles stay valid. nn.TransformerEncoder and nn.TransformerEncoderLayer no longer use torch's fast
    path for inference, which would not call the attention module. The fast path also sets outputs at padding to zero;
    without it, these outputs are computed as in training.

    example  arguments of the model. The model is run on them before and after the replacement, in eval mode without the
             fast path, and the outputs are compared, except entries that were NaN before; None compares nothing

    In this example the output changes by rounding only:

    >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> report = regard.integrations.torch.replace(layer, example=(torch.randn(1, 5, 16),))
    >>> report.replaced, report.max_difference < 1e-5
    (('self_attn',), True)
    """
    _check_model(model)
    if example is not None and not isinstance(example, tuple | list):
        raise ConfigError(f"example must be a tuple of the arguments of the model, (x,), not {type(example).__name__}")
    if type(model) is nn.MultiheadAttention:
        raise ConfigError(
            "the model is a single MultiheadAttention, which has no parent to replace it in; "
            "use regard.nn.MultiheadAttention.from_torch(layer)"
        )
    before = None if example is None else _run(model, example)
    new: dict[int, MultiheadAttention] = {}
    replaced, left_out = [], {}
    for name, parent, key, layer in _attention_layers(model):
        if isinstance(layer, MultiheadAttention):
            continue
        if type(layer) is not nn.MultiheadAttention:
            left_out[name] = (
                "torch.nn.utils.parametrize computes its weights in a class of its own"
                if parametrize.is_parametrized(layer)
                else f"{type(layer).__name__} is a subclass with code of its own"
            )
            continue
        if id(layer) not in new:
            new[id(layer)] = MultiheadAttention.from_torch(layer)
            new[id(layer)].__dict__[_ORIGINAL] = layer  # not a submodule, so it is in no state dict
        setattr(parent, key, new[id(layer)])
        replaced.append(name)
    if not replaced and not left_out:
        raise ConfigError(
            f"{type(model).__name__} contains no torch.nn.MultiheadAttention; there is nothing to replace"
        )
    for module, switch in _fast_path_switches(model):
        if any(type(layer) is MultiheadAttention for layer in module.modules()):
            module.__dict__.setdefault(_ORIGINAL, getattr(module, switch))
            setattr(module, switch, 0)
    difference = None if before is None else _largest_difference(before, _run(model, example or ()))
    return Replacement(tuple(replaced), difference, left_out)


def restore(model: nn.Module) -> tuple[str, ...]:
    """Undo `replace`: put the torch.nn.MultiheadAttention modules back and return their names.

    Parameters that were trained in between are kept.

    >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    >>> report = regard.integrations.torch.replace(layer)
    >>> regard.integrations.torch.restore(layer)
    ('self_attn',)
    """
    _check_model(model)
    names = []
    for name, parent, key, layer in _attention_layers(model):
        original = layer.__dict__.get(_ORIGINAL)
        if original is None:
            continue
        setattr(parent, key, original.train(layer.training))
        names.append(name)
    for module, switch in _fast_path_switches(model):
        if _ORIGINAL in module.__dict__:
            setattr(module, switch, module.__dict__.pop(_ORIGINAL))
    if not names:
        raise ConfigError(f"{type(model).__name__} contains no module that regard.integrations.torch.replace put there")
    return tuple(names)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.MultiheadAttention]]:
    """Yield every nn.MultiheadAttention: its path, its parent module, its name in the parent, and the module.

    A shared module is yielded once for each parent.
    """
    for path, parent in list(model.named_modules()):
        for key, child in list(parent._modules.items()):
            if isinstance(child, nn.MultiheadAttention):
                yield f"{path}.{key}" if path else key, parent, key, child


def _fast_path_switches(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each encoder and encoder layer, with the name of an attribute that turns off torch's fast path if it is 0.

    The fast path of an encoder layer does not call the attention module. The fast path of an encoder passes nested
    tensors to its layers.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            yield module, "activation_relu_or_gelu"
        elif isinstance(module, nn.TransformerEncoder) and hasattr(module, "use_nested_tensor"):
            yield module, "use_nested_tensor"


def _run(model: nn.Module, example: tuple[Any, ...]) -> list[Tensor]:
    """Run a model in eval mode without gradients and return the floating-point tensors of its output.

    torch's fast path is switched off, because it sets outputs at padding to zero.
    """
    modes, fast = {module: module.training for module in model.modules()}, torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            out = model(*example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            module.training = mode
    return [leaf for leaf in _pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _largest_difference(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    gaps = [(old.double() - new.double()).abs().masked_fill(old.isnan(), 0) for old, new in pairs if old.numel()]
    return max((gap.max().item() for gap in gaps), default=0.0)
