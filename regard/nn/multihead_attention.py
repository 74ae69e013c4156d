"""A drop-in for torch.nn.MultiheadAttention that computes with `regard.attend`."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regard.base.errors import ConfigError, ShapeError
from regard.core.absolute_positions import Positions
from regard.core.attend import attend, attend_with_weights
from regard.core.masks.algebra import Full, Mask
from regard.core.masks.data import DenseMask
from regard.core.masks.forms.causal import Causal
from regard.core.masks.forms.key_padding import KeyPaddingMask
from regard.core.scores import Additive, ScoreTerm


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with the signature and the state dict of torch.nn.MultiheadAttention.

    The boolean masks have the meaning that they have in torch: True in `attn_mask` and `key_padding_mask` hides a key.
    `attn_mask` may also be a mask of regard, such as `causal()`. There are three differences to torch: the output of a
    query that sees no key is zero instead of NaN, padding and causal masks are not expanded to a matrix, and
    `is_causal=True` needs no `attn_mask`.

    embed_dim      model width
    num_heads      number of heads
    dropout        dropout probability of the attention weights, in training only
    bias           whether the projections have a bias
    add_bias_kv    whether a learned key and value are appended to each sequence
    add_zero_attn  whether a key and a value of zeros are appended to each sequence
    kdim, vdim     widths of key and value; default `embed_dim`
    batch_first    whether inputs are (b, n, d) instead of (n, b, d)

    >>> layer = regard.nn.MultiheadAttention(32, 4, batch_first=True)
    >>> x = torch.randn(2, 5, 32)
    >>> out, weights = layer(x, x, x, attn_mask=causal())
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 32]), torch.Size([2, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"embed_dim must be a multiple of num_heads: embed_dim={embed_dim}, num_heads={num_heads}"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> "MultiheadAttention":
        """Return a layer that shares the parameters, hooks and training mode of a torch.nn.MultiheadAttention."""
        new = cls.__new__(cls)
        # the dictionaries themselves: hooks may set weights, and their handles must stay valid
        new.__dict__ = dict(layer.__dict__)
        return new

    def forward(
        self,
        query: Float[Tensor, "*n d"],
        key: Float[Tensor, "*m k"],
        value: Float[Tensor, "*m v"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "*n d"], Tensor | None]:
        """Return the attention output, and the attention weights if `need_weights`, else None.

        The weights are (b, i, j), or (b, h, i, j) without `average_attn_weights`.

        query             (i, b, d), (b, i, d) with batch_first, or (i, d) for a single sequence without a batch axis
        key, value        shapes as for query, with j positions
        key_padding_mask  (b, j), True where a key is padding, or floats that are added to the scores
        attn_mask         (i, j) or (b h, i, j), True where a pair is hidden, or floats that are added to the scores; or
                          a mask of regard
        is_causal         whether each query sees only the keys up to its own index; ignored if `attn_mask` is given
        """
        self._check_inputs(query, key, value)
        same = query is key and key is value
        single = query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._project(query, key, value, same)
        padding = _read_padding(key_padding_mask, None if single else len(q), key.shape[1])
        mask, terms = self._read_masks(padding, attn_mask, is_causal, q, key.shape[1], k.shape[2])
        # the first query is at index 0, as torch's is_causal means it; regard's own masks are aligned to the end
        positions = None if isinstance(attn_mask, Mask) else Positions(0, 0)
        dropout = self.dropout if self.training else 0.0
        settings: dict[str, Any] = {"mask": mask, "scores": terms, "positions": positions, "dropout": dropout}
        weights: Tensor | None = None
        if need_weights:
            out, weights = attend_with_weights(q, k, v, **settings)
        else:
            out = attend(q, k, v, **settings)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if single else weights
        if single:
            return out[0], weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise an error for nested tensors, and inputs whose axes or widths are not those of the layer."""
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor):
                raise ConfigError(f"{name} must be a tensor, not {type(x).__name__}; pass layer(query, key, value)")
            if x.is_nested:
                raise ConfigError(
                    "regard.nn.MultiheadAttention takes padded tensors with key_padding_mask, not nested tensors; "
                    "call torch.nested.to_padded_tensor first"
                )
            axes = {2: "(n, d)", 3: "(b, n, d)" if self.batch_first else "(n, b, d)"}
            if x.ndim not in axes or x.ndim != query.ndim:
                both = " or ".join(axes.values()) if x is query else axes[query.ndim] + " as query is"
                raise ShapeError(f"{name} has {x.ndim} axes, {tuple(x.shape)}, but must be {both}")
            if x.shape[-1] != width:
                raise ShapeError(
                    f"{name} has width {x.shape[-1]}, {tuple(x.shape)}, but the layer was built for {width}"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the heads of q, k and v, (b h n c), including the keys and values that the layer appends.

        same  whether query, key and value are the same tensor
        """
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._qkv_same_embed_dim:
            projections = self.in_proj_weight.chunk(3)
        else:
            projections = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if same and self._qkv_same_embed_dim:
            q, k, v = functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            q, k, v = (
                functional.linear(x, weight, bias)
                for x, weight, bias in zip((query, key, value), projections, biases, strict=True)
            )
        if self.bias_k is not None and self.bias_v is not None:
            b = len(k)
            k, v = (torch.cat([x, bias.expand(b, -1, -1)], 1) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return q, k, v

    def _read_masks(
        self,
        padding: Tensor | None,
        attn_mask: Tensor | Mask | None,
        is_causal: bool,
        q: Tensor,
        given: int,
        keys: int,
    ) -> tuple[Mask, tuple[ScoreTerm, ...]]:
        """Convert torch's masks to a mask and score terms of regard.

        padding  key_padding_mask, (b, j)
        given    number of keys that the caller passed
        keys     number of all keys; those that the layer appends are visible to every query
        """
        b, h, i, _ = q.shape
        _check_mask_dtype("attn_mask", attn_mask)
        mask: Mask = Full()
        terms: list[ScoreTerm] = []
        appended = keys - given
        if isinstance(attn_mask, Mask):
            if appended:
                raise ConfigError(
                    "a mask of regard does not know the keys that add_bias_kv and add_zero_attn append; "
                    "pass a boolean matrix, True where hidden"
                )
            mask = attn_mask
        elif attn_mask is not None:
            wanted = ((i, given), (b * h, i, given))
            if tuple(attn_mask.shape) not in wanted:
                raise ShapeError(
                    f"attn_mask is {tuple(attn_mask.shape)}, but must be {wanted[0]} or {wanted[1]}: "
                    "(i, j) or (b h, i, j)"
                )
            attn_mask = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (b, h))
            if attn_mask.dtype == torch.bool:
                mask = DenseMask(_append_visible(~attn_mask, appended))
            else:
                terms.append(Additive(functional.pad(attn_mask.to(q.dtype), (0, appended))))
        if is_causal and attn_mask is None:
            if appended:
                visible = torch.ones(i, given, dtype=torch.bool, device=q.device).tril()
                mask = DenseMask(_append_visible(visible, appended))
            else:
                mask = Causal()
        if padding is not None:
            if padding.dtype == torch.bool:
                real = KeyPaddingMask(_append_visible(~padding, appended))
                mask = real if isinstance(mask, Full) else mask & real
            else:
                terms.append(Additive(functional.pad(padding.to(q.dtype), (0, appended))[:, None, None]))
        return mask, tuple(terms)


def _append_visible(visible: Bool[Tensor, "*bi j"], appended: int) -> Bool[Tensor, "*bi n"]:
    """Append `appended` visible keys to a boolean mask.

    The mask is padded as uint8, because TorchInductor cannot compile padding of booleans.
    """
    return functional.pad(visible.to(torch.uint8), (0, appended), value=1).bool() if appended else visible


def _read_padding(padding: Tensor | Mask | None, b: int | None, j: int) -> Tensor | None:
    """Check a key_padding_mask and return it with axes (b, j).

    b  number of sequences; None for inputs without a batch axis, whose mask is (j,)
    """
    if padding is None:
        return None
    if isinstance(padding, Mask):
        raise ConfigError(f"key_padding_mask must be a tensor; pass a mask of regard, {padding}, as attn_mask")
    _check_mask_dtype("key_padding_mask", padding)
    wanted, letters = ((j,), "(j,)") if b is None else ((b, j), "(b, j)")
    if tuple(padding.shape) != wanted:
        raise ShapeError(f"key_padding_mask is {tuple(padding.shape)}, but must be {wanted}, {letters}")
    return padding if b is not None else padding[None]


def _check_mask_dtype(name: str, mask: Tensor | Mask | None) -> None:
    """Raise ConfigError unless the mask is None, a mask of regard, or a boolean or floating-point tensor.

    In a mask of integers, such as the attention_mask of a tokenizer, 1 usually means visible, but True hides a key
    here. So integers raise the error.
    """
    if mask is not None and not isinstance(mask, Tensor | Mask):
        raise ConfigError(f"{name} must be a tensor or a mask of regard, not {type(mask).__name__}: {mask!r}")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ConfigError(
            f"{name} must be boolean, True where hidden, or floats to add to the scores, not {mask.dtype}; "
            "pass mask == 0 for a mask in which 1 means visible, as in the attention_mask of a tokenizer"
        )
