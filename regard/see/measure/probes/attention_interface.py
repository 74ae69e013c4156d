"""Probe a Hugging Face layer whose projections are not known, such as multi-head latent attention.

The layer looks up its attention function in transformers' `AttentionInterface` and calls it after the projections and
rotary positions. In this call, q, k and v are replaced by chosen tensors.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import ConfigError
from regard.core.heads import split_heads
from regard.see.measure.probes.hooked_layers import OUTPUT_MODULES, FirstArgument, rotary_phases
from regard.see.measure.probes.module_copies import ModuleCopies, dtypes_and_device
from regard.see.measure.probes.probe import AS_FUNCTION, Probe, ProbeOptions, first_tensor

KEY = "regard_probe"  # the name of the replaced function among the attention functions of transformers
NOTE = "q, k and v are replaced after the projections and rotary positions of the layer, which are not tested"


def calls_attention_interface(module: nn.Module) -> bool:
    """Return whether a module is a transformers attention layer that calls a function of `AttentionInterface`."""
    beside = vars(sys.modules[type(module).__module__])
    known = "eager_attention_forward" in beside and "ALL_ATTENTION_FUNCTIONS" in beside
    return known and "attention_interface" in inspect.getsource(type(module).forward)


@dataclass
class _ChosenTensors:
    """Replaces q, k and v in the next attention call of a transformers layer.

    original  the attention function of the layer
    tensors   q, k and v to use; None keeps the q, k and v that the layer computes
    shapes    shapes of the q, k and v that the layer computed in its last call
    """

    original: Callable[..., Any]
    tensors: tuple[Tensor, Tensor, Tensor] | None = None
    shapes: list[torch.Size] = field(default_factory=list)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **keywords: Any) -> Any:
        """Call the layer's attention function with the chosen q, k and v in place of those that the layer computed.

        The shapes of the tensors that the layer computed are stored in `shapes`.
        """
        self.shapes = [q.shape, k.shape, v.shape]
        return self.original(module, *(self.tensors or (q, k, v)), *rest, **keywords)


def probe_attention_interface(module: nn.Module, name: str, options: ProbeOptions) -> Probe:
    """Build the probe of a transformers attention layer that calls a function of `AttentionInterface`.

    A first call of the layer with zeros finds the numbers and widths of its heads.
    """
    functions = vars(sys.modules[type(module).__module__])
    config: Any = module.config
    kind = config._attn_implementation
    original = functions["ALL_ATTENTION_FUNCTIONS"].get_interface(kind, functions["eager_attention_forward"])
    chosen = _ChosenTensors(original)
    copies = ModuleCopies(module, _replace_output)
    run = partial(_run_layer, copies, chosen, name, options)
    (dtype, *_), device = dtypes_and_device(module, options)
    try:
        with torch.no_grad():
            run(torch.zeros(2, 5, config.hidden_size, dtype=dtype, device=device))
    except Exception as error:  # the module of the user may raise any exception
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}; {AS_FUNCTION}") from error
    (_, h, _, c), (_, g, _, _), (_, _, _, e) = chosen.shapes
    takes = inspect.signature(module.forward).parameters
    own = {each: value for each, value in takes.items() if value.kind is value.POSITIONAL_OR_KEYWORD}

    def call(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Tensor:
        chosen.tensors = q, k, v
        try:
            return split_heads(run(q.new_zeros(len(q), q.shape[2], config.hidden_size), **keywords), h)
        finally:
            chosen.tensors = None

    return Probe(
        name,
        call,
        heads=h,
        kv_heads=g,
        width=c,
        equal_widths=e == c,
        square=True,
        parameters=tuple(own)[1:],
        module=copies.reference,
        layout="b n (h c)",
        value_width=e,
        grouped=g < h,
        dtype=dtype,
        device=device,
        filled_in=("position_embeddings",) if "position_embeddings" in takes else (),
        filled_values={"position_embeddings": "the cosines and sines of its own rotary class"},
        note=NOTE,
    )


def _replace_output(copy: nn.Module) -> None:
    for name, _ in list(copy.named_children()):
        if name in OUTPUT_MODULES:
            copy.set_submodule(name, FirstArgument())


def _run_layer(
    copies: ModuleCopies, chosen: _ChosenTensors, name: str, options: ProbeOptions, x: Tensor, **keywords: object
) -> Tensor:
    """Run a transformers layer on x, with `chosen.attend` in place of the layer's attention function."""
    copy: Any = copies.at(x.dtype)
    takes = inspect.signature(copy.forward).parameters
    empty = [
        each for each, value in takes.items() if value.default is value.empty and value.kind is not value.VAR_KEYWORD
    ]
    settings: dict[str, Any] = {**dict.fromkeys(empty[1:]), **options.extra, **keywords}
    if "position_embeddings" in takes and settings.get("position_embeddings") is None:
        settings["position_embeddings"] = rotary_phases(copy, name, x, x.shape[1])
    functions = vars(sys.modules[type(copies.reference).__module__])["ALL_ATTENTION_FUNCTIONS"]
    kind, copy.config._attn_implementation = copy.config._attn_implementation, KEY
    functions[KEY] = chosen.attend
    try:
        return first_tensor(copy(x, **settings)).flatten(2)
    finally:
        copy.config._attn_implementation = kind
        del functions[KEY]
