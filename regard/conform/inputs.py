"""`AttentionInputs`: the inputs of one attention call. Also writes tensors as Python code."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LINE = 1200  # characters of a printed line of an example
MAX_BITS = 32  # entries of a mask that is written as a list
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one attention call.

    q, k, v  queries, keys and values
    visible  Boolean mask, True where a query sees a key; None for no mask
    causal   whether to set the causal argument of the attention, if it has one
    """

    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    visible: Bool[Tensor, "b h i j"] | None = None
    causal: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """The sizes (b, h, g, i, j, c, e): batch, query heads, key heads, queries, keys, key width, value width."""
        b, h, i, c = self.q.shape
        return b, h, self.k.shape[1], i, self.k.shape[2], c, self.v.shape[3]

    @property
    def pair_shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, i, j) of the attention weights."""
        b, h, _, i, j, _, _ = self.sizes
        return b, h, i, j

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def to(self, dtype: torch.dtype) -> "AttentionInputs":
        """Return the inputs with q, k and v in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def with_tensors(self, **tensors: Tensor) -> "AttentionInputs":
        """Return the inputs with some of q, k and v replaced, such as inputs.with_tensors(q=q)."""
        q, k, v = (tensors.get(name, getattr(self, name)) for name in QKV)
        return AttentionInputs(q, k, v, self.visible, self.causal)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AttentionInputs":
        """Return the inputs with a function applied to each of q, k and v."""
        return self.with_tensors(**{name: change(getattr(self, name)) for name in QKV})

    def neutral(self) -> "AttentionInputs":
        """Return the inputs with q = 0, k = 1 and v = 1."""
        return AttentionInputs(
            torch.zeros_like(self.q), torch.ones_like(self.k), torch.ones_like(self.v), self.visible, self.causal
        )

    def with_zero_queries(self) -> "AttentionInputs":
        """Return the inputs with q = 0, so that the weights depend only on mask and bias."""
        return self.with_tensors(q=torch.zeros_like(self.q))

    def select(self, axis: str, index: Tensor, square: bool = False) -> "AttentionInputs":
        """Return the inputs with only the given entries along one axis.

        axis    "b" (batch), "h" (heads), "i" (queries), "j" (keys), "c" (width of keys) or "e" (width of values)
        index   indices of the entries to keep
        square  for the axes i and j: whether to select the same entries along both
        """
        _, h, g, *_ = self.sizes
        axes = {axis, *("ij" if square and axis in "ij" else "")}
        key_axes = axes - {"h"} if g < h else axes  # shared key heads stay

        def pick(x: Tensor, names: str, chosen: set[str]) -> Tensor:
            for at, name in enumerate(names):
                x = x.index_select(at, index) if name in chosen else x
            return x

        return replace(
            self,
            q=pick(self.q, "bhic", axes),
            k=pick(self.k, "bhjc", key_axes),
            v=pick(self.v, "bhje", key_axes),
            visible=None if self.visible is None else pick(self.visible, "bhij", axes),
        )


def hide_later_half(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a mask that hides the later half of the keys from every query."""
    visible = torch.ones(inputs.pair_shape, dtype=torch.bool)
    visible[..., inputs.k.shape[2] // 2 + 1 :] = False
    return replace(inputs, visible=visible)


def tensor_code(x: Tensor) -> str:
    """Return Python code that creates exactly this tensor.

    The code is a short call such as torch.zeros(...) if possible.
    """
    x = x.detach()
    if x.dim() > 2 and not _constant(x) and x.shape[:-2].numel() > 2 and bool((x == x.flatten(0, -3)[0]).all()):
        return f"{tensor_code(x.flatten(0, -3)[0])}.repeat({', '.join(map(str, x.shape[:-2]))}, 1, 1)"
    if not x.is_floating_point():
        first = x.flatten()[0].item()
        if x.dtype == torch.bool and x.numel() > MAX_BITS and not _constant(x):  # the bits of one number
            bits = sum(bit << n for n, bit in enumerate(x.flatten().tolist()))
            return f"torch.tensor([{bits:#x} >> n & 1 for n in range({x.numel()})]).bool().reshape{tuple(x.shape)}"
        return f"torch.full({tuple(x.shape)}, {first})" if _constant(x) else f"torch.tensor({x.tolist()})"
    if x.numel() > MAX_BITS and bool(((x == 0) | (x == -torch.inf)).all()) and not _constant(x):  # an additive mask
        return f"torch.zeros{tuple(x.shape)}.masked_fill({tensor_code(x != 0)}, -torch.inf){_dtype_code(x)}"
    if _constant(x) and x.flatten()[0].item() in (0, 1):
        return f"torch.{'zeros' if x.flatten()[0] == 0 else 'ones'}{tuple(x.shape)}{_dtype_code(x)}"
    # the fewest digits that identify a number of this dtype
    write: Callable[[float], str] = repr if x.dtype == torch.float64 else lambda value: str(np.float32(value))
    if _constant(x):
        return f"torch.full({tuple(x.shape)}, {_list_code(x.flatten()[0].item(), write)}{_dtype_code(x, ', ')})"
    return f"torch.tensor({_list_code(x.tolist(), write)}{_dtype_code(x, ', ')})"


def rounded_tensor_code(x: Tensor, digits: int = 6) -> str:
    """Return Python code that creates the tensor with its numbers rounded to some significant digits."""
    if x.is_floating_point() and _constant(x) and x.flatten()[0].item() in (0, 1):
        return tensor_code(x)
    return f"torch.tensor({_list_code(x.tolist(), lambda value: f'{value:.{digits}g}')}{_dtype_code(x, ', ')})"


def _constant(x: Tensor) -> bool:
    return x.numel() > 1 and bool((x == x.flatten()[0]).all())


def _dtype_code(x: Tensor, before: str = "") -> str:
    if x.dtype in (torch.float32, torch.bool, torch.int64):
        return ""
    return f"{before}dtype={x.dtype}" if before else f".to({x.dtype})"


def _list_code(value: object, write: Callable[[float], str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_list_code(entry, write) for entry in value)}]"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return f"float({str(value)!r})"
        text = write(value)
        return text if "." in text or "e" in text else f"{text}.0"
    return str(value)
