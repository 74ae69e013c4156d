"""Hugging Face's attention registry: the functions it hands out, told what they were called with.

A model of transformers asks the registry for its attention function at every call. While watching, the registry hands
out the same function with a listener around it. What any of them computes is heard inside it, step by step, as in code
written by hand. Only where nothing was heard there (flash attention, compiled flex_attention, an operator of one's own)
is it told by its arguments: the queries, keys and values, and the mask that the mask function registered under the same
name has made. Since a function may do as it likes with its arguments, that is held against what it gave.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from regard.core.absolute_positions import Positions
from regard.core.masks import causal, window
from regard.core.masks.algebra import Mask
from regard.core.scores import ScoreTerm, additive, sink, softcap
from regard.see.call_adapters import FlexMask, InterceptedCall, ParsedCall, cut_rows, read_mask, spread
from regard.see.statistics import statistics

Listen = Callable[[str, Callable[..., Any]], Callable[..., Any]]
ROWS = 8  # queries whose output is held against the weights
BY_ARGUMENTS = "told by its arguments, not by what happens inside"
# how far rounding may carry an output, as a share of the largest value: a product in a lower precision is no other mask
ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-3}


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
) -> InterceptedCall:
    """A call of a registered function, by what its arguments mean everywhere in that library."""
    q, k, v = spread(query, key, value)
    i, j = q.shape[2], k.shape[2]
    flash = "flash" in name
    by_rule = getattr(module, "is_causal", True) if is_causal is None else is_causal
    terms: tuple[ScoreTerm, ...] = () if softcap is None else (_softcap(softcap),)
    mask, more, positions = _mask(attention_mask, i, j, s_aux is not None)
    if by_rule and i > 1 and (attention_mask is None or flash):
        mask = causal() if attention_mask is None else mask & causal()
        positions = Positions.last_rows(i, j) if flash else Positions(0, 0)
    if flash and sliding_window is not None:
        mask = mask & window(before=sliding_window - 1, after=0 if by_rule else sliding_window - 1)
    if position_bias is not None:
        more = (additive(position_bias.detach()), *more)  # first, since the lowest number of a mask swallows it too
    if s_aux is not None:
        more = (*more, sink(s_aux.detach()))
    beta = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return InterceptedCall(f"hugging face {name}", q, k, v, mask, (*terms, *more), beta, positions, float(dropout))


_softcap = softcap


def heads_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParsedCall | None:
    """How many heads a registered function is asked for: its queries are (b h i c)."""
    query = args[0] if args else kwargs.get("query")
    return ParsedCall(query.shape[1]) if isinstance(query, Tensor) and query.ndim == 4 else None


def compiles(function: Callable[..., Any]) -> bool:
    """Whether this is the library's own function that compiles flex_attention: with a listener on it would again."""
    return getattr(function, "__module__", "") == "transformers.integrations.flex_attention"


def theirs(function: Callable[..., Any]) -> bool:
    """Whether a function is the library's own, which is known to keep to its arguments."""
    return getattr(function, "__module__", "").startswith("transformers.")


def held_against(
    heard: InterceptedCall, out: Tensor, attention_mask: Any = None, trusted: bool = False
) -> InterceptedCall:
    """A call told by its arguments, with a note that says so, or an error where it did not give what they mean.

    out             what the function gave, (b i h e)
    attention_mask  as the function was handed it: a row of real keys for each sequence leaves filling out
    trusted         whether the function is known to keep to its arguments, where dropout leaves nothing to compare
    """
    b, h, i, _ = heard.q.shape
    if heard.v is None or out.shape != (b, i, h, heard.v.shape[-1]):
        raise RuntimeError(f"a registered function gave {tuple(out.shape)}, which is not (b i h e) of its arguments")
    if heard.dropout and trusted:
        return replace(heard, note=f"{BY_ARGUMENTS}; not held against its output, which dropout changed")
    if heard.dropout:
        raise RuntimeError(
            "a registered function that could not be followed inside, and whose output dropout changed, so that it "
            "could not be held against its arguments; call model.eval() first"
        )
    rows = torch.linspace(0, i - 1, min(i, ROWS), device=out.device).long()
    few = cut_rows(heard, rows)
    exact = torch.promote_types(heard.q.dtype, torch.float32)
    v = heard.v.to(exact).repeat_interleave(h // heard.v.shape[1], 1)
    given = out.detach().transpose(1, 2)[:, :, rows].to(exact)
    with torch.autocast(out.device.type, enabled=False):
        found = statistics(few.q, few.k, mask=few.mask, scores=few.terms, beta=few.beta, positions=few.positions)
        off = (found.weights() @ v - given).abs().amax(-1)
    off = off.masked_fill(found.lse == -torch.inf, 0)  # a row that sees nothing is given anything: zeros, a mean, NaN
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        off = off.masked_fill(~attention_mask[:, -i:].to(torch.bool)[:, None, rows], 0)
    coarse = max((heard.q.dtype, out.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    room = ROUNDING.get(coarse, 3e-2) * v.abs().amax((-2, -1))[..., None]
    if not bool((off <= room).all()):  # asked this way, NaN is no agreement
        raise RuntimeError(
            "a registered function that could not be followed inside, and whose output is not what its arguments mean: "
            "it has a mask, scale or bias of its own"
        )
    return replace(heard, note=f"{BY_ARGUMENTS}; {len(rows)} rows of its output agree")


def causal_by(module: object, arguments: Mapping[str, object]) -> bool:
    """Whether a call is one of causal attention to itself: as its module says, or else by positions handed along."""
    said = getattr(module, "is_causal", None)
    return bool(said) if said is not None else not {"position_ids", "cache_position"}.isdisjoint(arguments)


def _mask(given: Any, i: int, j: int, sunk: bool) -> tuple[Mask, tuple[ScoreTerm, ...], Positions]:
    """The mask that their mask function has made: a matrix, a row of real keys for each sequence, or a block mask."""
    if hasattr(given, "mask_mod"):
        return FlexMask(given.mask_mod), (), Positions.last_rows(i, j)
    if isinstance(given, Tensor) and given.ndim == 2:
        given = given[:, -j:].to(torch.bool)[:, None, None]
    if isinstance(given, Tensor) and given.shape[-1] > j:
        given = given[..., :j]  # a mask made for a cache longer than what it holds
    return read_mask(given, i, j, sunk)
