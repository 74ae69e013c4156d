"""Explain which kernel computes each attention layer of a model, and why."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.base.display import TextDisplay
from regard.base.errors import ConfigError
from regard.core.kernels import Explanation, explain, observe_requests
from regard.core.kernels.request import Request


class LayerExplanation(NamedTuple):
    """One call of `attend` in a model: the name of the module that made the call, and the result of `explain`."""

    layer: str
    explanation: Explanation


@dataclass(frozen=True)
class ModelExplanation(TextDisplay):
    """The explanations of all calls of `attend` in one forward pass, in order.

    left_out  names of attention modules that ran without calling `attend`, because they compute attention differently
    """

    layers: tuple[LayerExplanation, ...]
    left_out: tuple[str, ...] = ()

    @property
    def kernels(self) -> dict[str, int]:
        """The number of attention calls that each kernel computes, by name of the kernel."""
        return dict(Counter(str(layer.explanation.chosen) for layer in self.layers))

    def __getitem__(self, layer: str) -> Explanation:
        for name, explanation in self.layers:
            if name == layer:
                return explanation
        raise KeyError(f"no attention call in {layer!r}; there are calls in {', '.join(x.layer for x in self.layers)}")

    def __str__(self) -> str:
        groups: dict[str, list[str]] = {}
        for name, explanation in self.layers:
            groups.setdefault(str(explanation), []).append(name)
        calls = "call" if len(self.layers) == 1 else "calls"
        lines = [
            f"{len(self.layers)} attention {calls}: " + ", ".join(f"{n} x {name}" for name, n in self.kernels.items())
        ]
        for text, names in groups.items():
            lines += ["", _list_names(names), *(f"  {line}" for line in text.splitlines())]
        if self.left_out:
            lines += ["", _list_names(self.left_out), "  no call of attend: attention code of its own"]
        return "\n".join(lines)


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def explain_model(model: nn.Module, inputs: Any) -> ModelExplanation:
    """Run a model once and explain every call of `attend` inside it. The RNG state is restored afterwards.

    inputs  a tensor, a tuple of positional arguments, or a dictionary of keyword arguments
    """
    found: list[LayerExplanation] = []
    stack: list[str] = []
    ran: list[str] = []

    def observe(name: str, request: Request, out: Tensor) -> None:
        found.append(LayerExplanation(stack[-1] if stack else "", explain(request)))

    with torch.random.fork_rng(), _track_modules(model, stack, ran), observe_requests(observe):
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, tuple | list):
            model(*inputs)
        else:
            model(inputs)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} made no call of regard.attend. For a model of Hugging Face call "
            'regard.integrations.huggingface.register() and model.set_attn_implementation("regard"), for modules of '
            "torch.nn regard.integrations.torch.replace(model). Calls inside torch.compile are not seen: pass the "
            "model before it is compiled"
        )
    return ModelExplanation(tuple(found), _without_calls(model, ran, [layer.layer for layer in found]))


def _without_calls(model: nn.Module, ran: list[str], called: list[str]) -> tuple[str, ...]:
    """Return the names of attention modules that ran but in which `attend` was not called.

    A module counts as an attention module if its class name contains "Attention". Of nested attention modules, only
    the innermost is listed.

    ran     names of all modules that ran
    called  names of the modules that called `attend`
    """
    modules = dict(model.named_modules())
    attention = [name for name in dict.fromkeys(ran) if name and "Attention" in type(modules[name]).__name__]

    def contains(name: str, others: list[str]) -> bool:
        return any(other == name or other.startswith(f"{name}.") for other in others)

    quiet = [name for name in attention if not contains(name, called)]
    return tuple(name for name in quiet if not any(other.startswith(f"{name}.") for other in quiet))


@contextmanager
def _track_modules(model: nn.Module, stack: list[str], ran: list[str]) -> Iterator[None]:
    """Record the names of running modules with forward hooks, inside the `with` block.

    stack  list in which the hooks keep the names of the modules that are running, the innermost last
    ran    list to which the hooks append the name of each module when its forward pass starts
    """

    def enter(name: str) -> None:
        stack.append(name)
        ran.append(name)

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(module.register_forward_hook(lambda *_: _pop(stack), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pop(stack: list[str]) -> None:
    """Remove the last element of a list and return None. A forward hook calls this function.

    If the hook returned the element, torch would replace the output of the module by it.
    """
    stack.pop()
