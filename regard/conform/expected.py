"""Compute the expected output of a call in float64, under the measured or declared conventions."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.conform.inputs import AttentionInputs
from regard.core.attend import attend
from regard.core.scores import ScoreTerm, additive, sink, softcap
from regard.see.measure.norms import normalise
from regard.see.measure.rotary import Rotation


@dataclass(frozen=True)
class ExpectedAttention:
    """All conventions that determine the correct output of one attention call.

    visible           Boolean mask, True where a query sees a key
    scale             factor of q . k
    grouping          order in which key heads are assigned to query heads: "repeat" (0 0 1 1) or "tile" (0 1 0 1)
    rotation          rotary embedding of q and k; None for none
    rotary_alignment  how queries are aligned with more keys: "top-left" or "bottom-right"
    norm, epsilon     norm of q and k ("rms", "layer", "l2" or None), and its epsilon
    bias              bias that is added to the scores; None for none
    softcap           soft-cap of the scores; None for none
    sink              logit of the attention sink of each head; None for none
    """

    visible: Bool[Tensor, "#b #h i j"]
    scale: float
    grouping: str = "repeat"
    rotation: Rotation | None = None  # rotary embedding of q and k
    rotary_alignment: str = "bottom-right"  # how queries are aligned with more keys
    norm: str | None = None  # norm of q and k: "rms", "layer" or "l2"
    epsilon: float = 0.0  # epsilon of the norm
    bias: Float[Tensor, "#b h i j"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, "h"] | None = None  # the logit of each head's sink

    def reference(self, inputs: AttentionInputs) -> Float[Tensor, "b h i e"]:
        """Compute the correct output in float64 by the definition of attention; rows that see no key give zeros."""
        q, k, v = self.prepare(inputs.to(torch.float64))
        terms: list[ScoreTerm | Tensor] = [] if self.softcap is None else [softcap(self.softcap)]
        terms += [] if self.bias is None else [additive(self.bias.double())]
        terms += [] if self.sink is None else [sink(self.sink.double())]
        visible = self.visible.expand(*q.shape[:3], k.shape[2])
        return attend(q, k, v, mask=visible, scores=terms, beta=self.scale, kernel="reference")

    def naive(self, inputs: AttentionInputs) -> Float[Tensor, "b h i e"]:
        """Compute the output by the definition of attention, in the dtype of the inputs.

        Its rounding error, multiplied by a factor, is the tolerance of the checker.
        """
        q, k, v = self.prepare(inputs)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        nonempty = self.visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~self.visible & nonempty, -torch.inf)
        if self.sink is not None:
            logits = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, logits], -1).softmax(-1)[..., :-1] @ v * nonempty
        return scores.softmax(-1) @ v * nonempty

    def prepare(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v after normalisation and rotary embedding.

        If grouping is "tile", k and v are repeated to as many heads as q has.
        """
        q, k, v = inputs.q, inputs.k, inputs.v
        _, h, g, i, j, _, _ = inputs.sizes
        q, k = (normalise(x, self.norm, self.epsilon) for x in (q, k))
        if self.rotation is not None:
            start = j - i if self.rotary_alignment == "bottom-right" else 0
            q, k = self.rotation.apply(q, start), self.rotation.apply(k)
        if self.grouping == "tile" and g < h:
            k, v = k.repeat(1, h // g, 1, 1), v.repeat(1, h // g, 1, 1)
        return q, k, v
