"""Hugging Face's attention registry: the functions it hands out, told what they were called with.

A model of transformers asks the registry for its attention function at every call. While watching, the registry hands
out the same function with a listener around it. What "eager" and "sdpa" compute is then seen inside them, step by step;
what runs out of sight (flash attention, compiled flex_attention, a function of one's own) is told by its arguments: the
queries, keys and values, and the mask that the mask function registered under the same name has made.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from regard.core.algebra import Mask
from regard.core.grid import Places
from regard.core.masks import causal, window
from regard.core.scores import Term, additive, sink, softcap
from regard.see.translate import FlexMask, Heard, read_mask, spread

Listen = Callable[[str, Callable[..., Any]], Callable[..., Any]]
IN_SIGHT = ("eager", "sdpa")


@contextmanager
def listening(listen: Listen) -> Iterator[None]:
    """Hand every function that a registry gives out to `listen`, which gives back the one to be called."""
    utils = sys.modules.get("transformers.modeling_utils")
    interface = getattr(utils, "AttentionInterface", None)
    if interface is None:
        yield  # no model of theirs can exist
        return
    original = interface.get_interface

    @wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return listen(attn_implementation or "eager", original(self, attn_implementation, default))

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def from_interface(
    name: str,
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rest: object,
) -> Heard:
    """A call of a registered function, by what its arguments mean everywhere in that library."""
    q, k, v = spread(query, key, value)
    i, j = q.shape[2], k.shape[2]
    flash = "flash" in name
    by_rule = getattr(module, "is_causal", True) if is_causal is None else is_causal
    terms: tuple[Term, ...] = () if softcap is None else (_softcap(softcap),)
    mask, more, places = _mask(attention_mask, i, j, s_aux is not None)
    if by_rule and i > 1 and (attention_mask is None or flash):
        mask = causal() if attention_mask is None else mask & causal()
        places = Places.last_rows(i, j) if flash else Places(0, 0)
    if flash and sliding_window is not None:
        mask = mask & window(before=sliding_window - 1, after=0 if by_rule else sliding_window - 1)
    if position_bias is not None:
        more = (additive(position_bias.detach()), *more)  # first, since the lowest number of a mask swallows it too
    if s_aux is not None:
        more = (*more, sink(s_aux.detach()))
    beta = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return Heard(f"hugging face {name}", q, k, v, mask, (*terms, *more), beta, places, float(dropout))


_softcap = softcap


def causal_by(module: object, arguments: Mapping[str, object]) -> bool:
    """Whether a call is one of causal attention to itself: as its module says, or else by positions handed along."""
    said = getattr(module, "is_causal", None)
    return bool(said) if said is not None else not {"position_ids", "cache_position"}.isdisjoint(arguments)


def _mask(given: Any, i: int, j: int, sunk: bool) -> tuple[Mask, tuple[Term, ...], Places]:
    """The mask that their mask function has made: a matrix, a row of real keys for each sequence, or a block mask."""
    if hasattr(given, "mask_mod"):
        return FlexMask(given.mask_mod), (), Places.last_rows(i, j)
    if isinstance(given, Tensor) and given.ndim == 2:
        given = given[:, -j:].to(torch.bool)[:, None, None]
    if isinstance(given, Tensor) and given.shape[-1] > j:
        given = given[..., :j]  # a mask made for a cache longer than what it holds
    return read_mask(given, i, j, sunk)
