"""Layers that `watch` does not look into, and what makes a layer one that it does look into."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from regard.see.simple_layers import KINDS, is_simple_layer
from regard.see.watch import watch

pytestmark = pytest.mark.usefixtures("check_hooks_removed")
X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def attend_to_itself(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


def with_forward_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, out: attend_to_itself(out))


def with_pre_hook(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, args: attend_to_itself(args[0]))


def with_another_forward(layer: nn.Module) -> None:
    layer.forward = attend_to_itself  # type: ignore[method-assign]


def with_a_child(layer: nn.Module) -> None:
    layer.child = nn.Identity()


@pytest.mark.parametrize("change", [with_forward_hook, with_pre_hook, with_another_forward])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), nn.GELU, lambda: nn.LayerNorm(4)])
def test_attention_in_a_hook_or_a_replaced_forward_of_a_simple_layer_is_recorded(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    model = nn.Sequential(make(), nn.ReLU())
    assert is_simple_layer(model[0])
    change(model[0])
    with watch(model) as seen:
        model(X)
    assert list(seen) == ["0"]


def test_attention_in_a_global_hook_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: attend_to_itself(out) if module is model[0] else None
    )
    with watch(model) as seen:
        model(X)
    hook.remove()
    assert list(seen) == ["0"]


class Keys(nn.Linear):
    """A linear layer whose class is not that of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return attend_to_itself(super().forward(x))


def test_only_layers_of_torch_and_transformers_are_simple() -> None:
    assert not any(map(is_simple_layer, (Keys(4, 4), nn.Softmax(-1), nn.MultiheadAttention(4, 2), nn.Sequential())))
    layer = nn.Linear(4, 4)
    with_a_child(layer)
    assert not is_simple_layer(layer)
    model = nn.Sequential(Keys(4, 4))
    with watch(model) as seen:
        model(X)
    assert list(seen) == ["0"]


class KeysAsWeight(nn.Module):
    """Attention whose products are linear layers, with keys and values as their weights."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.scores, self.mix = nn.Linear(4, 5), nn.Linear(5, 4, bias=False)
        del self.scores.weight, self.mix.weight
        self.buffer = buffer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer, weight in ((self.scores, k), (self.mix, v.mT)):
            if self.buffer:
                layer.register_buffer("weight", weight)
            else:
                layer.weight = weight
        out: Tensor = self.mix(self.scores(q).softmax(-1))
        return out


@pytest.mark.parametrize("buffer", [False, True])
def test_a_linear_layer_whose_weight_is_a_tensor_may_be_a_product_of_queries_and_keys(buffer: bool) -> None:
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    model = KeysAsWeight(buffer)
    with watch(model) as seen:
        model(q, k, v)
    bias = model.scores.bias.detach()
    torch.testing.assert_close(seen.records[0].weights()[0, 0], (q @ k.mT + bias).softmax(-1))


def test_a_linear_layer_of_a_functional_call_may_be_a_product() -> None:
    layer = nn.Linear(4, 5, bias=False)
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    with watch() as seen:
        scores = torch.func.functional_call(layer, {"weight": k}, (q,))
        scores.softmax(-1) @ v
    torch.testing.assert_close(seen.records[0].weights()[0, 0], (q @ k.mT).softmax(-1))


class CallsOf(TorchFunctionMode):
    """Counts torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_other_function_modes_see_every_call(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    other = CallsOf()
    if inside:
        with watch(model), other:
            model(X)
    else:
        with other, watch(model):
            model(X)
    assert {"linear", "gelu"} <= set(other.names)


def test_dropout_of_weights_is_recorded_although_dropout_is_a_simple_layer() -> None:
    dropout = nn.Dropout(0.5)
    assert is_simple_layer(dropout)
    with watch() as seen:
        dropout((X @ X.mT).softmax(-1)) @ X
    assert seen.records[0].dropout == 0.5


class Unhashable:
    """A function without a hash, as a class that compares by value has none."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)


def test_functions_without_a_hash_are_intercepted() -> None:
    with watch() as seen:
        for _ in range(2):
            torch.overrides.handle_torch_function(Unhashable(), (X,), X)
        attend_to_itself(X)
    assert len(seen) == 1  # inside a torch function torch suspends the mode


@pytest.mark.parametrize("kind", KINDS)
def test_simple_layers_have_no_children_and_no_softmax(kind: type[nn.Module]) -> None:
    assert "softmax" not in kind.forward.__code__.co_names
    assert kind.__module__.startswith("torch.nn.modules")
