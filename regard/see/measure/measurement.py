"""`measure_attention`: infer the conventions of a black-box attention from its outputs for chosen q, k and v."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from regard.see.measure.biases import BiasReading, read_bias
from regard.see.measure.dropout import DropoutReading, read_training_dropout, remove_eval_dropout
from regard.see.measure.heads import HeadReading, read_heads
from regard.see.measure.linearity import LinearityReading, read_linearity
from regard.see.measure.masks import MaskReading, read_mask
from regard.see.measure.probes.probe import Probe, fewer_kv_heads
from regard.see.measure.raw_weights import RawWeights, read_raw_weights
from regard.see.measure.read_weights import WeightReader, training_mode
from regard.see.measure.scale import ScoreReading, read_rotary_alignment, read_scores
from regard.see.measure.scores import ScoreReader


@dataclass(frozen=True)
class AttentionMeasurement:
    """The measured conventions of an attention function: heads, mask, bias, scores and dropout.

    Each property is measured when it is first read.
    """

    raw: RawWeights
    dropout_in_eval: float
    seed: int

    @property
    def notes(self) -> list[str]:
        """Remarks on what could not be measured and on what is unusual."""
        return self.raw.notes

    @property
    def sees_nothing(self) -> bool:
        """Whether no query sees any key, so that nothing else can be measured."""
        return not bool(self.raw.nonempty.any())

    @property
    def _steady(self) -> bool:
        return self.raw.deterministic or self.dropout_in_eval > 0

    @cached_property
    def heads(self) -> HeadReading:
        """The key head that each query head uses."""
        with self._isolated():
            return read_heads(self.raw, self._steady)

    @cached_property
    def linearity(self) -> LinearityReading:
        """Whether the output is weights @ v, and along which axis the weights sum to one."""
        with self._isolated():
            return read_linearity(self.raw, self.heads.value_heads)

    @cached_property
    def mask(self) -> MaskReading:
        """The measured mask: which keys a query sees without a mask argument, and how a mask is passed."""
        with self._isolated():
            return read_mask(self.raw)

    @cached_property
    def bias(self) -> BiasReading:
        """The position bias that is added to the scores, and the logits of attention sinks."""
        with self._isolated():
            return read_bias(self.raw, self.linearity.normalised)

    @cached_property
    def scores(self) -> ScoreReading:
        """How scores are computed from q and k: scale, soft-cap, norm and rotary positions."""
        with self._isolated():
            return read_scores(self.raw, self.heads.key_heads, self.linearity.normalised, self._steady)

    @cached_property
    def dropout(self) -> DropoutReading | None:
        """The dropout in training mode; None for a function, which has no training mode."""
        with self._isolated():
            return read_training_dropout(self.raw, self.dropout_in_eval)

    def rotary_alignment(self, square: ScoreReading) -> str | None:
        """Measure which positions rotary embedding gives to the queries if there are more keys than queries.

        Returns "bottom-right" (the queries are at the last positions), "top-left" (at the first), or None if neither
        fits.

        square  how scores are computed, measured with equal numbers of queries and keys
        """
        with self._isolated():
            return read_rotary_alignment(ScoreReader(self.raw, self.heads.key_heads), square)

    def linearity_with_sink(self) -> LinearityReading:
        """Return `linearity`, but with `normalised` set to "rows and a sink" if an attention sink was found."""
        return replace(self.linearity, normalised="rows and a sink") if self.bias.sink is not None else self.linearity

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Context manager: run in eval mode with a fixed seed; restore the mode and the RNG state on exit."""
        with _isolated(self.raw.reader.probe, self.seed):
            yield


@contextmanager
def _isolated(probe: Probe, seed: int) -> Iterator[None]:
    devices = [probe.device.index or 0] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), training_mode(probe.module, training=False):
        torch.manual_seed(seed)
        yield


def measure_attention(
    probe: Probe,
    *,
    queries: int = 7,
    keys: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> AttentionMeasurement:
    """Measure the conventions of an attention function with random q, k and v.

    Sizes that the probe fixes are taken from the probe instead of the arguments.

    queries, keys           numbers of queries and keys; by default there are as many keys as queries
    heads, kv_heads, width  numbers of query heads and key heads, and width of one head of q and k
    dtype                   dtype of q, k and v; float32 is used if the attention raises an error for this dtype
    seed                    seed of q, k and v, and of dropout
    extra                   keyword arguments passed at every call
    """
    h = probe.heads or heads or (6 if probe.grouped else 3)
    g = probe.kv_heads or kv_heads or (fewer_kv_heads(h) if probe.grouped else h)
    c = probe.width or width or 8
    e = probe.value_width or (c if probe.equal_widths else None)
    sizes = (2, h, g, queries, queries if keys is None else keys, c)
    with _isolated(probe, seed):
        reader, tensors, notes = WeightReader.with_random_inputs(probe, sizes, e, extra or {}, dtype, seed)
        raw, in_eval = remove_eval_dropout(read_raw_weights(reader, tensors, notes))
    return AttentionMeasurement(raw, in_eval, seed)
