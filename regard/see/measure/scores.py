"""Scores, read from weights: what k adds to the logarithm of the weights of q."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.see.measure.measurement import Plate


@dataclass(frozen=True)
class Scorer:
    """Reads the scores of any q and k, and has the q . k to compare them with."""

    plate: Plate
    key_heads: tuple[int, ...]  # whose keys each query head is compared with
    keyed: bool  # k changes weights also where q = 0, by a term that is taken off

    def scores(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """What k adds to the scores of q; NaN where it cannot be told.

        Weights tell scores up to a constant of each row. So every second key is zero in turn: its score is known.
        """
        visible = self.plate.visible
        visible = visible if len(q) == len(visible) else visible[:1].expand(len(q), -1, -1, -1)
        without = self._logs(q, 0 * k)
        told = torch.full(visible.shape, math.nan, dtype=torch.float64)
        for parity in (0, 1):
            some = k.clone()
            some[:, :, parity::2] = 0
            gain = self._logs(q, some) - without
            zero = visible & gain.isfinite()
            zero[..., 1 - parity :: 2] = False
            constant = gain.masked_fill(~zero, 0).sum(-1, keepdim=True) / zero.sum(-1, keepdim=True)
            told[..., 1 - parity :: 2] = (gain - constant)[..., 1 - parity :: 2]
        return told.masked_fill(~visible | ~told.isfinite(), math.nan)

    def pairs(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """q . k, each query head with the key head that it is compared with."""
        return torch.einsum("bhic,bhjc->bhij", q, self.spread_out(k))

    def spread_out(self, k: Float[Tensor, "b g j c"]) -> Float[Tensor, "b h j c"]:
        """A key head for each query head."""
        return k[:, list(self.key_heads)]

    def _logs(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        """The logarithms of the weights, less what k does alone."""
        told = self._log(q, k)
        return told - self._log(0 * q, k) if self.keyed else told

    def _log(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h i j"]:
        weights = self.plate.eye.weights(q, k)
        # what was taken off leaves rounding, beside which a tiny weight means nothing
        return weights.masked_fill(weights < 1e-9, 0).log() if self.plate.eye.affine else weights.log()
