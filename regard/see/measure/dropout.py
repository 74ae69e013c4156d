"""Measure the dropout of attention weights in training and eval mode: the fraction of zeros, and the scale factor."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from regard.see.measure.raw_weights import RawWeights
from regard.see.measure.read_weights import READINGS, training_mode


@dataclass(frozen=True)
class DropoutReading:
    """The measured dropout of the attention weights: fraction of zeros, and scale factor of the kept weights."""

    share: float = 0.0  # fraction of weights that are zero
    factor: float = 1.0  # factor of the weights that are kept
    consistent: bool = True  # the factor is 1 / (1 - share), up to chance
    on_output: bool = False  # dropout acts on the output, not only on the weights

    @property
    def probability(self) -> float:
        """The dropout probability p.

        p is computed from the factor of the kept weights, which should be 1 / (1 - p). If the factor and the fraction
        of zeros do not agree, p is the fraction of zeros.
        """
        return round(1 - 1 / self.factor, 6) if self.consistent else self.share


def remove_eval_dropout(raw: RawWeights) -> tuple[RawWeights, float]:
    """Undo dropout that is active in eval mode by mistake: return the weights without it, and its probability p.

    A correct attention has no dropout in eval mode: p is 0, and its weights are returned unchanged.
    """
    if raw.deterministic or not bool(raw.nonempty.any()):
        return raw, 0.0
    factor = float(raw.flat.sum(-1)[raw.nonempty].median())  # every weight was kept in some reading
    found = _read_dropout(raw, lambda: factor)
    if found.share:
        reader = replace(raw.reader, kept_factor=factor)
        raw = replace(raw, reader=reader, flat=raw.flat / factor, random=raw.random / factor)
    return raw, found.probability


def read_training_dropout(raw: RawWeights, in_eval: float) -> DropoutReading | None:
    """Measure the dropout in training mode; returns None for a function, which has no training mode.

    in_eval  the dropout probability that was measured in eval mode; 0 for a correct attention
    """
    reader = raw.reader
    if reader.probe.module is None:
        if in_eval:
            raw.notes.append("weights are dropped at every call: a function has no eval mode")
        return None
    exact = reader.weights(*raw.neutral)
    with training_mode(reader.probe.module, training=True):
        largest = replace(reader, readings=READINGS, kept_factor=1.0)
        return _read_dropout(raw, lambda: float((largest.weights(*raw.neutral) / exact)[raw.visible].median()))


def _read_dropout(raw: RawWeights, read_factor: Callable[[], float]) -> DropoutReading:
    """Measure dropout in 16 calls: the fraction of weights set to zero, and the factor that scales the other weights.

    read_factor  function that measures the factor by which the kept weights are scaled
    """
    zero = torch.stack([raw.reader.weights_once(*raw.neutral)[raw.visible] == 0 for _ in range(16)]).double()
    share = float(zero.mean()) if zero.numel() else 0.0
    if not share:
        return DropoutReading()
    columns = raw.reader.raw_output(*raw.neutral, torch.ones_like(raw.v))[raw.nonempty]
    on_output = bool(((columns - columns[..., :1]).abs() > 1e-6).any())
    if on_output:
        raw.notes.append("dropout acts on the output, not on the weights")
    factor = read_factor()
    # the standard error of the share, whether weights are dropped one by one or together
    error = max(math.sqrt(share * (1 - share) / zero.numel()), float(zero.mean(1).std()) / math.sqrt(len(zero)))
    consistent = abs(1 - 1 / factor - share) < 5 * error + 1e-3
    if not consistent:
        raw.notes.append(f"dropout multiplies the weights that it keeps by {factor:.4g}, which is not 1 / (1 - p)")
    return DropoutReading(share, factor, consistent, on_output)
