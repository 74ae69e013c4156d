"""Records of nn.MultiheadAttention and nn.TransformerEncoderLayer, whose fast paths are one fused operator.

A hook on these modules, or an active torch function mode, disables the fast path, and the output is then no longer
bitwise the same. So these modules run without hooks, and q, k and v are computed from their inputs a second time for
the record.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.core.absolute_positions import Positions
from regard.core.masks import causal
from regard.core.masks.algebra import Full
from regard.core.masks.data import DenseMask
from regard.see.call_adapters import cast_for_autocast, read_mask
from regard.see.record import Record

ROUTE = "nn.MultiheadAttention"
FUNCTIONAL = inspect.signature(functional.multi_head_attention_forward)
FORWARD = inspect.signature(nn.MultiheadAttention.forward)
# attributes of nn.MultiheadAttention that multi_head_attention_forward takes by the same name
SAME_NAMES = (
    "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "training", "q_proj_weight",
    "k_proj_weight", "v_proj_weight",
)  # fmt: skip


@contextmanager
def disable_fused_layers() -> Iterator[None]:
    """Context manager: turn off the fused fast path of torch's Transformer layers.

    A fused layer runs as one operator, so the output of its heads cannot be changed.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def bind_arguments(*args: Any, **kwargs: Any) -> SimpleNamespace:
    """Return the arguments of a functional.multi_head_attention_forward call by their names, with the defaults."""
    bound = FUNCTIONAL.bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def averages_weights(*args: Any, **kwargs: Any) -> bool:
    """Return whether an nn.MultiheadAttention call with these arguments returns the mean of the weights over heads."""
    bound = FORWARD.bind(None, *args, **kwargs)
    bound.apply_defaults()
    return bool(bound.arguments["average_attn_weights"])


def build_functional_record(*args: Any, **kwargs: Any) -> Record:
    """Build the record of a functional.multi_head_attention_forward call from its arguments."""
    given = bind_arguments(*args, **kwargs)
    query, key, value, padding = given.query, given.key, given.value, given.key_padding_mask
    own_keys = given.query is given.key  # self-attention
    if query.ndim == 2:
        query, key, value = query[:, None], key[:, None], value[:, None]
        padding = None if padding is None else padding[None]
    b, heads = query.shape[1], given.num_heads
    if given.use_separate_proj_weight:
        weights: Any = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = (None, None, None) if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    q, k, v = map(functional.linear, (query, key, value), weights, biases)
    if given.bias_k is not None and given.bias_v is not None:
        k, v = torch.cat([k, given.bias_k.repeat(1, b, 1)]), torch.cat([v, given.bias_v.repeat(1, b, 1)])
    q, k, v = (x.reshape(len(x), b, heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))
    k = k if given.static_k is None else given.static_k.unflatten(0, (b, heads))
    v = v if given.static_v is None else given.static_v.unflatten(0, (b, heads))
    if given.add_zero_attn:
        k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    q, k, v = cast_for_autocast(q, k, v)
    j, dropout = k.shape[2], given.dropout_p if given.training else 0.0
    beta = q.shape[-1] ** -0.5
    mask, terms, positions = read_mask(merge_masks(given.attn_mask, padding, b, j, q.dtype), q, k, beta)
    if given.is_causal and padding is None and not given.need_weights:  # is_causal replaces the mask
        mask, terms, positions = causal(), (), Positions(0, 0)
    return Record(q, k, v, mask, terms, beta, positions, ROUTE, dropout, positions_known=own_keys)


def merge_masks(attn: Tensor | None, padding: Tensor | None, b: int, j: int, dtype: torch.dtype) -> Tensor | None:
    """Merge the attn_mask and key_padding_mask of a torch layer into one additive mask; None if both are None.

    In a boolean mask, True hides a key.

    b  number of sequences
    j  number of keys, with those that the layer appends (bias_k, add_zero_attn), which are always visible
    """
    parts = []
    if attn is not None:
        shape = attn.shape if attn.ndim == 2 else (b, -1, *attn.shape[-2:])
        parts.append(to_additive_mask(attn, dtype).reshape(shape))
    if padding is not None:
        parts.append(to_additive_mask(padding, dtype)[:, None, None])
    # keys that the layer appends are visible to all
    parts = [functional.pad(part, (0, j - part.shape[-1])) for part in parts]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive mask: True becomes -inf. An additive mask is returned unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def build_module_record(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Record:
    """Build the record of an nn.MultiheadAttention call from the layer and its arguments."""
    if query.is_nested:
        return build_nested_record(layer, query)
    if layer.batch_first and query.ndim == 3:
        first = query.transpose(0, 1)
        query, key, value = first, first if key is query else key.transpose(0, 1), value.transpose(0, 1)
    shared: dict[str, Any] = {name: getattr(layer, name) for name in SAME_NAMES}
    return build_functional_record(
        query,
        key,
        value,
        embed_dim_to_check=layer.embed_dim,
        dropout_p=layer.dropout,
        out_proj_weight=layer.out_proj.weight,
        out_proj_bias=layer.out_proj.bias,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=not layer._qkv_same_embed_dim,
        is_causal=is_causal,
        **shared,
    )


def build_nested_record(layer: nn.MultiheadAttention, x: Tensor) -> Record:
    """Build the record of an nn.MultiheadAttention call with a nested tensor.

    The sequences of a nested tensor have different lengths, and the record holds them padded to the longest. Its mask
    hides padded keys from all queries, and all keys from padded queries.
    """
    lengths = torch.tensor([len(part) for part in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    record = build_module_record(layer, *(padded if layer.batch_first else padded.transpose(0, 1),) * 3)
    real = torch.arange(padded.shape[1], device=x.device) < lengths[:, None]
    visible = real[:, None, :, None] & real[:, None, None, :]
    return replace(record, mask=Full() if bool(visible.all()) else DenseMask(visible))


def build_encoder_layer_record(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Record:
    """Build the record of the attention in an nn.TransformerEncoderLayer that ran as one fused operator."""
    x = layer.norm1(src) if layer.norm_first else src
    return build_module_record(layer.self_attn, x, x, x, src_key_padding_mask, True, src_mask)


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """An output transform: the output of the call is a linear projection of the concatenated heads."""

    weight: Float[Tensor, "d f"]
    bias: Float[Tensor, "d"] | None
    heads: int
    batch_first: bool

    def apply(self, heads: Float[Tensor, "b h i e"], out: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(heads.dtype)
        flat = functional.linear(heads.transpose(1, 2).flatten(2), self.weight.to(heads.dtype), bias)
        return (flat if self.batch_first else flat.transpose(0, 1)).reshape(out.shape)

    def read_heads(self, out: Tensor) -> None:
        """Return None: the output is a projection of all heads together, from which the heads cannot be recovered."""

    def pull_back(self, gradient: Tensor) -> Float[Tensor, "b h i e"]:
        flat = gradient @ self.weight.to(gradient.dtype)
        flat = flat[:, None] if flat.ndim == 2 else flat  # one sequence
        flat = flat if self.batch_first else flat.transpose(0, 1)
        heads: Tensor = flat.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)
