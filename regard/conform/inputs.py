"""What an attention is asked: queries, keys, values, and perhaps a mask. It can be cut down and written out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

LONGEST = 1200  # characters of a line of an example that anybody reads


@dataclass(frozen=True)
class Inputs:
    """One call. `causal` asks for it through the argument that the attention has for it, where it has one."""

    q: Float[Tensor, "b h i c"]
    k: Float[Tensor, "b g j c"]
    v: Float[Tensor, "b g j e"]
    visible: Bool[Tensor, "b h i j"] | None = None
    causal: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """b, h, g, i, j, c, e."""
        b, h, i, c = self.q.shape
        return b, h, self.k.shape[1], i, self.k.shape[2], c, self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def to(self, dtype: torch.dtype) -> "Inputs":
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def having(self, **tensors: Tensor) -> "Inputs":
        """The same call with other q, k or v."""
        return Inputs(
            tensors.get("q", self.q), tensors.get("k", self.k), tensors.get("v", self.v), self.visible, self.causal
        )

    def cut(self, axis: str, keep: Tensor, square: bool = False) -> "Inputs":
        """Only those entries of one axis: b, h, i, j, c or e. `square` cuts i and j together."""
        q, k, v, visible = self.q, self.k, self.v, self.visible
        _, h, g, *_ = self.sizes
        if axis == "b":
            q, k, v = q[keep], k[keep], v[keep]
            visible = None if visible is None else visible[keep]
        elif axis == "h":
            q, visible = q[:, keep], None if visible is None else visible[:, keep]
            k, v = (k, v) if g < h else (k[:, keep], v[:, keep])
        elif axis == "c":
            q, k = q[..., keep], k[..., keep]
        elif axis == "e":
            v = v[..., keep]
        if axis == "i" or (axis == "j" and square):
            q, visible = q[:, :, keep], None if visible is None else visible[:, :, keep]
        if axis == "j" or (axis == "i" and square):
            k, v, visible = k[:, :, keep], v[:, :, keep], None if visible is None else visible[..., keep]
        return replace(self, q=q, k=k, v=v, visible=visible)


def exact(x: Tensor) -> str:
    """A tensor as one types it, every digit of it, or the shortest call that makes it."""
    x = x.detach()
    if x.dim() > 2 and not _uniform(x) and x.shape[:-2].numel() > 2 and bool((x == x.flatten(0, -3)[0]).all()):
        return f"{exact(x.flatten(0, -3)[0])}.repeat({', '.join(map(str, x.shape[:-2]))}, 1, 1)"
    if not x.is_floating_point():
        return (
            f"torch.full({tuple(x.shape)}, {x.flatten()[0].item()})" if _uniform(x) else f"torch.tensor({x.tolist()})"
        )
    for fill in ("nan", "inf", "-inf"):
        # a tensor that is simple but for whole rows of NaN or infinity
        odd = x.isnan() if fill == "nan" else x == float(fill)
        rows = odd.transpose(0, -2).flatten(1).all(1).nonzero()[:, 0] if x.dim() > 1 else x.new_zeros(0)
        plain = torch.where(odd, _first(x[~odd]), x)
        if len(rows) and int(odd.sum()) == len(rows) * x.numel() // x.shape[-2] and _uniform(plain):
            return f"{exact(plain)}.index_fill(-2, torch.tensor({rows.tolist()}), float({fill!r}))"
    if _uniform(x) and x.flatten()[0].item() in (0, 1):
        return f"torch.{'zeros' if x.flatten()[0] == 0 else 'ones'}{tuple(x.shape)}{_of(x)}"
    # the shortest digits that tell a number from the next one of its dtype
    say: Callable[[float], str] = repr if x.dtype == torch.float64 else lambda value: str(np.float32(value))
    if _uniform(x):
        return f"torch.full({tuple(x.shape)}, {_listed(x.flatten()[0].item(), say)}{_of(x, ', ')})"
    return f"torch.tensor({_listed(x.tolist(), say)}{_of(x, ', ')})"


def rounded(x: Tensor, digits: int = 6) -> str:
    """A tensor to so many digits."""
    if x.is_floating_point() and _uniform(x) and x.flatten()[0].item() in (0, 1):
        return exact(x)
    return f"torch.tensor({_listed(x.tolist(), lambda value: f'{value:.{digits}g}')}{_of(x, ', ')})"


def _uniform(x: Tensor) -> bool:
    return x.numel() > 1 and bool((x == x.flatten()[0]).all())


def _first(x: Tensor) -> Tensor:
    return x.flatten()[0] if x.numel() else x.new_zeros(())


def _of(x: Tensor, before: str = "") -> str:
    if x.dtype in (torch.float32, torch.bool, torch.int64):
        return ""
    return f"{before}dtype={x.dtype}" if before else f".to({x.dtype})"


def _listed(value: object, say: Callable[[float], str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_listed(entry, say) for entry in value)}]"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return f"float({str(value)!r})"
        said = say(value)
        return said if "." in said or "e" in said else f"{said}.0"
    return str(value)
