"""What an attention is asked: queries, keys, values, and perhaps a mask. It can be cut down and written out."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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


def written(x: Tensor) -> str:
    """A tensor as one types it, or as the shortest call that makes it."""
    if x.numel() > 1 and not x.is_floating_point() and bool((x == x.flatten()[0]).all()):
        return f"torch.full({tuple(x.shape)}, {x.flatten()[0].item()})"
    if x.is_floating_point() and x.numel() > 1 and bool((x == 0).all()):
        return f"torch.zeros{tuple(x.shape)}{_of(x)}"
    if x.is_floating_point() and x.numel() > 1 and bool((x == 1).all()):
        return f"torch.ones{tuple(x.shape)}{_of(x)}"
    if x.numel() > 400:
        return f"torch.randn{tuple(x.shape)}{_of(x)}  # {x.numel()} numbers, from the seed of the check"
    return f"torch.tensor({_listed(x.tolist())}{_of(x, ', ')})"


def _of(x: Tensor, before: str = "") -> str:
    if x.dtype in (torch.float32, torch.bool, torch.int64):
        return ""
    return f"{before}dtype={x.dtype}" if before else f".to({x.dtype})"


def _listed(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_listed(entry) for entry in value)}]"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return f"float({str(value)!r})"
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.6g}.0"
    return str(value)
