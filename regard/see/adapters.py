"""`as_probe`: wrap any attention function or module as a function of q, k and v with a fixed order of axes."""

import torch
from torch import nn

from regard.base.errors import ConfigError
from regard.see.measure.probes.attention_interface import calls_attention_interface, probe_attention_interface
from regard.see.measure.probes.functions import LAYOUTS, probe_function, read_signature
from regard.see.measure.probes.hooked_layers import probe_layer
from regard.see.measure.probes.module_copies import ModuleCopies
from regard.see.measure.probes.multihead import probe_multihead
from regard.see.measure.probes.probe import AS_FUNCTION, Probe, ProbeOptions
from regard.see.measure.probes.projections import KNOWN, known_projections
from regard.see.measure.probes.wrapper_modules import probe_wrapper

__all__ = ["Probe", "as_probe"]


def as_probe(
    fn: object,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    layout: str | None = None,
    queries: int | None = None,
    keys: int | None = None,
    device: torch.device | str | None = None,
    **extra: object,
) -> Probe:
    """Wrap any attention function or module as a `Probe`, which has one fixed signature.

    `probe.call(q, k, v)` takes q (b h i c), k (b g j c) and v (b g j e), and returns (b h i e), for b sequences, h
    query heads, g key heads, i queries and j keys. c and e are the widths of one head of q and of v.

    fn                      a function of q, k and v in any known layout, or a module; modules are copied
    heads, kv_heads, width  numbers of query heads and key heads, and width of one head; needed if trial calls cannot
                            find them, such as heads=4 if the function has ALiBi slopes for 4 heads
    layout                  "b h n c", "b n h c", "n b h c", "b n c", "n b c" or "n c": the order of the axes of q, k
                            and v, where n is the axis of positions; None finds it by trial calls
    queries, keys           numbers of queries and keys of the trial calls; needed if a tensor in `extra`, such as a
                            mask, has a fixed number of queries or keys
    device                  device of the calls; None is the CPU. A module with parameters is always called on their
                            device
    extra                   keyword arguments passed to `fn` at every call

    The inputs of this module are (n, b, width), with the heads concatenated along the width:

    >>> as_probe(torch.nn.MultiheadAttention(12, 3)).layout
    'n b (h c)'
    """
    if isinstance(fn, Probe):
        return fn
    check_layout(layout)
    if not callable(fn):
        raise ConfigError(f"an attention is a function of q, k and v or an nn.Module, not {fn!r}; {AS_FUNCTION}")
    options = ProbeOptions(heads, kv_heads, width, layout, queries, keys, device, extra)
    with torch.random.fork_rng(devices=[]):  # trial calls must not change the caller's random state
        if isinstance(fn, nn.Module):
            module = getattr(fn, "_orig_mod", fn)  # the module that torch.compile wraps
            assert isinstance(module, nn.Module)
            return _probe_module(module, type(module).__name__, options)
        named = fn if hasattr(fn, "__name__") else getattr(fn, "func", fn)  # the function inside a partial
        return probe_function(lambda q: fn, fn, getattr(named, "__name__", type(named).__name__), options)


def check_layout(layout: str | None) -> None:
    """Check that a layout is None or a known layout such as "b h n c", else raise ConfigError."""
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, not {layout!r}")


def _probe_module(module: nn.Module, name: str, options: ProbeOptions) -> Probe:
    if isinstance(module, nn.MultiheadAttention):
        return probe_multihead(module, name, options)
    known = known_projections(module)
    if known is not None:
        return probe_layer(module, known, name, options)
    if calls_attention_interface(module):
        return probe_attention_interface(module, name, options)
    inside = _attentions_inside(module)
    if len(inside) > 1:
        raise ConfigError(
            f"{name} has {len(inside)} attentions inside: {', '.join(inside[:8])}"
            f"{', ...' if len(inside) > 8 else ''}; pass one of them: module.get_submodule({min(inside)!r}), or check "
            "the whole model with kind='decoder' if it takes tokens"
        )
    if inside:
        return probe_wrapper(module, inside[0], name, options, _probe_module)
    if read_signature(module.forward).takes_qkv:
        copies = ModuleCopies(module)
        return probe_function(lambda q: copies.at(q.dtype), module.forward, name, options, copies.reference)
    raise ConfigError(
        f"{name} has no projections with known names: looked for {'; '.join(map(str, KNOWN))}, "
        f"but it has {' '.join(part for part, _ in module.named_children()) or 'no submodules'}; {AS_FUNCTION}"
    )


def _attentions_inside(module: nn.Module) -> list[str]:
    """Return the paths of the attention modules inside a module, without those inside another attention module."""
    found: list[str] = []
    for path, part in module.named_modules():
        within = not path or any(path.startswith(f"{other}.") for other in found)
        if not within and (isinstance(part, nn.MultiheadAttention) or known_projections(part) is not None):
            found.append(path)
    return found
