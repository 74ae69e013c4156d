"""Hooks on Hugging Face's attention registry (`AttentionInterface`).

A transformers model looks up its attention function in the registry at every call. Inside `watch`, the registry returns
a wrapper of this function. Operations inside the function are intercepted as in any other code. If no operation is
intercepted (flash attention, compiled flex_attention, a custom operator), the call is recorded by its arguments: q, k,
v and the mask. A function can ignore some of its arguments, so such a record is verified: attention computed from it
must equal the output of the function.
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
from regard.see.call_adapters import FlexMask, expand_batch, keep_rows, read_mask
from regard.see.leading_axes import HeadCount
from regard.see.record import Record, UnsupportedAttention

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
ROWS = 8  # queries whose output is compared
BY_ARGUMENTS = "recorded by its arguments, not by the operations inside"
# tolerance of the comparison, relative to the largest value; the function may compute in a lower precision
ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-3}


@contextmanager
def intercept_registry(wrap: Wrap) -> Iterator[None]:
    """Context manager: wrap the attention functions that transformers looks up in its AttentionInterface registry.

    wrap  wrap(name, function) returns the function to use instead
    """
    utils = sys.modules.get("transformers.modeling_utils")
    interface = getattr(utils, "AttentionInterface", None)
    if interface is None:
        yield  # transformers is not imported
        return
    original = interface.get_interface

    @wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(attn_implementation or "eager", original(self, attn_implementation, default))

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def build_interface_record(
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
) -> Record:
    """Build the record of a call of a transformers attention function from its arguments.

    name    name of the function in the registry, such as "sdpa"
    module  the attention layer that called the function
    """
    q, k, v = expand_batch(query, key, value)
    i, j = q.shape[2], k.shape[2]
    flash = "flash" in name
    by_rule = getattr(module, "is_causal", True) if is_causal is None else is_causal
    terms: tuple[ScoreTerm, ...] = () if softcap is None else (_softcap(softcap),)
    beta = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    mask, more, positions = _read_mask(attention_mask, q, k, beta, s_aux is not None)
    if by_rule and i > 1 and (attention_mask is None or flash):
        mask = causal() if attention_mask is None else mask & causal()
        positions = Positions.last_rows(i, j) if flash else Positions(0, 0)
    if flash and sliding_window is not None:
        mask = mask & window(before=sliding_window - 1, after=0 if by_rule else sliding_window - 1)
    if position_bias is not None:
        more = (additive(position_bias), *more)  # first: a mask with the lowest number of the dtype hides it too
    if s_aux is not None:
        more = (*more, sink(s_aux))
    return Record(q, k, v, mask, (*terms, *more), beta, positions, f"hugging face {name}", float(dropout))


_softcap = softcap


def heads_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HeadCount | None:
    """Return the number of heads from the arguments of a transformers attention call; None if q has not four axes."""
    query = args[0] if args else kwargs.get("query")
    return HeadCount(query.shape[1]) if isinstance(query, Tensor) and query.ndim == 4 else None


def is_compiled_flex(function: Callable[..., Any]) -> bool:
    """Return whether the function is transformers' own wrapper of compiled flex_attention."""
    return getattr(function, "__module__", "") == "transformers.integrations.flex_attention"


def is_library_function(function: Callable[..., Any]) -> bool:
    """Return whether the function is part of transformers, so that its arguments have the documented meaning."""
    return getattr(function, "__module__", "").startswith("transformers.")


def verify_output(record: Record, out: Tensor, attention_mask: Any = None, trusted: bool = False) -> Record:
    """Check that attention computed from a recorded call equals the output of the call.

    The record was built from the arguments of the attention function. Returns the record with a note that says so.
    Raises an error if the outputs differ.

    out             the output of the function, (b i h e)
    attention_mask  the argument of the function; a (b, n) mask excludes padded queries from the comparison
    trusted         whether the function is part of transformers. With dropout, outputs cannot be compared: the record
                    of a trusted function then gets a note, any other raises an error
    """
    b, h, i, _ = record.q.shape
    if record.v is None or out.shape != (b, i, h, record.v.shape[-1]):
        raise UnsupportedAttention(
            f"a registered function returned {tuple(out.shape)}, which is not (b i h e) of its arguments"
        )
    if record.dropout and trusted:
        return replace(record, note=f"{BY_ARGUMENTS}; not verified, because dropout changed its output")
    if record.dropout:
        raise UnsupportedAttention(
            "no operation inside a registered function was intercepted, and dropout changed its output, so its "
            "arguments cannot be verified; call model.eval() first"
        )
    rows = torch.linspace(0, i - 1, min(i, ROWS), device=out.device).long()
    few = keep_rows(record, rows)
    exact = torch.promote_types(record.q.dtype, torch.float32)
    v = record.v.to(exact).repeat_interleave(h // record.v.shape[1], 1)
    given = out.detach().transpose(1, 2)[:, :, rows].to(exact)
    with torch.autocast(out.device.type, enabled=False):
        off = (few.weights() @ v - given).abs().amax(-1)
    off = off.masked_fill(few.lse == -torch.inf, 0)  # empty rows may be zeros, a mean or NaN
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        off = off.masked_fill(~attention_mask[:, -i:].to(torch.bool)[:, None, rows], 0)
    coarse = max((record.q.dtype, out.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    room = ROUNDING.get(coarse, 3e-2) * v.abs().amax((-2, -1))[..., None]
    if not bool((off <= room).all()):  # False for NaN
        raise UnsupportedAttention(
            "no operation inside a registered function was intercepted, and its output is not that of its arguments: "
            "it has its own mask, scale or bias"
        )
    return replace(record, note=f"{BY_ARGUMENTS}; {len(rows)} rows of its output agree")


def is_causal_call(module: object, arguments: Mapping[str, object]) -> bool:
    """Return whether an attention call of transformers is causal.

    module     the attention layer; if it has an attribute `is_causal`, this attribute decides
    arguments  arguments of the call; without the attribute, the call is causal if position_ids or
               cache_position is among them
    """
    causal_attribute = getattr(module, "is_causal", None)
    if causal_attribute is not None:
        return bool(causal_attribute)
    return not {"position_ids", "cache_position"}.isdisjoint(arguments)


def _read_mask(
    mask: Any, q: Tensor, k: Tensor, beta: float, has_sink: bool
) -> tuple[Mask, tuple[ScoreTerm, ...], Positions]:
    """Convert an attention_mask of transformers to a mask, score terms and positions.

    mask      a matrix of query-key pairs; a (b, n) mask that is True for keys that are not padding; or a BlockMask of
              FlexAttention
    has_sink  whether an attention sink takes part in the softmax
    """
    i, j = q.shape[2], k.shape[2]
    if hasattr(mask, "mask_mod"):
        return FlexMask(mask.mask_mod), (), Positions.last_rows(i, j)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        mask = mask[:, -j:].to(torch.bool)[:, None, None]
    if isinstance(mask, Tensor) and mask.shape[-1] > j:
        mask = mask[..., :j]  # a mask for a static cache
    return read_mask(mask, q, k, beta, has_sink)
