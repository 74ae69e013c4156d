"""What an attention is taken to compute: who sees whom, the scale and all else that the formula leaves open."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.conform.inputs import Inputs
from regard.core.attend import attend
from regard.core.positions import Rotary
from regard.core.scores import ScoreTerm, additive, sink, softcap


@dataclass(frozen=True)
class View:
    """The conventions under which one call has one right answer."""

    visible: Bool[Tensor, "#b #h i j"]
    scale: float
    grouping: str = "repeat"
    rotary: str | None = None
    base: float = 10000.0
    turning: float = 1.0  # the share of coordinates that rotary turns
    alignment: str = "bottom-right"  # where rotary lets queries stand when there are fewer of them than keys
    norm: str | None = None  # of q and k
    epsilon: float = 0.0  # what that norm adds to the mean of squares
    bias: Float[Tensor, "#b h i j"] | None = None
    cap: float | None = None
    sink: Float[Tensor, "h"] | None = None  # the logit of each head's sink
    blind_rows: str = "zero"

    def truth(self, inputs: Inputs) -> Float[Tensor, "b h i e"]:
        """The right answer, by the definition in float64."""
        q, k, v = self.prepared(inputs.to(torch.float64))
        visible = self.visible.expand(*q.shape[:3], k.shape[2])
        terms: list[ScoreTerm | Tensor] = [] if self.cap is None else [softcap(self.cap)]
        terms += [] if self.bias is None else [additive(self.bias.double())]
        terms += [] if self.sink is None else [sink(self.sink.double())]
        out = attend(q, k, v, mask=visible, scores=terms, beta=self.scale, kernel="reference")
        blind = ~visible.any(-1, keepdim=True)
        if self.blind_rows == "mean":
            mean = v.repeat_interleave(q.shape[1] // v.shape[1], 1).mean(2, keepdim=True)
            return torch.where(blind, mean, out)
        return out.masked_fill(blind, torch.nan) if self.blind_rows == "nan" else out

    def naive(self, inputs: Inputs) -> Float[Tensor, "b h i e"]:
        """The same steps one after the other in the precision of the inputs: the yardstick of the error."""
        q, k, v = self.prepared(inputs)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * self.scale
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        awake = self.visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~self.visible & awake, -torch.inf)
        if self.sink is not None:
            beside = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ v * awake
        return scores.softmax(-1) @ v * awake

    def prepared(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v turned to where they stand, with key heads in the order in which query heads use them."""
        q, k, v = inputs.q, inputs.k, inputs.v
        _, h, g, i, j, _, _ = inputs.sizes
        q, k = (normalised(x, self.norm, self.epsilon) for x in (q, k))
        if self.rotary is not None:
            width = None if self.turning == 1.0 else 2 * round(self.turning * q.shape[-1] / 2)
            turn = Rotary(base=self.base, pairing=self.rotary, width=width)
            q, k = turn(q, j - i if self.alignment == "bottom-right" else 0), turn(k, 0)
        if self.grouping == "tile" and g < h:
            k, v = k.repeat(1, h // g, 1, 1), v.repeat(1, h // g, 1, 1)
        return q, k, v


def normalised(x: Float[Tensor, "b h n c"], norm: str | None, epsilon: float) -> Float[Tensor, "b h n c"]:
    """Vectors of length one ("l2"), or of a mean square of one ("rms"), centred first with "layer"."""
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    squares = x.square().sum(-1, keepdim=True) if norm == "l2" else x.square().mean(-1, keepdim=True)
    return x * (squares + epsilon).clamp(min=1e-12).rsqrt()


def band(
    i: int, j: int, before: int | None, after: int | None, alignment: str = "bottom-right"
) -> Bool[Tensor, "1 1 i j"]:
    """Keys from `before` earlier ones to `after` later ones; None is without end. Queries are the last rows, or with
    top-left the first."""
    row = torch.arange(i)[:, None] + (j - i if alignment == "bottom-right" else 0)
    column = torch.arange(j)[None, :]
    seen = torch.ones(i, j, dtype=torch.bool)
    if before is not None:
        seen &= column >= row - before
    if after is not None:
        seen &= column <= row + after
    return seen[None, None]
