"""Read scores from weights: the logarithm of a weight is the score of its query-key pair plus a constant of the row."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.see.measure.raw_weights import RawWeights


@dataclass(frozen=True)
class ScoreReader:
    """Measures the attention scores of any q and k, and computes q . k for comparison."""

    raw: RawWeights
    key_heads: tuple[int, ...]  # the key head of each query head

    def scores(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """Measure the scores of q and k from the log of the weights; NaN where a score is unknown.

        The weights determine the scores up to a constant for each row. A key of zeros has score zero, which gives the
        constant. So the scores are measured twice: the first time the keys at even positions are set to zero and the
        scores at odd positions are read, the second time the reverse.
        """
        visible = self.raw.visible
        visible = visible if len(q) == len(visible) else visible[:1].expand(len(q), -1, -1, -1)
        baseline = self._log_weights(q, 0 * k)
        scores = torch.full(visible.shape, math.nan, dtype=torch.float64)
        for parity in (0, 1):
            some = k.clone()
            some[:, :, parity::2] = 0
            gain = self._log_weights(q, some) - baseline
            zero = visible & gain.isfinite()
            zero[..., 1 - parity :: 2] = False
            constant = gain.masked_fill(~zero, 0).sum(-1, keepdim=True) / zero.sum(-1, keepdim=True)
            scores[..., 1 - parity :: 2] = (gain - constant)[..., 1 - parity :: 2]
        return scores.masked_fill(~visible | ~scores.isfinite(), math.nan)

    def products(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """Return q . k of each query head with its key head, (b h i j)."""
        return torch.einsum("bhic,bhjc->bhij", q, self.repeat_heads(k))

    def repeat_heads(self, k: Float[Tensor, "b g j c"]) -> Float[Tensor, "b h j c"]:
        """Return one key head for each query head, the one that it uses; a key head is repeated if several use it."""
        return k[:, list(self.key_heads)]

    def _log_weights(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        weights = self.raw.reader.weights(q, k)
        # a constant that was subtracted leaves rounding, so tiny weights mean nothing
        return weights.masked_fill(weights < 1e-9, 0).log() if self.raw.reader.affine else weights.log()
