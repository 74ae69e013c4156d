"""Anything that attends, as a function to hand q, k and v to: plain functions, and modules with projections inside."""

import torch
from torch import nn

from regard.base.errors import ConfigError
from regard.see.measure.probes.functions import EVERY, probe_function, signature_of
from regard.see.measure.probes.hooked_layers import probe_layer
from regard.see.measure.probes.module_copies import ModuleCopies
from regard.see.measure.probes.multihead import probe_multihead
from regard.see.measure.probes.probe import AS_FUNCTION, Probe, Wanted
from regard.see.measure.probes.projections import KNOWN, known_projections

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
    """The attention meant: a function of q, k and v in any layout, or a module, of which a copy is asked.

    heads, kv_heads, width  the sizes to ask with, where they cannot be found out: slopes made for 4 heads need heads=4
    layout                  "b h n c", "b n h c", "n b h c", "b n c", "n b c" or "n c", where it shall not be found out
    queries, keys           how many to try with, where something in `extra` was made for that many
    extra                   keywords handed on at every call
    """
    if isinstance(fn, Probe):
        return fn
    if layout is not None and layout not in EVERY:
        raise ConfigError(f"layout is one of {', '.join(map(repr, EVERY))}, not {layout!r}")
    if not callable(fn):
        raise ConfigError(f"an attention is a function of q, k and v or an nn.Module, not {fn!r}; {AS_FUNCTION}")
    wanted = Wanted(heads, kv_heads, width, layout, queries, keys, device, extra)
    with torch.random.fork_rng(devices=[]):  # trying must not change what is drawn afterwards
        if isinstance(fn, nn.Module):
            module = getattr(fn, "_orig_mod", fn)  # what torch.compile wraps
            assert isinstance(module, nn.Module)
            return _of_module(module, type(module).__name__, wanted)
        named = fn if hasattr(fn, "__name__") else getattr(fn, "func", fn)  # a partial has its name inside
        return probe_function(lambda q: fn, fn, getattr(named, "__name__", type(named).__name__), wanted)


def _of_module(module: nn.Module, name: str, wanted: Wanted) -> Probe:
    if isinstance(module, nn.MultiheadAttention):
        return probe_multihead(module, name, wanted)
    known = known_projections(module)
    if known is not None:
        return probe_layer(module, known, name, wanted)
    inside = _inside(module)
    if len(inside) > 1:
        raise ConfigError(
            f"{name} has {len(inside)} attentions inside: {', '.join(list(inside)[:8])}"
            f"{', ...' if len(inside) > 8 else ''}; hand over one: module.get_submodule({min(inside)!r}), or check the "
            "whole with kind='decoder' where it takes tokens"
        )
    for path, part in inside.items():
        return _of_module(part, f"{name}.{path}", wanted)
    if signature_of(module.forward)[1] is not None:
        copies = ModuleCopies(module)
        return probe_function(lambda q: copies.at(q.dtype), module.forward, name, wanted, copies.shown)
    raise ConfigError(
        f"{name} has no projections that are known by name: looked for {'; '.join(map(str, KNOWN))}, "
        f"but it has {' '.join(part for part, _ in module.named_children()) or 'no submodules'}; {AS_FUNCTION}"
    )


def _inside(module: nn.Module) -> dict[str, nn.Module]:
    """The attentions among its submodules, by path; what lies inside one is part of it."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        within = not path or any(path.startswith(f"{other}.") for other in found)
        if not within and (isinstance(part, nn.MultiheadAttention) or known_projections(part) is not None):
            found[path] = part
    return found
